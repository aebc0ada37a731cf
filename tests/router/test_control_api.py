"""Uploads, aliases, retiring and looking, over a registry in memory."""

import asyncio
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from registry.errors import (
    Conflict,
    InvalidAdapter,
    LimitExceeded,
    NotReady,
    RegistryUnavailable,
    StagingFailed,
)
from registry.pulse import FleetPulse, ReplicaLoad
from registry.types import ActivationState, Fault, ReplicaRecord, Scope
from router.app import create_app, endpoints
from router.auth import Principal
from router.config import RouterConfig, UploadLimits
from router.errors import AuthenticationFailed
from tests.router.support import BASE_NAME, Stack, error_of, replica_record, running

FILES = {
    "adapter_config.json": b'{"r": 8}',
    "adapter_model.safetensors": bytes(range(256)) * 9000,
}


def parts(files: dict[str, bytes]) -> list[tuple[str, tuple[str, bytes, str]]]:
    return [("files", (name, content, "application/octet-stream")) for name, content in files.items()]


async def push(stack: Stack, name: str = "support", files: Any = FILES, **params: str) -> httpx.Response:
    return await stack.http.post(f"/v1/adapters/{name}/versions", params=params, files=parts(files))


async def test_push_stores_the_files_as_sent_and_waits_for_the_fleet() -> None:
    async with running() as stack:
        response = await push(stack)
        assert response.status_code == 201, response.text
        body = response.json()
        assert stack.registry.pushed == [FILES]
        assert (body["name"], body["version"]["number"], body["created"]) == ("support", 1, True)
        activation = body["activation"]
        assert (activation["state"], activation["waiting_for"], activation["staged_after_s"]) == ("done", [], 0.25)
        assert ("wait_activation", 1, 60.0) in stack.registry.calls


async def test_push_of_known_content_is_200_and_the_same_version() -> None:
    async with running() as stack:
        first, second = await push(stack), await push(stack)
        assert (first.status_code, second.status_code) == (201, 200)
        assert second.json()["version"] == first.json()["version"]
        assert second.json()["created"] is False


async def test_push_flags_come_as_query_or_as_form_fields() -> None:
    async with running() as stack:
        assert (await push(stack, activate="false")).json()["activation"] is None
        waiting = (await push(stack, wait="false")).json()["activation"]
        assert (waiting["state"], waiting["waiting_for"]) == ("pending", ["r0"])
        response = await stack.http.post(
            "/v1/adapters/support/versions", data={"activate": "false"}, files=parts(FILES)
        )
        assert response.json()["activation"] is None
        for bad in ({"activate": "maybe"}, {"wat": "true"}):
            assert (await push(stack, **bad)).status_code == 400
        assert len(stack.registry.pushed) == 3


BAD_NAMES = [
    "..%2Fx",
    "%2Fetc%2Fpasswd",
    "..",
    "a%00b",
    "a%252Fb",
    "-x",
    "x-",
    "a..b",
    "ü",
    "x" * 65,
    "a%3Ab",
    "a@1",
    "a b",
]


@pytest.mark.parametrize("name", BAD_NAMES)
async def test_name_outside_the_grammar_is_refused_before_anything_is_stored(name: str) -> None:
    async with running() as stack:
        answers = [
            await raw(stack, "POST", f"/v1/adapters/{name}/versions"),
            await raw(stack, "GET", f"/v1/adapters/{name}"),
            await raw(stack, "DELETE", f"/v1/adapters/{name}"),
            await raw(stack, "DELETE", f"/v1/adapters/{name}/versions/1"),
            await raw(stack, "PUT", f"/v1/adapters/{name}/aliases/live"),
            await raw(stack, "POST", f"/v1/adapters/{name}/rollback"),
        ]
        for response in answers:
            assert (response.status_code, error_of(response)["code"]) == (400, "invalid_name"), response.text
            assert error_of(response)["param"] == "name"
        assert stack.registry.pushed == stack.registry.calls == []


async def raw(stack: Stack, method: str, path: str) -> httpx.Response:
    """Send a path exactly as written: httpx would tidy it, so the scope is built by hand."""
    messages: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        messages.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [],
        "client": ("c", 1),
        "server": ("s", 80),
    }
    await stack.app(scope, receive, send)  # type: ignore[arg-type]
    body = b"".join(message.get("body", b"") for message in messages[1:])
    return httpx.Response(messages[0]["status"], headers=messages[0]["headers"], content=body)


