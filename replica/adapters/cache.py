"""The adapters of one replica: `acquire` a digest, get a lease, use its weights once it is ready.

A miss passes three stages, each off the step thread: node store to host image (`ImageLoader`), waiting for room in
the arena, host image to slot (`SlotCopier`). The step thread only keeps the books, in `acquire`, `poll` and `release`.
Room is given in the order of arrival among the waiters whose bytes are in hand: a slow fetch keeps no slot idle.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from registry.types import AdapterManifest
from replica.adapters.copier import SlotCopier
from replica.adapters.eviction import GreedyDualPolicy
from replica.adapters.fit import Budgets, ImagePlanner
from replica.adapters.host_cache import HostCache, HostLease
from replica.adapters.loader import ImageLoader, Loaded
from replica.adapters.node_store import NodeStore
from replica.adapters.residents import Resident, Residents
from replica.adapters.slots import SlotArena
from replica.adapters.stats import CacheStats, LoadObserver, LoadTimes
from replica.adapters.waiters import Waiter, WaiterQueue, WaiterState
from replica.adapters.weights import AdapterImage
from replica.config import AdapterCacheConfig
from replica.errors import AdapterUnavailable, ReplicaError, UnknownAdapter
from replica.model.batch import LoraPair, Site


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

    def release(self) -> None:
        """Give the claim back."""
        assert not self._released, f"{self!r} was released twice"
        self._released = True
        self._cache._release(self)


@dataclass(slots=True)
class _Copy:
    """A copy in progress; `pairs` or `error` is set when it ended."""

    waiter: Waiter[AdapterLease]
    slot: int
    image: AdapterImage
    borrowed: HostLease | None
    started_s: float
    pairs: Mapping[int, LoraPair] | None = None
    error: ReplicaError | None = None


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
    """Slots over host cache over node store. `prefetch`, `forget`, `stats` and `check_fits` are safe from any thread;
    everything else belongs to the step thread, and `poll` to the moment between two steps."""

    def __init__(
        self,
        store: NodeStore,
        host: HostCache,
        planner: ImagePlanner,
        residents: Residents,
        workers: Workers,
        clock: Callable[[], float],
        times: LoadTimes,
        failure_ttl_s: float,
        drain_after_s: float,
    ) -> None:
        self._store, self._host, self._planner, self._residents = store, host, planner, residents
        self._workers, self._clock, self._times = workers, clock, times
        self._drain_after_s = drain_after_s
        memory = residents.arena.memory
        self._copier = SlotCopier(memory)
        self._loader = ImageLoader(
            store, host, planner, workers.readers, workers.fetchers, times, clock, failure_ttl_s,
            pin=memory.device.type == "cuda", on_settled=self._notify,
        )  # fmt: skip
        self._waiters: WaiterQueue[AdapterLease] = WaiterQueue()
        self._leases: set[AdapterLease] = set()
        self._copied: deque[_Copy] = deque()
        self._forgotten: deque[str] = deque()
        self._callbacks: list[Callable[[], None]] = []
        self._counts: Counter[str] = Counter()

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
        """Allocate the arena and start the load threads. `dtype` is the base model's."""
        arena = SlotArena(config.max_slots, config.arena_bytes, len(sites), device, dtype)
        budgets = Budgets(config.max_rank, arena.num_bytes, config.host_bytes, store.max_bytes)
        return cls(
            store=store,
            host=HostCache(config.host_bytes),
            planner=ImagePlanner(sites, dtype, budgets),
            residents=Residents(arena, GreedyDualPolicy(16 * config.max_slots, 64 * config.max_slots)),
            workers=workers or Workers.start(config.num_load_threads),
            clock=clock,
            times=LoadTimes(observer),
            failure_ttl_s=config.failure_ttl_s,
            drain_after_s=config.drain_after_s,
        )

    def __repr__(self) -> str:
        return f"AdapterCache({len(self._leases)} leases, {len(self._waiters)} waiting, {self._residents!r})"

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

    def prefetch(self, digest: str) -> None:
        """Bring an adapter to the host cache, if it is known and has not failed just now. Never blocks or raises."""
        if self._host.touch(digest) or self._loader.failure(digest) or not self._store.knows(digest):
            return
        self._loader.request(digest)

    def acquire(self, digest: str) -> AdapterLease:
        """A lease on an adapter, ready at once if that is resident. Never blocks.

        Raises UnknownAdapter, and for `failure_ttl_s` what a load of it raised: AdapterUnavailable, AdapterTooLarge.
        Faults that a load finds come as the lease's `error`.
        """
        self._take_in()
        lease = AdapterLease(self, digest)
        resident = self._residents.find(digest)
        if resident is not None:
            self._residents.pin(resident)
            lease._resident = resident
            self._counts["hits"] += 1
        else:
            (self._waiters.find(digest) or self._start(digest)).leases.append(lease)
            self._counts["misses"] += 1
        self._leases.add(lease)
        self._residents.policy.use(digest)
        self._give_room(may_move=False)
        return lease

    def poll(self) -> None:
        """Settle what the load threads finished, and give room to the oldest waiters. Call it between two steps.

        Views from before the call are stale after it: images may have moved.
        """
        self._take_in()
        self._give_room(may_move=True)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, from a load thread, when a `poll` has something to settle."""
        self._callbacks.append(callback)

    def forget(self, digest: str) -> None:
        """Drop an adapter from host and slot; a pinned slot serves its leases first. Takes effect at the next call."""
        self._host.forget(digest)
        self._loader.forget_failure(digest)
        self._forgotten.append(digest)

    def close(self) -> None:
        """Stop the load threads; waits for what they are doing."""
        self._workers.stop()

    def _start(self, digest: str) -> Waiter[AdapterLease]:
        """A new waiter, with its load under way."""
        failure = self._loader.failure(digest)
        if failure is not None:
            raise failure
        if not self._store.knows(digest):
            raise UnknownAdapter(f"adapter {digest} was never staged on this node")
        waiter: Waiter[AdapterLease] = Waiter(digest, self._clock())
        self._waiters.append(waiter)
        if self._host.touch(digest):
            waiter.state = WaiterState.IN_HAND
        else:
            self._loader.request(digest)
        return waiter

    def _take_in(self) -> None:
        """Take note of what other threads did."""
        while self._forgotten:
            self._forget_slot(self._forgotten.popleft())
        for loaded in self._loader.settled():
            for waiter in self._waiters.of(loaded.digest):
                if waiter.state is WaiterState.LOADING:
                    self._on_loaded(waiter, loaded)
        while self._copied:
            self._on_copied(self._copied.popleft())

    def _forget_slot(self, digest: str) -> None:
        self._residents.forget(digest)
        for waiter in self._waiters.of(digest):
            waiter.forgotten = True

    def _on_loaded(self, waiter: Waiter[AdapterLease], loaded: Loaded) -> None:
        if loaded.error is not None:
            self._fail(waiter, loaded.error)
            return
        waiter.state = WaiterState.IN_HAND
        waiter.tier = loaded.tier
        waiter.load_seconds = loaded.seconds
        if self._waiters.holder is waiter:
            waiter.image = loaded.image
        else:
            waiter.in_hand_s = self._clock()

    def _fail(self, waiter: Waiter[AdapterLease], error: ReplicaError) -> None:
        self._waiters.remove(waiter)
        for lease in waiter.leases:
            lease.error = error

    def _give_room(self, may_move: bool) -> None:
        """Start the copies that there is room for; the oldest waiter without room keeps what comes free."""
        for waiter in self._waiters.in_hand():
            self._residents.cancel_reservation()
            if not self._bind(waiter) and not self._start_copy(waiter, may_move):
                return
        self._residents.cancel_reservation()
        for waiter in self._waiters:
            self._bind(waiter)

    def _bind(self, waiter: Waiter[AdapterLease]) -> bool:
        """Let a waiter use the slot that its adapter still has (it was closed for a reservation that ended)."""
        resident = self._residents.find(waiter.digest)
        if resident is None or waiter.state is WaiterState.COPYING:
            return False
        self._waiters.remove(waiter)
        for lease in waiter.leases:
            self._residents.pin(resident)
            lease._resident = resident
        return True

    def _start_copy(self, waiter: Waiter[AdapterLease], may_move: bool) -> bool:
        """False when there is no room now; what comes free is then reserved for this waiter."""
        borrowed = self._host.borrow(waiter.digest)
        image = borrowed.image if borrowed else waiter.image
        if image is None:
            self._load_again(waiter)
            return True
        slot = self._residents.make_room(image.layout, may_move)
        if slot is None:
            if borrowed is not None:
                borrowed.release()
            self._residents.reserve(image.num_bytes, self._clock() - waiter.in_hand_s >= self._drain_after_s)
            return False
        self._submit(_Copy(waiter, slot, image, borrowed, self._clock()))
        return True

    def _load_again(self, waiter: Waiter[AdapterLease]) -> None:
        """The host cache dropped the image before there was room: load it once more, to hold on to, one at a time."""
        if self._waiters.holder in (None, waiter):
            self._waiters.holder = waiter
            waiter.state = WaiterState.LOADING
            self._loader.request(waiter.digest, hold=True)

    def _submit(self, copy: _Copy) -> None:
        waiter = copy.waiter
        waiter.state = WaiterState.COPYING
        waiter.image = None
        if self._waiters.holder is waiter:
            self._waiters.holder = None
        self._counts[f"loads.{waiter.tier}"] += 1
        self._times.observe("wait", copy.started_s - waiter.in_hand_s)
        start, fence = self._residents.arena.start(copy.slot), self._copier.fence()
        self._workers.copiers.submit(self._copy, copy, start, fence)

    def _copy(self, copy: _Copy, start: int, fence: torch.cuda.Event | None) -> None:
        """Runs on a load thread."""
        started_s = self._clock()
        try:
            copy.pairs = self._copier.copy(copy.image, start, fence)
            self._times.observe("copy", self._clock() - started_s)
        except Exception as error:
            copy.error = AdapterUnavailable(f"adapter {copy.image.digest} could not be copied to its slot: {error}")
        if copy.borrowed is not None:
            copy.borrowed.release()
        self._copied.append(copy)
        self._notify()

    def _on_copied(self, copy: _Copy) -> None:
        waiter, now_s = copy.waiter, self._clock()
        if copy.pairs is None:
            assert copy.error is not None
            self._residents.arena.free(copy.slot)
            self._fail(waiter, copy.error)
            return
        self._waiters.remove(waiter)
        resident = self._residents.publish(
            waiter.digest, copy.slot, copy.image.num_bytes, copy.pairs, len(waiter.leases), waiter.forgotten
        )
        for lease in waiter.leases:
            lease._resident = resident
        self._times.observe("total", now_s - waiter.arrived_s)
        seconds = waiter.load_seconds + now_s - copy.started_s
        self._residents.policy.loaded(waiter.digest, copy.image.num_bytes, seconds)

    def _release(self, lease: AdapterLease) -> None:
        self._leases.remove(lease)
        if lease._resident is not None:
            resident, lease._resident = lease._resident, None
            self._residents.unpin(resident)
        elif lease.error is None:
            self._withdraw(lease)

    def _withdraw(self, lease: AdapterLease) -> None:
        """A lease stops waiting; the last one takes its waiter along, unless the copy is already under way."""
        waiter = next(one for one in self._waiters if lease in one.leases)
        waiter.leases.remove(lease)
        if not waiter.leases and waiter.state is not WaiterState.COPYING:
            self._waiters.remove(waiter)

    def _notify(self) -> None:
        for callback in self._callbacks:
            callback()

    def stats(self) -> CacheStats:
        """Counts of this moment."""
        arena = self._residents.arena
        return CacheStats(
            num_slots=arena.num_slots,
            slots_by_state=self._residents.num_in_state(),
            resident=self._residents.digests(),
            host_cached=self._host.digests(),
            host_bytes=self._host.num_bytes,
            arena_bytes=arena.num_bytes,
            arena_free_bytes=arena.free_bytes,
            num_waiting=len(self._waiters),
            num_hits=self._counts["hits"],
            num_misses=self._counts["misses"],
            num_failures=self._loader.num_failures,
            loads={tier: self._counts[f"loads.{tier}"] for tier in ("host", "node", "blob")},
            evictions={
                "slot": self._residents.num_evictions,
                "host": self._host.num_evictions,
                "node": self._store.num_evictions,
            },
            load_seconds=self._times.snapshot(),
        )

    def check_integrity(self) -> None:
        """Every pin and every waiter belongs to a lease, and the tiers are consistent. Cheap enough when idle."""
        self._residents.check_integrity()
        self._host.check_integrity()
        ready = sum(lease.ready for lease in self._leases)
        waiting = [lease for waiter in self._waiters for lease in waiter.leases]
        failed = sum(lease.error is not None for lease in self._leases)
        assert ready == self._residents.num_pins(), repr(self)
        assert ready + len(waiting) + failed == len(self._leases), repr(self)
        assert all(waiter.leases or waiter.state is WaiterState.COPYING for waiter in self._waiters), repr(self)
        copying = sum(waiter.state is WaiterState.COPYING for waiter in self._waiters)
        assert copying == self._residents.num_in_state()["loading"], repr(self)
