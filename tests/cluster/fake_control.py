"""A control server of a few lines on a loopback port, for tests of the command line. It keeps what it was sent."""

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from registry.types import (
    LIVE_ALIAS,
    Activation,
    ActivationState,
    AdapterManifest,
    AdapterRecord,
    Event,
    Fault,
    FleetTemplate,
    ModuleLora,
    ReplicaRecord,
    TemplateRules,
    TensorInfo,
    VersionRecord,
    VersionState,
)
from router.view.records import FleetReport
from tests.cluster.http_server import serving_app
from tests.fleet_reports import fleet_report

BROKEN_WEIGHTS = b"broken"
FAULTS = (
    Fault(code="unknown_module", message="layers.9.q_proj is not in the base", hint="train on this base"),
    Fault(code="not_finite", message="layers.0.v_proj.lora_B has 1 NaN"),
)
BASE_DIGEST = "b" * 64


@dataclass
class FakeFleet:
    """What the server knows, and the switches that tests turn."""

    key: str | None = None
    is_ready: bool = True
    num_polls_pending: int = 2
    staging_error: str | None = None
    adapters: dict[str, AdapterRecord] = field(default_factory=dict)
    replicas: list[ReplicaRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    activations: dict[int, Activation] = field(default_factory=dict)
    uploads: list[dict[str, bytes]] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)
    template: FleetTemplate = field(
        default_factory=lambda: FleetTemplate(rules=TemplateRules(), max_rank=64, targets=(), base=None)
    )
    calls: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=lambda: [""])
    report: FleetReport = field(default_factory=fleet_report)
    asked: list[dict[str, str]] = field(default_factory=list)

    def note(self, kind: str, name: str, number: int | None = None) -> None:
        revision = len(self.events) + 1
        self.events.append(Event(revision=revision, at_s=1e9, kind=kind, name=name, number=number, actor="tester"))

    def start(self, name: str, alias: str, version: VersionRecord) -> Activation:
        activation = Activation(
            activation_id=len(self.activations) + 1,
            name=name,
            alias=alias,
            number=version.number,
            digest=version.digest,
            state=ActivationState.PENDING,
            requested_at_s=time.time(),
            waiting_for=tuple(replica.replica_id for replica in self.replicas),
        )
        self.activations[activation.activation_id] = activation
        return activation

    def advance(self, activation: Activation) -> Activation:
        """The activation after one more poll: pending for a while, then done or failed."""
        self.num_polls_pending -= 1
        if self.num_polls_pending >= 0:
            return activation
        changes: dict[str, Any] = {"waiting_for": (), "state": ActivationState.DONE, "staged_after_s": 0.4}
        if self.staging_error:
            changes = {"state": ActivationState.FAILED, "error": self.staging_error}
        else:
            self._arrive(activation)
        return activation.model_copy(update=changes)

    def _arrive(self, activation: Activation) -> None:
        adapter = self.adapters[activation.name]
        aliases = {**adapter.aliases, activation.alias: activation.number}
        self.adapters[adapter.name] = adapter.model_copy(update={"aliases": aliases})
        staged = {"staged": (activation.digest,)}
        self.replicas = [replica.model_copy(update=staged) for replica in self.replicas]
        self.note("activated", activation.name, activation.number)


def replica_record(ordinal: int, **changes: Any) -> ReplicaRecord:
    fields = {
        "replica_id": f"replica-{ordinal}",
        "ring_id": ordinal,
        "node_id": "node-a",
        "num_slots": 4,
        "revision": 1,
    }
    return ReplicaRecord(**{**fields, **changes})


def version_record(number: int, weights: bytes = b"weights") -> VersionRecord:
    return VersionRecord(
        number=number,
        digest=hashlib.sha256(weights).hexdigest(),
        state=VersionState.ACTIVE,
        created_at_s=time.time() - 90,
        num_bytes=len(weights),
        max_rank=8,
        target_names=("q_proj", "v_proj"),
    )