@pytest.mark.parametrize("name", [BASE_NAME, "base"])
async def test_names_of_the_base_are_taken(name: str) -> None:
    async with running() as stack:
        response = await push(stack, name)
        assert (response.status_code, error_of(response)["code"]) == (409, "conflict")
        assert stack.registry.pushed == []


async def test_invalid_adapter_tells_every_fault() -> None:
    async with running() as stack:
        faults = (Fault(code="nan", message="NaN in q_proj"), Fault(code="rank", message="rank 0", hint="r >= 1"))
        stack.registry.push_error = InvalidAdapter(faults)
        response = await push(stack)
        assert response.status_code == 400
        assert error_of(response)["code"] == "invalid_adapter"
        assert [fault["code"] for fault in error_of(response)["faults"]] == ["nan", "rank"]
        assert error_of(response)["faults"][1]["hint"] == "r >= 1"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotReady("no base model yet"), 503),
        (RegistryUnavailable("the registry cannot be reached"), 503),
        (Conflict("owned by another tenant"), 409),
        (LimitExceeded("too large"), 413),
        (StagingFailed("r1 lacks memory"), 502),
    ],
)
async def test_registry_errors_keep_code_and_message(error: Any, status: int) -> None:
    async with running() as stack:
        stack.registry.push_error = error
        response = await push(stack)
        assert (response.status_code, error_of(response)["code"]) == (status, error.code)
        assert error_of(response)["message"] == error.message


@pytest.mark.parametrize(
    ("files", "status", "code", "message"),
    [
        ({"../x": b"1"}, 400, "invalid_name", "not a plain name"),
        ({"a/b": b"1"}, 400, "invalid_name", "not a plain name"),
        ({"..": b"1"}, 400, "invalid_name", "not a plain name"),
        ({f"f{i}": b"1" for i in range(17)}, 400, "invalid_value", "more than 16 files"),
        ({"big": b"x" * 3_000_000}, 413, "body_too_large", "2500000"),
    ],
)
async def test_upload_limits(files: dict[str, bytes], status: int, code: str, message: str) -> None:
    async with running(RouterConfig(uploads=UploadLimits(max_upload_bytes=2_500_000))) as stack:
        response = await push(stack, files=files)
        assert (response.status_code, error_of(response)["code"]) == (status, code), response.text
        assert message in error_of(response)["message"]
        assert stack.registry.pushed == []


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("text/plain", b"{}", "multipart/form-data"),
        ("", b"", "multipart/form-data"),
        ("multipart/form-data", b"", "multipart/form-data"),
        ("multipart/form-data; boundary=b", b"", "ends before its last boundary"),
        ("multipart/form-data; boundary=b", b"garbage", "malformed"),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="f"; filename="a"\r\n\r\nhalf',
            "ends before",
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="wait"\r\n\r\ntrue\r\n--b--\r\n',
            "no file",
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="wait"\r\n\r\n' + b"x" * 5000 + b"\r\n--b--\r\n",
            "more than 4096 bytes",
        ),
    ],
)
async def test_upload_that_is_no_form_is_refused(kind: str, content: bytes, message: str) -> None:
    async with running() as stack:
        response = await stack.http.post(
            "/v1/adapters/support/versions", content=content, headers={"content-type": kind}
        )
        assert response.status_code == 400
        assert message in error_of(response)["message"]
        assert stack.registry.pushed == []


async def test_upload_over_the_limit_without_a_length_is_cut_off() -> None:
    async with running(RouterConfig(uploads=UploadLimits(max_upload_bytes=100_000))) as stack:
        sent = 0

        async def body() -> Any:
            nonlocal sent
            yield b'--b\r\nContent-Disposition: form-data; name="f"; filename="a"\r\n\r\n'
            for _ in range(100):
                sent += 10_000
                yield b"x" * 10_000

        response = await stack.http.post(
            "/v1/adapters/support/versions",
            content=body(),
            headers={"content-type": "multipart/form-data; boundary=b"},
        )
        assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
        assert sent < 200_000


async def test_adapters_versions_and_manifest_can_be_read() -> None:
    async with running() as stack:
        await push(stack)
        listed = (await stack.http.get("/v1/adapters")).json()
        assert [record["name"] for record in listed["data"]] == ["support"]
        one = (await stack.http.get("/v1/adapters/support")).json()
        assert one == listed["data"][0]
        version = (await stack.http.get("/v1/adapters/support/versions/1")).json()
        assert version["version"] == one["versions"][0]
        assert version["manifest"]["digest"] == version["version"]["digest"]
        for path in ("/v1/adapters/nobody", "/v1/adapters/support/versions/2"):
            missing = await stack.http.get(path)
            assert (missing.status_code, error_of(missing)["code"]) == (404, "adapter_not_found")
        assert (await stack.http.get("/v1/adapters/support/versions/x")).status_code == 400


