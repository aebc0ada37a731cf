"""The gateway's own series, and merging expositions."""

import asyncio
import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from registry.catalog import Resolution
from registry.errors import ModelNotFound
from registry.types import Access, TenantLimits
from replica.config import MetricsConfig as ReplicaMetricsConfig
from replica.errors import AdapterUnavailable
from replica.messages import GenerateRequest, Origin, SamplingParams
from replica.metrics import ReplicaMetrics
from replica.sequence import RequestGroup
from router.config import MetricsConfig, RouterConfig
from router.errors import BadRequest, GatewaySilent
from router.exposition import merge_expositions
from router.metrics import SETTLED_AT_ONCE, GatewayMetrics
from router.pace import MAX_GAPS
from router.schemas import CompletionBody
from tests.fakes import CollectingOutbox
from tests.metrics_text import samples_of, value_of
from tests.router.support import BASE_NAME, Stack, adapter_record, delta, error_of, running
from tests.router.test_openai_api import says

LEGAL = Resolution(model="legal", adapter="legal", number=1, digest="0" * 64)


def value(stack: Stack, name: str, **labels: str) -> float | None:
    return value_of(stack.gateway.metrics.exposition(), name, **labels)


async def test_calls_count_by_model_and_outcome() -> None:
    async with running() as stack:
        stack.fleet.script = says("abc", "de")
        await stack.complete()
        await stack.complete(model="legal@1", stream=True)
        await stack.complete(model=BASE_NAME)
        stack.fleet.script = lambda replica_id, request: [AdapterUnavailable("broken")]
        await stack.complete()
        assert value(stack, "lorafleet_requests_total", model="legal", version="1", outcome="ok") == 2
        assert value(stack, "lorafleet_requests_total", model="base", version="-", outcome="ok") == 1
        assert value(stack, "lorafleet_requests_total", model="legal", version="1", outcome="adapter_unavailable") == 1
        assert value(stack, "lorafleet_gateway_completion_tokens_total", model="legal", version="1") == 10
        assert value(stack, "lorafleet_gateway_prompt_tokens_total", model="legal", version="1") == 9
        assert value(stack, "lorafleet_gateway_first_token_seconds_count", model="legal", version="1") == 2
        assert value(stack, "lorafleet_gateway_between_tokens_seconds_count", model="legal", version="1") == 2
        assert value(stack, "lorafleet_gateway_in_flight", model="legal", version="1") == 0
        assert value(stack, "lorafleet_gateway_placements_total", kind="home", held="none") == 3
        assert value(stack, "lorafleet_gateway_placements_total", kind="base", held="none") == 1


async def test_unknown_models_mint_no_series() -> None:
    async with running() as stack:
        await stack.complete()
        before = set(samples_of(stack.gateway.metrics.exposition()))
        call = stack.gateway.completion_call
        for number in range(10_000):
            with pytest.raises(ModelNotFound):
                await call("default", CompletionBody(model=f"random-{number}", prompt="hi"))
        for model in ("random-over-http", "legal@random", "x" * 1_000_000):
            assert (await stack.complete(model=model)).status_code in (400, 404)
        after = set(samples_of(stack.gateway.metrics.exposition()))
        assert {name for name, _ in after - before} == {"lorafleet_gateway_errors_total"}
        assert b"random" not in stack.gateway.metrics.exposition()
        assert len(stack.gateway.metrics.exposition()) < 20_000


async def test_versions_beyond_the_bound_share_a_bucket_until_others_go() -> None:
    names = [f"a{number}" for number in range(5)]
    config = RouterConfig(metrics=MetricsConfig(max_adapters=3, max_tenants=2))
    async with running(config, catalog=delta([adapter_record(name) for name in names])) as stack:
        stack.fleet.script = says("abc")
        for name in names:
            await stack.complete(model=name)
        metrics = stack.gateway.metrics
        assert value(stack, "lorafleet_requests_total", model="a1", version="1", outcome="ok") == 1
        assert value(stack, "lorafleet_requests_total", model="_other", version="-", outcome="ok") == 3
        for tenant in ("default", "second", "third", "fourth"):
            metrics.limited(tenant, "max_concurrent")
        assert value(stack, "lorafleet_gateway_limited_total", tenant="_other", limit="max_concurrent") == 2
        await stack.gateway.apply(delta([adapter_record(name) for name in names[1:]], revision=2))
        await stack.complete(model="a4")
        assert value(stack, "lorafleet_requests_total", model="a4", version="1", outcome="ok") == 1
        assert value(stack, "lorafleet_requests_total", model="_other", version="-", outcome="ok") == 3