def adapter_record(name: str, num_versions: int = 1, **changes: Any) -> AdapterRecord:
    versions = tuple(version_record(number, f"{name}{number}".encode()) for number in range(1, num_versions + 1))
    fields = {"name": name, "owner": "team-a", "revision": 3, "created_at_s": 1e9, "versions": versions}
    return AdapterRecord(**{**fields, "aliases": {LIVE_ALIAS: num_versions}, **changes})


def manifest_of(version: VersionRecord) -> AdapterManifest:
    tensor = TensorInfo(key="k", dtype="F32", shape=(8, 16), sha256="c" * 64)
    module = ModuleLora(path="model.layers.0.self_attn.q_proj", rank=8, alpha=16, scale=2, a=tensor, b=tensor)
    return AdapterManifest(
        digest=version.digest,
        base_digest=BASE_DIGEST,
        base_verified=True,
        modules=(module,),
        blob_sha256="d" * 64,
        blob_bytes=version.num_bytes,
    )


def error(status: int, code: str, message: str, **more: Any) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "t", "param": None, "code": code, **more}}, status)


def dump(record: Any) -> Any:
    return record.model_dump(mode="json")


def listing(records: list[Any]) -> JSONResponse:
    return JSONResponse({"object": "list", "data": [dump(record) for record in records]})


