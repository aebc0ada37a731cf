"""The documents against the code: settings, routes, errors, commands, links, and the YAML files."""

import json
import re
import shlex
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from urllib.parse import urlsplit

import pytest
import typer
import yaml
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from starlette.routing import compile_path

from cluster.cli import app as cli
from cluster.config import FleetConfig, environment_overrides, load_fleet, load_registry
from registry import config_fields, tensor_keys
from registry.catalog import Catalog
from registry.config import RegistryConfig
from registry.errors import RegistryError
from registry.types import (
    Activation,
    AdapterAccess,
    AdapterRecord,
    AuditEntry,
    AuditPage,
    BaseBinding,
    Canary,
    CollectItem,
    CollectReport,
    Event,
    Fault,
    FleetTemplate,
    KeyRecord,
    NewKey,
    PushResult,
    ReplicaRecord,
    ReplicaVersionState,
    TemplateRules,
    TenantLimits,
    TenantRecord,
    VersionRecord,
    VersionStates,
)
from replica.errors import ReplicaError
from router import route_docs
from router.app import Endpoint, endpoints
from router.config import RouterConfig
from router.errors import RouterError, http_face
from router.gateway import Gateway
from router.schemas import (
    HARMLESS,
    AliasBody,
    CallersBody,
    CanaryBody,
    ChatBody,
    ChatMessage,
    CollectBody,
    CompletionBody,
    HaltBody,
    KeyBody,
    PromoteBody,
    QuarantineBody,
    RollbackBody,
    RotateBody,
    SourceBody,
    TenantBody,
)
from router.vllm_api import LoadBody, UnloadBody
from tests.router.fakes import FakeFleet, FakeRegistry

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DEPLOYED = sorted((ROOT / "deploy").glob("*.yaml"))
KINDS = {int: "integer", float: "number", str: "text", Path: "path", bool: "true or false"}


def read(name: str) -> str:
    return (ROOT / name).read_text()


def rows(text: str) -> list[list[str]]:
    """The cells of every table row."""
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| ")
    ]


def section(text: str, title: str) -> str:
    """What stands under the heading `title`, up to the next heading of any level."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"no section {title!r}"
    return found[1]


def shell_lines(path: Path) -> Iterator[str]:
    """The commands of a document's `sh` blocks, continued lines joined."""
    for block in re.findall(r"^```sh\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
        yield from (line for line in block.replace("\\\n", " ").splitlines() if line.strip())


# Settings.


def settings(model: type[BaseModel], given: BaseModel | None = None, prefix: str = "") -> Iterator[list[str]]:
    """Name, type with range, and default of every setting, nested models opened."""
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True) if given is None else getattr(given, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            nested = default if isinstance(default, BaseModel) else None
            yield from settings(field.annotation, nested, f"{prefix}{name}.")
        else:
            yield [f"`{prefix}{name}`", kind_of(field), shown(default)]


def kind_of(field: FieldInfo) -> str:
    options = get_args(field.annotation) if get_origin(field.annotation) in (Union, types.UnionType) else ()
    plain = next((option for option in options if option is not type(None)), field.annotation)
    if get_origin(plain) is Literal:
        return " or ".join(f"`{word}`" for word in get_args(plain))
    if get_origin(plain) is tuple:
        return f"list of {item_kind(get_args(plain)[0])}"
    if get_origin(plain) is Annotated:
        plain, limits = get_args(plain)
        return KINDS[plain] + range_of(limits) + (" or none" if options else "")
    return KINDS[plain] + range_of(field) + (" or none" if options else "")


def item_kind(item: Any) -> str:
    """What a list holds: `text`, `integer`, or the words that are allowed."""
    while get_origin(item) is Annotated:
        item = get_args(item)[0]
    return ", ".join(f"`{word}`" for word in get_args(item)) if get_origin(item) is Literal else KINDS[item]


def range_of(field: FieldInfo) -> str:
    """` 1 to 16`, ` above 0`, ` from 1`, or nothing."""
    limits = {
        name: getattr(rule, name) for rule in field.metadata for name in ("ge", "gt", "le") if hasattr(rule, name)
    }
    low = f"above {limits['gt']}" if "gt" in limits else f"{limits['ge']}" if "ge" in limits else ""
    if "le" in limits:
        return f" {low} to {limits['le']}"
    return f" {low}" if "gt" in limits else f" from {low}" if low else ""


def shown(default: object) -> str:
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, tuple):
        return f"`{list(default)}`"
    return "none" if default is None else f"`{default}`"


def variable(setting: str, prefix: str) -> str:
    return f"`{prefix}{setting.strip('`').upper().replace('.', '__')}`"