async def test_alias_is_put_with_the_expected_revision_and_answers_when_done() -> None:
    async with running() as stack:
        await push(stack, activate="false")
        response = await stack.http.put(
            "/v1/adapters/support/aliases/canary", json={"version": 1, "expected_revision": 7}
        )
        assert (response.status_code, response.json()["state"]) == (200, "done")
        assert ("activate", "support", "canary", 1, "default", 7) in stack.registry.calls
        quick = await stack.http.put("/v1/adapters/support/aliases/canary", json={"version": 1, "wait": False})
        assert quick.json()["state"] == "pending"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("aliases/Live", {"version": 1}, "alias"),
        ("aliases/..", {"version": 1}, "alias"),
        ("aliases/live", {"version": 0}, "version"),
        ("aliases/live", {"version": "1"}, "version"),
        ("aliases/live", {}, "version"),
        ("aliases/live", {"version": 1, "wat": 1}, "wat"),
    ],
)
async def test_bad_alias_request_is_refused(path: str, body: dict[str, Any], param: str) -> None:
    async with running() as stack:
        await push(stack, activate="false")
        response = await stack.http.put(httpx.URL(f"/v1/adapters/support/{path}".replace("..", "%2E%2E")), json=body)
        assert (response.status_code, error_of(response)["param"]) == (400, param)
        assert stack.registry.calls == []


async def test_rollback_defaults_to_live() -> None:
    async with running() as stack:
        await push(stack)
        assert (await stack.http.post("/v1/adapters/support/rollback")).json()["state"] == "done"
        await stack.http.post("/v1/adapters/support/rollback", json={"alias": "canary"})
        assert [call[1:3] for call in stack.registry.calls if call[0] == "rollback"] == [
            ("support", "live"),
            ("support", "canary"),
        ]
        assert (await stack.http.post("/v1/adapters/support/rollback", json={"alias": "../x"})).status_code == 400


async def test_retire_of_a_version_or_of_everything() -> None:
    async with running() as stack:
        await push(stack)
        assert (await stack.http.delete("/v1/adapters/support/versions/1")).status_code == 200
        assert (await stack.http.delete("/v1/adapters/support")).json()["name"] == "support"
        assert [call for call in stack.registry.calls if call[0] == "retire"] == [
            ("retire", "support", 1, "default", None),
            ("retire", "support", None, "default", None),
        ]
        assert (await stack.http.delete("/v1/adapters/nobody")).status_code == 404


async def test_activation_can_be_asked_for_and_waited_for() -> None:
    async with running() as stack:
        await push(stack, wait="false")
        assert (await stack.http.get("/v1/activations/1")).json()["state"] == "pending"
        assert (await stack.http.get("/v1/activations/1", params={"wait_s": "2.5"})).json()["state"] == "done"
        assert ("wait_activation", 1, 2.5) in stack.registry.calls
        assert (await stack.http.get("/v1/activations/9")).status_code == 404
        for path, params in (("x", {}), ("1", {"wait_s": "-1"}), ("1", {"wait_s": "nan"})):
            assert (await stack.http.get(f"/v1/activations/{path}", params=params)).status_code == 400


async def test_failed_activation_is_told() -> None:
    async with running() as stack:
        stack.registry.end_state = ActivationState.FAILED
        assert (await push(stack)).json()["activation"]["state"] == "failed"


def state(record: ReplicaRecord, **fields: Any) -> dict[str, Any]:
    """What the interface says of a replica; 16 is the bound of an idle fleet."""
    return {**record.model_dump(mode="json"), "load": None, "num_requests": 0, "load_bound": 16, **fields}


async def test_replicas_are_told_with_their_loads() -> None:
    async with running() as stack:
        known, load = replica_record(0), ReplicaLoad(num_running=3, num_waiting=1, num_kv_blocks=64)
        news = {"seen": 1, "plan": None, "in_flight": {known.replica_id: 4}, "residency": {}}
        stack.gateway.placement.hear(FleetPulse(board_id="b", loads={known.replica_id: load}, **news))
        stack.registry.reported = (known, replica_record(7))
        told = (await stack.http.get("/v1/replicas")).json()["data"]
        assert told[0] == state(known, load=load.model_dump(), num_requests=4)
        assert told[1] == state(replica_record(7), load_bound=None), "one that takes no requests here"


