"""The host cache: the oldest leave, borrowed images stay, the budget holds."""

import pytest
import torch

from replica.adapters.host_cache import HostCache
from replica.adapters.weights import AdapterImage, ImageLayout


def make_image(digest: str, num_elements: int = 32) -> AdapterImage:
    return AdapterImage(digest, ImageLayout(torch.float32, (), num_elements), torch.zeros(num_elements))


def test_least_recently_used_image_leaves() -> None:
    cache = HostCache(2 * 128)
    assert cache.add(make_image("a"))
    assert cache.add(make_image("b"))
    assert cache.touch("a")
    assert cache.add(make_image("c"))
    assert cache.digests() == ("a", "c")
    assert cache.num_bytes == 256
    assert cache.num_evictions == 1
    cache.check_integrity()


def test_borrowed_image_stays_until_it_is_given_back() -> None:
    cache = HostCache(128)
    cache.add(make_image("a"))
    lease = cache.borrow("a")
    assert lease is not None
    assert not cache.add(make_image("b"))
    lease.release()
    with pytest.raises(AssertionError):
        lease.release()
    assert cache.add(make_image("b"))
    assert cache.digests() == ("b",)


def test_nothing_leaves_for_an_image_that_still_would_not_fit() -> None:
    cache = HostCache(3 * 128)
    for digest in "abc":
        cache.add(make_image(digest))
    lease = cache.borrow("b")
    assert not cache.add(make_image("large", 96))
    assert set(cache.digests()) == {"a", "b", "c"}
    assert lease is not None
    lease.release()


def test_same_image_twice_counts_once() -> None:
    cache = HostCache(1024)
    cache.add(make_image("a"))
    cache.add(make_image("a"))
    assert cache.num_bytes == 128


def test_forgotten_image_leaves_when_its_copy_ends() -> None:
    cache = HostCache(1024)
    cache.add(make_image("a"))
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