ALL_SETTINGS = [
    *((row, variable(row[0], "LORAFLEET_")) for row in settings(FleetConfig)),
    *((row, variable(row[0], "LORAFLEET_REGISTRY__")) for row in settings(RegistryConfig)),
]


@pytest.mark.parametrize(("row", "name"), ALL_SETTINGS, ids=lambda value: value if isinstance(value, str) else "")
def test_setting_is_documented_with_type_default_and_variable(row: list[str], name: str) -> None:
    documented = [cells for cells in rows(read("docs/configuration.md")) if (cells[0], cells[-1]) == (row[0], name)]
    assert [[*row, name]] == [[*cells[:3], cells[-1]] for cells in documented]
    assert all(len(cells[3]) > 10 for cells in documented), "a setting without its meaning"


def test_configuration_names_no_setting_that_is_gone() -> None:
    known = {row[0] for row, _ in ALL_SETTINGS}
    named = {cells[0] for cells in rows(read("docs/configuration.md")) if "`LORAFLEET_" in cells[-1]}
    assert named == known


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_variables_in_examples_are_settings(path: Path) -> None:
    known = {name.strip("`") for _, name in ALL_SETTINGS}
    for name, value in re.findall(r"\b(LORAFLEET_\w+__\w+)=(\S+)", path.read_text()):
        assert name in known
        assert environment_overrides({name: value})


# The HTTP interface.


def all_endpoints() -> list[Endpoint]:
    return endpoints(Gateway(RouterConfig(), Catalog(("base",)), FakeFleet(), FakeRegistry({})))


def test_every_route_is_in_the_api_document_with_its_scope() -> None:
    documented = {cells[0]: cells[1] for cells in rows(read("docs/api.md")) if len(cells) > 1}
    for endpoint in all_endpoints():
        route = f"`{endpoint.method} {endpoint.path.replace(':path', '')}`"
        assert documented.get(route) == (f"`{endpoint.scope}`" if endpoint.scope else "public"), route


def subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    yield kind
    for child in kind.__subclasses__():
        yield from subclasses(child)


ERRORS = [kind for root in (RouterError, RegistryError, ReplicaError) for kind in subclasses(root)]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_error_is_in_the_api_document_as_it_looks_over_http(kind: Any) -> None:
    face = http_face(kind.__new__(kind))
    retry = "" if face.retry_after_s is None else f"{face.retry_after_s} s"
    documented = [cells[:4] for cells in rows(section(read("docs/api.md"), "Codes")) if cells[0] == f"`{kind.code}`"]
    assert documented == [[f"`{kind.code}`", str(face.status), f"`{face.type}`", retry]]


def is_unsupported(field: FieldInfo) -> bool:
    return field.annotation is Any and any(isinstance(rule, BeforeValidator) for rule in field.metadata)


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, ChatMessage], ids=lambda body: body.__name__)
def test_request_field_is_documented_where_it_belongs(body: type[BaseModel]) -> None:
    api = read("docs/api.md")
    ignored, refused = section(api, "Accepted and ignored"), section(api, "Refused unless empty")
    used = api.replace(ignored, "").replace(refused, "")
    for name, field in body.model_fields.items():
        place = refused if is_unsupported(field) else ignored if name in HARMLESS else used
        assert f"`{name}`" in place, name


@pytest.mark.parametrize(
    "record",
    [
        *(AuditPage, AuditEntry, CollectReport, CollectItem, VersionStates, ReplicaVersionState, Canary),
        *(CanaryBody, PromoteBody, HaltBody, QuarantineBody, CollectBody),
        *(AdapterRecord, VersionRecord, Activation, PushResult, ReplicaRecord, Event, Fault, AliasBody, RollbackBody),
        *(AdapterAccess, TenantRecord, TenantLimits, KeyRecord, NewKey, KeyBody, RotateBody, CallersBody, TenantBody),
        *(SourceBody, LoadBody, UnloadBody, BaseBinding, FleetTemplate, TemplateRules),
    ],
    ids=lambda record: record.__name__,
)
def test_record_fields_are_documented(record: type[BaseModel]) -> None:
    api = read("docs/api.md") + read("docs/adapters.md")
    assert [name for name in record.model_fields if f"`{name}`" not in api] == []


CURLS = [line for path in DOCS for line in shell_lines(path) if line.startswith("curl ")]


def test_there_are_curl_examples_for_both_apis() -> None:
    assert any("/v1/chat/completions" in line for line in CURLS)
    assert any("/versions" in line for line in CURLS)


