"""The adapters of one replica: `acquire` a digest, get a lease, use its weights once it is ready.

A hit pins a slot (`Residents`); a miss takes the `MissPath`: node store to host image, room in the arena, host image to
slot. Load threads do the work; the step thread only keeps the books, in `acquire`, `poll` and `release`.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

import torch

from registry.types import AdapterManifest
from replica.adapters.copier import CopyQueue, SlotCopier
from replica.adapters.eviction import GreedyDualPolicy
from replica.adapters.fit import Budgets, ImagePlanner
from replica.adapters.host_cache import HostCache
from replica.adapters.host_memory import HostMemory
from replica.adapters.image_reader import ImageReader
from replica.adapters.keeper import Keeper
from replica.adapters.loader import ImageLoader, Reader
from replica.adapters.misses import MissPath
from replica.adapters.node_store import NodeStore
from replica.adapters.read_ahead import ReadAhead
from replica.adapters.read_process import ReadProcesses
from replica.adapters.residents import Resident, Residents
from replica.adapters.slots import SlotArena
from replica.adapters.stats import SOURCES, CacheStats, LoadObserver, LoadTimes
from replica.config import AdapterCacheConfig
from replica.errors import ReplicaError
from replica.messages import SlotView
from replica.model.batch import LoraPair, Site

logger = logging.getLogger(__name__)
READ_THREADS = 8
"""Threads, or processes, that read one adapter where decode steps need no core."""


class AdapterLease:
    """A claim on one adapter: first it waits, then it is `ready` and pins a slot, or `error` says why it never will.

    Release it exactly once, whatever became of it; releasing one that waits withdraws it. `pairs` are views that are
    good until the next `AdapterCache.poll`: read them anew for every step. Only the step thread uses a lease.
    """

    def __init__(self, cache: "AdapterCache", digest: str) -> None:
        self.digest = digest
        self.error: ReplicaError | None = None
        self._cache = cache
        self._resident: Resident | None = None
        self._released = False

    def __repr__(self) -> str:
        state = "released" if self._released else "ready" if self.ready else "failed" if self.error else "waiting"
        return f"AdapterLease({self.digest[:8]}, {state}, slot {self.slot})"

    @property
    def ready(self) -> bool:
        return self._resident is not None

    @property
    def slot(self) -> int | None:
        """The row of the slot tables, when ready."""
        return None if self._resident is None else self._resident.slot

    @property
    def pairs(self) -> Mapping[int, LoraPair]:
        """Site index -> pair, for the sites that the adapter touches."""
        assert self._resident is not None, "the adapter is not ready, or its lease was released"
        return self._cache.pairs(self._resident.slot)

    @property
    def resident(self) -> Resident | None:
        return self._resident

    def bind(self, resident: Resident) -> None:
        """For the cache: the adapter is resident, and pinned for this lease."""
        self._resident = resident

    def fail(self, error: ReplicaError) -> None:
        """For the cache: the adapter will not come."""
        self.error = error

    def release(self) -> None:
        """Give the claim back."""
        assert not self._released, f"{self!r} was released twice"
        self._released = True
        self._cache._release(self)


@dataclass(frozen=True, slots=True)
class Workers:
    """The threads of the three kinds of work: files to images, fetches from the source, copies into slots."""

    readers: Executor
    fetchers: Executor
    copiers: Executor

    @classmethod
    def start(cls, num_threads: int) -> "Workers":
        return cls(
            ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-read"),
            ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-fetch"),
            ThreadPoolExecutor(1, thread_name_prefix="adapter-copy"),
        )

    def stop(self) -> None:
        for executor in (self.fetchers, self.readers, self.copiers):
            executor.shutdown(wait=True, cancel_futures=True)


class AdapterCache:
    """Slots over host cache over node store. `prefetch`, `warm`, `keep`, `forget`, `stats`, `slots` and `check_fits`
    are safe from any thread; everything else belongs to the step thread, and `poll` to the moment between two steps."""

    def __init__(
        self,
        store: NodeStore,
        host: HostCache,
        planner: ImagePlanner,
        residents: Residents,
        reader: Reader,
        workers: Workers,
        clock: Callable[[], float],
        times: LoadTimes,
        failure_ttl_s: float,
        drain_after_s: float,
        most_ahead: int,
    ) -> None:
        self._store, self._host, self._planner, self._residents = store, host, planner, residents
        self._reader, self._workers, self._clock, self._times = reader, workers, clock, times
        self._loader = ImageLoader(
            store, host, planner, reader, workers.readers, workers.fetchers, times, clock, failure_ttl_s,
            on_settled=self._notify,
        )  # fmt: skip
        copies = CopyQueue(SlotCopier(residents.arena.memory), workers.copiers, times, clock, self._notify)
        self._misses = MissPath(self._loader, host, residents, copies, times, clock, drain_after_s)
        self._read_ahead = ReadAhead(self._loader, host, most_ahead, lambda digest: residents.find(digest) is not None)
        self._leases: set[AdapterLease] = set()
        self._keeper = Keeper(self._claim, clock, failure_ttl_s)
        self._forgotten: deque[str] = deque()
        self._callbacks: list[Callable[[], None]] = []
        self._num_hits = 0
        self._num_misses = 0

    @classmethod
    def build(
        cls,
        config: AdapterCacheConfig,
        store: NodeStore,
        sites: Sequence[Site],
        device: torch.device,
        dtype: torch.dtype,
        clock: Callable[[], float] = time.monotonic,
        observer: LoadObserver | None = None,
        workers: Workers | None = None,
    ) -> "AdapterCache":
        """Take the arena and the host memory, and start what loads. `dtype` is the base model's.

        Raises OutOfMemory when either cannot be had, and AdapterUnavailable when no process can be had to read.
        """
        on_gpu = device.type == "cuda"
        arena = SlotArena(config.max_slots, config.arena_bytes, len(sites), device, dtype)
        budgets = Budgets(config.max_rank, arena.num_bytes, config.host_bytes, store.max_bytes)
        num_readers, in_processes = _readers(config, on_gpu)
        with ExitStack() as taken:
            memory = taken.enter_context(closing(HostMemory(config.host_bytes, pin=on_gpu, share=in_processes)))
            reader: Reader
            if in_processes:
                reader = ReadProcesses(sites, dtype, num_readers, memory, config.num_load_threads)
            else:
                reader = ImageReader(num_readers)
            taken.enter_context(closing(reader))
            cache = cls(
                store=store,
                host=HostCache(memory, clock),
                planner=ImagePlanner(sites, dtype, budgets),
                residents=Residents(arena, GreedyDualPolicy(16 * config.max_slots, 64 * config.max_slots)),
                reader=reader,
                workers=workers or Workers.start(config.num_load_threads),
                clock=clock,
                times=LoadTimes(observer),
                failure_ttl_s=config.failure_ttl_s,
                drain_after_s=config.drain_after_s,
                most_ahead=config.num_load_threads,
            )
            taken.pop_all()
        return cache

    def __repr__(self) -> str:
        return f"AdapterCache({len(self._leases)} leases, {len(self._misses.waiters)} waiting, {self._residents!r})"

    @property
    def arena(self) -> SlotArena:
        """For kernels: the memory and the slot tables."""
        return self._residents.arena

    def pairs(self, slot: int) -> Mapping[int, LoraPair]:
        """The pairs of a resident slot; good until the next `poll`."""
        return self._residents.arena.pairs(slot)

    def check_fits(self, manifest: AdapterManifest) -> None:
        """Raises AdapterTooLarge when a budget can never hold it, AdapterUnavailable when it does not fit the base."""
        self._planner.plan(manifest)

    def image_bytes(self, digest: str) -> int:
        """What an adapter takes of the arena; 0 when it is not known or can never come.

        Reads its manifest only if nothing planned its image before, as staging and loading do on other threads.
        """
        known = self._planner.num_bytes(digest)
        try:
            return self._planner.plan(self._store.manifest(digest)).num_bytes if known is None else known
        except ReplicaError:
            return 0

    def load_s(self, digest: str) -> float:
        """How long reading an adapter and copying it into a slot takes, by its size and the loads so far."""
        num_bytes = self.image_bytes(digest)
        return self._misses.cost.seconds(num_bytes) if num_bytes else 0.0

    def prefetch(self, digest: str) -> None:
        """Bring an adapter to the host cache for a request that waits for its turn, if it is known and has not failed
        just now: at once, or when those asked for before have been read or used. Never blocks or raises."""
        with suppress(ReplicaError):
            self._read_ahead.want(digest)

    def warm(self, digest: str) -> None:
        """As `prefetch`, into host memory that nothing uses: no other image leaves for it, and one that is there counts
        as used no more than before. Never blocks or raises."""
        self._workers.readers.submit(self._warm, digest)

    def _warm(self, digest: str) -> None:
        with suppress(ReplicaError):
            num_bytes = self._planner.plan(self._store.manifest(digest)).num_bytes
            if not self._host.holds(digest) and num_bytes <= self._host.free_bytes:
                self._loader.check(digest)
                self._loader.request(digest, ahead=True)

    def acquire(self, digest: str) -> AdapterLease:
        """A lease on an adapter, ready at once if that is resident. Never blocks.

        Raises UnknownAdapter, and for `failure_ttl_s` what a load of it raised: AdapterUnavailable, AdapterTooLarge.
        Faults that a load finds come as the lease's `error`.
        """
        self._take_in()
        lease = self._claim(digest)
        if lease.ready:
            self._num_hits += 1
        else:
            self._num_misses += 1
        self._residents.policy.use(digest)
        self._misses.give_room(may_move=False)
        return lease

    def _claim(self, digest: str) -> AdapterLease:
        """A lease that nothing counts yet."""
        lease = AdapterLease(self, digest)
        resident = self._residents.find(digest)
        if resident is not None:
            self._residents.pin(resident)
            lease.bind(resident)
        else:
            self._misses.join(digest, lease)
        self._leases.add(lease)
        return lease

    def keep(self, digests: Sequence[str]) -> None:
        """Keep these adapters, and no others, in their slots from now on, in that order as far as they leave room.

        A slot and the bytes of the largest adapter known here stay for others. Should a larger one come later and find
        no room, the least used of these let go, until the next call. Reads manifests that are new.
        """
        largest = max(map(self.image_bytes, self._store.known()), default=0)
        free_bytes, chosen = self.arena.num_bytes - largest, list[str]()
        for digest in digests:
            size = self.image_bytes(digest)
            if size and size <= free_bytes and len(chosen) < self.arena.num_slots - 1:
                chosen.append(digest)
                free_bytes -= size
        if len(chosen) < len(digests):
            logger.warning("%d of %d pinned adapters have no room here", len(digests) - len(chosen), len(digests))
        self._keeper.want(chosen)
        self._notify()

    @property
    def keeps_all(self) -> bool:
        """Whether all that `keep` chose is in its slot, or will not come. Safe from any thread."""
        return self._keeper.is_settled

    def poll(self) -> None:
        """Settle what the load threads finished, and give room to the oldest waiters. Call it between two steps.

        Views from before the call are stale after it: images may have moved.
        """
        self._take_in()
        self._keeper.settle()
        self._misses.give_room(may_move=True)
        if self._keeper.give_way():
            self._misses.give_room(may_move=True)
        self._read_ahead.go_on()

    def on_change(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, from a load thread, when a `poll` has something to settle."""
        self._callbacks.append(callback)

    def forget(self, digest: str) -> None:
        """Drop an adapter from host and slot; a pinned slot serves its leases first. Takes effect at the next call."""
        self._host.forget(digest)
        self._loader.forget_failure(digest)
        self._planner.forget(digest)
        self._forgotten.append(digest)

    def close(self) -> None:
        """Stop what loads, wait for what it is doing, and give the host memory up. Idempotent."""
        with closing(self._host), closing(self._reader):
            self._workers.stop()

    def _take_in(self) -> None:
        """Take note of what other threads did."""
        while self._forgotten:
            digest = self._forgotten.popleft()
            self._keeper.drop(digest)
            self._residents.forget(digest)
            self._misses.forget(digest)
        self._misses.settle()

    def _release(self, lease: AdapterLease) -> None:
        self._leases.remove(lease)
        if lease._resident is not None:
            resident, lease._resident = lease._resident, None
            self._residents.unpin(resident)
        elif lease.error is None:
            self._misses.withdraw(lease)

    def _notify(self) -> None:
        for callback in self._callbacks:
            callback()

    def slots(self) -> tuple[SlotView, ...]:
        """Who sits in which slot at this moment. Safe from any thread."""
        return self._residents.views(self._misses.copying)

    def stats(self) -> CacheStats:
        """Counts of this moment."""
        arena = self._residents.arena
        return CacheStats(
            num_slots=arena.num_slots,
            slots_by_state=self._residents.num_in_state(),
            resident=self._residents.digests(),
            host_cached=self._host.digests(),
            host_bytes=self._host.num_bytes,
            host_free_bytes=self._host.free_bytes,
            arena_bytes=arena.num_bytes,
            arena_free_bytes=arena.free_bytes,
            num_waiting=len(self._misses.waiters),
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_failures=self._loader.num_failures,
            loads={source: self._misses.loads[source] for source in SOURCES},
            evictions={
                ("slot", "room"): self._residents.num_evictions,
                ("slot", "withdrawn"): self._residents.num_withdrawn,
                ("host", "room"): self._host.num_evictions,
                ("host", "withdrawn"): self._host.num_withdrawn,
                ("node", "room"): self._store.num_evictions,
                ("node", "withdrawn"): self._store.num_withdrawn,
                ("node", "damaged"): self._store.num_damaged,
            },
            load_seconds=self._times.snapshot(),
        )

    def check_integrity(self) -> None:
        """Every pin and every waiter belongs to a lease, and the tiers are consistent. Cheap enough when idle."""
        self._residents.check_integrity()
        self._host.check_integrity()
        self._misses.check_integrity()
        ready = sum(lease.ready for lease in self._leases)
        waiting = sum(len(waiter.claims) for waiter in self._misses.waiters)
        failed = sum(lease.error is not None for lease in self._leases)
        assert ready == self._residents.num_pins(), repr(self)
        assert ready + waiting + failed == len(self._leases), repr(self)


def _readers(config: AdapterCacheConfig, on_gpu: bool) -> tuple[int, bool]:
    """How many share the reading of an adapter, and whether they are processes."""
    in_processes = on_gpu if config.read_in_processes is None else config.read_in_processes
    return config.num_read_threads or (READ_THREADS if on_gpu else 1), in_processes
