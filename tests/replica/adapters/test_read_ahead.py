"""What is read before its turn: nothing for nothing, nothing that holds up others for good, in the order of asking."""

from pathlib import Path

import pytest

from replica.adapters.host_cache import UNUSED_S
from replica.adapters.image_reader import ImageReader
from tests.replica.adapters.made import make_adapter
from tests.replica.adapters.test_misses import ByHand

ADAPTERS = [make_adapter(seed) for seed in range(6)]
DIGESTS = [made.digest for made in ADAPTERS]


def resident(hand: ByHand, number: int) -> None:
    """Bring an adapter into a slot, and let nobody use it."""
    lease = hand.cache.acquire(DIGESTS[number])
    hand.run(hand.reads)
    hand.run(hand.copies)
    assert lease.ready
    lease.release()


def test_what_is_in_a_slot_is_not_read_ahead(tmp_path: Path) -> None:
    hand = ByHand(tmp_path, max_slots=2, adapters=ADAPTERS)
    resident(hand, 0)
    hand.cache._host.forget(DIGESTS[0])
    hand.cache.prefetch(DIGESTS[0])
    assert not hand.reads
    hand.cache.poll()
    assert not hand.reads
    assert len(hand.cache._read_ahead) == 0


def test_images_of_resident_adapters_that_requests_ask_for_do_not_count_as_unused(tmp_path: Path) -> None:
    hand = ByHand(tmp_path, max_slots=2, adapters=ADAPTERS, host_images=4)
    for number in (0, 1):
        resident(hand, number)
        hand.cache._host.forget(DIGESTS[number])
        hand.cache._loader.request(DIGESTS[number])
    hand.run(hand.reads)
    assert hand.cache._host.unused_bytes() > 0
    for digest in DIGESTS[:3]:
        hand.cache.prefetch(digest)
    assert hand.cache._host.unused_bytes() == 0
    assert len(hand.reads) == 1


def test_images_whose_requests_gave_up_hold_up_reading_for_a_while_only(tmp_path: Path) -> None:
    hand = ByHand(tmp_path, max_slots=1, adapters=ADAPTERS, host_images=4)
    for digest in DIGESTS[:2]:
        hand.cache.prefetch(digest)
    hand.run(hand.reads)
    hand.now_s = UNUSED_S - 1
    hand.cache.prefetch(DIGESTS[2])
    hand.cache.poll()
    assert not hand.reads
    hand.now_s = UNUSED_S
    hand.cache.poll()
    assert len(hand.reads) == 1


def test_slow_fetches_hold_up_no_reading_and_are_bounded_themselves(tmp_path: Path) -> None:
    hand = ByHand(tmp_path, max_slots=1, adapters=ADAPTERS, host_images=8, absent=ADAPTERS[:3])
    for digest in DIGESTS[:3]:
        hand.cache.prefetch(digest)
    hand.run(hand.reads)
    assert len(hand.fetches) == 2
    hand.cache.prefetch(DIGESTS[3])
    assert len(hand.reads) == 1
    assert len(hand.cache._read_ahead) == 1
    hand.run(hand.fetches)
    hand.run(hand.reads)
    assert len(hand.fetches) == 1
    assert set(DIGESTS[:2]) < set(hand.cache.stats().host_cached)


def test_what_is_wanted_twice_waits_once(tmp_path: Path) -> None:
    hand = ByHand(tmp_path, max_slots=1, adapters=ADAPTERS, host_images=6)
    for digest in (*DIGESTS[:3], *DIGESTS[:3], DIGESTS[2]):
        hand.cache.prefetch(digest)
    assert len(hand.reads) == 2
    assert len(hand.cache._read_ahead) == 3, "one, and the two under way in case that they come to nothing"
    hand.run(hand.reads)
    hand.run(hand.reads)
    assert len(hand.cache._read_ahead) == 0
    assert hand.cache.stats().load_seconds["read"][0] == 3


def test_beyond_the_bound_the_newest_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replica.adapters.read_ahead.MOST_WANTED", 2)
    hand = ByHand(tmp_path, max_slots=1, adapters=ADAPTERS, host_images=6)
    for digest in DIGESTS:
        hand.cache.prefetch(digest)
    hand.run(hand.reads)
    hand.run(hand.reads)
    assert set(hand.cache.stats().host_cached) == set(DIGESTS[:4]), "two at once, and two that wait"
    assert not hand.reads


def test_one_that_came_while_it_was_asked_for_is_not_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = list[Path]()
    read = ImageReader.read
    monkeypatch.setattr(ImageReader, "read", lambda self, path, *rest: paths.append(path) or read(self, path, *rest))
    hand = ByHand(tmp_path, max_slots=1, adapters=ADAPTERS, host_images=4)
    hand.cache.prefetch(DIGESTS[0])
    hand.run(hand.reads)
    hand.cache._loader.request(DIGESTS[0])
    lease = hand.cache.acquire(DIGESTS[0])
    hand.run(hand.reads)
    hand.run(hand.copies)
    assert lease.ready
    assert len(paths) == 1
    assert hand.cache.stats().loads["node"] == 1
    lease.release()
    hand.cache.check_integrity()
