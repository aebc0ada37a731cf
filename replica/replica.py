"""One replica: a base model, its adapters and a step loop behind generate, stage, forget and status. Knows no Ray."""

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch

from registry.types import AdapterManifest, BaseSpec
from replica.accounts import OnEnded, OnPreempted
from replica.adapters.cache import AdapterCache
from replica.adapters.node_store import BlobSource, NodeStore
from replica.adapters.slot_tables import SlotTables
from replica.config import MIB, ModelConfig, ReplicaConfig
from replica.engine import Engine
from replica.errors import AdapterWithdrawn, EngineDead, ReplicaDraining, UnknownAdapter
from replica.limits import RequestLimits
from replica.memory_plan import asked_kv_blocks
from replica.memory_profile import CudaMemory, DeviceMemory, fit_kv_blocks
from replica.messages import GenerateRequest, ReplicaStatus, SlotView, TokenChunk
from replica.metrics import ReplicaMetrics
from replica.model.base_model import BaseModel
from replica.model.batch import Site
from replica.model.device_runner import StepLimits
from replica.outbox import LoopOutbox, Outbox, take_all
from replica.readings import EngineReadings, TenantReadings, TierReadings
from replica.step import StepModel
from telemetry.exporter import Reader

STALL_S = 60.0
"""Without a step for this long although there is work, a replica counts as dead."""

KEEP_S, KEEP_POLL_S = 60.0, 0.02
"""How long `keep` waits at most, and how often it looks."""

ABORT_GRACE_S = 10.0

CPU_KV_BYTES = 512 * MIB
"""The KV cache on a CPU when the configuration leaves it open."""

MAX_WITHDRAWN = 10_000
"""Versions that are remembered as withdrawn, so that a late request gets the right error."""


class Model(StepModel, Protocol):
    """The base model as the replica sees it."""

    @property
    def spec(self) -> BaseSpec: ...
    @property
    def tokenizer_json(self) -> bytes: ...
    @property
    def sites(self) -> Sequence[Site]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def vocab_size(self) -> int: ...
    def kv_bytes_per_block(self, block_size: int) -> int: ...
    def allocate_kv(self, num_blocks: int, block_size: int) -> None: ...
    def attach_adapters(self, memory: torch.Tensor, tables: SlotTables, max_rank: int) -> None:
        """Let steps read adapters from the slots of an arena."""

    def prepare(self, limits: StepLimits) -> object:
        """Get ready for the largest steps there will be; after the cache and the adapters. Raises OutOfMemory."""


