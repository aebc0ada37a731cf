"""The gateway's own series, and merging expositions."""

from prometheus_client.parser import text_string_to_metric_families

from registry.catalog import Resolution
from replica.errors import AdapterUnavailable
from router.exposition import merge_expositions
from router.metrics import GatewayMetrics
from tests.metrics_text import value_of
from tests.router.support import BASE_NAME, Stack, adapter_record, delta, running
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
        for number in range(200):
            await stack.complete(model=f"random-{number}")
        text = stack.gateway.metrics.exposition()
        assert b"random-" not in text
        assert value(stack, "lorafleet_gateway_errors_total", code="model_not_found") == 200


async def test_series_go_with_their_adapter_and_do_not_come_back() -> None:
    async with running(catalog=delta([adapter_record("legal"), adapter_record("sql")])) as stack:
        stack.fleet.script = says("abc")
        await stack.complete()
        await stack.complete(model="sql")
        late = stack.gateway.metrics.meter(LEGAL, "acme", 3)
        with late:
            await stack.gateway.apply(delta([adapter_record("sql")], revision=2))
            late.prompt_meter()(5, 1)
        text = stack.gateway.metrics.exposition()
        assert b'model="legal"' not in text
        assert b'model="sql"' in text


def test_times_come_from_the_clock() -> None:
    now_s = 10.0
    metrics = GatewayMetrics(clock=lambda: now_s)
    with metrics.meter(LEGAL, "acme", 1) as meter:
        arrived = meter.prompt_meter()
        now_s = 10.5
        arrived(1, 1)
        now_s = 11.5
        arrived(4, 2)
    for name, seconds in (("first_token", 0.5), ("between_tokens", 0.5), ("latency", 1.5)):
        sample = f"lorafleet_gateway_{name}_seconds_sum"
        assert value_of(metrics.exposition(), sample, model="legal", version="1") == seconds
    assert value_of(metrics.exposition(), "lorafleet_tenant_first_token_seconds_sum", tenant="acme") == 0.5


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
        meter.prompt_meter()(1, 1)
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
