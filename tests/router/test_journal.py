"""One line in the log for each call, the request id on its way, and the entry in the ledger of use."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from registry.usage_records import UsageEntry
from replica.errors import AdapterUnavailable, EngineDead, Overloaded
from replica.messages import GenerateRequest, TokenChunk
from router.app import create_app
from router.config import RequestLimits, RouterConfig
from router.errors import ReplicaGone
from tests.log_capture import CapturedLog, captured_log
from tests.router.fakes import one_choice
from tests.router.support import Stack, delta, digest, ids_of, running
from tests.router.test_tenants import RING, chat, guarded_stack

SECRET = "correct-horse-battery"


@pytest.fixture
def log() -> Iterator[CapturedLog]:
    with captured_log() as captured:
        yield captured


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running() as made:
        made.fleet.script = lambda replica_id, request: one_choice(request.request_id, [(65, 66), (67,)])
        yield made


def entries(stack: Stack) -> list[UsageEntry]:
    batch = stack.gateway.journal.ledger.batch()
    return [] if batch is None else list(batch.entries)


@pytest.mark.parametrize("stream", [False, True])
async def test_call_leaves_one_line(stack: Stack, log: CapturedLog, stream: bool) -> None:
    response = await stack.http.post(
        "/v1/chat/completions",
        json={"model": "legal", "messages": [{"role": "user", "content": SECRET}], "stream": stream},
        headers={"x-request-id": "job-1:a.b"},
    )
    assert response.headers.get_list("x-request-id") == ["job-1:a.b"]
    (line,) = log.lines
    replica_id, sent = stack.fleet.requests[0]
    expected = {
        "message": "request", "request_id": "job-1:a.b", "call_id": sent.request_id, "tenant": "default",
        "adapter": "legal", "version": 1, "digest": digest(1001)[:12], "replica": replica_id, "outcome": "ok",
        "output_tokens": 3, "prompt_tokens": len(sent.prompt),
    }  # fmt: skip
    assert {name: line[name] for name in expected} == expected
    assert 0 <= line["first_token_ms"] <= line["total_ms"]
    assert sent.origin.request_id == "job-1:a.b"
    assert (sent.origin.name, sent.origin.number, sent.origin.traceparent) == ("legal", 1, None)


async def test_base_is_named_base(stack: Stack, log: CapturedLog) -> None:
    await stack.complete(model="tiny-base")
    (line,) = log.of("request")
    assert (line["adapter"], line["version"], line["digest"]) == ("base", None, None)


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", "é", "a;b", '"'])
async def test_id_that_is_not_sane_is_replaced(stack: Stack, log: CapturedLog, given: str) -> None:
    response = await stack.http.post(
        "/v1/completions",
        json={"model": "legal", "prompt": "hi"},
        headers=[(b"x-request-id", given.encode())],  # type: ignore[arg-type]
    )
    (line,) = log.of("request")
    assert response.headers["x-request-id"] == line["request_id"] != given
    assert len(line["request_id"]) == 32


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("POST", "/v1/models", 405), ("POST", "/v1/completions", 400), ("GET", "/health", 200)],
)
async def test_every_answer_has_an_id(stack: Stack, method: str, path: str, status: int) -> None:
    response = await stack.http.request(method, path, headers={"x-request-id": "mine"})
    assert (response.status_code, response.headers.get_list("x-request-id")) == (status, ["mine"])


@pytest.mark.parametrize(("given", "added"), [(b"mine", []), (b"not sane", [32]), (b"", [32])])
async def test_id_that_the_server_repeats_is_not_added_again(stack: Stack, given: bytes, added: list[int]) -> None:
    app = create_app(stack.gateway, server_repeats_id=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as client:
        response = await client.get("/health", headers=[(b"x-request-id", given)])
    assert [len(value) for value in response.headers.get_list("x-request-id")] == added


FAILURES = [
    (AdapterUnavailable("broken"), "adapter_unavailable", 1),
    (Overloaded("full"), "overloaded", 1),
    (ReplicaGone("gone"), "replica_gone", 1),
]


@pytest.mark.parametrize(("error", "code", "num_lines"), FAILURES, ids=lambda value: str(value))
@pytest.mark.parametrize("stream", [False, True])
async def test_failed_call_leaves_one_line_and_no_use(
    stack: Stack, log: CapturedLog, error: Exception, code: str, num_lines: int, stream: bool
) -> None:
    stack.fleet.script = lambda replica_id, request: [error]
    assert (await stack.complete(stream=stream)).status_code >= 400
    assert [line["outcome"] for line in log.of("request")] == [code]
    assert log.of("refused") == []
    assert entries(stack) == []


async def test_failure_in_a_stream_is_charged_for_what_came(stack: Stack, log: CapturedLog) -> None:
    def script(replica_id: str, request: GenerateRequest) -> Any:
        return [(TokenChunk(request.request_id, 0, (65, 66)),), EngineDead("dead")]

    stack.fleet.script = script
    await stack.complete(stream=True)
    (line,) = log.of("request")
    assert (line["outcome"], line["output_tokens"]) == ("engine_dead", 2)
    (entry,) = entries(stack)
    assert (entry.requests, entry.output_tokens, entry.prompt_tokens) == (1, 2, line["prompt_tokens"])


async def test_client_that_leaves_leaves_a_line(stack: Stack, log: CapturedLog) -> None:
    reached = asyncio.Event()

    def script(replica_id: str, request: GenerateRequest) -> Any:
        reached.set()
        return [(TokenChunk(request.request_id, 0, (65, 66)),)]

    stack.fleet.script = script
    stack.fleet.hang = True
    call = asyncio.create_task(stack.complete())
    await reached.wait()
    await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    (line,) = log.of("request")
    assert (line["outcome"], line["output_tokens"]) == ("disconnect", 2)


@pytest.mark.parametrize(
    ("fields", "code"), [({"model": "unknown"}, "model_not_found"), ({"temperature": 9}, None), ({"bad": 1}, None)]
)
async def test_refusal_leaves_a_line_without_the_clients_words(
    stack: Stack, log: CapturedLog, fields: dict[str, Any], code: str | None
) -> None:
    response = await stack.complete(**{"prompt": SECRET, **fields})
    (line,) = log.lines
    error = response.json()["error"]
    expected = ("refused", code or error["code"], "/v1/completions", "default", response.headers["x-request-id"])
    assert tuple(line[name] for name in ("message", "code", "route", "tenant", "request_id")) == expected


async def test_limit_leaves_one_line(log: CapturedLog) -> None:
    config = RouterConfig(requests=RequestLimits(max_concurrent_requests=1))
    async with running(config) as stack:
        stack.fleet.script = lambda replica_id, request: one_choice(request.request_id, [(65,)])
        response = await stack.complete(prompt=["a", "b"])
    assert response.status_code == 429
    assert [line["outcome"] for line in log.of("request")] == [response.json()["error"]["code"]]


async def test_retry_is_told_with_the_id(log: CapturedLog) -> None:
    async with running(catalog=delta(num_replicas=2)) as stack:
        failed: list[str] = []

        def script(replica_id: str, request: GenerateRequest) -> Any:
            if not failed:
                failed.append(replica_id)
                return [ReplicaGone("gone")]
            return one_choice(request.request_id, [(65,)])

        stack.fleet.script = script
        response = await stack.complete()
        (retry,) = log.of("replica refused or failed")
        (line,) = log.of("request")
    assert (retry["replica"], retry["code"]) == (failed[0], "replica_gone")
    assert retry["request_id"] == line["request_id"] == response.headers["x-request-id"]
    assert line["replica"] != failed[0]


async def test_use_is_what_answers_said(stack: Stack) -> None:
    used = {"prompt_tokens": 0, "completion_tokens": 0}
    for fields in ({}, {"n": 1, "stop": ["B"]}, {"prompt": ["one", "three"]}, {"echo": True}, {"stream": True}):
        response = await stack.complete(**fields)
        if "stream" not in fields:
            for name in used:
                used[name] += response.json()["usage"][name]
        else:
            used["prompt_tokens"] += len(ids_of("<s>hi"))
            used["completion_tokens"] += 3
    (entry,) = entries(stack)
    assert (entry.tenant, entry.name, entry.number, entry.digest) == ("default", "legal", 1, digest(1001))
    assert entry.requests == 5
    assert {"prompt_tokens": entry.prompt_tokens, "completion_tokens": entry.output_tokens} == used


async def test_neither_key_nor_prompt_nor_answer_is_in_any_line(log: CapturedLog) -> None:
    answer = ids_of(SECRET.upper())

    async with guarded_stack() as stack:
        stack.fleet.script = lambda replica_id, request: one_choice(request.request_id, [answer])
        words = [{"role": "user", "content": SECRET}]
        for fields in ({}, {"stream": True}, {"model": SECRET}, {"user": SECRET, "x": SECRET}, {"temperature": SECRET}):
            await chat(stack, "acme", **{"messages": words, **fields})
        stack.fleet.script = lambda replica_id, request: [EngineDead(SECRET)]
        await chat(stack, "acme", messages=words)
        for error in (RuntimeError(RING.texts["acme"]), Overloaded("full")):
            stack.fleet.script = lambda replica_id, request, error=error: [error]  # type: ignore[misc]
            await chat(stack, "acme", messages=words)
        key = RING.texts["admin"]
        for header in (f"Bearer {key}x", f"Basic {key}", key):
            await stack.http.get("/v1/models", headers={"authorization": header})
        await stack.http.delete(f"/v1/keys/{key}", headers=RING.header("admin"))
        await stack.http.get(f"/{key}?{key}={SECRET}", headers={"x-request-id": f"{key} {SECRET}"})
    assert len(log.lines) >= 12
    for text in (SECRET, SECRET.upper(), *(key.split("_", 2)[2] for key in RING.texts.values())):
        assert text not in log.text
    assert json.dumps(log.lines)