async def test_replicas_and_events() -> None:
    async with running() as stack:
        replicas = (await stack.http.get("/v1/replicas")).json()["data"]
        assert replicas == [state(replica_record(i)) for i in (0, 1)], "the catalog's in an outage"
        fresh = replica_record(0).model_copy(update={"resident": ("f" * 64,)})
        stack.registry.reported = (fresh,)
        assert (await stack.http.get("/v1/replicas")).json()["data"] == [state(fresh)]
        events = (await stack.http.get("/v1/events", params={"after": 3, "limit": 2})).json()["data"]
        assert [event["revision"] for event in events] == [4, 5]
        for bad in ({"after": "-1"}, {"limit": "x"}, {"after": "9" * 20}):
            assert (await stack.http.get("/v1/events", params=bad)).status_code == 400


ROUTES = {
    ("GET", "/v1/models", Scope.INFER),
    ("GET", "/v1/models/{model:path}", Scope.INFER),
    ("POST", "/v1/chat/completions", Scope.INFER),
    ("POST", "/v1/completions", Scope.INFER),
    ("POST", "/v1/adapters/{name:path}/versions", Scope.UPLOAD),
    ("GET", "/v1/adapters/{name:path}/versions/{number}", Scope.UPLOAD),
    ("DELETE", "/v1/adapters/{name:path}/versions/{number}", Scope.UPLOAD),
    ("PUT", "/v1/adapters/{name:path}/aliases/{alias}", Scope.UPLOAD),
    ("POST", "/v1/adapters/{name:path}/rollback", Scope.UPLOAD),
    ("GET", "/v1/template", Scope.UPLOAD),
    ("POST", "/v1/load_lora_adapter", Scope.UPLOAD),
    ("POST", "/v1/unload_lora_adapter", Scope.UPLOAD),
    ("GET", "/v1/adapters", Scope.UPLOAD),
    ("GET", "/v1/adapters/{name:path}", Scope.UPLOAD),
    ("DELETE", "/v1/adapters/{name:path}", Scope.UPLOAD),
    ("GET", "/v1/replicas", Scope.ADMIN),
    ("GET", "/v1/events", Scope.ADMIN),
    ("GET", "/v1/activations/{activation_id}", Scope.UPLOAD),
    ("GET", "/v1/adapters/{name:path}/versions/{number}/replicas", Scope.UPLOAD),
    ("POST", "/v1/adapters/{name:path}/versions/{number}/quarantine", Scope.ADMIN),
    ("DELETE", "/v1/adapters/{name:path}/aliases/{alias}", Scope.UPLOAD),
    ("POST", "/v1/adapters/{name:path}/canary", Scope.UPLOAD),
    ("POST", "/v1/adapters/{name:path}/promote", Scope.UPLOAD),
    ("POST", "/v1/adapters/{name:path}/halt", Scope.UPLOAD),
    ("GET", "/v1/audit", Scope.ADMIN),
    ("GET", "/v1/usage", Scope.INFER),
    ("POST", "/v1/gc", Scope.ADMIN),
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/metrics", Scope.METRICS),
    ("GET", "/metrics/targets", Scope.METRICS),
    ("GET", "/v1/fleet", Scope.METRICS),
    ("GET", "/openapi.json", Scope.INFER),
    ("GET", "/dashboard", None),
    ("GET", "/dashboard/{file}", None),
    ("PUT", "/v1/adapters/{name:path}/callers", Scope.UPLOAD),
    ("PUT", "/v1/adapters/{name:path}/pin", Scope.ADMIN),
    ("DELETE", "/v1/adapters/{name:path}/pin", Scope.ADMIN),
    ("PUT", "/v1/adapters/{name:path}/preload", Scope.UPLOAD),
    ("DELETE", "/v1/adapters/{name:path}/preload", Scope.UPLOAD),
    ("GET", "/v1/tenants", Scope.ADMIN),
    ("POST", "/v1/tenants", Scope.ADMIN),
    ("GET", "/v1/tenants/{tenant}", Scope.ADMIN),
    ("PATCH", "/v1/tenants/{tenant}", Scope.ADMIN),
    ("DELETE", "/v1/tenants/{tenant}", Scope.ADMIN),
    ("POST", "/v1/tenants/{tenant}/keys", Scope.ADMIN),
    ("GET", "/v1/keys", Scope.ADMIN),
    ("POST", "/v1/keys/{key_id}/rotate", Scope.ADMIN),
    ("DELETE", "/v1/keys/{key_id}", Scope.ADMIN),
}


