"""The host cache: the oldest leave, borrowed images stay, the budget holds."""

import mmap
from pathlib import Path

import pytest
import torch

from replica.adapters.host_cache import UNUSED_S, HostCache
from replica.adapters.host_memory import HostBlock, HostMemory
from replica.adapters.weights import AdapterImage, ImageLayout
from replica.errors import OutOfMemory

ROOT = Path(__file__).parents[3]


def make_cache(max_bytes: int) -> HostCache:
    return HostCache(HostMemory(max_bytes, pin=False))


def make_image(digest: str, block: HostBlock) -> AdapterImage:
    data = block.data.view(torch.float32)
    return AdapterImage(digest, ImageLayout(torch.float32, (), data.numel()), data, block)


def add(cache: HostCache, digest: str, num_bytes: int = 128) -> bool:
    """What a load does; false when there was no room."""
    block = cache.make_room(num_bytes)
    return block is not None and cache.add(make_image(digest, block))


def test_least_recently_used_image_leaves() -> None:
    cache = make_cache(2 * 128)
    assert add(cache, "a")
    assert add(cache, "b")
    assert cache.touch("a")
    assert add(cache, "c")
    assert cache.digests() == ("a", "c")
    assert cache.num_bytes == 256
    assert cache.num_evictions == 1
    cache.check_integrity()


def test_borrowed_image_stays_until_it_is_given_back() -> None:
    cache = make_cache(128)
    add(cache, "a")
    lease = cache.borrow("a")
    assert lease is not None
    assert not add(cache, "b")
    lease.release()
    with pytest.raises(AssertionError):
        lease.release()
    del lease
    assert add(cache, "b")
    assert cache.digests() == ("b",)


def test_nothing_leaves_for_an_image_that_still_would_not_fit() -> None:
    cache = make_cache(3 * 128)
    for digest in "abc":
        add(cache, digest)
    lease = cache.borrow("b")
    assert not add(cache, "large", 384)
    assert set(cache.digests()) == {"a", "b", "c"}
    assert lease is not None
    lease.release()


def test_load_in_progress_counts_against_the_budget() -> None:
    cache = make_cache(2 * 128)
    first, second = cache.make_room(128), cache.make_room(128)
    assert first is not None
    assert second is not None
    assert cache.make_room(128) is None
    del second
    assert cache.make_room(128) is not None
    assert cache.add(make_image("a", first))
    cache.check_integrity()


def test_memory_of_an_image_that_left_is_not_given_out_while_somebody_reads_it() -> None:
    cache = make_cache(128)
    add(cache, "a")
    lease = cache.borrow("a")
    assert lease is not None
    image = lease.image
    image.data.fill_(7.0)
    cache.forget("a")
    lease.release()
    assert cache.digests() == ()
    assert cache.make_room(128) is None
    assert image.data.tolist() == [7.0] * 32
    del image, lease
    assert cache.make_room(128) is not None


def test_image_outside_the_budget_is_not_kept() -> None:
    cache = make_cache(1024)
    assert not cache.add(make_image("a", HostBlock(torch.zeros(128, dtype=torch.uint8))))
    assert cache.digests() == ()


def test_blocks_do_not_overlap_and_all_come_back() -> None:
    memory = HostMemory(1024, pin=False)
    blocks = [memory.allocate(size) for size in (128, 384, 256, 256)]
    for value, block in enumerate(blocks):
        assert block is not None
        block.data.fill_(value)
    assert memory.allocate(128) is None
    for value, block in enumerate(blocks):
        assert block is not None
        assert block.data.unique().tolist() == [value]
    del block
    blocks.clear()
    assert memory.free_bytes == 1024
    memory.check_integrity()


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("max_bytes", [1 << 60, 1 << 80])
def test_more_memory_than_the_host_can_give_is_refused_at_once(max_bytes: int, share: bool) -> None:
    with pytest.raises(OutOfMemory, match="host_bytes"):
        HostMemory(max_bytes, pin=False, share=share)


def test_shared_memory_is_the_same_wherever_it_is_mapped() -> None:
    memory = HostMemory(4 * mmap.PAGESIZE, pin=False, share=True)
    first, second = memory.allocate(mmap.PAGESIZE), memory.allocate(256)
    assert first is not None
    assert second is not None
    second.data.fill_(7)
    with mmap.mmap(memory.descriptor, memory.max_bytes) as other:
        start = memory.offset_of(second)
        assert start == mmap.PAGESIZE
        assert other[start : start + 256] == bytes([7]) * 256
        other[0:3] = b"abc"
        assert bytes(first.data[:3].tolist()) == b"abc"
    descriptor = memory.descriptor
    memory.close()
    with (ROOT / "README.md").open() as other_file:  # takes the number that is free now
        memory.close()
        assert other_file.fileno() == descriptor
        assert other_file.readline()
    assert second.data[0] == 7


def test_same_image_twice_counts_once() -> None:
    cache = make_cache(1024)
    add(cache, "a")
    add(cache, "a")
    assert cache.num_bytes == 128


def test_forgotten_image_leaves_when_its_copy_ends() -> None:
    cache = make_cache(1024)
    add(cache, "a")
    lease = cache.borrow("a")
    cache.forget("a")
    cache.forget("unknown")
    assert cache.borrow("a") is None
    assert not cache.touch("a")
    assert cache.num_bytes == 128
    cache.check_integrity()
    assert lease is not None
    lease.release()
    assert cache.num_bytes == 0


def read_for_a_request(cache: HostCache, digest: str) -> None:
    block = cache.make_room(128)
    assert block is not None
    assert cache.add(make_image(digest, block), "node", read_s=2.0)


def test_image_counts_as_unused_until_it_is_copied_or_nobody_waits_or_a_while_has_passed() -> None:
    now_s = 0.0
    cache = HostCache(HostMemory(1024, pin=False), clock=lambda: now_s)
    for digest in "abcd":
        read_for_a_request(cache, digest)
    add(cache, "warmed")
    assert cache.unused_bytes() == 4 * 128
    lease = cache.borrow("a")
    assert lease is not None
    lease.release()
    assert cache.touch("b", is_awaited=False)
    cache.forget("c")
    cache.check_integrity()
    assert cache.unused_bytes() == 128
    now_s = UNUSED_S - 1
    read_for_a_request(cache, "e")
    cache.touch("d")
    assert cache.unused_bytes() == 2 * 128
    now_s = UNUSED_S
    assert cache.unused_bytes() == 128
    cache.check_integrity()


def test_image_given_back_uncopied_is_still_the_one_that_was_read_for_a_copy() -> None:
    cache = make_cache(1024)
    read_for_a_request(cache, "a")
    seen = []
    for is_copied in (False, True, True):
        lease = cache.borrow("a")
        assert lease is not None
        seen.append((lease.source, lease.read_s))
        (lease.release if is_copied else lease.cancel)()
    assert seen == [("node", 2.0), ("node", 2.0), ("host", 0.0)]


def test_looking_for_an_image_is_no_use_of_it() -> None:
    cache = make_cache(1024)
    add(cache, "a")
    add(cache, "b")
    assert cache.holds("a")
    assert not cache.holds("c")
    assert cache.digests() == ("a", "b")