class FakeControl:
    """The routes, over one FakeFleet."""

    def __init__(self, fleet: FakeFleet) -> None:
        self.fleet = fleet

    def app(self) -> Starlette:
        adapter = "/v1/adapters/{name}"
        routes = [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/v1/fleet", self.guarded(self.report)),
            Route("/v1/models", self.guarded(self.models)),
            Route("/v1/template", self.guarded(self.template)),
            Route("/v1/replicas", self.guarded(self.replicas)),
            Route("/v1/events", self.guarded(self.events)),
            Route("/v1/adapters", self.guarded(self.list)),
            Route(adapter, self.guarded(self.adapter), methods=["GET", "DELETE"]),
            Route(f"{adapter}/versions", self.guarded(self.push), methods=["POST"]),
            Route(f"{adapter}/versions/{{number:int}}", self.guarded(self.version), methods=["GET", "DELETE"]),
            Route(f"{adapter}/aliases/{{alias}}", self.guarded(self.alias), methods=["PUT"]),
            Route(f"{adapter}/rollback", self.guarded(self.rollback), methods=["POST"]),
            Route("/v1/activations/{activation_id:int}", self.guarded(self.activation)),
        ]
        return Starlette(routes=routes)

    def guarded(self, route: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            self.fleet.calls.append(f"{request.method} {request.url.path}")
            if self.fleet.key and request.headers.get("authorization") != f"Bearer {self.fleet.key}":
                return error(401, "invalid_api_key", "no such key")
            name = request.path_params.get("name")
            known = name is None or name in self.fleet.adapters or request.url.path.endswith("/versions")
            return await route(request) if known else error(404, "adapter_not_found", f"no adapter {name}")

        return answer

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if self.fleet.is_ready:
            return JSONResponse({"ready": True, "missing": []})
        return error(503, "not_ready", "not ready: no base yet")

    async def metrics(self, request: Request) -> Response:
        pages = self.fleet.metrics
        return PlainTextResponse(pages.pop(0) if len(pages) > 1 else pages[0])

    async def report(self, request: Request) -> Response:
        self.fleet.asked.append(dict(request.query_params))
        return JSONResponse(dump(self.fleet.report))

    async def models(self, request: Request) -> Response:
        models = [{"id": "smol", "parent": None}, *({"id": name, "parent": "smol"} for name in self.fleet.adapters)]
        return JSONResponse({"object": "list", "data": models})

    async def replicas(self, request: Request) -> Response:
        return listing(self.fleet.replicas)

    async def events(self, request: Request) -> Response:
        after, limit = int(request.query_params["after"]), int(request.query_params["limit"])
        return listing([event for event in self.fleet.events if event.revision > after][:limit])

    async def list(self, request: Request) -> Response:
        return listing(list(self.fleet.adapters.values()))

    async def adapter(self, request: Request) -> Response:
        name = request.path_params["name"]
        if request.method == "DELETE":
            del self.fleet.adapters[name]
            return Response(status_code=204)
        return JSONResponse(dump(self.fleet.adapters[name]))

    async def version(self, request: Request) -> Response:
        found = self.fleet.adapters[request.path_params["name"]].version(request.path_params["number"])
        if found is None:
            return error(404, "adapter_not_found", "no such version")
        if request.method == "DELETE":
            return Response(status_code=204)
        return JSONResponse({"version": dump(found), "manifest": dump(manifest_of(found))})

    async def push(self, request: Request) -> Response:
        name = request.path_params["name"]
        if request.headers["content-type"] == "application/json":
            self.fleet.sources.append(await request.json())
            return self._pushed(name, b"fetched", self.fleet.sources[-1]["activate"])
        async with request.form() as form:
            files = {
                file.filename or "": await file.read() for file in form.getlist("files") if not isinstance(file, str)
            }
        self.fleet.uploads.append(files)
        weights = files.get("adapter_model.safetensors") or next(iter(files.values()))
        if weights.startswith(BROKEN_WEIGHTS):
            message = "; ".join(fault.message for fault in FAULTS)
            return error(400, "invalid_adapter", message, faults=[dump(fault) for fault in FAULTS])
        return self._pushed(name, weights, request.query_params["activate"] == "true")

    async def template(self, request: Request) -> Response:
        return JSONResponse(dump(self.fleet.template))

    def _pushed(self, name: str, weights: bytes, wants: bool) -> Response:
        version, created = self._store(name, weights)
        activation = dump(self.fleet.start(name, LIVE_ALIAS, version)) if wants else None
        result = {"name": name, "version": dump(version), "created": created, "activation": activation}
        return JSONResponse(result, 201 if created else 200)

    def _store(self, name: str, weights: bytes) -> tuple[VersionRecord, bool]:
        adapter = self.fleet.adapters.get(name) or adapter_record(name, 0, aliases={})
        candidate = version_record(len(adapter.versions) + 1, weights)
        known = next((version for version in adapter.versions if version.digest == candidate.digest), None)
        if known is not None:
            return known, False
        versions = (*adapter.versions, candidate)
        self.fleet.adapters[name] = adapter.model_copy(update={"versions": versions})
        return candidate, True

    async def alias(self, request: Request) -> Response:
        adapter, body = self.fleet.adapters[request.path_params["name"]], await request.json()
        version = adapter.version(body["version"])
        if version is None:
            return error(404, "adapter_not_found", f"{adapter.name} has no version {body['version']}")
        return JSONResponse(dump(self.fleet.start(adapter.name, request.path_params["alias"], version)))

    async def rollback(self, request: Request) -> Response:
        adapter, alias = self.fleet.adapters[request.path_params["name"]], (await request.json())["alias"]
        version = adapter.version(adapter.aliases[alias] - 1)
        if version is None:
            return error(409, "conflict", f"{alias} has never pointed elsewhere")
        return JSONResponse(dump(self.fleet.start(adapter.name, alias, version)))

    async def activation(self, request: Request) -> Response:
        number = request.path_params["activation_id"]
        self.fleet.activations[number] = self.fleet.advance(self.fleet.activations[number])
        return JSONResponse(dump(self.fleet.activations[number]))


@contextmanager
def serving(fleet: FakeFleet) -> Iterator[str]:
    """The server on a free loopback port, in a thread; yields its URL and takes it down at the end."""
    with serving_app(FakeControl(fleet).app()) as url:
        yield url
