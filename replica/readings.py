"""What engine, adapter tiers and tenants' queues keep anyway, read when a replica is scraped. Counts nothing itself."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from replica.adapters.stats import CacheStats
from replica.engine import EngineCounts, TenantState
from telemetry import catalogue
from telemetry.cap import OTHER
from telemetry.catalogue import DIGEST_LABEL_LENGTH
from telemetry.exporter import Reading
from telemetry.metric import Metric


class EngineReadings:
    """The step loop and its KV blocks, of which there are `num_blocks`."""

    def __init__(self, counts: Callable[[], EngineCounts], num_blocks: int) -> None:
        self._counts = counts
        self._num_blocks = num_blocks

    def __call__(self) -> Iterator[Reading]:
        counts = self._counts()
        states = {"waiting": counts.num_waiting, "loading": counts.num_loading, "running": counts.num_running}
        yield from _each(catalogue.SEQUENCES, states)
        used = self._num_blocks - counts.num_free_blocks
        yield from _each(catalogue.KV_BLOCKS, {"used": used, "free": counts.num_free_blocks})
        yield Reading(catalogue.STEPS, counts.num_steps)
        yield Reading(catalogue.PREEMPTIONS, counts.num_preemptions)
        yield Reading(catalogue.PAUSES, counts.num_pauses)
        yield Reading(catalogue.FOUND_TOKENS, counts.num_found_tokens)


class TierReadings:
    """The adapter tiers. At the slot a look-up is a request's; at host and node it is a load's."""

    def __init__(self, stats: Callable[[], CacheStats]) -> None:
        self._stats = stats

    def __call__(self) -> Iterator[Reading]:
        stats = self._stats()
        yield from _each(catalogue.SLOTS, stats.slots_by_state)
        arena = {"used": stats.arena_bytes - stats.arena_free_bytes, "free": stats.arena_free_bytes}
        yield from _each(catalogue.ARENA_BYTES, arena)
        yield from _each(catalogue.HOST_BYTES, {"used": stats.host_bytes, "free": stats.host_free_bytes})
        for tier, digests in (("slot", stats.resident), ("host", stats.host_cached)):
            for label in sorted({digest[:DIGEST_LABEL_LENGTH] for digest in digests}):
                yield Reading(catalogue.RESIDENT, 1, (label, tier))
        yield Reading(catalogue.ADAPTERS_WAITING, stats.num_waiting)
        host, node, blob = (stats.loads[source] for source in ("host", "node", "blob"))
        yield from _each(catalogue.HITS, {"slot": stats.num_hits, "host": host, "node": node})
        yield from _each(catalogue.MISSES, {"slot": stats.num_misses, "host": node + blob, "node": blob})
        yield from _each(catalogue.LOADS, stats.loads)
        for (tier, cause), count in stats.evictions.items():
            yield Reading(catalogue.EVICTIONS, count, (tier, cause))
        yield Reading(catalogue.LOAD_FAILURES, stats.num_failures)


class TenantReadings:
    """Queues by tenant. `known` are those with series of their own: they show 0 when nothing of theirs waits."""

    def __init__(
        self, states: Callable[[], Mapping[str, TenantState]], known: Callable[[], Iterable[str]], limit: int
    ) -> None:
        self._states = states
        self._known = known
        self._limit = limit

    def __call__(self) -> Iterator[Reading]:
        for label, state in self._labelled().items():
            yield Reading(catalogue.TENANT_WAITING, state.num_waiting, (label,))
            yield Reading(catalogue.TENANT_OLDEST_WAIT, state.oldest_wait_s, (label,))
            yield Reading(catalogue.TENANT_DEFICIT, state.deficit, (label,))

    def _labelled(self) -> dict[str, TenantState]:
        """At most `limit` tenants by name, and the others together."""
        labelled = {tenant: TenantState() for tenant in self._known()}
        for tenant, state in self._states().items():
            label = tenant if tenant in labelled or len(labelled) < self._limit else OTHER
            labelled[label] = _together(labelled.get(label, TenantState()), state)
        return labelled


def _together(one: TenantState, other: TenantState) -> TenantState:
    oldest_wait_s = max(one.oldest_wait_s, other.oldest_wait_s)
    return TenantState(one.num_waiting + other.num_waiting, oldest_wait_s, one.deficit + other.deficit)


def _each(metric: Metric, values: Mapping[str, float]) -> Iterator[Reading]:
    for label, value in values.items():
        yield Reading(metric, value, (label,))
