"""The HTTP application: a list of routes, each with the scope it needs, and a list of middleware."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, compile_path

from registry.errors import RegistryError
from registry.types import Scope
from replica.errors import ReplicaError
from router.auth import Authenticator, Principal
from router.control_api import ControlApi
from router.errors import INVALID, RouterError, error_body, error_code, headers_of, http_face
from router.fleet_api import FleetApi
from router.gateway import Gateway
from router.lifecycle_api import LifeCycleApi
from router.middleware import ErrorBoundary, HeaderLimit, RequestId
from router.openai_api import OpenAiApi
from router.openapi import document
from router.operations_api import OperationsApi
from router.params import query_known
from router.residence_api import ResidenceApi
from router.route_docs import DOCS, PARAMETERS
from router.tenant_api import TenantApi
from router.upload_api import UploadApi
from router.usage_api import UsageApi
from router.vllm_api import VllmApi

Handler = Callable[[Request, Principal], Awaitable[Response]]
NOBODY = Principal("", frozenset())


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route. It must name its scope; None is public, everything else needs a caller who has the scope."""

    method: str
    path: str
    handler: Handler
    scope: Scope | None
    or_admin: bool = False
    """Whether an admin's key will do without the scope."""


def endpoints(gateway: Gateway) -> list[Endpoint]:
    """Every route there is. More specific paths come first: a name may hold anything, so that it can be refused."""
    openai, control, operations = OpenAiApi(gateway), ControlApi(gateway), OperationsApi(gateway)
    life, uploads, vllm = LifeCycleApi(gateway), UploadApi(gateway), VllmApi(gateway)
    tenants, fleet, residence = TenantApi(gateway), FleetApi(gateway), ResidenceApi(gateway)
    adapter = "/v1/adapters/{name:path}"
    described = Description()
    routes = [
        Endpoint("GET", "/v1/models", openai.models, Scope.INFER),
        Endpoint("GET", "/v1/models/{model:path}", openai.model, Scope.INFER),
        Endpoint("POST", "/v1/chat/completions", openai.chat_completions, Scope.INFER),
        Endpoint("POST", "/v1/completions", openai.completions, Scope.INFER),
        Endpoint("POST", f"{adapter}/versions", uploads.push, Scope.UPLOAD),
        Endpoint("GET", f"{adapter}/versions/{{number}}", control.version, Scope.UPLOAD),
        Endpoint("DELETE", f"{adapter}/versions/{{number}}", control.retire_version, Scope.UPLOAD),
        Endpoint("GET", f"{adapter}/versions/{{number}}/replicas", life.version_states, Scope.UPLOAD),
        Endpoint("POST", f"{adapter}/versions/{{number}}/quarantine", life.quarantine, Scope.ADMIN),
        Endpoint("PUT", f"{adapter}/aliases/{{alias}}", control.put_alias, Scope.UPLOAD),
        Endpoint("DELETE", f"{adapter}/aliases/{{alias}}", life.remove_alias, Scope.UPLOAD),
        Endpoint("POST", f"{adapter}/canary", life.canary, Scope.UPLOAD),
        Endpoint("POST", f"{adapter}/promote", life.promote, Scope.UPLOAD),
        Endpoint("POST", f"{adapter}/halt", life.halt, Scope.UPLOAD),
        Endpoint("POST", f"{adapter}/rollback", control.rollback, Scope.UPLOAD),
        Endpoint("PUT", f"{adapter}/callers", tenants.set_callers, Scope.UPLOAD),
        Endpoint("PUT", f"{adapter}/pin", residence.pin, Scope.ADMIN),
        Endpoint("DELETE", f"{adapter}/pin", residence.unpin, Scope.ADMIN),
        Endpoint("PUT", f"{adapter}/preload", residence.set_preload, Scope.UPLOAD),
        Endpoint("DELETE", f"{adapter}/preload", residence.clear_preload, Scope.UPLOAD),
        Endpoint("GET", "/v1/tenants", tenants.every, Scope.ADMIN),
        Endpoint("POST", "/v1/tenants", tenants.add, Scope.ADMIN),
        Endpoint("GET", "/v1/tenants/{tenant}", tenants.one, Scope.ADMIN),
        Endpoint("PATCH", "/v1/tenants/{tenant}", tenants.change, Scope.ADMIN),
        Endpoint("DELETE", "/v1/tenants/{tenant}", tenants.remove, Scope.ADMIN),
        Endpoint("POST", "/v1/tenants/{tenant}/keys", tenants.new_key, Scope.ADMIN),
        Endpoint("GET", "/v1/keys", tenants.keys, Scope.ADMIN),
        Endpoint("POST", "/v1/keys/{key_id}/rotate", tenants.rotate_key, Scope.ADMIN),
        Endpoint("DELETE", "/v1/keys/{key_id}", tenants.revoke_key, Scope.ADMIN),
        Endpoint("GET", "/v1/template", uploads.template, Scope.UPLOAD),
        Endpoint("POST", "/v1/load_lora_adapter", vllm.load, Scope.UPLOAD),
        Endpoint("POST", "/v1/unload_lora_adapter", vllm.unload, Scope.UPLOAD),
        Endpoint("GET", "/v1/adapters", control.adapters, Scope.UPLOAD),
        Endpoint("GET", adapter, control.adapter, Scope.UPLOAD),
        Endpoint("DELETE", adapter, control.retire_adapter, Scope.UPLOAD),
        Endpoint("GET", "/v1/replicas", control.replicas, Scope.ADMIN),
        Endpoint("GET", "/v1/events", control.events, Scope.ADMIN),
        Endpoint("GET", "/v1/usage", UsageApi(gateway).usage, Scope.INFER, or_admin=True),
        Endpoint("GET", "/v1/audit", life.audit, Scope.ADMIN),
        Endpoint("POST", "/v1/gc", life.collect, Scope.ADMIN),
        Endpoint("GET", "/v1/activations/{activation_id}", control.activation, Scope.UPLOAD),
        Endpoint("GET", "/health", operations.health, None),
        Endpoint("GET", "/ready", operations.ready, None),
        Endpoint("GET", "/metrics", operations.metrics, Scope.METRICS),
        Endpoint("GET", "/metrics/targets", operations.targets, Scope.METRICS),
        Endpoint("GET", "/v1/fleet", fleet.fleet, Scope.METRICS),
        Endpoint("GET", "/openapi.json", described.answer, Scope.INFER, or_admin=True),
        Endpoint("GET", "/dashboard", fleet.page, None),
        Endpoint("GET", "/dashboard/{file}", fleet.file, None),
    ]
    described.tell_of(routes)
    return routes


