"""What is said first, and when nothing is."""

from typing import Any

from registry.types import Event
from router.view.findings import findings
from router.view.records import AdapterTable, Finding, FleetReport, Rollout, Totals
from tests.fleet_reports import adapter_row, fleet_report, replica_view, tenant_view


def quiet(**changes: Any) -> FleetReport:
    fields: dict[str, Any] = {"replicas": (replica_view(0),), "tenants": (), "findings": ()}
    return fleet_report(**{**fields, "totals": totals(), **changes})


def totals(**changes: Any) -> Totals:
    return Totals(**{**dict.fromkeys(Totals.model_fields, 0), "hit_rate": 0.99, **changes})


def found(report: FleetReport, *events: Event) -> list[Finding]:
    return list(findings(report, events))


def codes(report: FleetReport, *events: Event) -> list[str]:
    return [finding.code for finding in found(report, *events)]


def crowd(noisy: int, other: int) -> FleetReport:
    whole = noisy + other
    tenants = (
        tenant_view("globex", waiting=noisy, queue_share=noisy / whole, service_share=0.5),
        tenant_view("acme", waiting=other, queue_share=other / whole, in_flight=1),
    )
    return quiet(tenants=tenants, totals=totals(waiting=whole))


def test_fleet_in_order_has_nothing_to_say() -> None:
    assert found(quiet()) == []


def test_noisy_tenant_is_named_with_its_part_of_queue_and_service() -> None:
    (finding,) = found(crowd(41, 9))
    assert finding.subject == "globex"
    assert finding.text == "globex holds 82 % of the queue (41 of 50 requests) and gets 50 % of the service"


def test_short_or_shared_queue_or_a_lone_tenant_is_not_noise() -> None:
    assert codes(crowd(5, 1)) == []
    assert codes(crowd(25, 25)) == []
    alone = quiet(tenants=(tenant_view("globex", waiting=50, queue_share=1.0),), totals=totals(waiting=50))
    assert codes(alone) == []


def test_tenant_that_waits_long_starves_and_one_that_is_refused_is_throttled() -> None:
    waits, refused = tenant_view("acme", waiting=1, oldest_wait_s=31.0), tenant_view("globex", limited_per_s=2.5)
    texts = [finding.text for finding in found(quiet(tenants=(refused, waits)))]
    assert texts == [
        "acme starves: its oldest call waits 31 s",
        "globex is throttled: 2.5 calls/s refused by its limits",
    ]


def test_thrashing_needs_both_swaps_and_misses() -> None:
    (finding,) = found(quiet(totals=totals(swaps_per_s=14.0, hit_rate=0.31)))
    assert finding.severity == "bad"
    assert finding.text.startswith("thrashing: 14.0 swaps/s, hit rate 31 %")
    assert codes(quiet(totals=totals(swaps_per_s=0.1, hit_rate=0.1))) == []
    assert codes(quiet(totals=totals(swaps_per_s=14.0, hit_rate=0.95))) == []
    assert codes(quiet(totals=totals(swaps_per_s=14.0, hit_rate=None))) == []


def test_replicas_that_are_silent_drained_or_behind_are_named() -> None:
    replicas = (replica_view(0, answers=False), replica_view(1, drained="bad disk"), replica_view(2, behind=99))
    assert codes(quiet(replicas=replicas)) == ["replica_silent", "replica_drained", "replica_behind"]


def test_gateways_that_do_not_answer_are_told() -> None:
    (finding,) = found(quiet(num_gateways=3, num_gateways_counted=2))
    assert (finding.code, finding.severity) == ("gateway_silent", "warn")
    assert finding.text == "calls of 2 of 3 gateways: the others do not answer"


def test_one_adapter_with_most_of_the_traffic_may_be_merged() -> None:
    table = AdapterTable(num_total=2, num_matching=2, rows=(adapter_row("legal", tokens_per_s=90.0),))
    assert codes(quiet(adapters=table, totals=totals(tokens_per_s=100.0, num_adapters=2))) == ["dominant_adapter"]
    base = AdapterTable(num_total=2, num_matching=2, rows=(adapter_row("base", owner=None, tokens_per_s=90.0),))
    assert codes(quiet(adapters=base, totals=totals(tokens_per_s=100.0, num_adapters=2))) == []


def test_failures_of_calls_and_of_activations_and_a_silent_registry_are_told() -> None:
    failed = Event(
        revision=9,
        at_s=1e9 - 5,
        kind="activation_failed",
        name="legal",
        number=3,
        actor="r",
        detail={"error": "no room"},
    )
    report = quiet(registry_answers=False, missing=("replica",), totals=totals(requests_per_s=10.0, failures_per_s=2.0))
    assert codes(report, failed) == ["not_ready", "registry_silent", "failing", "rollout_failed"]
    assert found(report, failed)[-1].text == "legal@3 was not activated: no room"


def test_rollout_that_waits_too_long_is_stuck() -> None:
    fields: dict[str, Any] = dict.fromkeys(Rollout.model_fields)
    fields |= {"kind": "activation", "name": "legal", "number": 2, "num_staged": 1, "num_replicas": 2}
    rollout = Rollout(**{**fields, "since_s": 1e9 - 45, "waiting_for": ("replica-1",)})
    (finding,) = found(quiet(rollouts=(rollout,)))
    assert finding.text == "legal@2 waits for replica-1 since 45 s"
