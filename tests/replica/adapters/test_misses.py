"""Single orders of events on the way of a miss, with load threads that are moved by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from replica.adapters.cache import AdapterCache, Workers
from replica.adapters.node_store import NodeStore
from replica.adapters.waiters import WaiterState
from replica.adapters.weights import plan_layout
from replica.config import MIB, AdapterCacheConfig
from replica.messages import SlotView
from tests.replica.adapters.by_hand import Tasks
from tests.replica.adapters.made import SITES, DictSource, Made, assert_holds, make_adapter

ADAPTERS = [make_adapter(seed) for seed in range(4)]
SIZE = plan_layout(ADAPTERS[0].manifest, {site.path: site for site in SITES}, torch.float32).num_bytes


class ByHand:
    """A cache whose reads, fetches and copies wait to be run. The host cache holds `host_images`.

    The bytes of the `absent` are not on the node. Two loads ahead may be under way at once from each place.
    """

    def __init__(
        self,
        folder: Path,
        max_slots: int,
        adapters: Sequence[Made] = ADAPTERS,
        host_images: int = 1,
        absent: Sequence[Made] = (),
    ) -> None:
        store = NodeStore(folder, DictSource(*adapters), MIB)
        for made in adapters:
            (store.remember if made in absent else store.stage)(made.manifest)
        self.now_s = 0.0
        self.reads: list[Callable[[], None]] = []
        self.fetches: list[Callable[[], None]] = []
        self.copies: list[Callable[[], None]] = []
        workers = Workers(Tasks(self.reads), Tasks(self.fetches), Tasks(self.copies))
        config = AdapterCacheConfig(max_slots=max_slots, host_bytes=host_images * SIZE, num_load_threads=2)
        self.cache = AdapterCache.build(
            config, store, SITES, torch.device("cpu"), torch.float32, clock=lambda: self.now_s, workers=workers
        )

    def run(self, tasks: list[Callable[[], None]]) -> None:
        while tasks:
            tasks.pop(0)()
        self.cache.poll()
        self.cache.check_integrity()


@pytest.fixture
def one_slot(tmp_path: Path) -> ByHand:
    return ByHand(tmp_path, max_slots=1)


@pytest.fixture
def two_slots(tmp_path: Path) -> ByHand:
    return ByHand(tmp_path, max_slots=2)


def test_only_one_image_is_held_outside_the_host_budget(one_slot: ByHand) -> None:
    leases = [one_slot.cache.acquire(made.digest) for made in ADAPTERS]
    one_slot.run(one_slot.reads)
    for _ in range(3):
        one_slot.cache.poll()
        assert len(one_slot.reads) <= 1
        one_slot.run(one_slot.reads)
        assert sum(waiter.image is not None for waiter in one_slot.cache._misses.waiters) <= 1
        one_slot.run(one_slot.copies)
    for lease in leases:
        lease.release()


def test_reading_ahead_pushes_out_nothing_that_is_wanted_sooner(tmp_path: Path) -> None:
    """A queue of twelve over a host of four: each is read once, and a turn that has come waits behind few reads."""
    adapters = [make_adapter(seed) for seed in range(12)]
    hand = ByHand(tmp_path, max_slots=1, adapters=adapters, host_images=4)
    num_reads = 0
    for made in adapters:
        hand.cache.prefetch(made.digest)
    for made in adapters:
        assert len(hand.reads) <= 2
        lease = hand.cache.acquire(made.digest)
        while not lease.ready:
            num_reads += len(hand.reads)
            hand.run(hand.reads)
            hand.run(hand.copies)
        lease.release()
    assert num_reads == len(adapters)
    assert len(hand.cache._read_ahead) == 0


def test_one_that_waited_for_room_counts_as_read_from_the_node(one_slot: ByHand) -> None:
    first = one_slot.cache.acquire(ADAPTERS[0].digest)
    one_slot.run(one_slot.reads)
    one_slot.run(one_slot.copies)
    second = one_slot.cache.acquire(ADAPTERS[1].digest)
    one_slot.run(one_slot.reads)
    one_slot.cache.poll()
    assert not one_slot.copies, "there is no room"
    first.release()
    one_slot.cache.poll()
    one_slot.run(one_slot.copies)
    assert one_slot.cache.stats().loads == {"host": 0, "node": 2, "blob": 0}
    second.release()


def test_load_that_is_joined_to_be_held_hands_its_image_over(one_slot: ByHand) -> None:
    loader = one_slot.cache._loader
    loader.request(ADAPTERS[0].digest)
    loader.request(ADAPTERS[0].digest, hold=True)
    loader.request(ADAPTERS[0].digest)
    assert len(one_slot.reads) == 1
    one_slot.reads.pop()()
    (loaded,) = loader.settled()
    assert loaded.image is not None


def test_prefetch_that_ends_during_the_copy_changes_nothing(two_slots: ByHand) -> None:
    cache = two_slots.cache
    lease = cache.acquire(ADAPTERS[0].digest)
    two_slots.run(two_slots.reads)
    assert [waiter.state for waiter in cache._misses.waiters] == [WaiterState.COPYING]
    cache._loader.request(ADAPTERS[0].digest)
    two_slots.run(two_slots.reads)
    assert len(two_slots.copies) == 1
    two_slots.run(two_slots.copies)
    assert_holds(lease.pairs, ADAPTERS[0])
    lease.release()


def test_adapter_forgotten_during_its_copy_serves_who_waited_and_leaves(two_slots: ByHand) -> None:
    cache = two_slots.cache
    old = cache.acquire(ADAPTERS[0].digest)
    two_slots.run(two_slots.reads)
    cache.forget(ADAPTERS[0].digest)
    new = cache.acquire(ADAPTERS[0].digest)
    two_slots.run(two_slots.copies)
    assert old.ready
    assert not new.ready
    assert cache.stats().resident == ()
    assert_holds(old.pairs, ADAPTERS[0])
    two_slots.run(two_slots.reads)
    two_slots.run(two_slots.copies)
    assert_holds(new.pairs, ADAPTERS[0])
    assert old.slot != new.slot
    old.release()
    assert cache.stats().slots_by_state == {"free": 1, "loading": 0, "resident": 0, "pinned": 1}
    new.release()


def test_withdrawn_during_its_copy_becomes_resident_unpinned(two_slots: ByHand) -> None:
    cache = two_slots.cache
    cache_lease = cache.acquire(ADAPTERS[0].digest)
    two_slots.run(two_slots.reads)
    cache_lease.release()
    two_slots.run(two_slots.copies)
    assert cache.stats().slots_by_state["resident"] == 1
    hit = cache.acquire(ADAPTERS[0].digest)
    assert_holds(hit.pairs, ADAPTERS[0])
    hit.release()


def test_slots_tell_who_is_on_the_way_in_and_who_keeps_them(two_slots: ByHand) -> None:
    cache, digest = two_slots.cache, ADAPTERS[0].digest
    assert cache.slots() == (SlotView("free"), SlotView("free"))
    lease = cache.acquire(digest)
    two_slots.run(two_slots.reads)
    assert cache.slots() == (SlotView("loading", digest), SlotView("free"))
    two_slots.run(two_slots.copies)
    again = cache.acquire(digest)
    assert cache.slots()[0] == SlotView("pinned", digest, 2)
    cache.forget(digest)
    again.release()
    cache.poll()
    assert cache.slots()[0] == SlotView("pinned", digest, 1), "forgotten, but still in use"
    lease.release()
    assert cache.slots() == (SlotView("free"), SlotView("free"))


def test_victim_stays_until_the_new_bytes_are_in_hand(one_slot: ByHand) -> None:
    cache = one_slot.cache
    first = cache.acquire(ADAPTERS[0].digest)
    one_slot.run(one_slot.reads)
    one_slot.run(one_slot.copies)
    first.release()
    second = cache.acquire(ADAPTERS[1].digest)
    cache.poll()
    assert cache.stats().resident == (ADAPTERS[0].digest,)
    again = cache.acquire(ADAPTERS[0].digest)
    assert again.ready
    again.release()
    one_slot.run(one_slot.reads)
    assert cache.stats().resident == ()
    one_slot.run(one_slot.copies)
    assert_holds(second.pairs, ADAPTERS[1])
    second.release()
