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
