"""What a replica counts as the step loop and the loads go on. Knows figures, not the parts they come from."""

import threading
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Items
from operator import attrgetter

from replica.config import MetricsConfig
from replica.messages import FinishReason, GenerateRequest
from replica.model.batch import ForwardBatch
from replica.sequence import Sequence
from telemetry import catalogue
from telemetry.cap import OTHER, Capped
from telemetry.catalogue import DIGEST_LABEL_LENGTH
from telemetry.exporter import Exporter, Reader
from telemetry.series import Counter, Family, Histogram

Key = tuple[str, str]
"""Adapter and version, as labels say them."""

BASE: Key = ("base", "-")
TENANT_OF = attrgetter("group.request.tenant")
MAX_UNCOUNTED_STEPS = 128
"""Steps that are kept before they are added up."""


class ReplicaMetrics:
    """Told by the step thread, but for `observe` and `staged`, which any thread may call."""

    def __init__(self, config: MetricsConfig | None = None) -> None:
        self.config = config or MetricsConfig()
        self._exporter = exporter = Exporter(catalogue.REPLICA)
        self._choices = exporter.counter(catalogue.CHOICES)
        self._prompt_tokens = exporter.counter(catalogue.REPLICA_PROMPT_TOKENS).labels()
        self._generation_tokens = exporter.counter(catalogue.GENERATION_TOKENS).labels()
        self._step = exporter.histogram(catalogue.STEP_SECONDS).labels()
        self._batch_tokens = exporter.histogram(catalogue.BATCH_TOKENS).labels()
        self._batch_sequences = exporter.histogram(catalogue.BATCH_SEQUENCES).labels()
        self._batch_adapters = exporter.histogram(catalogue.BATCH_ADAPTERS).labels()
        self._load = exporter.histogram(catalogue.LOAD_SECONDS)
        self._staging = exporter.histogram(catalogue.STAGING_SECONDS)
        self._lock = threading.Lock()
        self._steps: list[tuple[float, int, int, int]] = []
        """Seconds, tokens, sequences and adapters of the steps that are not counted yet."""
        self._sampled_for: list[str] = []
        """The tenant of every token that they sampled."""
        self._waits = _Waits(exporter.histogram(catalogue.QUEUE_WAIT_S), self.config.max_adapters)
        self._tenants = _tenants(exporter, self.config.max_tenants)

    def __repr__(self) -> str:
        return f"ReplicaMetrics({self._waits!r}, tenants={self._tenants!r})"

    def watch(self, reader: Reader) -> None:
        """Ask `reader` for its values whenever the metrics are rendered."""
        self._exporter.watch(reader)

    def render(self) -> bytes:
        """Prometheus' text format. Any thread may call it."""
        with self._lock:
            self._count_steps()
        return self._exporter.render()

    def tenants(self) -> Iterator[str]:
        """The tenants with series of their own."""
        return (tenant for tenant, _ in self._tenants)

    def on_start(self, request: GenerateRequest, waited_s: float) -> None:
        num_prompt = len(request.prompt)
        self._prompt_tokens.inc(num_prompt)
        self._waits.of(request).observe(waited_s)
        with self._lock:
            tenant = self._tenants.of(request.tenant)
            tenant.queue_wait_s.observe(waited_s)
            tenant.service.inc(num_prompt)

    def on_step(self, batch: ForwardBatch, took_s: float, sampled: Items[Sequence]) -> None:
        with self._lock:
            self._steps.append((took_s, batch.token_ids.numel(), len(batch.spans), len(batch.segments)))
            self._sampled_for.extend(map(TENANT_OF, sampled))
            if len(self._steps) >= MAX_UNCOUNTED_STEPS:
                self._count_steps()

    def _count_steps(self) -> None:
        """Add up the steps since the last time: between steps, with cold caches, each by itself costs several times
        as much."""
        steps, self._steps = self._steps, []
        for took_s, num_tokens, num_sequences, num_adapters in steps:
            self._step.observe(took_s)
            self._batch_tokens.observe(num_tokens)
            self._batch_sequences.observe(num_sequences)
            self._batch_adapters.observe(num_adapters)
        tokens, self._sampled_for = Tally(self._sampled_for), []
        self._generation_tokens.inc(tokens.total())
        for tenant, num_tokens in tokens.items():
            self._tenants.of(tenant).service.inc(num_tokens)

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


class _Tenant:
    """The series of one tenant."""

    def __init__(self, service: Counter, queue_wait_s: Histogram) -> None:
        self.service = service
        self.queue_wait_s = queue_wait_s


def _tenants(exporter: Exporter, limit: int) -> Capped[str, _Tenant]:
    service, waits = exporter.counter(catalogue.TENANT_SERVICE), exporter.histogram(catalogue.TENANT_QUEUE_WAIT_S)
    return Capped(limit, lambda tenant: _Tenant(service.labels(tenant), waits.labels(tenant)), OTHER)


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
