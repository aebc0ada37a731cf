"""Any order of acquires, releases, loads, failures and polls: a Hypothesis state machine over the adapter cache.

The load threads are replaced by a list of tasks that the machine runs one at a time, in any order.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from registry.types import AdapterManifest
from replica.adapters.cache import AdapterCache, AdapterLease, Workers
from replica.adapters.node_store import NodeStore
from replica.adapters.waiters import Waiter, WaiterState
from replica.adapters.weights import plan_layout
from replica.config import MIB, AdapterCacheConfig
from replica.errors import AdapterUnavailable, UnknownAdapter
from tests.replica.adapters.by_hand import Tasks
from tests.replica.adapters.made import QV, DictSource, assert_holds, make_adapter, make_sites

SITES = make_sites(num_layers=1)
ADAPTERS = [
    make_adapter(seed, rank=rank, targets=targets, sites=SITES)
    if targets
    else make_adapter(seed, rank=rank, sites=SITES)
    for seed, (rank, targets) in enumerate([(8, None), (8, None), (4, None), (2, QV), (16, None), (8, QV)])
]
TRUE = {made.digest: made for made in ADAPTERS}
BY_PATH = {site.path: site for site in SITES}
LARGEST = max(plan_layout(made.manifest, BY_PATH, torch.float32).num_bytes for made in ADAPTERS)

_FOLDER = tempfile.TemporaryDirectory()
STORE = NodeStore(Path(_FOLDER.name), DictSource(*ADAPTERS), MIB)
for made in ADAPTERS:
    STORE.stage(made.manifest)


class FlakyFiles:
    """The node store, with switches: what fails to be read, what has to be fetched first, what is unknown."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.absent: set[str] = set()
        self.unknown: set[str] = set()
        self.max_bytes = STORE.max_bytes
        self.num_evictions = self.num_withdrawn = self.num_damaged = 0

    def knows(self, digest: str) -> bool:
        return digest not in self.unknown and STORE.knows(digest)

    def holds(self, digest: str) -> bool:
        return digest not in self.absent

    def path(self, digest: str) -> Path:
        return STORE.path(digest)

    def manifest(self, digest: str) -> AdapterManifest:
        if digest in self.unknown:
            raise UnknownAdapter(digest)
        return TRUE[digest].manifest

    def open(self, digest: str) -> Path:
        self.absent.discard(digest)
        if digest in self.failing:
            raise AdapterUnavailable(f"{digest} fails")
        return Path()

    @contextmanager
    def reading(self, manifest: AdapterManifest) -> Iterator[Path]:
        if manifest.digest in self.failing:
            raise AdapterUnavailable(f"{manifest.digest} fails")
        yield STORE.open(manifest.digest)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        max_slots=st.integers(1, 4),
        arena=st.sampled_from([1.0, 1.3, 2.0, 2.5]),
        host=st.sampled_from([1.0, 1.6, 4.0]),
        drain_after_s=st.sampled_from([0.0, 1.0]),
    )
    def build(self, max_slots: int, arena: float, host: float, drain_after_s: float) -> None:
        self.tasks: list[Callable[[], None]] = []
        self.files = FlakyFiles()
        self.now_s = 0.0
        workers = Workers(Tasks(self.tasks), Tasks(self.tasks), Tasks(self.tasks))
        config = AdapterCacheConfig(
            max_slots=max_slots,
            arena_bytes=int(LARGEST * arena),
            host_bytes=int(LARGEST * host),
            failure_ttl_s=2.0,
            drain_after_s=drain_after_s,
        )
        self.cache = AdapterCache.build(
            config, self.files, SITES, torch.device("cpu"), torch.float32, lambda: self.now_s, workers=workers
        )
        self.leases: list[AdapterLease] = []
        self.slots: dict[AdapterLease, int | None] = {}
        self.copying: set[Waiter] = set()

    @rule(made=st.sampled_from(ADAPTERS))
    def acquire(self, made: Any) -> None:
        try:
            lease = self.cache.acquire(made.digest)
        except UnknownAdapter:
            assert made.digest in self.files.unknown
        except AdapterUnavailable:
            with pytest.raises(AdapterUnavailable):
                self.cache._loader.check(made.digest)
        else:
            self.leases.append(lease)
            self.see_starts()

    @rule(made=st.sampled_from(ADAPTERS))
    def prefetch(self, made: Any) -> None:
        self.cache.prefetch(made.digest)

    @rule(kept=st.lists(st.sampled_from(list(TRUE)), max_size=2, unique=True))
    def keep(self, kept: list[str]) -> None:
        """More than `AdapterCache.keep` would choose, at times: the rest has too little room, or none."""
        self.cache._keeper.want(kept)

    @rule(which=st.integers(0, 1000))
    def release(self, which: int) -> None:
        if self.leases:
            self.leases.pop(which % len(self.leases)).release()

    @rule()
    def poll(self) -> None:
        self.cache.poll()
        self.see_starts()

    @rule(which=st.integers(0, 1000))
    def run_a_task(self, which: int) -> None:
        if self.tasks:
            self.tasks.pop(which % len(self.tasks))()

    @rule(made=st.sampled_from(ADAPTERS), kind=st.sampled_from(["failing", "absent", "unknown"]))
    def switch(self, made: Any, kind: str) -> None:
        getattr(self.files, kind).symmetric_difference_update({made.digest})

    @rule(made=st.sampled_from(ADAPTERS))
    def forget(self, made: Any) -> None:
        self.cache.forget(made.digest)

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    def see_starts(self) -> None:
        """Whoever starts to copy overtakes no older waiter whose image is there too."""
        older: list[Waiter] = []
        for waiter in self.cache._misses.waiters:
            if waiter.state is WaiterState.COPYING and waiter not in self.copying:
                overtaken = [one for one in older if one.state is WaiterState.IN_HAND]
                assert not any(one.digest in self.cache._host.digests() for one in overtaken), (waiter, overtaken)
            older.append(waiter)
        self.copying = {waiter for waiter in older if waiter.state is WaiterState.COPYING}

    @invariant()
    def ready_leases_hold_their_own_weights_in_their_own_slot(self) -> None:
        if not hasattr(self, "cache"):
            return
        for lease in self.leases:
            if lease.ready:
                assert self.slots.setdefault(lease, lease.slot) == lease.slot
                assert_holds(lease.pairs, TRUE[lease.digest], sites=SITES)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()
            assert {*self.leases, *self.cache._keeper._leases.values()} == self.cache._leases
            assert Counter(slot.use for slot in self.cache.slots()) == +Counter(self.cache.stats().slots_by_state)

    def run_all(self) -> None:
        for task in self.tasks[:]:
            self.tasks.remove(task)
            task()
        self.poll()

    def teardown(self) -> None:
        """Every waiter gets an answer once those before it are done, whatever is kept; at the end nothing is pinned."""
        if not hasattr(self, "cache"):
            return
        self.answer_all()
        for kind in ("failing", "absent", "unknown"):
            getattr(self.files, kind).clear()
        for made in ADAPTERS:
            self.acquire(made)
        self.answer_all()
        self.cache._keeper.want(())
        for _ in range(3):
            self.run_all()
        states = self.cache.stats().slots_by_state
        assert states["pinned"] == states["loading"] == 0
        assert self.cache.stats().num_waiting == 0

    def answer_all(self) -> None:
        for _ in range(100):
            if not self.leases and not self.tasks:
                break
            self.run_all()
            self.ready_leases_hold_their_own_weights_in_their_own_slot()
            self.books_balance()
            for lease in [one for one in self.leases if one.ready or one.error]:
                self.leases.remove(lease)
                lease.release()
            self.now_s += 1.0
        assert not self.leases, self.leases


CacheMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestCacheMachine = CacheMachine.TestCase
