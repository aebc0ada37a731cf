"""What a replica exports to Prometheus, in a registry of its own. Knows figures, not the parts they come from."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replica.adapters.stats import CacheStats
from replica.engine import EngineCounts
from replica.messages import FinishReason
from replica.model.batch import ForwardBatch

ADAPTER_LABEL_LENGTH = 12
"""An adapter is labelled with this much of its digest; only adapters in a slot or in host memory have a series."""

STEP_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
WAIT_SECONDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
LOAD_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class ReplicaMetrics:
    """Counts what the step loop and the loads tell it, and reads the rest when it is scraped."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "lorafleet_replica_choices", "Choices that ended, by outcome.", ["outcome"], registry=self._registry
        )
        self._prompt_tokens = Counter(
            "lorafleet_replica_prompt_tokens", "Prompt tokens of started requests.", registry=self._registry
        )
        self._generation_tokens = Counter(
            "lorafleet_replica_generation_tokens", "Tokens sampled.", registry=self._registry
        )
        self._queue_wait = self._histogram("queue_wait_seconds", "From submission to the first step.", WAIT_SECONDS)
        self._step = self._histogram("step_seconds", "One step of the loop that computed something.", STEP_SECONDS)
        self._batch_tokens = self._histogram("batch_tokens", "Tokens a step.", BATCH_SIZES)
        self._batch_sequences = self._histogram("batch_sequences", "Sequences a step.", BATCH_SIZES)
        self._batch_adapters = self._histogram("batch_adapters", "Distinct adapters a step.", (0, *BATCH_SIZES))
        self._load = Histogram(
            "lorafleet_adapter_load_seconds",
            "Stages of loads: fetch (blob store to node), read (node to host), wait, copy (host to slot), total.",
            ["stage"],
            buckets=LOAD_SECONDS,
            registry=self._registry,
        )

    def __repr__(self) -> str:
        return f"ReplicaMetrics({len(list(self._registry.collect()))} families)"

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"lorafleet_replica_{name}", text, buckets=tuple(buckets), registry=self._registry)

    def watch(self, collector: Collector) -> None:
        """Ask `collector` for figures whenever the metrics are rendered."""
        self._registry.register(collector)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)

    def on_start(self, waited_s: float, num_prompt: int) -> None:
        self._queue_wait.observe(waited_s)
        self._prompt_tokens.inc(num_prompt)

    def on_step(self, batch: ForwardBatch, took_s: float) -> None:
        self._step.observe(took_s)
        self._batch_tokens.observe(batch.token_ids.shape[0])
        self._batch_sequences.observe(len(batch.spans))
        self._batch_adapters.observe(len(batch.segments))

    def on_end(self, reason: FinishReason, num_output: int) -> None:
        self._requests.labels(reason).inc()
        self._generation_tokens.inc(num_output)

    def observe(self, stage: str, seconds: float) -> None:
        """A timed stage of an adapter's load, from any thread."""
        self._load.labels(stage).observe(seconds)


class StateCollector(Collector):
    """Gauges and counters that the engine and the adapter cache keep anyway, read at scrape time."""

    def __init__(
        self, counts: Callable[[], EngineCounts], stats: Callable[[], CacheStats], num_blocks: int, block_size: int
    ) -> None:
        self._counts = counts
        self._stats = stats
        self._num_blocks = num_blocks
        self._block_size = block_size

    def collect(self) -> Iterable[Metric]:
        yield from self._engine(self._counts())
        stats = self._stats()
        yield from self._slots(stats)
        yield from self._tiers(stats)
        yield _residency(stats)

    def _engine(self, counts: EngineCounts) -> Iterable[Metric]:
        states = {"waiting": counts.num_waiting, "loading": counts.num_loading, "running": counts.num_running}
        yield _gauges("replica_sequences", "Requests waiting and loading, choices running.", "state", states)
        used = self._num_blocks - counts.num_free_blocks
        blocks = {"used": used, "free": counts.num_free_blocks}
        yield _gauges("replica_kv_blocks", f"KV cache blocks of {self._block_size} tokens.", "state", blocks)
        yield _counter("replica_steps", "Steps that computed something.", counts.num_steps)
        yield _counter("replica_preemptions", "Sequences that lost their KV blocks.", counts.num_preemptions)
        yield _counter("replica_pauses", "Sequences that gave their row to another tenant.", counts.num_pauses)
        yield _counter("replica_found_tokens", "Tokens whose KV was found again.", counts.num_found_tokens)

    def _slots(self, stats: CacheStats) -> Iterable[Metric]:
        yield _gauges("adapter_slots", "Adapter slots by state.", "state", stats.slots_by_state)
        arena = {"used": stats.arena_bytes - stats.arena_free_bytes, "free": stats.arena_free_bytes}
        yield _gauges("adapter_arena_bytes", "Device memory for adapters.", "state", arena)
        yield _counter("adapter_slot_hits", "Acquisitions that found the adapter in a slot.", stats.num_hits)
        yield _counter("adapter_slot_misses", "Acquisitions that did not.", stats.num_misses)
        yield _counter("adapter_load_failures", "Loads that failed.", stats.num_failures)

    def _tiers(self, stats: CacheStats) -> Iterable[Metric]:
        host = GaugeMetricFamily("lorafleet_adapter_host_bytes", "Host memory that holds adapter images.")
        host.add_metric([], stats.host_bytes)
        yield host
        yield _counters("adapter_loads", "Loads into a slot, by where the bytes came from.", "tier", stats.loads)
        yield _counters("adapter_evictions", "Evictions by tier.", "tier", stats.evictions)


def _residency(stats: CacheStats) -> Metric:
    """One series an adapter and tier; it goes when the adapter does."""
    family = GaugeMetricFamily("lorafleet_adapter_resident", "1 where an adapter is.", labels=["adapter", "tier"])
    for tier, digests in (("slot", stats.resident), ("host", stats.host_cached)):
        for label in sorted({digest[:ADAPTER_LABEL_LENGTH] for digest in digests}):
            family.add_metric([label, tier], 1)
    return family


def _gauges(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(f"lorafleet_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"lorafleet_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(f"lorafleet_{name}", text, value=value)
