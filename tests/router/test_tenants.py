"""Keys, access lists and limits of tenants at the gateway."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cluster.doors import authenticator, is_loopback
from registry.errors import NotReady
from registry.keys import mint, split
from registry.types import Access, AdapterRecord, KeyHash, LimitShare, LimitUse, Scope, TenantLimits
from replica.messages import GenerateRequest
from router.app import create_app, is_declared, undeclared
from router.auth import KeyAuthenticator
from router.config import RequestLimits, RouterConfig
from router.errors import AuthenticationFailed, TenantLimitReached
from router.tenant_limits import TenantGate
from tests.router.fakes import one_choice
from tests.router.support import Stack, adapter_record, delta, error_of, running

LIMITED = TenantLimits(weight=2.5, max_concurrent=2, requests_per_minute=5, tokens_per_minute=200)


class Ring:
    """Keys of several tenants."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.hashes: list[KeyHash] = []

    def add(self, name: str, tenant: str, *scopes: Scope, expires_at_s: float | None = None) -> None:
        minted = mint()
        self.texts[name] = minted.text
        key = KeyHash(key_id=minted.key_id, tenant=tenant, scopes=scopes, salt=minted.salt, hash=minted.hash)
        self.hashes.append(key.model_copy(update={"expires_at_s": expires_at_s}))

    def header(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.texts[name]}"}


def ring() -> Ring:
    made = Ring()
    made.add("acme", "acme", Scope.INFER, Scope.UPLOAD)
    made.add("other", "other", Scope.INFER, Scope.UPLOAD)
    made.add("admin", "root", *Scope)
    made.add("scraper", "root", Scope.METRICS)
    made.add("old", "acme", *Scope, expires_at_s=1.0)
    return made


RING = ring()
ACCESS = Access(has_keys=True, keys=tuple(RING.hashes), limits={"acme": LIMITED})


def record(name: str, owner: str, *callers: str) -> AdapterRecord:
    return adapter_record(name).model_copy(update={"owner": owner, "callers": callers})


RECORDS = (record("private", "acme"), record("lent", "acme", "other"), record("open", "acme", "*"))


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with guarded_stack() as made:
        yield made


def guarded_stack(config: RouterConfig | None = None) -> Any:
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def make() -> AsyncIterator[Stack]:
        async with running(config, delta(RECORDS).model_copy(update={"access": ACCESS})) as made:
            catalog = made.gateway.catalog
            made.gateway.authenticator = KeyAuthenticator(lambda: catalog.access, open_without_keys=True)
            made.registry.records = {each.name: each for each in RECORDS}
            made.app = create_app(made.gateway)
            made.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=made.app), base_url="http://gateway")
            made.fleet.script = answer
            yield made

    return make()


def answer(replica_id: str, request: GenerateRequest) -> Any:
    return one_choice(request.request_id, [(1, 2), (3,)])


async def chat(stack: Stack, key: str, model: str = "private", **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3} | fields
    return await stack.http.post("/v1/chat/completions", json=body, headers=RING.header(key))


# Keys.


def wrong_keys() -> dict[str, str]:
    key_id, secret = split(RING.texts["acme"]) or ("", "")
    return {
        "none": "",
        "scheme": f"Basic {RING.texts['acme']}",
        "bare": RING.texts["acme"],
        "secret": f"Bearer lf_{key_id}_{secret[:-1]}",
        "id": f"Bearer lf_{'0' * 12}_{secret}",
        "other's secret": f"Bearer lf_{key_id}_{split(RING.texts['other'])[1]}",  # type: ignore[index]
        "long": "Bearer " + "x" * 10_000,
        "not ascii": "Bearer lf_ü_ü",
        "expired": RING.header("old")["authorization"],
    }


@pytest.mark.parametrize("kind", wrong_keys())
async def test_wrong_key_gets_in_nowhere_and_is_not_repeated(stack: Stack, kind: str) -> None:
    sent = wrong_keys()[kind]
    for route in stack.app.routes:
        path = route.path.replace("{name:path}", "x").replace("{model:path}", "x")  # type: ignore[attr-defined]
        path = path.replace("{", "").replace("}", "")
        for method in route.methods:  # type: ignore[attr-defined]
            if path in ("/health", "/ready") or path.startswith("/dashboard"):
                continue
            response = await stack.http.request(method, path, headers={"authorization": sent.encode("latin-1")})
            assert response.status_code == 401, (method, path)
            assert response.headers["www-authenticate"] == "Bearer"
            assert len(sent) < 20 or sent.split()[-1] not in response.text