class Description:
    """The OpenAPI document of all routes, itself among them; made when it is asked for first."""

    def __init__(self) -> None:
        self._routes: Sequence[Endpoint] = ()
        self._body = b""

    def tell_of(self, routes: Sequence[Endpoint]) -> None:
        unknown = [route for route in routes if (route.method, route.path) not in DOCS]
        assert not unknown, f"routes that route_docs does not describe: {unknown}"
        self._routes = routes

    async def answer(self, request: Request, caller: Principal) -> Response:
        if not self._body:  # streams go on meanwhile
            self._body = bytes(JSONResponse(await asyncio.to_thread(document, self._routes, DOCS, PARAMETERS)).body)
        return Response(self._body, media_type="application/json")


def create_app(gateway: Gateway, *, server_repeats_id: bool = False) -> FastAPI:
    """The application over one gateway. Its only page is the dashboard; FastAPI's own documents are off.

    `server_repeats_id`: the server adds the request id that it handed in to every answer, as Serve's does.
    """
    app = FastAPI(
        title="lorafleet",
        openapi_url=None,
        redirect_slashes=False,
        middleware=[
            Middleware(RequestId, server_repeats=server_repeats_id),
            Middleware(ErrorBoundary, answered_error=gateway.metrics.answered_error),
            Middleware(HeaderLimit, max_bytes=gateway.config.requests.max_header_bytes),
        ],
    )
    every = endpoints(gateway)
    paths = Paths(every)
    for endpoint in every:
        handler = guarded(endpoint, gateway.authenticator, paths)
        app.add_api_route(endpoint.path, handler, methods=[endpoint.method], response_model=None)
    _add_error_handlers(app, gateway, paths)
    assert not undeclared(app), f"routes without a scope: {undeclared(app)}"
    return app


def undeclared(app: FastAPI) -> list[str]:
    """The paths that would answer without anybody having said who may ask."""
    return [str(getattr(route, "path", route)) for route in app.routes if not is_declared(route)]


def is_declared(route: BaseRoute) -> bool:
    """Whether the route was made from an Endpoint, behind its check."""
    return hasattr(getattr(route, "endpoint", None), "declared_scope")


class Paths:
    """Which methods a path takes: where another one is tried, the answer names them all."""

    def __init__(self, routes: Sequence[Endpoint]) -> None:
        self._patterns = [(compile_path(route.path)[0], route.method) for route in routes]

    def methods(self, path: str) -> set[str]:
        """None for a path that only a name with a slash in it would fit, which no adapter has."""
        fits = ((pattern.match(path), method) for pattern, method in self._patterns)
        return {method for match, method in fits if match and "/" not in match.groupdict().get("name", "")}

    def check(self, request: Request) -> None:
        """Raises a 405 for a path that was taken for a name, and belongs to a route of other methods."""
        if "/" in request.path_params.get("name", "") and (methods := self.methods(request.scope["path"])):
            raise HTTPException(405, headers=allowing(methods))


def allowing(methods: set[str]) -> dict[str, str]:
    return {"allow": ", ".join(sorted(methods))}


def guarded(endpoint: Endpoint, authenticator: Authenticator, paths: Paths) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint behind its check of the caller, and of the query where the route takes one."""
    known = tuple(query.name for query in DOCS[endpoint.method, endpoint.path].query)

    async def handle(request: Request) -> Response:
        paths.check(request)
        if endpoint.scope is None:
            return await endpoint.handler(request, NOBODY)
        caller = await authenticator.authenticate(request.headers)
        request.state.tenant = caller.tenant
        caller.require(endpoint.scope, or_admin=endpoint.or_admin)
        if known:
            query_known(request, known)
        return await endpoint.handler(request, caller)

    handle.declared_scope = endpoint.scope  # type: ignore[attr-defined]
    return handle


def _add_error_handlers(app: FastAPI, gateway: Gateway, paths: Paths) -> None:
    async def known(request: Request, error: Exception) -> Response:
        gateway.metrics.answered_error(error_code(error))
        if not getattr(request.state, "is_in_journal", False):
            route = str(getattr(request.scope.get("route"), "path", "unknown"))
            gateway.journal.refused(request.state.request_id, getattr(request.state, "tenant", None), route, error)
        return JSONResponse(error_body(error), http_face(error).status, headers_of(error))

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = "unknown_route" if error.status_code == 404 else "method_not_allowed"
        gateway.metrics.answered_error(code)
        message = f"{request.method} {request.url.path[:200]} is no route of this server"
        body = {"error": {"message": message, "type": INVALID, "param": None, "code": code}}
        headers = allowing(paths.methods(request.scope["path"])) if error.status_code == 405 else error.headers
        return JSONResponse(body, error.status_code, headers)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    for kind in (RouterError, RegistryError, ReplicaError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, no_route)
    app.add_exception_handler(ClientDisconnect, gone)
