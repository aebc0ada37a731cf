"""What a replica counts as the step loop and the loads go on. Knows figures, not the parts they come from."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from replica.config import MetricsConfig
from replica.messages import FinishReason, GenerateRequest
from replica.model.batch import ForwardBatch
from replica.sequence import RequestGroup
from replica.tenant_meters import TenantMeters
from telemetry import catalogue
from telemetry.cap import OTHER, Capped
from telemetry.catalogue import DIGEST_LABEL_LENGTH
from telemetry.exporter import Exporter, Reader
from telemetry.series import Family, Histogram

Key = tuple[str, str]
"""Adapter and version, as labels say them."""

BASE: Key = ("base", "-")
MAX_UNCOUNTED_STEPS = 128
"""Steps that are kept before they are added up."""


class ReplicaMetrics:
    """Told by the step thread, but for `observe` and `staged`, which any thread may call."""

    def __init__(self, config: MetricsConfig | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config or MetricsConfig()
        self._exporter = exporter = Exporter(catalogue.REPLICA)
        self._choices = exporter.counter(catalogue.CHOICES)
        self._prompt_tokens = exporter.counter(catalogue.REPLICA_PROMPT_TOKENS).labels()
        self._generation_tokens = exporter.counter(catalogue.GENERATION_TOKENS).labels()
        of_steps = (catalogue.STEP_SECONDS, catalogue.BATCH_TOKENS, catalogue.BATCH_SEQUENCES, catalogue.BATCH_ADAPTERS)
        self._of_steps = [exporter.histogram(metric).labels() for metric in of_steps]
        self._load = exporter.histogram(catalogue.LOAD_SECONDS)
        self._staging = exporter.histogram(catalogue.STAGING_SECONDS)
        self._lock = threading.Lock()
        self._steps: list[tuple[float, int, int, int]] = []
        """Seconds, tokens, sequences and adapters of the steps that are not counted yet."""
        self._waits = _Waits(exporter.histogram(catalogue.QUEUE_WAIT_S), self.config.max_adapters)
        self._tenants = TenantMeters(exporter, self.config.max_tenants, self.config.tenant_idle_s, clock)

    def __repr__(self) -> str:
        return f"ReplicaMetrics({self._waits!r}, {self._tenants!r})"

    def watch(self, reader: Reader) -> None:
        """Ask `reader` for its values whenever the metrics are rendered."""
        self._exporter.watch(reader)

    def render(self) -> bytes:
        """Prometheus' text format. Any thread may call it."""
        with self._lock:
            self._count()
            self._tenants.sweep()
        return self._exporter.render()

    def tenants(self) -> Iterator[str]:
        """The tenants with series of their own."""
        return iter(self._tenants)

    def on_start(self, group: RequestGroup, waited_s: float) -> None:
        request = group.request
        self._prompt_tokens.inc(len(request.prompt))
        self._waits.of(request).observe(waited_s)
        with self._lock:
            self._tenants.begin(group, waited_s)

    def on_step(self, batch: ForwardBatch, took_s: float) -> None:
        self._steps.append((took_s, batch.token_ids.shape[0], len(batch.spans), len(batch.segments)))
        if len(self._steps) >= MAX_UNCOUNTED_STEPS:
            with self._lock:
                self._count()

    def _count(self) -> None:
        """Add up steps and tokens since the last time: between steps, with cold caches, each by itself costs several
        times as much. The step thread may append meanwhile, so only what was there is taken away."""
        steps = self._steps[:]
        del self._steps[: len(steps)]
        for histogram, values in zip(self._of_steps, zip(*steps, strict=True), strict=False):
            histogram.observe_all(values)
        self._generation_tokens.inc(self._tenants.count())

    def on_end(self, reason: FinishReason) -> None:
        self._choices.labels(reason).inc()

    def on_withdrawn(self, digest: str) -> None:
        """Drop the series of a version that is served no more."""
        self._waits.drop(digest)

    def observe(self, stage: str, seconds: float, source: str) -> None:
        """A timed stage of an adapter's load."""
        with self._lock:
            self._load.labels(source, stage).observe(seconds)

    def staged(self, outcome: str, seconds: float) -> None:
        """A version's bytes came to the node (`ok`), or did not (`failed`)."""
        with self._lock:
            self._staging.labels(outcome).observe(seconds)


class _Waits:
    """Queue waits by version, gone when its digest is."""

    def __init__(self, family: Family[Histogram], limit: int) -> None:
        self._family = family
        self._series: Capped[Key, Histogram] = Capped(limit, lambda key: family.labels(*key), (OTHER, "-"))
        self._keys: defaultdict[str, set[Key]] = defaultdict(set)

    def __repr__(self) -> str:
        return f"models={self._series!r}"

    def of(self, request: GenerateRequest) -> Histogram:
        key = key_of(request)
        if request.adapter is not None:
            self._keys[request.adapter].add(key)
        return self._series.of(key)

    def drop(self, digest: str) -> None:
        for key in self._keys.pop(digest, ()):
            if self._series.drop(key) is not None:
                self._family.remove(*key)


def key_of(request: GenerateRequest) -> Key:
    """The labels of what a request asks for; of a version without a name, its digest."""
    if request.adapter is None:
        return BASE
    name, number = request.origin.name, request.origin.number
    return (request.adapter[:DIGEST_LABEL_LENGTH], "-") if name is None else (name, str(number))