async def test_series_of_a_tenant_go_when_it_is_removed() -> None:
    async with running() as stack:
        access = Access(has_keys=True, limits={"acme": TenantLimits(), "other": TenantLimits()})
        await stack.gateway.apply(delta(revision=2).model_copy(update={"access": access}))
        for tenant in ("acme", "other", "default"):
            with stack.gateway.metrics.meter(LEGAL, tenant, 3):
                pass
        left = access.model_copy(update={"limits": {"other": TenantLimits()}})
        await stack.gateway.apply(delta(revision=3).model_copy(update={"access": left}))
        text = stack.gateway.metrics.exposition()
        assert b'tenant="acme"' not in text
        assert {b'tenant="other"', b'tenant="default"'} <= set(re.findall(rb'tenant="\w+"', text))


async def test_a_thousand_adapters_are_scraped_within_a_second() -> None:
    names = [f"adapter-{number}" for number in range(1000)]
    async with running(catalog=delta([adapter_record(name) for name in names])) as stack:
        for name in names:
            for outcome in ("", "stop"):
                found = Resolution(model=name, adapter=name, number=1)
                with suppress(BadRequest), stack.gateway.metrics.meter(found, "acme", 5) as meter:
                    arrived = meter.pace().arrived
                    arrived(1, 1)
                    arrived(3, 1)
                    if outcome:
                        raise BadRequest("no")
        replica = ReplicaMetrics()
        for name in names:
            replica.on_start(RequestGroup(request_of(name), CollectingOutbox()), 0.1)
        stack.fleet.texts = {"r0": replica.render(), "r1": replica.render()}
        started_s = time.process_time()  # what a busy machine does to the clock on the wall is not the scrape's
        text = await stack.gateway.exposition()
        took_s = time.process_time() - started_s
        assert text.count(b"\n") > 75_000
        assert took_s < 1.0


def request_of(name: str) -> GenerateRequest:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return GenerateRequest(name, "acme", digest, (1,), SamplingParams(1), origin=Origin(name=name, number=1))


def test_replica_drops_a_version_that_is_withdrawn_and_bounds_the_others() -> None:
    metrics = ReplicaMetrics(ReplicaMetricsConfig(max_adapters=2))
    sample = "lorafleet_replica_queue_wait_seconds_count"
    requests = [request_of(name) for name in ("a", "b", "c", "d")]
    for request in requests:
        metrics.on_start(RequestGroup(request, CollectingOutbox()), 0.1)
    assert value_of(metrics.render(), sample, model="_other", version="-") == 2
    metrics.on_withdrawn(requests[0].adapter or "")
    assert value_of(metrics.render(), sample, model="a", version="1") is None
    metrics.on_start(RequestGroup(requests[3], CollectingOutbox()), 0.1)
    assert value_of(metrics.render(), sample, model="d", version="1") == 1


async def test_series_go_with_their_adapter_and_do_not_come_back() -> None:
    async with running(catalog=delta([adapter_record("legal"), adapter_record("sql")])) as stack:
        stack.fleet.script = says("abc")
        await stack.complete()
        await stack.complete(model="sql")
        late = stack.gateway.metrics.meter(LEGAL, "acme", 3)
        with late:
            await stack.gateway.apply(delta([adapter_record("sql")], revision=2))
            late.pace().arrived(5, 1)
        text = stack.gateway.metrics.exposition()
        assert b'model="legal"' not in text
        assert b'model="sql"' in text


def test_times_come_from_the_clock() -> None:
    now_s = 10.0
    metrics = GatewayMetrics(clock=lambda: now_s)
    with metrics.meter(LEGAL, "acme", 1) as meter:
        arrived = meter.pace().arrived
        now_s = 10.5
        arrived(1, 1)
        now_s = 11.5
        arrived(4, 2)
    for name, seconds in (("first_token", 0.5), ("between_tokens", 0.5), ("latency", 1.5)):
        sample = f"lorafleet_gateway_{name}_seconds_sum"
        assert value_of(metrics.exposition(), sample, model="legal", version="1") == seconds
    assert value_of(metrics.exposition(), "lorafleet_tenant_first_token_seconds_sum", tenant="acme") == 0.5


