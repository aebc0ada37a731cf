"""Traces, log lines and the usage report of real replicas: what a script did is what they say."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from registry.usage_records import UsageGroup
from replica.adapters.image_reader import ImageReader
from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from router.app import create_app
from router.deadline import TIMEOUT_HEADER
from telemetry.otel import OtelTracer
from telemetry.traces import Traceparent, parse
from tests.e2e.test_metrics_truth import TENANT_HEADER, TenantsByHeader
from tests.local_fleet import LocalFleet, local_fleet, until
from tests.log_capture import CapturedLog, captured_log
from tests.metrics_text import sum_of
from tests.tiny_models import make_adapter, make_model

CLIENT = Traceparent(0x1234, 0x5678)
PARTS = ("queue", "load", "prefill", "decode")
CLOCKS_APART_NS = 20_000_000
"""Wall time is worked out by each process from two clocks, between whose readings it may be put aside."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "tiny-llama")


@pytest.fixture
def log() -> Iterator[CapturedLog]:
    with captured_log() as captured:
        yield captured


class Traced:
    """A fleet of two replicas and two adapters, whose spans are kept."""

    def __init__(self, fleet: LocalFleet, client: httpx.AsyncClient, spans: InMemorySpanExporter) -> None:
        self.fleet = fleet
        self.client = client
        self._spans = spans

    async def complete(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "a", "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        return await self.client.post("/v1/completions", json={**body, **fields}, headers=headers)

    async def spans(self, count: int) -> tuple[ReadableSpan, ...]:
        """All spans so far, once there are `count`; they leave the replica's thread a moment after its tokens."""
        await until(lambda: len(self._spans.get_finished_spans()) >= count)
        await asyncio.sleep(0.02)
        return self._spans.get_finished_spans()


@pytest.fixture
async def traced(base: Path, tmp_path: Path) -> AsyncIterator[Traced]:
    config = ReplicaConfig(
        model=ModelConfig(base=str(base), device="cpu", num_threads=1),
        adapters=AdapterCacheConfig(max_slots=2, arena_bytes=1 << 22),
        scheduler=SchedulerConfig(num_kv_blocks=128),
    )
    exporter = InMemorySpanExporter()
    tracer = OtelTracer(SimpleSpanProcessor(exporter), role="test", member="m")
    async with local_fleet(tmp_path, config, tracer=tracer) as fleet, fleet.client() as client:
        for seed, name in enumerate("ab"):
            await fleet.push(name, make_adapter(base, ("q_proj",), 4, folder=tmp_path / name, seed=seed))
        yield Traced(fleet, client, exporter)
        fleet.check_integrity()


def named(spans: Sequence[ReadableSpan], name: str) -> ReadableSpan:
    (span,) = [span for span in spans if span.name == name]
    return span


def assert_tree(spans: Sequence[ReadableSpan], parent: Traceparent | None) -> ReadableSpan:
    """One request with its parts below it, each within it and one after the other."""
    request = named(spans, "request")
    assert request.kind is SpanKind.SERVER
    assert (request.parent and request.parent.span_id) == (parent and parent.span_id)
    own = request.context
    for span in spans:
        assert span.context.trace_id == own.trace_id
        if span is not request:
            assert span.parent is not None
            assert span.parent.span_id == own.span_id
            assert request.start_time is not None
            assert span.start_time is not None
            assert span.end_time is not None
            assert request.end_time is not None
            assert request.start_time - CLOCKS_APART_NS <= span.start_time <= span.end_time
            assert span.end_time <= request.end_time + 50_000_000
    parts = sorted((span for span in spans if span is not request), key=lambda span: PARTS.index(span.name))
    for before, after in pairwise(parts):
        assert before.end_time <= after.start_time + 1_000, (before.name, after.name)  # type: ignore[operator]
    return request


async def test_streamed_request_has_its_whole_tree(traced: Traced, log: CapturedLog) -> None:
    began_ns = time.time_ns()
    response = await traced.complete({"traceparent": str(CLIENT), "x-request-id": "mine"}, stream=True)
    assert response.status_code == 200
    spans = await traced.spans(5)
    took_ns = time.time_ns() - began_ns
    assert sorted(span.name for span in spans) == sorted(("request", *PARTS))
    request = assert_tree(spans, CLIENT)
    assert request.context.trace_id == CLIENT.trace_id
    assert request.attributes is not None
    assert request.end_time - request.start_time <= took_ns  # type: ignore[operator]
    digest = traced.fleet.gateway.catalog.adapters[0].versions[0].digest
    for span in spans:
        assert span.attributes is not None
        found = {name: span.attributes[f"lorafleet.{name}"] for name in ("tenant", "adapter", "version", "digest")}
        assert found == {"tenant": "default", "adapter": "a", "version": 1, "digest": digest[:12]}
        assert span.status.status_code is StatusCode.UNSET
    prompt, output = (named(spans, name).attributes for name in ("prefill", "decode"))
    assert prompt is not None
    assert output is not None
    assert request.attributes["lorafleet.request_id"] == "mine"
    assert request.attributes["lorafleet.prompt_tokens"] == prompt["lorafleet.tokens"]
    assert request.attributes["lorafleet.output_tokens"] == output["lorafleet.tokens"] == 8
    lines = log.of("request")
    assert sorted(line["logger"] for line in lines) == ["cluster.replica_journal", "router.journal"]
    assert {line["request_id"] for line in lines} == {"mine"}
    assert len({line["replica"] for line in lines}) == 1


async def test_second_request_needs_no_load_and_a_root_of_its_own(traced: Traced) -> None:
    await traced.complete(model="tiny-llama")
    spans = await traced.spans(4)
    assert sorted(span.name for span in spans) == sorted({"request", *PARTS} - {"load"})
    assert_tree(spans, None)


async def test_client_that_does_not_sample_is_not_traced(traced: Traced) -> None:
    assert (await traced.complete({"traceparent": str(CLIENT._replace(is_sampled=False))})).status_code == 200
    assert (await traced.complete({"traceparent": "00-broken"})).status_code == 200
    spans = await traced.spans(4)
    assert [span.name for span in spans].count("request") == 1
    assert named(spans, "request").parent is None


async def test_request_that_is_given_up_ends_its_trace(traced: Traced) -> None:
    generation = traced.client.stream(
        "POST", "/v1/completions",
        json={"model": "a", "prompt": "hi", "max_tokens": 120, "ignore_eos": True, "stream": True},
        headers={TIMEOUT_HEADER: "0.05"},
    )  # fmt: skip
    async with generation as response:
        await response.aread()
    spans = await traced.spans(3)
    assert_tree(spans, None)
    last = max(spans, key=lambda span: PARTS.index(span.name) if span.name in PARTS else -1)
    assert last.attributes is not None
    assert last.attributes["lorafleet.outcome"] == "abort"


async def test_failed_load_is_an_error_in_the_trace(
    traced: Traced, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(ImageReader, "read", broken)
    await traced.fleet.push("c", make_adapter(base, ("q_proj",), 4, folder=tmp_path / "c", seed=9))
    response = await traced.complete(model="c")
    assert response.status_code >= 500
    spans = await traced.spans(2)
    code = response.json()["error"]["code"]
    request = assert_tree([span for span in spans if span.name in ("request", *PARTS)], None)
    assert (request.status.status_code, request.status.description) == (StatusCode.ERROR, code)
    failed = [span for span in spans if span.name != "request" and span.status.status_code is StatusCode.ERROR]
    assert [span.status.description for span in failed] == [code]
    assert not any(span.name in ("prefill", "decode") for span in spans)


async def test_report_is_what_the_script_counted_and_the_device_was_busy(traced: Traced) -> None:
    fleet, client = traced.fleet, traced.client
    counted: Counter[tuple[str, str | None, str]] = Counter()
    fleet.gateway.authenticator = TenantsByHeader()
    fleet.app = create_app(fleet.gateway)
    await client.aclose()
    async with fleet.client() as client:

        async def one(number: int) -> None:
            tenant, model = ("default", "acme")[number % 2], ("a", "b", "tiny-llama")[number % 3]
            if tenant == "acme" and model != "tiny-llama":
                tenant = "default"
            body = {"model": model, "prompt": "x" * (number % 7 + 1), "max_tokens": number % 5 + 1, "ignore_eos": True}
            body |= {"n": 2} if number % 4 == 0 else {"stop": ["e"]}
            response = await client.post("/v1/completions", json=body, headers={TENANT_HEADER: tenant})
            adapter = None if model == "tiny-llama" else model
            counted[tenant, adapter, "requests"] += 1
            for name in ("prompt_tokens", "completion_tokens"):
                counted[tenant, adapter, name] += response.json()["usage"][name]

        await asyncio.gather(*(one(number) for number in range(30)))
        gone = asyncio.create_task(
            client.post("/v1/completions", json={"model": "a", "prompt": "y", "max_tokens": 100})
        )
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
    await until(lambda: all(not replica.status().num_running for replica in fleet.replicas.values()))
    await asyncio.sleep(0.1)
    await fleet.tell_usage()
    rows = fleet.registry.registry.usage.report(from_s=None, to_s=None).rows
    found = {
        (row.tenant, row.adapter, name): getattr(row, name.replace("completion", "output"))
        for row in rows
        for name in ("requests", "prompt_tokens", "completion_tokens")
    }
    extra = Counter(found) - counted
    assert not Counter(counted) - Counter(found)
    assert extra["default", "a", "requests"] <= 1, "the call that was given up may have had its first token"
    assert {key[:2] for key in extra} <= {("default", "a")}
    (total,) = fleet.registry.registry.usage.report(from_s=None, to_s=None, group_by=()).rows
    busy_ns = sum(replica.engine._accounts.busy_ns for replica in fleet.replicas.values())
    assert total.device_ns == busy_ns > 0
    by_hour = fleet.registry.registry.usage.report(from_s=None, to_s=None, group_by=(UsageGroup.HOUR,)).rows
    assert sum(row.device_ns for row in by_hour) == total.device_ns


def test_traceparents_are_read_as_the_recommendation_says() -> None:
    good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert str(parse(good)) == good
    assert parse(good.replace("00-0af", "cc-0af")) == parse(good)
    assert parse(good[:-2] + "00") == Traceparent(*parse(good)[:2], False)  # type: ignore[index]
    for bad in (
        None,
        "",
        good.upper(),
        f"ff{good[2:]}",
        f"{good}x",
        good.replace("b7ad6b7169203331", "0" * 16),
        "0" * 55,
    ):
        assert parse(bad) is None


async def test_preempted_choice_says_whose_it_is(base: Path, tmp_path: Path, log: CapturedLog) -> None:
    config = ReplicaConfig(
        model=ModelConfig(base=str(base), device="cpu", num_threads=1),
        adapters=AdapterCacheConfig(max_slots=2, arena_bytes=1 << 22),
        scheduler=SchedulerConfig(num_kv_blocks=8, block_size=4),
    )
    async with local_fleet(tmp_path, config, num_replicas=1) as fleet, fleet.client() as client:
        await fleet.push("a", make_adapter(base, ("q_proj",), 4, folder=tmp_path / "a", seed=0))
        body = {"model": "a", "prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True, "temperature": 0}
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=body, headers={"x-request-id": f"r{n}"}) for n in range(4))
        )
        assert [answer.status_code for answer in answers] == [200] * 4
        await until(lambda: len([line for line in log.of("request") if "device_ms" in line]) == 4)
        text = await fleet.gateway.exposition()
        digest = fleet.gateway.catalog.adapters[0].versions[0].digest
        fleet.check_integrity()
    lines = log.of("preempted")
    assert sum_of(text, "lorafleet_replica_preemptions_total") == len(lines) > 0
    who = {
        "tenant": "default",
        "adapter": "a",
        "version": 1,
        "digest": digest[:12],
        "replica": "replica-0",
        "choice": 0,
    }
    assert all(who.items() <= line.items() and 0 < line["tokens"] < 23 for line in lines)
    ends = {line["request_id"]: line["preemptions"] for line in log.of("request") if "device_ms" in line}
    assert ends.keys() == {f"r{n}" for n in range(4)}
    assert +Counter(ends) == Counter(line["request_id"] for line in lines)
