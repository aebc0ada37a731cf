"""The OpenAPI document, put together from the routes and what `route_docs` says of each. Knows no gateway."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from registry.types import Scope
from router.answer_shapes import ErrorAnswer

REF = "#/components/schemas/{model}"
KEY = "key"
JSON = "application/json"

Schema = dict[str, Any]


def release() -> str:
    """The version that is installed; 0 where the source runs as it lies."""
    try:
        return version("lorafleet")
    except PackageNotFoundError:
        return "0"


class Route(Protocol):
    """What the document takes from a route."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def scope(self) -> Scope | None: ...
    @property
    def or_admin(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Query:
    """A query parameter that may be left out."""

    name: str
    schema: Schema
    description: str


@dataclass(frozen=True, slots=True)
class About:
    """What a route takes and answers, beside its path and what every route may answer.

    `answers` is status -> media type -> a model, or a schema for what is no JSON; `errors` are statuses with the error
    body. A body that `is_optional` may be left out.
    """

    summary: str
    answers: Mapping[int, Mapping[str, type[BaseModel] | Schema]]
    body: Mapping[str, type[BaseModel]] = field(default_factory=dict)
    is_optional: bool = False
    query: tuple[Query, ...] = ()
    headers: tuple[Query, ...] = ()
    errors: tuple[int, ...] = ()
    error_model: type[BaseModel] = ErrorAnswer


def answers(model: type[BaseModel], status: int = 200) -> Mapping[int, Mapping[str, type[BaseModel] | Schema]]:
    return {status: {JSON: model}}


class _Models:
    """The models that were referred to, each in the mode in which it travels."""

    def __init__(self) -> None:
        self._wanted: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {}
        self._refs: Mapping[Any, Schema] = {}

    def want(self, model: type[BaseModel] | Schema, mode: JsonSchemaMode) -> None:
        if not isinstance(model, dict):
            self._wanted[model, mode] = None

    def define(self) -> Schema:
        """Name all that are wanted; `ref` works from now on."""
        self._refs, definitions = models_json_schema(list(self._wanted), ref_template=REF)
        return dict(definitions.get("$defs", {}))

    def ref(self, model: type[BaseModel] | Schema, mode: JsonSchemaMode) -> Schema:
        return model if isinstance(model, dict) else dict(self._refs[model, mode])


def document(
    routes: Iterable[Route], docs: Mapping[tuple[str, str], About], parameters: Mapping[str, Schema]
) -> Schema:
    """An OpenAPI 3.1 document of all `routes`; `docs` is by method and path, `parameters` by a path parameter's name.

    Raises KeyError for a route that nobody described.
    """
    routes, models = list(routes), _Models()
    for route in routes:
        about = docs[route.method, route.path]
        models.want(about.error_model, "serialization")
        for body in about.body.values():
            models.want(body, "validation")
        for media in about.answers.values():
            for model in media.values():
                models.want(model, "serialization")
    schemas = models.define()
    paths: dict[str, Schema] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(
            route, docs[route.method, route.path], parameters, models
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "lorafleet", "version": release()},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {KEY: {"type": "http", "scheme": "bearer", "description": "a key: `lf_...`"}},
        },
    }


def _operation(route: Route, about: About, parameters: Mapping[str, Schema], models: _Models) -> Schema:
    names = [part.split(":")[0].strip("{}") for part in route.path.split("/") if part.startswith("{")]
    operation: Schema = {
        "summary": about.summary,
        "description": _who(route),
        "security": [] if route.scope is None else [{KEY: []}],
        "responses": _responses(route, about, bool(names), models),
    }
    given = [{"name": name, "in": "path", "required": True, "schema": parameters[name]} for name in names]
    given += [_optional(query, "query") for query in about.query]
    given += [_optional(header, "header") for header in about.headers]
    if given:
        operation["parameters"] = given
    if about.body:
        content = {media: {"schema": models.ref(model, "validation")} for media, model in about.body.items()}
        operation["requestBody"] = {"required": not about.is_optional, "content": content}
    return operation


def _who(route: Route) -> str:
    if route.scope is None:
        return "Public."
    return f"Needs a key with the scope `{route.scope}`" + (" or `admin`." if route.or_admin else ".")


def _optional(query: Query, place: str) -> Schema:
    return {
        "name": query.name,
        "in": place,
        "required": False,
        "description": query.description,
        "schema": query.schema,
    }


def _responses(route: Route, about: About, has_names: bool, models: _Models) -> Schema:
    """The answers of the route, then the errors that it shares with others: by path, by key, by body."""
    statuses = {405, 431, *about.errors}
    if route.scope is not None:
        statuses |= {401, 403, 503}
    if has_names:
        statuses |= {400, 404}
    if about.query or about.headers:
        statuses |= {400}
    if about.body:
        statuses |= {400, 408, 413}
    error = {"description": "an error", "content": {JSON: {"schema": models.ref(about.error_model, "serialization")}}}
    found: Schema = {str(status): _response(media, models) for status, media in about.answers.items()}
    for status in sorted(statuses - about.answers.keys()):
        found[str(status)] = {**error, "headers": {"retry-after": RETRY_AFTER}} if status in (429, 503) else error
    return {status: {**each, "headers": {**each.get("headers", {}), **ID}} for status, each in sorted(found.items())}


ID: Schema = {"x-request-id": {"description": "the client's own, or a new one", "schema": {"type": "string"}}}
RETRY_AFTER: Schema = {"description": "seconds", "schema": {"type": "integer", "minimum": 1}}


def _response(media: Mapping[str, type[BaseModel] | Schema], models: _Models) -> Schema:
    content = {kind: {"schema": models.ref(model, "serialization")} for kind, model in media.items()}
    return {"description": "the answer", "content": content}
