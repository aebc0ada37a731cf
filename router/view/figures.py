"""Which metrics the view of the fleet is made of. They stand here and nowhere else."""

from typing import NamedTuple

from telemetry import catalogue
from telemetry.metric import Metric

Key = tuple[str, ...]
"""The values of the labels that a figure is kept apart by."""


class Figure(NamedTuple):
    """A metric, or the part of it where the labels `where` have these values, kept apart by the labels `by`.

    Of a histogram its buckets, or with `is_count` only how often it was observed.
    """

    metric: Metric
    by: tuple[str, ...] = ()
    where: tuple[tuple[str, str], ...] = ()
    is_count: bool = False

    @property
    def sample_name(self) -> str:
        return self.metric.sample_names[-1 if self.is_count else 0]

    @property
    def has_buckets(self) -> bool:
        return self.metric.kind == "histogram" and not self.is_count


VERSION = ("model", "version")
TENANT = ("tenant",)

RUNNING = Figure(catalogue.SEQUENCES, where=(("state", "running"),))
WAITING = Figure(catalogue.SEQUENCES, where=(("state", "waiting"),))
LOADING = Figure(catalogue.SEQUENCES, where=(("state", "loading"),))
KV_USED = Figure(catalogue.KV_BLOCKS, where=(("state", "used"),))
KV_FREE = Figure(catalogue.KV_BLOCKS, where=(("state", "free"),))
HITS = Figure(catalogue.HITS, where=(("tier", "slot"),))
MISSES = Figure(catalogue.MISSES, where=(("tier", "slot"),))
SWAPS = Figure(catalogue.EVICTIONS, where=(("tier", "slot"), ("cause", "room")))
LOADS = Figure(catalogue.LOADS)
GENERATED = Figure(catalogue.GENERATION_TOKENS)
HELD = Figure(catalogue.RESIDENT, by=("tier",))
STARTS = Figure(catalogue.QUEUE_WAIT_S, by=VERSION, is_count=True)

REQUESTS = Figure(catalogue.REQUESTS, by=VERSION)
GOOD_REQUESTS = Figure(catalogue.REQUESTS, by=VERSION, where=(("outcome", "ok"),))
LEFT_REQUESTS = Figure(catalogue.REQUESTS, by=VERSION, where=(("outcome", "disconnect"),))
TOKENS = Figure(catalogue.COMPLETION_TOKENS, by=VERSION)
IN_FLIGHT = Figure(catalogue.IN_FLIGHT, by=VERSION)
FIRST_TOKEN = Figure(catalogue.FIRST_TOKEN_S, by=VERSION)
LATENCY = Figure(catalogue.LATENCY_S, by=VERSION)

TENANT_WAITING = Figure(catalogue.TENANT_WAITING, by=TENANT)
TENANT_OLDEST = Figure(catalogue.TENANT_OLDEST_WAIT, by=TENANT)
TENANT_SERVICE = Figure(catalogue.TENANT_SERVICE, by=TENANT)
TENANT_QUEUE_WAIT = Figure(catalogue.TENANT_QUEUE_WAIT_S, by=TENANT)
TENANT_REQUESTS = Figure(catalogue.TENANT_REQUESTS, by=TENANT)
TENANT_IN_FLIGHT = Figure(catalogue.TENANT_IN_FLIGHT, by=TENANT)
TENANT_FIRST_TOKEN = Figure(catalogue.TENANT_FIRST_TOKEN_S, by=TENANT)
LIMITED = Figure(catalogue.LIMITED, by=TENANT)

GATEWAY_REVISION = Figure(catalogue.GATEWAY_REVISION)
GATEWAYS = Figure(catalogue.GATEWAY_LAG, by=("gateway",))

FIGURES = (
    *(RUNNING, WAITING, LOADING, KV_USED, KV_FREE, HITS, MISSES, SWAPS, LOADS, GENERATED, HELD, STARTS),
    *(REQUESTS, GOOD_REQUESTS, LEFT_REQUESTS, TOKENS, IN_FLIGHT, FIRST_TOKEN, LATENCY),
    *(TENANT_WAITING, TENANT_OLDEST, TENANT_SERVICE, TENANT_QUEUE_WAIT, TENANT_REQUESTS, TENANT_IN_FLIGHT),
    *(TENANT_FIRST_TOKEN, LIMITED, GATEWAY_REVISION, GATEWAYS),
)
