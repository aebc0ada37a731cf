"""What an operator should see first, each in one sentence. Pure."""

from collections.abc import Iterator, Sequence

from registry.types import Event
from router.view.records import Finding, FleetReport, TenantView

NOISY_SHARE = 0.6
NOISY_WAITING = 8
"""A tenant is noisy when it holds this much of a queue of at least so many requests, and it is not alone."""
STARVING_S = 30.0
THRASHING_HIT_RATE = 0.6
THRASHING_SWAPS_PER_S = 1.0
"""Below this hit rate, with at least so many swaps a second, slots are too few for what is asked for."""
DOMINANT_SHARE = 0.8
DOMINANT_TOKENS_PER_S = 1.0
BEHIND_REVISIONS = 20
STUCK_S = 30.0
RECENT_S = 600.0
FAILED = "activation_failed"
SEVERITIES = ("bad", "warn", "info")


def findings(report: FleetReport, events: Sequence[Event]) -> tuple[Finding, ...]:
    """The worst first."""
    found = [*_service(report), *_tenants(report), *_slots(report), *_replicas(report), *_registry(report, events)]
    return tuple(sorted(found, key=lambda one: SEVERITIES.index(one.severity)))


def _service(report: FleetReport) -> Iterator[Finding]:
    if report.missing:
        yield Finding(severity="bad", code="not_ready", text=f"not serving: no {', no '.join(report.missing)} yet")
    if not report.registry_answers:
        text = "the registry does not answer; inference goes on from the last catalog, nothing can be changed"
        yield Finding(severity="bad", code="registry_silent", text=text)
    if report.num_gateways_counted < report.num_gateways:
        text = f"calls of {report.num_gateways_counted} of {report.num_gateways} gateways: the others do not answer"
        yield Finding(severity="warn", code="gateway_silent", text=text)
    failures, requests = report.totals.failures_per_s, report.totals.requests_per_s
    if requests > 0 and failures / requests > 0.05:
        text = f"{percent(failures / requests)} of calls fail ({failures:.1f} a second)"
        yield Finding(severity="bad", code="failing", text=text)


def _tenants(report: FleetReport) -> Iterator[Finding]:
    waiting = report.totals.waiting
    others = {one.tenant for one in report.tenants if one.waiting or one.in_flight or one.requests_per_s > 0}
    for tenant in report.tenants:
        if waiting >= NOISY_WAITING and tenant.queue_share >= NOISY_SHARE and others - {tenant.tenant}:
            yield _noisy(tenant, sum(one.waiting for one in report.tenants))
        if tenant.oldest_wait_s > STARVING_S:
            text = f"{tenant.tenant} starves: its oldest call waits {tenant.oldest_wait_s:.0f} s"
            yield Finding(severity="bad", code="starving", text=text, subject=tenant.tenant)
        if tenant.limited_per_s > 0:
            text = f"{tenant.tenant} is throttled: {tenant.limited_per_s:.1f} calls/s refused by its limits"
            yield Finding(severity="info", code="throttled", text=text, subject=tenant.tenant)


def _noisy(tenant: TenantView, waiting: int) -> Finding:
    text = (
        f"{tenant.tenant} holds {percent(tenant.queue_share)} of the queue ({tenant.waiting} of {waiting} requests)"
        f" and gets {percent(tenant.service_share)} of the service"
    )
    return Finding(severity="warn", code="noisy_tenant", text=text, subject=tenant.tenant)


def _slots(report: FleetReport) -> Iterator[Finding]:
    totals = report.totals
    misses_often = totals.hit_rate is not None and totals.hit_rate < THRASHING_HIT_RATE
    if misses_often and totals.swaps_per_s >= THRASHING_SWAPS_PER_S:
        text = f"thrashing: {totals.swaps_per_s:.1f} swaps/s, hit rate {percent(totals.hit_rate or 0.0)}"
        yield Finding(severity="bad", code="thrashing", text=f"{text}; more adapters are asked for than slots hold")
    for row in report.adapters.rows[:1]:
        if row.owner is not None and totals.tokens_per_s >= DOMINANT_TOKENS_PER_S and totals.num_adapters > 1:
            share = row.tokens_per_s / totals.tokens_per_s
            if share >= DOMINANT_SHARE:
                text = f"{row.name} makes {percent(share)} of all tokens; consider merging it into a base of its own"
                yield Finding(severity="info", code="dominant_adapter", text=text, subject=row.name)


def _replicas(report: FleetReport) -> Iterator[Finding]:
    for replica in report.replicas:
        about = {"subject": replica.replica_id}
        if not replica.answers:
            text = f"replica {replica.ring_id} does not answer"
            yield Finding(severity="bad", code="replica_silent", text=text, **about)
        if replica.drained is not None:
            text = f"replica {replica.ring_id} takes no requests: {replica.drained}"
            yield Finding(severity="warn", code="replica_drained", text=text, **about)
        elif replica.behind > BEHIND_REVISIONS:
            text = f"replica {replica.ring_id} is {replica.behind} changes behind"
            yield Finding(severity="warn", code="replica_behind", text=text, **about)


def _registry(report: FleetReport, events: Sequence[Event]) -> Iterator[Finding]:
    for rollout in report.rollouts:
        age_s = report.at_s - (rollout.since_s or report.at_s)
        if rollout.kind == "activation" and age_s > STUCK_S:
            late = ", ".join(rollout.waiting_for) or "a replica"
            text = f"{rollout.name}@{rollout.number} waits for {late} since {age_s:.0f} s"
            yield Finding(severity="warn", code="rollout_stuck", text=text, subject=rollout.name)
    for event in events:
        if event.kind == FAILED and report.at_s - event.at_s < RECENT_S:
            text = f"{event.name}@{event.number} was not activated: {event.detail.get('error', 'no reason given')}"
            yield Finding(severity="warn", code="rollout_failed", text=text, subject=event.name)


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"
