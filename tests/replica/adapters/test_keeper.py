"""Adapters that are kept in their slots: never victims, bounded by slots and bytes, let go when they are not wanted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from replica.messages import SlotView
from tests.replica.adapters.test_cache import ADAPTERS, R8_BYTES, Bench, Clock, bench, image_bytes

SMALL = ADAPTERS[:4]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Bench]:
    with bench(tmp_path, max_slots=3) as fleet:
        fleet.stage(*SMALL)
        yield fleet
        fleet.cache.keep(())
        fleet.until(lambda: fleet.cache.keeps_all)


def keep(fleet: Bench, *numbers: int) -> None:
    fleet.cache.keep([ADAPTERS[number].digest for number in numbers])
    fleet.until(lambda: fleet.cache.keeps_all)


def resident(fleet: Bench) -> set[str]:
    return set(fleet.cache.stats().resident)


def test_kept_adapter_comes_without_a_request_and_is_no_victim(fleet: Bench) -> None:
    keep(fleet, 0)
    for _ in range(3):
        for made in SMALL[1:]:
            fleet.ready(made).release()
            assert ADAPTERS[0].digest in resident(fleet)
    stats = fleet.cache.stats()
    assert stats.num_hits + stats.num_misses == 9, "what is kept counts for no request"
    assert SlotView("pinned", ADAPTERS[0].digest, 0) in fleet.cache.slots(), "nobody uses it"


def test_one_slot_is_always_left_and_others_find_room_in_it(fleet: Bench) -> None:
    keep(fleet, 0, 1, 2, 3)
    assert resident(fleet) == {ADAPTERS[0].digest, ADAPTERS[1].digest}
    for made in SMALL[2:]:
        fleet.ready(made).release()
    assert resident(fleet) >= {ADAPTERS[0].digest, ADAPTERS[1].digest}


def test_bytes_of_the_largest_adapter_are_always_left(tmp_path: Path) -> None:
    largest = image_bytes(ADAPTERS[5])
    with bench(tmp_path, max_slots=8, arena_bytes=largest + R8_BYTES) as fleet:
        fleet.stage(*ADAPTERS)
        keep(fleet, 0, 1)
        assert resident(fleet) == {ADAPTERS[0].digest}
        fleet.ready(ADAPTERS[5]).release()
        assert resident(fleet) == {ADAPTERS[0].digest, ADAPTERS[5].digest}
        fleet.cache.keep(())
        fleet.until(lambda: fleet.cache.keeps_all)


def test_newcomer_is_let_in_beside_kept_adapters_in_constant_use(tmp_path: Path) -> None:
    """Slots are drained for one that waits long, and a kept one would never drain."""
    clock = Clock()
    with bench(tmp_path, clock=clock, max_slots=2, drain_after_s=1) as fleet:
        fleet.stage(*SMALL)
        keep(fleet, 0)
        held = fleet.ready(ADAPTERS[1])
        newcomer = fleet.cache.acquire(ADAPTERS[2].digest)
        fleet.until(lambda: fleet.cache.stats().load_seconds["read"][0] == 3)
        clock.now_s = 10.0
        fleet.cache.poll()
        fleet.ready(ADAPTERS[0]).release()
        assert not fleet.cache.acquire(ADAPTERS[1].digest).ready, "its slot is promised"
        held.release()
        fleet.until(lambda: newcomer.ready)
        newcomer.release()
        fleet.cache.keep(())
        fleet.until(lambda: fleet.cache.keeps_all)
        for lease in tuple(fleet.cache._leases):
            fleet.until(lambda lease=lease: lease.ready)  # type: ignore[misc]
            lease.release()


def test_kept_adapters_give_way_to_a_larger_one_that_nothing_else_has_room_for(tmp_path: Path) -> None:
    """It came after the last `keep`, which left less than it needs; those behind it would wait for ever too."""
    clock, large = Clock(), ADAPTERS[5]
    arena_bytes = image_bytes(large) + R8_BYTES
    with bench(tmp_path, clock=clock, max_slots=8, arena_bytes=arena_bytes, drain_after_s=1) as fleet:
        fleet.stage(*SMALL)
        keep(fleet, 0, 1)
        assert resident(fleet) == {ADAPTERS[0].digest, ADAPTERS[1].digest}
        fleet.ready(ADAPTERS[0]).release()
        fleet.stage(large)
        leases = [fleet.cache.acquire(large.digest)]
        fleet.until(lambda: large.digest in fleet.cache.stats().host_cached)
        leases.append(fleet.cache.acquire(ADAPTERS[2].digest))
        fleet.until(lambda: ADAPTERS[2].digest in fleet.cache.stats().host_cached)
        fleet.cache.poll()
        assert not any(lease.ready for lease in leases)
        clock.now_s = 10.0
        fleet.until(lambda: leases[0].ready)
        assert resident(fleet) == {ADAPTERS[0].digest, large.digest}, "the less used one gave way"
        leases[0].release()
        fleet.until(lambda: leases[1].ready)
        leases[1].release()
        assert fleet.cache.keeps_all, "what gave way is kept again at the next word"
        keep(fleet, 0, 1)
        assert ADAPTERS[0].digest in resident(fleet)
        fleet.cache.keep(())
        fleet.until(lambda: fleet.cache.keeps_all)


def test_kept_adapters_stay_while_one_waits_for_room_that_others_will_leave(tmp_path: Path) -> None:
    clock, large = Clock(), ADAPTERS[5]
    with bench(tmp_path, clock=clock, arena_bytes=image_bytes(large) + R8_BYTES, drain_after_s=1) as fleet:
        fleet.stage(*SMALL, large)
        keep(fleet, 0)
        held = fleet.ready(ADAPTERS[1])
        newcomer = fleet.cache.acquire(large.digest)
        fleet.until(lambda: fleet.cache.stats().load_seconds["read"][0] == 3)
        clock.now_s = 10.0
        for _ in range(3):
            fleet.cache.poll()
        assert fleet.cache.acquire(ADAPTERS[0].digest).ready
        held.release()
        fleet.until(lambda: newcomer.ready)
        for lease in (newcomer, *(one for one in fleet.cache._leases if one.digest == ADAPTERS[0].digest)):
            if lease not in fleet.cache._keeper._leases.values():
                lease.release()
        assert ADAPTERS[0].digest in resident(fleet)
        fleet.cache.keep(())
        fleet.until(lambda: fleet.cache.keeps_all)


def test_adapter_that_is_wanted_no_more_may_go(fleet: Bench) -> None:
    keep(fleet, 0)
    keep(fleet, 1)
    for made in SMALL[2:]:
        fleet.ready(made).release()
    assert ADAPTERS[0].digest not in resident(fleet)
    assert ADAPTERS[1].digest in resident(fleet)


def test_withdrawn_adapter_is_kept_no_more(fleet: Bench) -> None:
    keep(fleet, 0)
    fleet.cache.forget(ADAPTERS[0].digest)
    fleet.until(lambda: ADAPTERS[0].digest not in resident(fleet))


def test_adapter_that_cannot_be_loaded_keeps_nobody_waiting(fleet: Bench) -> None:
    fleet.cache.keep(["f" * 64, ADAPTERS[0].digest])
    fleet.until(lambda: fleet.cache.keeps_all)
    assert resident(fleet) == {ADAPTERS[0].digest}


def test_what_could_not_be_loaded_is_tried_again_after_a_while(tmp_path: Path) -> None:
    clock, bad = Clock(), ADAPTERS[0]
    with bench(tmp_path, clock=clock, failure_ttl_s=10) as fleet:
        fleet.stage(bad)
        path = fleet.store.open(bad.digest)
        path.write_bytes(bad.blob[:-1] + bytes([bad.blob[-1] ^ 1]))
        keep(fleet, 0)
        assert fleet.cache.stats().num_failures == 1
        clock.now_s = 9.9
        for _ in range(3):
            fleet.cache.poll()
        assert resident(fleet) == set()
        clock.now_s = 10.1
        fleet.until(lambda: bad.digest in resident(fleet))
        fleet.cache.keep(())
        fleet.until(lambda: fleet.cache.keeps_all)