async def test_scrape_shows_what_live_streams_have_brought_and_counts_nothing_twice() -> None:
    async with running() as stack:
        counted = "lorafleet_gateway_completion_tokens_total"
        labels = {"model": "legal", "version": "1"}
        with stack.gateway.metrics.meter(LEGAL, "acme", 1) as meter:
            one, other = meter.pace(), meter.pace()
            for number in range(1, MAX_GAPS + 3):
                one.arrived(2, 1)
                if number % 100 == 0:
                    text = await stack.gateway.own_exposition()
                    assert value_of(text, counted, **labels) == 2 * number
            other.arrived(3, 3)
            text = await stack.gateway.own_exposition()
            assert value_of(text, counted, **labels) == 2 * (MAX_GAPS + 2) + 3
            assert value_of(text, "lorafleet_gateway_first_token_seconds_count", **labels) == 1
            assert value_of(text, "lorafleet_gateway_in_flight", **labels) == 1
        text = await stack.gateway.own_exposition()
        assert value_of(text, counted, **labels) == 2 * (MAX_GAPS + 2) + 3
        assert (
            value_of(text, "lorafleet_tenant_tokens_total", tenant="acme", kind="completion") == 2 * (MAX_GAPS + 2) + 3
        )
        assert value_of(text, "lorafleet_gateway_between_tokens_seconds_count", **labels) == MAX_GAPS + 1


class FakePeers:
    """`router.gateway.Peers` whose others are given."""

    def __init__(self, **texts: bytes) -> None:
        self.texts = texts

    async def names(self) -> Sequence[str]:
        return list(self.texts)

    async def metrics(self) -> Mapping[str, bytes]:
        return self.texts

    async def metrics_of(self, instance: str) -> bytes | None:
        return self.texts.get(instance)


async def test_scrape_of_a_gateway_covers_the_others() -> None:
    async with running() as stack:
        stack.gateway._peers = FakePeers(g1=b"lorafleet_gateway_revision 7\n")
        await stack.complete()
        text = (await stack.http.get("/metrics")).content
        assert value_of(text, "lorafleet_gateway_revision", instance="g1") == 7
        assert value_of(text, "lorafleet_gateway_revision", instance="gateway") == 1
        assert (await stack.http.get("/metrics", params={"instance": "g1"})).text == "lorafleet_gateway_revision 7\n"
        targets = [target["labels"]["instance"] for target in (await stack.http.get("/metrics/targets")).json()]
        assert targets == ["gateway", "g1", "registry", "r0", "r1"]
        stack.gateway._peers = FakePeers()
        assert (await stack.http.get("/metrics", params={"instance": "g1"})).status_code == 404
        assert b"g1" not in (await stack.http.get("/metrics")).content


class SilentPeers(FakePeers):
    """Others that are there and do not answer."""

    async def names(self) -> Sequence[str]:
        raise GatewaySilent("nobody says")

    async def metrics_of(self, instance: str) -> bytes | None:
        raise GatewaySilent(f"gateway {instance} does not answer")


async def test_gateway_that_is_there_and_silent_is_no_unknown_member() -> None:
    async with running() as stack:
        stack.gateway._peers = SilentPeers()
        for answer in (
            await stack.http.get("/metrics", params={"instance": "g1"}),
            await stack.http.get("/metrics/targets"),
        ):
            assert answer.status_code == 503
            assert error_of(answer)["code"] == "gateway_silent"
        assert (await stack.http.get("/metrics")).status_code == 200


async def test_gaps_of_a_stream_that_nobody_scrapes_do_not_pile_up() -> None:
    metrics = GatewayMetrics()
    with metrics.meter(LEGAL, "acme", 1) as meter:
        pace = meter.pace()
        for _ in range(3 * MAX_GAPS):
            pace.arrived(1, 1)
        assert len(pace.take_gaps_s()) < MAX_GAPS


