"""Puts the sections of the report together. Pure: the same moment and windows give the same report."""

from collections.abc import Sequence
from dataclasses import dataclass

from router.gateway_readings import names_of_digests
from router.metrics import BASE_LABEL
from router.view import figures
from router.view.adapters import adapter_rows, adapter_table
from router.view.findings import findings
from router.view.records import (
    AdapterRow,
    FleetReport,
    History,
    HistoryPoint,
    ReplicaView,
    Totals,
)
from router.view.replicas import hit_rate, replica_views, slots_by_adapter
from router.view.rollouts import Rollouts
from router.view.sources import Moment
from router.view.tenants import tenant_views
from router.view.traffic import Traffic
from router.view.window import Window

MAX_TENANTS = 100
MAX_ROLLOUTS = 100


@dataclass(frozen=True, slots=True)
class Page:
    """A report with its busiest adapter alone, and all rows of the adapters to take others from."""

    report: FleetReport
    rows: list[AdapterRow]

    def answer(
        self, limit: int, search: str, points: Sequence[HistoryPoint], *, with_events: bool, period_s: float
    ) -> FleetReport:
        changes: dict[str, object] = {
            "adapters": adapter_table(self.rows, limit, search),
            "history": History(points=tuple(points)),
            "period_s": round(period_s, 2),
        }
        return self.report.model_copy(update=changes if with_events else {**changes, "events": None})


def build_page(moment: Moment, short: Window, long: Window, gateway: str) -> Page:
    """The report of a moment, with rates of the `short` window and quantiles of the `long` one."""
    names = names_of_digests(moment.adapters)
    replicas = replica_views(moment.replicas, moment.slots, names, short, moment.revision)
    traffic, tenants = Traffic(short, long), tenant_views(short, long)
    rows = adapter_rows(moment.adapters, BASE_LABEL, slots_by_adapter(replicas), traffic)
    num_counted = short.num_members(figures.GATEWAY_REVISION)
    rollouts = Rollouts(moment.replicas, moment.events, traffic).of(moment.adapters)
    report = FleetReport(
        at_s=round(moment.wall_s, 2),
        window_s=round(short.span_s, 3),
        latency_window_s=round(long.span_s, 3),
        period_s=1.0,
        gateway=gateway,
        num_gateways=max(num_counted, len(short.values(figures.GATEWAYS))),
        num_gateways_counted=num_counted,
        revision=moment.revision,
        base=moment.base,
        missing=moment.missing,
        registry_answers=moment.registry_answers,
        totals=_totals(short, traffic, replicas, sum(bool(adapter.aliases) for adapter in moment.adapters)),
        findings=(),
        replicas=replicas,
        adapters=adapter_table(rows, 1, ""),
        num_tenants=len(tenants),
        tenants=tuple(tenants[:MAX_TENANTS]),
        rollouts=rollouts[:MAX_ROLLOUTS],
        events=tuple(moment.events),
        history=History(points=()),
    )
    return Page(report.model_copy(update={"findings": findings(report, moment.events)}), rows)


def _totals(short: Window, traffic: Traffic, replicas: Sequence[ReplicaView], num_adapters: int) -> Totals:
    keys = [key for found in traffic.keys.values() for key in found]
    p50, p99 = traffic.first_token.quantiles(keys)
    return Totals(
        num_adapters=num_adapters,
        requests=sum(traffic.requests.values()),
        requests_per_s=sum(traffic.requests_per_s.values()),
        failures_per_s=traffic.failures_per_s(keys),
        tokens=short.value(figures.GENERATED),
        tokens_per_s=short.rate(figures.GENERATED),
        swaps=short.value(figures.SWAPS),
        swaps_per_s=short.rate(figures.SWAPS),
        loads=short.value(figures.LOADS),
        loads_per_s=short.rate(figures.LOADS),
        hits=short.value(figures.HITS),
        misses=short.value(figures.MISSES),
        lookups_per_s=short.rate(figures.HITS) + short.rate(figures.MISSES),
        hit_rate=hit_rate(short),
        in_flight=int(sum(traffic.in_flight.values())),
        waiting=sum(replica.waiting for replica in replicas),
        running=sum(replica.running for replica in replicas),
        loading=sum(replica.loading for replica in replicas),
        num_slots=sum(replica.num_slots for replica in replicas),
        num_slots_used=sum(slot.use != "free" for replica in replicas for slot in replica.slots),
        first_token_p50_s=p50,
        first_token_p99_s=p99,
    )


def history_point(report: FleetReport) -> HistoryPoint:
    """The report's line in the history."""
    totals = report.totals
    return HistoryPoint(
        at_s=report.at_s,
        requests_per_s=round(totals.requests_per_s, 2),
        tokens_per_s=round(totals.tokens_per_s, 1),
        swaps_per_s=round(totals.swaps_per_s, 2),
        hit_rate=None if totals.hit_rate is None else round(totals.hit_rate, 4),
        waiting=totals.waiting,
        running=totals.running,
    )