def test_unknown_id_wrong_secret_and_revoked_read_the_same() -> None:
    door = KeyAuthenticator(lambda: ACCESS, open_without_keys=True)
    texts = set()
    for kind in ("secret", "id", "other's secret"):
        with pytest.raises(AuthenticationFailed) as refused:
            asyncio.run(door.authenticate({"authorization": wrong_keys()[kind]}))
        texts.add(refused.value.message)
    assert len(texts) == 1


async def test_key_is_known_from_the_catalog_and_its_use_is_noted() -> None:
    access: list[Access | None] = [None]
    door = KeyAuthenticator(lambda: access[0], open_without_keys=True, wall_clock=lambda: 0.5)
    with pytest.raises(NotReady):
        await door.authenticate(RING.header("acme"))
    access[0] = ACCESS
    assert (await door.authenticate(RING.header("acme"))).tenant == "acme"
    assert (await door.authenticate(RING.header("old"))).is_admin
    assert set(door.take_used()) == {RING.hashes[0].key_id, RING.hashes[4].key_id}
    assert door.take_used() == ()
    access[0] = ACCESS.model_copy(update={"keys": ACCESS.keys[1:]})
    with pytest.raises(AuthenticationFailed):
        await door.authenticate(RING.header("acme"))


@pytest.mark.parametrize(
    ("keys", "host", "is_open"),
    [
        ("auto", "127.0.0.1", True),
        ("auto", "localhost", True),
        ("auto", "0.0.0.0", False),
        ("auto", "10.0.0.7", False),
        ("required", "127.0.0.1", False),
        ("ignored", "0.0.0.0", True),
    ],
)
async def test_server_without_keys_is_open_on_loopback_only(
    stack: Stack, keys: Any, host: str, is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stack.gateway.catalog.access = Access(has_keys=False)
    door = authenticator(RouterConfig(keys=keys), stack.gateway.catalog, host)
    assert host in caplog.text or not is_open
    if is_open:
        assert (await door.authenticate({})).scopes == frozenset(Scope)
        return
    with pytest.raises(AuthenticationFailed, match="lorafleet key bootstrap") as refused:
        await door.authenticate({})
    assert host in refused.value.message


async def test_server_whose_keys_are_all_gone_stays_closed(stack: Stack) -> None:
    stack.gateway.catalog.access = Access(has_keys=True)
    door = authenticator(RouterConfig(), stack.gateway.catalog, "127.0.0.1")
    with pytest.raises(AuthenticationFailed):
        await door.authenticate({})


def test_hosts_that_only_this_machine_reaches() -> None:
    assert [is_loopback(host) for host in ("127.1.2.3", "::1", "localhost")] == [True] * 3
    assert [is_loopback(host) for host in ("::", "", "example.org", "192.168.0.1")] == [False] * 4


def test_route_that_nobody_declared_is_found(stack: Stack) -> None:
    assert all(is_declared(route) for route in stack.app.routes)
    stack.app.add_api_route("/v1/forgotten", lambda: None)
    assert undeclared(stack.app) == ["/v1/forgotten"]


async def test_other_spellings_of_a_path_lead_nowhere(stack: Stack) -> None:
    for path in ("//v1/models", "/v1//models", "/v1/models/", "/V1/models", "/metrics/", "/docs", "/openapi.json"):
        response = await stack.http.get(path)
        assert response.status_code in (401, 404), path


async def test_scopes_decide(stack: Stack) -> None:
    paths = {"/v1/models": 200, "/v1/adapters": 200, "/v1/replicas": 403, "/metrics": 403, "/v1/tenants": 403}
    for path, status in paths.items():
        assert (await stack.http.get(path, headers=RING.header("acme"))).status_code == status
    for path, status in {"/metrics": 200, "/v1/models": 403, "/v1/keys": 403}.items():
        assert (await stack.http.get(path, headers=RING.header("scraper"))).status_code == status


# What is another tenant's.


CHANGES = [
    ("PUT", "/v1/adapters/{}/aliases/live", {"version": 1}),
    ("DELETE", "/v1/adapters/{}/aliases/live", None),
    ("POST", "/v1/adapters/{}/rollback", {}),
    ("POST", "/v1/adapters/{}/canary", {"version": 1, "weight": 0.5}),
    ("POST", "/v1/adapters/{}/promote", {}),
    ("POST", "/v1/adapters/{}/halt", {}),
    ("DELETE", "/v1/adapters/{}/versions/1", None),
    ("DELETE", "/v1/adapters/{}", None),
    ("PUT", "/v1/adapters/{}/callers", {"callers": ["other"]}),
    ("PUT", "/v1/adapters/{}/preload", {"every_s": 60}),
    ("DELETE", "/v1/adapters/{}/preload", None),
]
LOOKS = ["/v1/adapters/{}", "/v1/adapters/{}/versions/1", "/v1/adapters/{}/versions/1/replicas"]


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
async def test_only_owner_and_admin_change_an_adapter(stack: Stack, method: str, path: str, body: Any) -> None:
    async def ask(key: str, name: str) -> httpx.Response:
        content = None if body is None else json.dumps(body)
        return await stack.http.request(method, path.format(name), content=content, headers=RING.header(key))

    hidden, absent = await ask("other", "private"), await ask("other", "nothing")
    assert (hidden.status_code, hidden.text) == (404, absent.text.replace("nothing", "private"))
    assert (await ask("other", "lent")).status_code == 403
    assert stack.registry.calls == []
    assert (await ask("acme", "private")).status_code == 200
    assert (await ask("admin", "private")).status_code == 200


@pytest.mark.parametrize("path", LOOKS)
async def test_what_a_tenant_may_not_call_does_not_exist_for_it(stack: Stack, path: str) -> None:
    hidden = await stack.http.get(path.format("private"), headers=RING.header("other"))
    absent = await stack.http.get(path.format("nothing"), headers=RING.header("other"))
    assert (hidden.status_code, hidden.text) == (404, absent.text.replace("nothing", "private"))
    for key, name in (("other", "lent"), ("other", "open"), ("acme", "private"), ("admin", "private")):
        assert (await stack.http.get(path.format(name), headers=RING.header(key))).status_code == 200


async def test_lists_and_calls_hide_it_too(stack: Stack) -> None:
    listed = (await stack.http.get("/v1/adapters", headers=RING.header("other"))).json()["data"]
    assert {each["name"]: each["callers"] for each in listed} == {"lent": ["other"], "open": ["*"]}
    models = (await stack.http.get("/v1/models", headers=RING.header("other"))).json()["data"]
    assert [each["id"] for each in models] == ["tiny-base", "lent", "open"]
    for model in ("private", "private@1", "private@live", "private@9"):
        response = await chat(stack, "other", model)
        assert response.status_code == 404
        assert error_of(response)["message"] == f"the model {model!r} does not exist"
    assert (await chat(stack, "other", "lent")).status_code == 200
    owned = (await stack.http.get("/v1/adapters/lent", headers=RING.header("acme"))).json()
    assert owned["callers"] == ["other"]


async def test_activations_and_vllm_routes_hide_it_too(stack: Stack) -> None:
    activation = await stack.registry.activate("private", "live", 1, actor="acme")
    path = f"/v1/activations/{activation.activation_id}"
    assert (await stack.http.get(path, headers=RING.header("acme"))).status_code == 200
    looked: list[str] = []
    access_of = stack.registry.access_of
    stack.registry.access_of = lambda name: looked.append(name) or access_of(name)  # type: ignore[method-assign, func-returns-value]
    hidden = await stack.http.get(path, headers=RING.header("other"))
    absent = await stack.http.get("/v1/activations/77", headers=RING.header("other"))
    assert (hidden.status_code, hidden.text) == (404, absent.text.replace("77", str(activation.activation_id)))
    assert len(looked) == 2, "neither answer costs a question more than the other"
    unload = {"lora_name": "private"}
    response = await stack.http.post("/v1/unload_lora_adapter", json=unload, headers=RING.header("other"))
    assert response.status_code == 404
    response = await stack.http.post(
        "/v1/unload_lora_adapter", json={"lora_name": "lent"}, headers=RING.header("other")
    )
    assert response.status_code == 403


# Tenants and keys over HTTP.


async def test_tenant_and_key_are_made_changed_and_ended(stack: Stack) -> None:
    admin = RING.header("admin")
    made = await stack.http.post("/v1/tenants", json={"name": "t", "weight": 2.0, "max_concurrent": 4}, headers=admin)
    assert (made.status_code, made.json()["limits"]["max_concurrent"]) == (201, 4)
    changed = await stack.http.patch("/v1/tenants/t", json={"max_concurrent": None, "max_slots": 1}, headers=admin)
    assert changed.json()["limits"] == {**TenantLimits().model_dump(), "weight": 2.0, "max_slots": 1}
    body = {"scopes": ["infer"], "expires_in_s": 60.0, "note": "ci"}
    key = (await stack.http.post("/v1/tenants/t/keys", json=body, headers=admin)).json()
    assert key["secret"].startswith("lf_")
    assert key["key"]["expires_at_s"] > time.time() + 50
    listed = await stack.http.get("/v1/keys?tenant=t", headers=admin)
    assert key["secret"] not in listed.text
    key_id = key["key"]["key_id"]
    assert (await stack.http.post(f"/v1/keys/{key_id}/rotate", headers=admin)).status_code == 201
    assert (await stack.http.delete(f"/v1/keys/{key_id}", headers=admin)).json()["revoked_at_s"]
    whole = await stack.http.delete(f"/v1/keys/{key['secret']}", headers=admin)
    assert whole.status_code == 400
    assert key["secret"] not in whole.text
    assert (await stack.http.delete("/v1/tenants/t", headers=admin)).json() == {"name": "t", "removed": True}
    assert error_of(await stack.http.get("/v1/tenants/t", headers=admin))["code"] == "tenant_not_found"


# Limits.


async def running_streams(stack: Stack, number: int) -> None:
    async with asyncio.timeout(10):
        while stack.fleet.num_open < number:  # noqa: ASYNC110 (a fake counts, it tells nobody)
            await asyncio.sleep(0.001)


async def test_concurrent_requests_of_a_tenant_are_limited_and_others_are_not(stack: Stack) -> None:
    stack.fleet.hang, stack.fleet.script = True, lambda replica_id, request: []
    tasks = [asyncio.create_task(chat(stack, "acme", stream=True)) for _ in range(2)]
    await running_streams(stack, 2)
    refused = await chat(stack, "acme")
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    error = error_of(refused)
    assert (error["code"], error["limit"], error["type"]) == (
        "tenant_limit_reached",
        "max_concurrent",
        "rate_limit_error",
    )
    other = asyncio.create_task(chat(stack, "other", "open"))
    await running_streams(stack, 3)
    for task in (*tasks, other):
        task.cancel()
    await asyncio.gather(*tasks, other, return_exceptions=True)
    text = stack.gateway.metrics.exposition().decode()
    assert 'lorafleet_gateway_limited_total{tenant="acme",limit="max_concurrent"} 1\n' in text


async def test_weight_and_expected_output_go_with_the_request(stack: Stack) -> None:
    stack.gateway.outputs.note("acme", range(1, 101))
    await chat(stack, "acme")
    await chat(stack, "acme", max_tokens=None)
    await chat(stack, "other", "open", max_tokens=None)
    sent = [(request.weight, request.expected_tokens) for _, request in stack.fleet.requests]
    assert sent == [(2.5, None), (2.5, 95), (1.0, None)]


def gate(now: list[float], limits: TenantLimits, shared: bool = False) -> TenantGate:
    access = Access(has_keys=True, limits={"t": limits})
    return TenantGate(lambda: access, shared=shared, clock=lambda: now[0])


def test_requests_of_a_minute_come_back_after_a_minute() -> None:
    now = [0.0]
    door = gate(now, TenantLimits(requests_per_minute=3))
    for at_s in (0.0, 20.0, 40.0):
        now[0] = at_s
        with door.admit("t", 1, 1):
            pass
    with pytest.raises(TenantLimitReached) as refused, door.admit("t", 1, 1):
        pass
    assert (refused.value.limit, refused.value.retry_after_s) == ("requests_per_minute", 21)
    now[0] = 61.0
    with door.admit("t", 1, 1):
        pass
    with pytest.raises(TenantLimitReached), door.admit("t", 1, 1):
        pass


def test_tokens_that_were_not_used_are_given_back_where_they_were_charged() -> None:
    now = [0.0]
    door = gate(now, TenantLimits(tokens_per_minute=100))
    with door.admit("t", 1, 90) as charge:
        now[0] = 30.0
        charge.settle(40)
        charge.settle(0)
    with pytest.raises(TenantLimitReached), door.admit("t", 1, 61):
        pass
    with door.admit("t", 1, 60) as charge:
        charge.settle(75)
    with pytest.raises(TenantLimitReached, match="needs 101"), door.admit("t", 1, 101):
        pass
    now[0] = 62.0
    with door.admit("t", 1, 25):
        pass
    with pytest.raises(TenantLimitReached), door.admit("t", 1, 1):
        pass


async def test_gateway_waits_for_its_first_part_and_keeps_to_it() -> None:
    door = gate([0.0], TenantLimits(max_concurrent=8), shared=True)

    async def answer_once() -> None:
        await door.wait_for_news(1.0)
        assert door.uses() == (LimitUse(tenant="t", limit="max_concurrent", held=0, wanted=0),)
        door.take([LimitShare(tenant="t", limit="max_concurrent", granted=2, target=2)])

    waiting = asyncio.create_task(answer_once())
    await door.ready("t")
    await waiting
    with door.admit("t", 2, 1):
        with pytest.raises(TenantLimitReached), door.admit("t", 1, 1):
            pass
        assert door.uses() == (LimitUse(tenant="t", limit="max_concurrent", held=2, wanted=3),)
        door.take([LimitShare(tenant="t", limit="max_concurrent", granted=2, target=1)])
    assert door.uses() == (LimitUse(tenant="t", limit="max_concurrent", held=1, wanted=1),)
    with pytest.raises(TenantLimitReached), door.admit("t", 2, 1):
        pass


async def test_abandoned_requests_leave_nothing_of_any_limit(stack: Stack) -> None:
    stack.fleet.hang, stack.fleet.script = True, lambda replica_id, request: []
    for round_number in range(40):
        task = asyncio.create_task(chat(stack, "acme", stream=bool(round_number % 2), max_tokens=1))
        for _ in range(round_number % 12):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        stack.gateway.limits._meters.get("acme", {}).pop("requests_per_minute", None)
        stack.gateway.limits._meters.get("acme", {}).pop("tokens_per_minute", None)
    meters = stack.gateway.limits._meters["acme"]
    assert meters["max_concurrent"].counter.used(0.0) == 0


# Hardening.


async def test_headers_and_bodies_over_the_limit_are_refused(stack: Stack) -> None:
    big = await stack.http.get("/v1/models", headers={**RING.header("acme"), "x-junk": "j" * 40_000})
    assert (big.status_code, error_of(big)["code"]) == (431, "headers_too_large")
    long = await stack.http.get("/health?" + "q" * 40_000)
    assert long.status_code == 431
    body = {"model": "open", "prompt": [1] * 300_002}
    many = await stack.http.post("/v1/completions", json=body, headers=RING.header("acme"))
    assert (many.status_code, error_of(many)["code"]) == (400, "invalid_value")


async def test_slow_body_ends_with_408() -> None:
    config = RouterConfig(requests=RequestLimits(body_timeout_s=0.05))
    async with guarded_stack(config) as stack:

        async def trickle() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(5)

        response = await stack.http.post("/v1/completions", content=trickle(), headers=RING.header("acme"))
        assert (response.status_code, error_of(response)["code"]) == (408, "body_timeout")


async def test_client_that_does_not_read_its_stream_gives_its_places_back() -> None:
    config = RouterConfig(requests=RequestLimits(send_timeout_s=0.05))
    async with guarded_stack(config) as stack:
        body = json.dumps({"model": "open", "prompt": "hi", "stream": True, "max_tokens": 3}).encode()
        headers = [(b"authorization", RING.header("acme")["authorization"].encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if asked:
                await asyncio.Event().wait()
            asked = True
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        async with asyncio.timeout(5):
            await stack.app({**scope, "http_version": "1.1", "root_path": ""}, receive, send)


async def test_many_token_ids_are_refused_by_their_number_first(stack: Stack) -> None:
    body = {"model": "open", "prompt": [999_999] * 200_000}
    started_s = time.perf_counter()
    response = await stack.http.post("/v1/completions", json=body, headers=RING.header("acme"))
    assert error_of(response)["code"] == "context_length_exceeded"
    assert time.perf_counter() - started_s < 1.0
    response = await stack.http.post(
        "/v1/completions", json={"model": "open", "prompt": [1, 999_999]}, headers=RING.header("acme")
    )
    assert "999999" in error_of(response)["message"]


async def test_whatever_clients_send_mints_no_series(stack: Stack) -> None:
    async def series() -> int:
        text = stack.gateway.metrics.exposition().decode()
        return sum(not line.startswith("#") for line in text.splitlines())

    await chat(stack, "other", "nobody-knows")
    before = await series()
    for i in range(300):
        await chat(stack, "other", f"name-{i}")
        await stack.http.get(f"/v1/models/{i}", headers={"x-request-id": f"id-{i}", **RING.header("other")})
    await chat(stack, "other", "x" * 1_000_000)
    assert await series() <= before + 2