@pytest.mark.parametrize("line", CURLS)
def test_curl_example_fits_a_route_and_its_body(line: str) -> None:
    words = shlex.split(line, comments=True)
    path = urlsplit(next(word for word in words if word.startswith("http"))).path
    data = option(words, "-d")
    method = option(words, "-X") or ("POST" if data or "-F" in words else "GET")
    endpoint = next(
        (each for each in all_endpoints() if each.method == method and compile_path(each.path)[0].match(path)), None
    )
    assert endpoint is not None, f"{method} {path}"
    if data is not None:
        body = route_docs.DOCS[endpoint.method, endpoint.path].body["application/json"]
        body.model_validate_json(json.dumps(json.loads(data)))


def option(words: list[str], name: str) -> str | None:
    return words[words.index(name) + 1] if name in words else None


# Faults of uploads.


def fault_codes() -> set[str]:
    """Every code that the registry's sources can put into a fault or a warning."""
    codes = {code for code, _, _ in [*config_fields.REFUSED.values(), *special_keys()]} | {"tokenizer"}
    for path in sorted({*(ROOT / "registry").glob("*.py")} - {ROOT / "registry" / "errors.py"}):
        text = path.read_text()
        codes |= set(re.findall(r'(?:\badd|warn|tell|_compare|_check_names|_Malformed)\(\s*"([a-z_]+)"', text))
        codes |= set(re.findall(r'\bcode(?:, hint)? ?= ?"([a-z_]+)"', text))
        codes |= set(re.findall(r'_required\(members, \w+, "([a-z_]+)"', text))
    return codes


def special_keys() -> list[tuple[str, str, str]]:
    return [(code, pattern, what) for pattern, code, what in tensor_keys._SPECIAL]


def test_every_code_of_a_fault_is_documented_once() -> None:
    documented = [cells[0] for cells in rows(section(read("docs/adapters.md"), "Faults and warnings"))]
    assert sorted(documented[1:]) == sorted(f"`{code}`" for code in fault_codes())


# Commands, links and files.

COMMANDS: Any = typer.main.get_command(cli)
CLI_LINES = [line for path in DOCS for line in shell_lines(path) if line.startswith("lorafleet ")]


@pytest.mark.parametrize("line", CLI_LINES)
def test_command_line_in_a_document_parses(line: str) -> None:
    _, name, *arguments = shlex.split(line, comments=True)
    COMMANDS.commands[name].make_context(name, arguments)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_commands_named_in_the_text_exist(path: Path) -> None:
    named = set(re.findall(r"`lorafleet ([a-z-]+)", path.read_text()))
    assert named <= COMMANDS.commands.keys()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_relative_links_resolve(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert missing == []


def test_files_named_in_the_architecture_exist() -> None:
    named = set(re.findall(r"(?:[\w-]+/)+[\w-]+\.\w+", read("docs/architecture.md")))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists() and not (ROOT / "docs" / name).exists()] == []


# The YAML files.


@pytest.mark.parametrize("path", DEPLOYED, ids=lambda path: path.name)
def test_yaml_arguments_are_what_the_builders_take(path: Path) -> None:
    applications = yaml.safe_load(path.read_text())["applications"]
    builders = {application["import_path"]: application.get("args", {}) for application in applications}
    assert builders.keys() == {"cluster.app:build_registry", "cluster.app:build_fleet"}
    config = load_fleet(builders["cluster.app:build_fleet"], {})
    load_registry(builders["cluster.app:build_registry"], {})
    assert config.registry_app in {application["name"] for application in applications}


@pytest.mark.filterwarnings("ignore")  # Ray's own, while it is imported
@pytest.mark.parametrize("path", DEPLOYED, ids=lambda path: path.name)
def test_yaml_has_no_key_that_serve_would_ignore(path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    given = yaml.safe_load(path.read_text())
    assert list(unknown_keys(given, ServeDeploySchema)) == []
    given["applications"][0]["arg"] = given["http_options"]["hots"] = {}
    assert list(unknown_keys(given, ServeDeploySchema)) == ["http_options.hots", "applications.arg"]


@pytest.mark.parametrize("path", DEPLOYED, ids=lambda path: path.name)
def test_yaml_overrides_deployments_that_exist(path: Path) -> None:
    known = set(re.findall(r'name="(\w+)"', read("cluster/app.py")))
    for application in yaml.safe_load(path.read_text())["applications"]:
        assert {deployment["name"] for deployment in application.get("deployments", [])} <= known


def unknown_keys(given: dict[str, Any], model: type[BaseModel], place: str = "") -> Iterator[str]:
    """Keys that `model`, or a model inside it, does not have."""
    for key, value in given.items():
        if key not in model.model_fields:
            yield f"{place}{key}"
            continue
        nested = next(models_in(model.model_fields[key].annotation), None)
        for each in value if isinstance(value, list) else [value]:
            if nested is not None and isinstance(each, dict):
                yield from unknown_keys(each, nested, f"{place}{key}.")


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)
