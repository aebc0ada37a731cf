"""The control API over HTTP, answered in the registry's own records. Knows nothing of terminals."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, Self, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from cluster.console.errors import Refused, Unreachable, WrongUsage
from registry.pulse import ReplicaState
from registry.types import (
    Activation,
    AdapterAccess,
    AdapterManifest,
    AdapterRecord,
    AuditPage,
    CollectReport,
    Event,
    Fault,
    FleetTemplate,
    KeyRecord,
    NewKey,
    Preload,
    PushResult,
    Record,
    Scope,
    TenantRecord,
    VersionRecord,
    VersionStates,
)
from router.view.records import FleetReport

Answer = TypeVar("Answer")
UploadPart = tuple[str, tuple[str, BinaryIO, str]]
"""The form field's name, then the file's name, its bytes and their media type."""

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 300.0
"""An upload is validated before it is answered, and a big one takes a while."""
START_HINT = "is the server up? start it with: make serve"
KEY_HINT = "set LORAFLEET_API_KEY or pass --key"
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


class VersionDetail(Record):
    """One version and what it holds."""

    version: VersionRecord
    manifest: AdapterManifest


class Page(BaseModel):
    """A list as the API wraps it."""

    data: list[dict[str, Any]]


class ControlClient:
    """Calls one gateway. Raises Refused, Unreachable or WrongUsage, never httpx's own errors."""

    def __init__(self, url: str, key: str | None = None, *, transport: httpx.BaseTransport | None = None) -> None:
        self.url = with_scheme(url).rstrip("/")
        host = _parsed(self.url).host
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            transport=transport,
            trust_env=host not in LOOPBACK_HOSTS,
        )

    def __repr__(self) -> str:
        return f"ControlClient({self.url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def push(self, name: str, parts: Sequence[UploadPart], *, activate: bool, wait: bool = False) -> PushResult:
        """Upload the files of one adapter; the bytes are streamed, never held whole."""
        flags = {"activate": _flag(activate), "wait": _flag(wait)}
        answer = self._call("POST", f"/v1/adapters/{name}/versions", params=flags, files=list(parts))
        return _read(PushResult, answer)

    def push_source(
        self, name: str, source: str, *, revision: str | None, activate: bool, wait: bool = False
    ) -> PushResult:
        """Have the server fetch the adapter from one of its sources."""
        body = {"source": source, "revision": revision, "activate": activate, "wait": wait}
        return _read(PushResult, self._call("POST", f"/v1/adapters/{name}/versions", json=body))

    def template(self) -> FleetTemplate:
        return _read(FleetTemplate, self._call("GET", "/v1/template"))

    def adapters(self) -> list[AdapterRecord]:
        return self._list(AdapterRecord, "/v1/adapters")

    def adapter(self, name: str) -> AdapterRecord:
        return _read(AdapterRecord, self._call("GET", f"/v1/adapters/{name}"))

    def version(self, name: str, number: int) -> VersionDetail:
        return _read(VersionDetail, self._call("GET", f"/v1/adapters/{name}/versions/{number}"))

    def set_alias(self, name: str, alias: str, number: int, expected_revision: int | None = None) -> Activation:
        body = {"version": number, "expected_revision": expected_revision, "wait": False}
        return _read(Activation, self._call("PUT", f"/v1/adapters/{name}/aliases/{alias}", json=body))

    def rollback(self, name: str, alias: str) -> Activation:
        return _read(
            Activation, self._call("POST", f"/v1/adapters/{name}/rollback", json={"alias": alias, "wait": False})
        )

    def tenants(self) -> list[TenantRecord]:
        return self._list(TenantRecord, "/v1/tenants")

    def add_tenant(self, name: str, limits: dict[str, Any]) -> TenantRecord:
        return _read(TenantRecord, self._call("POST", "/v1/tenants", json={"name": name, **limits}))

    def set_tenant(self, name: str, limits: dict[str, Any]) -> TenantRecord:
        return _read(TenantRecord, self._call("PATCH", f"/v1/tenants/{name}", json=limits))

    def remove_tenant(self, name: str) -> None:
        self._call("DELETE", f"/v1/tenants/{name}")

    def keys(self, tenant: str | None) -> list[KeyRecord]:
        return self._list(KeyRecord, "/v1/keys", params={} if tenant is None else {"tenant": tenant})

    def new_key(self, tenant: str, scopes: Sequence[Scope], expires_in_s: float | None, note: str) -> NewKey:
        body = {"scopes": list(scopes), "expires_in_s": expires_in_s, "note": note}
        return _read(NewKey, self._call("POST", f"/v1/tenants/{tenant}/keys", json=body))

    def rotate_key(self, key_id: str, overlap_s: float, expires_in_s: float | None) -> NewKey:
        body = {"overlap_s": overlap_s, "expires_in_s": expires_in_s}
        return _read(NewKey, self._call("POST", f"/v1/keys/{key_id}/rotate", json=body))

    def revoke_key(self, key_id: str) -> KeyRecord:
        return _read(KeyRecord, self._call("DELETE", f"/v1/keys/{key_id}"))

    def set_callers(self, name: str, callers: Sequence[str]) -> AdapterAccess:
        body = {"callers": list(callers)}
        return _read(AdapterAccess, self._call("PUT", f"/v1/adapters/{name}/callers", json=body))

    def pin(self, name: str) -> AdapterRecord:
        return _read(AdapterRecord, self._call("PUT", f"/v1/adapters/{name}/pin"))

    def unpin(self, name: str) -> AdapterRecord:
        return _read(AdapterRecord, self._call("DELETE", f"/v1/adapters/{name}/pin"))

    def set_preload(self, name: str, preload: Preload | None) -> AdapterRecord:
        """Say when an adapter is brought to its homes; None ends it."""
        path = f"/v1/adapters/{name}/preload"
        if preload is None:
            return _read(AdapterRecord, self._call("DELETE", path))
        return _read(AdapterRecord, self._call("PUT", path, json=preload.model_dump(exclude_none=True)))

    def activation(self, activation_id: int, *, wait_s: float = 0.0) -> Activation:
        """How far an activation is; the server holds the answer for up to `wait_s` seconds."""
        return _read(
            Activation, self._call("GET", f"/v1/activations/{activation_id}", params={"wait_s": f"{wait_s:.3f}"})
        )

    def retire(self, name: str, number: int | None = None, deadline_s: float | None = None) -> None:
        """Retire one version, or the whole adapter; what runs may go on for `deadline_s` seconds."""
        params = {} if deadline_s is None else {"deadline_s": f"{deadline_s:g}"}
        path = f"/v1/adapters/{name}" + ("" if number is None else f"/versions/{number}")
        self._call("DELETE", path, params=params)

    def canary(self, name: str, number: int, weight: float, alias: str) -> Activation:
        body = {"version": number, "weight": weight, "alias": alias, "wait": False}
        return _read(Activation, self._call("POST", f"/v1/adapters/{name}/canary", json=body))

    def promote(self, name: str, alias: str) -> Activation:
        body = {"alias": alias, "wait": False}
        return _read(Activation, self._call("POST", f"/v1/adapters/{name}/promote", json=body))

    def halt(self, name: str, alias: str) -> AdapterRecord:
        return _read(AdapterRecord, self._call("POST", f"/v1/adapters/{name}/halt", json={"alias": alias}))

    def remove_alias(self, name: str, alias: str) -> AdapterRecord:
        return _read(AdapterRecord, self._call("DELETE", f"/v1/adapters/{name}/aliases/{alias}"))

    def quarantine(self, name: str, number: int, reason: str) -> AdapterRecord:
        path = f"/v1/adapters/{name}/versions/{number}/quarantine"
        return _read(AdapterRecord, self._call("POST", path, json={"reason": reason}))

    def version_states(self, name: str, number: int, unless: str | None, wait_s: float) -> VersionStates:
        """Where a version is; the server holds the answer while the etag is still `unless`, for up to `wait_s`."""
        params = {"wait_s": f"{wait_s:.3f}", **({} if unless is None else {"unless": unless})}
        path = f"/v1/adapters/{name}/versions/{number}/replicas"
        return _read(VersionStates, self._call("GET", path, params=params))

    def collect(self, *, dry_run: bool) -> CollectReport:
        return _read(CollectReport, self._call("POST", "/v1/gc", json={"dry_run": dry_run}))

    def audit(self, after: int, limit: int) -> AuditPage:
        return _read(AuditPage, self._call("GET", "/v1/audit", params={"after": after, "limit": limit}))

    def usage(self, question: dict[str, str]) -> dict[str, Any]:
        """The report that the query parameters ask for, as the API has it."""
        return _read(dict[str, Any], self._call("GET", "/v1/usage", params=question))

    def usage_csv(self, question: dict[str, str]) -> str:
        return self._call("GET", "/v1/usage", params={**question, "format": "csv"}).content.decode()

    def replicas(self) -> list[ReplicaState]:
        return self._list(ReplicaState, "/v1/replicas")

    def events(self, after: int, limit: int = 500, wait_s: float = 0.0) -> list[Event]:
        """Changes after a revision; the server waits up to `wait_s` seconds for the first of them."""
        return self._list(Event, "/v1/events", params={"after": after, "limit": limit, "wait_s": f"{wait_s:.3f}"})

    def models(self) -> list[dict[str, Any]]:
        return _read(Page, self._call("GET", "/v1/models")).data

    def base_name(self) -> str | None:
        """What a request writes as its `model` to call the base; None while no base is served."""
        return next((str(model["id"]) for model in self.models() if model.get("parent") is None), None)

    def metrics(self) -> str:
        """The fleet's metrics in Prometheus' text format."""
        return self._call("GET", "/metrics").text

    def fleet(self, *, num_adapters: int, since_s: float = 0.0) -> FleetReport:
        """The fleet now, with the busiest adapters, and the history after `since_s`."""
        params: dict[str, Any] = {"limit": num_adapters, "since": f"{since_s:.3f}"}
        return _read(FleetReport, self._call("GET", "/v1/fleet", params=params))

    def health(self) -> None:
        self._call("GET", "/health")

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Whether the fleet serves, and the body that says what is missing (also while something else answers)."""
        with self._reaching():
            response = self._http.get("/ready")
        body = _json(response)
        if not isinstance(body, dict):
            body = {"reason": f"{self.url} answers, but not yet as a gateway (HTTP {response.status_code})"}
        return response.status_code == 200 and bool(body.get("ready")), body

    def _list(self, kind: type[Answer], path: str, **request: Any) -> list[Answer]:
        return _read(list[kind], _read(Page, self._call("GET", path, **request)).data)  # type: ignore[valid-type]

    def _call(self, method: str, path: str, **request: Any) -> httpx.Response:
        with self._reaching():
            response = self._http.request(method, path, **request)
        if not response.is_success:
            raise refusal(response)
        return response

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError:
            raise Unreachable(f"nothing answers at {self.url}", hint=START_HINT) from None
        except httpx.TimeoutException:
            raise Unreachable(f"{self.url} did not answer in time") from None
        except httpx.TransportError as error:
            raise Unreachable(f"the connection to {self.url} broke: {error}") from None


def with_scheme(url: str) -> str:
    """`host:port` means http."""
    return url if "://" in url else f"http://{url}"


def refusal(response: httpx.Response) -> Refused:
    """The server's error body as an exception; anything else is named for what it is."""
    body = _json(response)
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        message = (
            f"{response.url.copy_with(query=None)} answered HTTP {response.status_code}, not as a lorafleet gateway"
        )
        return Refused(message, code=f"http_{response.status_code}")
    faults = tuple(_fault(fault) for fault in error.get("faults") or ())
    code, hint = str(error.get("code") or error.get("type")), KEY_HINT if response.status_code == 401 else None
    return Refused(str(error.get("message")), code=code, faults=faults, hint=hint)


def _fault(data: Any) -> Fault:
    known = {key: value for key, value in dict(data).items() if key in Fault.model_fields}
    return Fault(**{"code": "fault", "message": "", **known})


def _parsed(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise WrongUsage(f"--url {url!r} is not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise WrongUsage(f"--url {url!r} is not a URL: it must look like http://host:port")
    return parsed


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


def _read(kind: type[Answer], answer: httpx.Response | Any) -> Answer:
    data = _json(answer) if isinstance(answer, httpx.Response) else answer
    try:
        return TypeAdapter(kind).validate_python(data, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise Refused(
            f"the server's answer is not what this version of lorafleet expects ({where}: {first['msg']})",
            code="unexpected_answer",
            hint="use the lorafleet that the server runs",
        ) from None
