"""What a replica counts by tenant: exact at every scrape, bounded, and gone when the tenant has long been idle."""

from replica.config import MetricsConfig
from replica.metrics import MAX_UNCOUNTED_STEPS, ReplicaMetrics
from replica.sequence import RequestGroup
from tests.fakes import CollectingOutbox
from tests.metrics_text import samples_of, value_of
from tests.replica.engine.harness import Bench, make_request

SERVICE, GENERATED = "lorafleet_tenant_service_tokens_total", "lorafleet_replica_generation_tokens_total"


class Counted(Bench):
    """A bench whose metrics are by a clock of the test's and go by `limits`."""

    def __init__(self, **limits: float) -> None:
        self.now_s = 0.0
        self.metrics = ReplicaMetrics(MetricsConfig(**limits), clock=lambda: self.now_s)
        super().__init__(num_blocks=256, metrics=self.metrics)

    def service(self) -> dict[str, float]:
        """Tokens by tenant, as a scrape shows them now."""
        samples = samples_of(self.metrics.render())
        return {dict(labels)["tenant"]: value for (name, labels), value in samples.items() if name == SERVICE}


def test_every_scrape_shows_the_tokens_that_have_come_so_far() -> None:
    bench = Counted()
    bench.submit("a", [1, 2, 3], max_tokens=6, tenant="acme", n=2)
    bench.submit("b", [1, 2], max_tokens=3, tenant="beta")
    while bench.step():
        came = {name: len(bench.outbox.tokens[name, 0]) + len(bench.outbox.tokens[name, 1]) for name in "ab"}
        assert bench.service() == {"acme": 3 + came["a"], "beta": 2 + came["b"]}
        assert value_of(bench.metrics.render(), GENERATED) == came["a"] + came["b"]
    assert bench.service() == {"acme": 3 + 12, "beta": 2 + 3}


def test_long_run_that_nobody_scrapes_is_counted_and_keeps_nothing() -> None:
    bench = Counted()
    for number in range(2 * MAX_UNCOUNTED_STEPS):
        bench.submit(f"r{number}", [1], max_tokens=2, tenant="acme")
        bench.step()
        bench.step()
    bench.finish()
    assert len(bench.metrics._steps) < MAX_UNCOUNTED_STEPS
    assert len(bench.metrics._tenants._begun) <= MAX_UNCOUNTED_STEPS
    assert bench.service() == {"acme": 3 * 2 * MAX_UNCOUNTED_STEPS}
    text = bench.metrics.render()
    assert value_of(text, "lorafleet_replica_step_seconds_count") == bench.engine.counts.num_steps


def test_tenant_that_is_idle_for_long_has_no_series_until_its_next_request() -> None:
    bench = Counted(tenant_idle_s=60)
    bench.submit("a", [1, 2], max_tokens=2, tenant="acme")
    bench.submit("b", [1, 2], max_tokens=100, tenant="beta")
    for _ in range(10):
        bench.step()
    assert bench.service().keys() == {"acme", "beta"}
    bench.now_s += 61
    assert bench.service().keys() == {"beta"}, "one that is being served is not idle"
    assert value_of(bench.metrics.render(), "lorafleet_tenant_queue_wait_seconds_count", tenant="acme") is None
    bench.submit("c", [1], max_tokens=1, tenant="acme")
    bench.finish()
    assert bench.service()["acme"] == 2


def test_tenants_beyond_the_bound_share_a_bucket_until_others_go() -> None:
    metrics = ReplicaMetrics(MetricsConfig(max_tenants=2))
    groups = [RequestGroup(make_request(name, [1], 1, tenant=name), CollectingOutbox()) for name in "abcd"]
    for group in groups:
        metrics.on_start(group, 0.1)
    waits = "lorafleet_tenant_queue_wait_seconds_count"
    assert value_of(metrics.render(), waits, tenant="_other") == 2
    assert value_of(metrics.render(), waits, tenant="c") is None