def test_every_route_is_known_and_has_its_scope() -> None:
    stack = Stack()
    assert {(e.method, e.path, e.scope) for e in endpoints(stack.gateway)} == ROUTES
    served = {(method, route.path) for route in stack.app.routes for method in route.methods}  # type: ignore[attr-defined]
    assert served == {(method, path) for method, path, _ in ROUTES}


class Keys:
    """Authenticator with two keys: one for inference only, one without scopes."""

    async def authenticate(self, headers: Any) -> Principal:
        known = {"Bearer infer": frozenset({Scope.INFER}), "Bearer none": frozenset()}
        key = headers.get("authorization")
        if key not in known:
            raise AuthenticationFailed("no such key")
        return Principal("tenant-a", known[key])


async def test_every_route_that_is_not_public_checks_the_key_first() -> None:
    stack = Stack()
    stack.gateway.authenticator = Keys()
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=create_app(stack.gateway)), base_url="http://g")
    for method, path, scope in sorted(ROUTES, key=str):
        filled = path.replace(":path", "").format(
            name="x", model="x", number="1", alias="live", activation_id="1", tenant="t", key_id="0" * 12, file="app.js"
        )
        for key, refusal in (("Bearer wrong", 401), ("Bearer none", 403)):
            response = await http.request(method, filled, headers={"authorization": key})
            if scope is None:
                assert response.status_code in (200, 503)
            else:
                assert response.status_code == refusal, (method, path, key)
        allowed = await http.request(method, filled, headers={"authorization": "Bearer infer"})
        assert (allowed.status_code == 403) == (scope not in (Scope.INFER, None)), (method, path)


@pytest.mark.parametrize("path", ["/", "/docs", "/redoc", "//v1/models", "/v1/models/../adapters/"])
async def test_unknown_route_is_an_openai_error(path: str) -> None:
    async with running() as stack:
        response = await raw(stack, "GET", path)
        assert response.status_code in (400, 404)
        assert error_of(response)["type"] == "invalid_request_error"


async def test_wrong_method_is_405_with_allow() -> None:
    async with running() as stack:
        response = await stack.http.get("/v1/completions")
        assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
        assert response.headers["allow"] == "POST"
        for method, path, allowed in [
            ("PUT", "/v1/tenants", "GET, POST"),
            ("GET", "/v1/adapters/x/versions", "POST"),
            ("DELETE", "/v1/adapters/x/versions/1/replicas", "GET"),
            ("GET", "/v1/adapters/x/aliases/live", "DELETE, PUT"),
        ]:
            response = await stack.http.request(method, path)
            assert (response.status_code, response.headers["allow"]) == (405, allowed), path
        response = await stack.http.get("/v1/adapters/x/y")
        assert (response.status_code, error_of(response)["code"]) == (400, "invalid_name")


async def test_disconnect_during_an_upload_leaves_no_file() -> None:
    async with running() as stack:
        messages = [
            {"type": "http.request", "body": b"--b\r\n", "more_body": True},
            {"type": "http.disconnect"},
        ]
        sent: list[Any] = []

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/adapters/x/versions",
            "raw_path": b"/v1/adapters/x/versions",
            "root_path": "",
            "query_string": b"",
            "http_version": "1.1",
            "scheme": "http",
            "headers": [(b"content-type", b"multipart/form-data; boundary=b")],
        }
        async with asyncio.timeout(2):
            await stack.app(scope, receive, send)  # type: ignore[arg-type]
        assert stack.registry.pushed == []
        assert all(message.get("status") != 500 for message in sent)


async def test_metrics_of_the_fleet_merge_into_one_valid_exposition() -> None:
    async with running() as stack:
        stack.fleet.texts = {
            f"r{i}": (
                b"# HELP lorafleet_requests_running Now.\n# TYPE lorafleet_requests_running gauge\n"
                b'lorafleet_requests_running{adapter="a"} %d.0\n'
                b"# HELP lorafleet_generated_tokens_total Sampled.\n# TYPE lorafleet_generated_tokens_total counter\n"
                b"lorafleet_generated_tokens_total %d.0\n" % (i, i * 10)
            )
            for i in (1, 2)
        }
        response = await stack.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(response.text)}
        running_now = {s.labels["instance"]: s.value for s in families["lorafleet_requests_running"].samples}
        assert running_now == {"r1": 1.0, "r2": 2.0}
        assert {s.labels["instance"] for s in families["lorafleet_gateway_revision"].samples} == {"gateway"}
        assert response.text.count("# TYPE lorafleet_requests_running ") == 1