class Replica:
    """Token ids in, token ids out. After `load` any thread may call anything but `load` and `report_to`."""

    spec: BaseSpec
    tokenizer_json: bytes

    def __init__(
        self,
        config: ReplicaConfig,
        source: BlobSource,
        *,
        on_fatal: Callable[[BaseException], None] | None = None,
        model_loader: Callable[[ModelConfig], Model] = BaseModel.load,
        stall_s: float = STALL_S,
        device_memory: Callable[[torch.device], DeviceMemory | None] | None = None,
        metrics: ReplicaMetrics | None = None,
    ) -> None:
        self._config = config
        self._on_fatal = on_fatal
        self._model_loader = model_loader
        self._stall_s = stall_s
        self._on_ended: OnEnded | None = None
        self._on_preempted: OnPreempted | None = None
        self._device_memory = device_memory or cuda_memory
        self._store = NodeStore(config.adapters.node_store, source, config.adapters.node_store_bytes)
        self._metrics = metrics or ReplicaMetrics(config.metrics)
        self._outboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopOutbox] = weakref.WeakKeyDictionary()
        self._engine: Engine | None = None
        self._withdrawn: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"Replica({self._config.model.base}, {self._engine})"

    def report_to(self, on_ended: OnEnded, on_preempted: OnPreempted | None = None) -> None:
        """Have every request that ends reported, from the step thread; before `load`."""
        self._on_ended = on_ended
        self._on_preempted = on_preempted

    def load(self) -> BaseSpec:
        """Load the base, allocate KV cache and adapter arena, start the step loop; blocks.

        Raises ModelError for a base that cannot be served and OutOfMemory for one that does not fit.
        """
        model = self._model_loader(self._config.model)
        self._cache = AdapterCache.build(
            self._config.adapters, self._store, model.sites, model.device, model.dtype, observer=self._metrics
        )
        block_size = self._config.scheduler.block_size
        try:
            num_blocks = self._prepare(model)
            self._limits = RequestLimits(model.vocab_size, model.context_length, num_blocks, block_size)
            self._engine = self._start(model, num_blocks)
        except BaseException:
            self._cache.close()
            raise
        # What one sequence can ever hold here; clients that leave max_tokens out get the rest of it.
        context_length = min(model.context_length, num_blocks * block_size)
        self.spec = model.spec.model_copy(update={"context_length": context_length})
        self.tokenizer_json = model.tokenizer_json
        return self.spec

    def _prepare(self, model: Model) -> int:
        """Give the model its KV cache, sized by what is left beside the largest steps, and get it ready for those."""
        config, arena, max_rank = self._config.scheduler, self._cache.arena, self._config.adapters.max_rank
        block_bytes = model.kv_bytes_per_block(config.block_size)
        num_blocks = asked_kv_blocks(block_bytes, config, default_bytes=CPU_KV_BYTES)
        assert num_blocks is not None
        memory = self._device_memory(model.device)
        if memory is not None:
            num_blocks = fit_kv_blocks(model, arena, max_rank, config, memory)
        model.allocate_kv(num_blocks, config.block_size)
        model.attach_adapters(arena.memory, arena.tables, max_rank)
        model.prepare(StepLimits(config.max_batch_tokens, config.max_num_seqs))
        return num_blocks

    def _start(self, model: Model, num_blocks: int) -> Engine:
        engine = Engine(
            model,
            self._cache,
            self._config.scheduler,
            self._metrics,
            num_blocks=num_blocks,
            num_slots=self._config.adapters.max_slots,
            on_fatal=self._on_fatal,
            on_ended=self._on_ended,
            on_preempted=self._on_preempted,
        )
        metrics, limit = self._metrics, self._config.metrics.max_tenants
        metrics.watch(EngineReadings(lambda: engine.counts, num_blocks))
        metrics.watch(TierReadings(self._cache.stats))
        metrics.watch(TenantReadings(engine.tenants, metrics.tenants, limit))
        self._cache.on_change(engine.wake)
        engine.start()
        return engine

    @property
    def engine(self) -> Engine:
        """The step loop. Raises EngineDead before `load`."""
        if self._engine is None:
            raise EngineDead("the replica is not loaded")
        return self._engine

    def submit(self, request: GenerateRequest, outbox: Outbox) -> None:
        """Queue a request; its chunks go to `outbox`, the last one of each choice with a finish reason.

        Raises InvalidRequest, UnknownAdapter, AdapterWithdrawn, Overloaded, ReplicaDraining, EngineDead.
        """
        engine = self.engine
        self._limits.check(request)
        if request.adapter is not None:
            if request.adapter in self._withdrawn:
                raise _withdrawn(request.adapter)
            if not self._store.knows(request.adapter):
                raise UnknownAdapter(f"adapter {request.adapter} was never staged on this replica's node")
        engine.submit(request, outbox)
        if request.adapter is None:
            return
        self._cache.prefetch(request.adapter)
        if request.adapter in self._withdrawn:  # it was withdrawn between the look and the queue
            engine.abort_adapter(request.adapter, _withdrawn(request.adapter))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one choice of it, within two steps. An unknown or ended one is left alone."""
        self.engine.abort(request_id, index)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[tuple[TokenChunk, ...], None]:
        """Submit, and yield what has come since the last time until every choice has ended; closing it aborts.

        Raises what `submit` does; a later fault comes as a chunk with `error`.
        """
        outbox = self._outbox()
        stream, num_open = outbox.open(request.request_id), request.sampling.n
        try:
            self.submit(request, outbox)
            while num_open:
                chunks = await take_all(stream)
                num_open -= sum(chunk.finish_reason is not None for chunk in chunks)
                yield chunks
        finally:
            outbox.close(request.request_id)
            if num_open:
                self.abort(request.request_id)

    def _outbox(self) -> LoopOutbox:
        loop = asyncio.get_running_loop()
        if loop not in self._outboxes:
            self._outboxes[loop] = LoopOutbox(loop)
        return self._outboxes[loop]

    async def stage(self, manifest: AdapterManifest) -> None:
        """Bring a version's bytes onto the node, on another thread. Raises AdapterTooLarge, AdapterUnavailable."""
        started_s, outcome = time.monotonic(), "failed"
        try:
            self._cache.check_fits(manifest)
            self._withdrawn.pop(manifest.digest, None)
            await asyncio.to_thread(self._store.stage, manifest)
            outcome = "ok"
        finally:
            self._metrics.staged(outcome, time.monotonic() - started_s)

    async def remember(self, manifest: AdapterManifest) -> None:
        """Make a version servable without its bytes, which come with its first request.

        Raises AdapterTooLarge, AdapterUnavailable.
        """
        self._cache.check_fits(manifest)
        self._withdrawn.pop(manifest.digest, None)
        await asyncio.to_thread(self._store.remember, manifest)

    def warm(self, digest: str) -> None:
        """Bring a version to host memory, where there is room to spare. Never blocks or raises."""
        self._cache.warm(digest)

    async def keep(self, digests: Sequence[str]) -> None:
        """Keep these versions, and no others, in their slots, in that order as far as they leave room for others.

        Returns when they are there or will not come, or after KEEP_S.
        """
        await asyncio.to_thread(self._cache.keep, digests)
        with suppress(TimeoutError):
            async with asyncio.timeout(KEEP_S):
                while not self._cache.keeps_all:  # noqa: ASYNC110 the step thread has no loop to tell
                    await asyncio.sleep(KEEP_POLL_S)

    def forget(self, digest: str) -> None:
        """Drop a version from all tiers; requests that wait for it or run on it end with AdapterWithdrawn."""
        self._withdrawn[digest] = None
        while len(self._withdrawn) > MAX_WITHDRAWN:
            del self._withdrawn[next(iter(self._withdrawn))]
        self.engine.abort_adapter(digest, _withdrawn(digest))
        self._store.forget(digest)
        self._cache.forget(digest)

    def staged(self) -> tuple[str, ...]:
        """The digests that can be served: their manifests are on the node, their bytes too or on demand."""
        return self._store.known()

    def held(self) -> tuple[str, ...]:
        """The digests whose bytes are on the node at this moment."""
        return self._store.staged()

    def running(self) -> tuple[str, ...]:
        """The digests that requests wait for or run on at this moment."""
        return tuple(self.engine.adapters_in_use())

    def resident(self) -> tuple[str, ...]:
        """The digests that are in a slot at this moment."""
        return self._cache.stats().resident

    def slots(self) -> tuple[SlotView, ...]:
        """Who sits in which adapter slot at this moment; none before `load`."""
        return () if self._engine is None else self._cache.slots()

    def status(self) -> ReplicaStatus:
        """What the replica holds and does at this moment."""
        counts, stats = self.engine.counts, self._cache.stats()
        return ReplicaStatus(
            num_waiting=counts.num_waiting,
            num_running=counts.num_running,
            num_loading=counts.num_loading,
            num_kv_blocks=self._limits.num_blocks,
            num_free_kv_blocks=counts.num_free_blocks,
            num_slots=stats.num_slots,
            resident=stats.resident,
            host_cached=stats.host_cached,
            host_bytes=stats.host_bytes,
            arena_bytes=stats.arena_bytes,
            arena_free_bytes=stats.arena_free_bytes,
            num_steps=counts.num_steps,
            num_adapter_loads=sum(stats.loads.values()),
            num_slot_hits=stats.num_hits,
            num_slot_misses=stats.num_misses,
            num_evictions=stats.evictions["slot", "room"],
        )

    def watch(self, reader: Reader) -> None:
        """Have the metrics tell what `reader` reads, too."""
        self._metrics.watch(reader)

    def metrics(self) -> bytes:
        """The Prometheus text of this replica alone."""
        return self._metrics.render()

    def check_integrity(self) -> None:
        """Assert that every KV block and slot pin belongs to a live request. Raises AssertionError."""
        self.engine.check_integrity(self._cache.check_integrity)

    def is_alive(self) -> bool:
        """Whether the step loop runs and, when there is work, makes progress."""
        return self._engine is not None and self._engine.is_alive(self._stall_s)

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait for those that are here; after `timeout_s` seconds abort the rest."""
        engine = self.engine
        engine.refuse(ReplicaDraining("the replica is draining"))
        if await asyncio.to_thread(engine.wait_idle, timeout_s):
            return
        engine.abort_all()
        await asyncio.to_thread(engine.wait_idle, ABORT_GRACE_S)

    def close(self) -> None:
        """Stop the step loop, end what still runs with an EngineDead chunk, stop the load threads. Idempotent."""
        if self._engine is not None:
            self._engine.close()
            self._cache.close()


def _withdrawn(digest: str) -> AdapterWithdrawn:
    return AdapterWithdrawn(f"adapter version {digest[:12]} was taken out of service")


def cuda_memory(device: torch.device) -> DeviceMemory | None:
    """The memory to divide; None on a CPU, where the KV cache is as large as the configuration says."""
    return CudaMemory(device) if device.type == "cuda" else None
