"""What `GET /v1/fleet` answers. Rates are over the last `window_s` seconds, quantiles over `latency_window_s`.

Long lists are arrays of rows, each row in the order of its type's fields: at a thousand adapters their names would be
most of the answer.
"""

from typing import Literal, NamedTuple

from registry.types import Event, Record


class SlotRow(NamedTuple):
    """One slot: `use` is `free`, `loading`, `resident` or `pinned`; `starts_per_s` are requests begun a second."""

    use: str
    adapter: str | None
    number: int | None
    num_pins: int
    starts_per_s: float


class ReplicaView(Record):
    """One replica. `answers` is false when its metrics are missing: then the figures are 0."""

    replica_id: str
    ring_id: int
    node_id: str
    answers: bool
    drained: str | None
    behind: int
    """Revisions that it has yet to act upon."""
    num_slots: int
    slots: tuple[SlotRow, ...]
    num_staged: int
    num_host_cached: int
    running: int
    waiting: int
    loading: int
    kv_used: float | None
    """Part of the KV cache that is in use."""
    tokens: float
    tokens_per_s: float
    swaps: float
    swaps_per_s: float
    hits: float
    misses: float
    hit_rate: float | None
    """Look-ups that found their adapter in a slot; None without any."""


class AdapterRow(NamedTuple):
    """One adapter, all its versions together. Quantiles are None when nothing was observed."""

    name: str
    owner: str | None
    live: int | None
    num_versions: int
    num_slots: int
    """Slots of the fleet that it sits in."""
    in_flight: int
    requests: float
    requests_per_s: float
    failures_per_s: float
    """Calls that ended with an error, disconnects left out."""
    tokens: float
    tokens_per_s: float
    first_token_p50_s: float | None
    first_token_p99_s: float | None
    latency_p50_s: float | None
    latency_p99_s: float | None


class AdapterTable(Record):
    """The busiest adapters first, at most as many as asked for; `num_matching` fit the search of `num_total`."""

    num_total: int
    num_matching: int
    columns: tuple[str, ...] = AdapterRow._fields
    rows: tuple[AdapterRow, ...]


class TenantView(Record):
    """One tenant; its shares are of all tenants' requests that wait, and of all service."""

    tenant: str
    waiting: int
    queue_share: float
    oldest_wait_s: float
    queue_wait_p50_s: float | None
    queue_wait_p99_s: float | None
    in_flight: int
    service: float
    service_per_s: float
    """Tokens, of prompts begun and sampled."""
    service_share: float
    requests: float
    requests_per_s: float
    limited: float
    limited_per_s: float
    first_token_p50_s: float | None
    first_token_p99_s: float | None


class VersionTraffic(Record):
    """How one version fares, to compare it with another."""

    number: int
    requests_per_s: float
    failures_per_s: float
    first_token_p50_s: float | None
    first_token_p99_s: float | None


class Rollout(Record):
    """A version on its way. `activation` waits for replicas, `canary` takes the share `weight`, `draining` goes."""

    kind: Literal["activation", "canary", "draining"]
    name: str
    number: int
    alias: str | None
    weight: float | None
    since_s: float | None
    num_staged: int
    num_replicas: int
    waiting_for: tuple[str, ...]
    until_s: float | None
    """When what still runs on a draining version is aborted."""
    new: VersionTraffic | None
    old: VersionTraffic | None


class Finding(Record):
    """Something worth saying in one sentence; `subject` is the tenant, adapter or replica that it is about."""

    severity: Literal["bad", "warn", "info"]
    code: str
    text: str
    subject: str | None = None


class Totals(Record):
    """The fleet as one."""

    num_adapters: int
    requests: float
    requests_per_s: float
    failures_per_s: float
    tokens: float
    tokens_per_s: float
    swaps: float
    swaps_per_s: float
    loads: float
    loads_per_s: float
    hits: float
    misses: float
    lookups_per_s: float
    hit_rate: float | None
    in_flight: int
    waiting: int
    running: int
    loading: int
    num_slots: int
    num_slots_used: int
    first_token_p50_s: float | None
    first_token_p99_s: float | None


class HistoryPoint(NamedTuple):
    """The fleet at one moment before; `at_s` is in seconds since the epoch."""

    at_s: float
    requests_per_s: float
    tokens_per_s: float
    swaps_per_s: float
    hit_rate: float | None
    waiting: int
    running: int


class History(Record):
    columns: tuple[str, ...] = HistoryPoint._fields
    points: tuple[HistoryPoint, ...]


class FleetReport(Record):
    """Everything; `events` is None for callers who are no admins."""

    at_s: float
    window_s: float
    latency_window_s: float
    period_s: float
    """The report changes no more often."""
    gateway: str
    """Which of the gateways has made the report."""
    num_gateways: int
    num_gateways_counted: int
    """Those whose calls are in the figures: the others did not answer."""
    revision: int
    base: str | None
    missing: tuple[str, ...]
    """What the fleet lacks before it can serve."""
    registry_answers: bool
    totals: Totals
    findings: tuple[Finding, ...]
    replicas: tuple[ReplicaView, ...]
    adapters: AdapterTable
    num_tenants: int
    tenants: tuple[TenantView, ...]
    rollouts: tuple[Rollout, ...]
    events: tuple[Event, ...] | None
    slot_columns: tuple[str, ...] = SlotRow._fields
    history: History