async def test_streams_get_their_turn_while_many_of_them_are_counted_for_a_scrape() -> None:
    metrics, turns = GatewayMetrics(), 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    with ExitStack() as calls:
        for _ in range(10 * SETTLED_AT_ONCE):
            calls.enter_context(metrics.meter(LEGAL, "acme", 1)).pace().arrived(1, 1)
        task = asyncio.create_task(other_work())
        await metrics.settle()
        task.cancel()
    assert turns >= 9
    assert (
        value_of(metrics.exposition(), "lorafleet_gateway_completion_tokens_total", model="legal", version="1") == 640
    )


def test_merge_groups_families_and_keeps_one_type_each() -> None:
    one = (
        b'# HELP x_total X.\n# TYPE x_total counter\nx_total{a="1"} 1.0\n'
        b'# TYPE h histogram\nh_bucket{le="1"} 1\nh_sum 2\nh_count 1\n'
    )
    two = b"# HELP x_total other\n# TYPE x_total counter\nx_total 2.0\nloose 3\n"
    merged = merge_expositions({"a": one, 'b"\\': two}).decode()
    assert merged.splitlines() == [
        "# HELP x_total X.",
        "# TYPE x_total counter",
        'x_total{instance="a",a="1"} 1.0',
        'x_total{instance="b\\"\\\\"} 2.0',
        "# TYPE h histogram",
        'h_bucket{instance="a",le="1"} 1',
        'h_sum{instance="a"} 2',
        'h_count{instance="a"} 1',
        'loose{instance="b\\"\\\\"} 3',
    ]
    assert {family.name for family in text_string_to_metric_families(merged)} == {"x", "h", "loose"}


def test_merge_of_real_expositions_can_be_read_back() -> None:
    made = GatewayMetrics()
    with made.meter(LEGAL, "acme", 2) as meter:
        meter.pace().arrived(1, 1)
    merged = merge_expositions({"g0": made.exposition(), "g1": made.exposition()}).decode()
    samples = [s for family in text_string_to_metric_families(merged) for s in family.samples]
    assert {s.labels["instance"] for s in samples} == {"g0", "g1"}
    assert len({(s.name, tuple(sorted(s.labels.items()))) for s in samples}) == len(samples)
    original = [s for f in text_string_to_metric_families(made.exposition().decode()) for s in f.samples]
    assert len(samples) == 2 * len(original)


def test_merge_keeps_an_instance_label_of_the_member_apart() -> None:
    merged = merge_expositions({"g": b'x{instance="theirs",a="b"} 1\ny{a="b",instance="theirs"} 1\n'}).decode()
    assert 'x{instance="g",exported_instance="theirs",a="b"} 1' in merged
    assert 'y{instance="g",a="b",exported_instance="theirs"} 1' in merged


def test_merge_survives_a_member_that_talks_nonsense() -> None:
    merged = merge_expositions({"bad": b"\xff<html>nope</html>\n# EOF\n\n{} 1\n", "good": b"x 1\n"}).decode()
    assert merged == 'x{instance="good"} 1\n'


async def test_a_member_can_be_scraped_alone_and_prometheus_is_told_of_each() -> None:
    async with running() as stack:
        stack.fleet.texts = {"r0": b"x 1\n"}
        stack.registry.reported = ()
        targets = (await stack.http.get("/metrics/targets")).json()
        assert [target["labels"]["__param_instance"] for target in targets] == ["gateway", "registry", "r0", "r1"]
        assert all(target["targets"] == ["gateway"] for target in targets)
        texts = {name: await stack.http.get("/metrics", params={"instance": name}) for name in ("gateway", "r0")}
        assert texts["r0"].text == "x 1\n"
        assert "lorafleet_gateway_replicas 2\n" in texts["gateway"].text
        assert "x{" not in texts["gateway"].text


async def test_a_member_that_is_unknown_or_silent_is_an_error_alone_and_left_out_of_the_whole() -> None:
    async with running() as stack:
        answers = [await stack.http.get("/metrics", params={"instance": name}) for name in ("nobody", "r1", "registry")]
        assert [(answer.status_code, answer.json()["error"]["code"]) for answer in answers] == [
            (404, "member_not_found"),
            (503, "replica_gone"),
            (503, "registry_unavailable"),
        ]
        whole = await stack.http.get("/metrics")
        assert whole.status_code == 200
        assert 'instance="registry"' not in whole.text
        stack.registry.reported = ()
        assert 'lorafleet_registry_revision{instance="registry"} 7' in (await stack.http.get("/metrics")).text
