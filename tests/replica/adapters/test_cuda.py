"""The CUDA side of the tiers: pinned images, a copy stream of its own, and steps that do not wait for a load."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from replica.adapters.cache import AdapterCache, AdapterLease
from replica.adapters.copier import SlotCopier
from replica.adapters.host_memory import HostBlock, HostMemory
from replica.adapters.node_store import NodeStore
from replica.adapters.slot_tables import SlotTables
from replica.adapters.weights import AdapterImage, ImageLayout, plan_layout
from replica.config import MIB, AdapterCacheConfig
from replica.memory_profile import CudaMemory
from tests.replica.adapters.made import DictSource, Made, make_adapter, make_sites

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SITES = make_sites(num_layers=4, scale=32)
BY_PATH = {site.path: site for site in SITES}
DEVICE = torch.device("cuda", 0)


@contextmanager
def cache_of(folder: Path, adapters: list[Made], **limits: int) -> Iterator[AdapterCache]:
    store = NodeStore(folder, DictSource(*adapters), 512 * MIB)
    for made in adapters:
        store.stage(made.manifest)
    cache = AdapterCache.build(AdapterCacheConfig(**limits), store, SITES, DEVICE, torch.bfloat16)
    try:
        yield cache
    finally:
        cache.close()


def wait_for(cache: AdapterCache, lease: AdapterLease) -> None:
    end_s = time.monotonic() + 20
    while not lease.ready:
        assert lease.error is None, lease.error
        assert time.monotonic() < end_s
        cache.poll()


def busy_for(seconds: float) -> None:
    """Queue work on the current stream that takes about so long."""
    torch.cuda._sleep(int(seconds * 1.7e9))


@pytest.mark.parametrize("own_stream", [False, True])
def test_adapters_come_and_go_bit_equal_while_the_compute_stream_is_busy(tmp_path: Path, own_stream: bool) -> None:
    adapters = [make_adapter(seed, rank=rank, sites=SITES) for seed, rank in enumerate((8, 16, 8, 64, 4))]
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with cache_of(tmp_path, adapters, max_slots=3, arena_bytes=24 * MIB) as cache, torch.cuda.stream(stream):
        busy = torch.randn(2048, 2048, device=DEVICE)
        for turn in range(30):
            made = adapters[turn % len(adapters)]
            lease = cache.acquire(made.digest)
            while not lease.ready:
                busy = torch.tanh(busy @ busy)
                wait_a_moment(cache, lease)
            for module in made.manifest.modules:
                pair = lease.pairs[BY_PATH[module.path].index]
                assert torch.equal(pair.a.cpu(), made.tensors[module.a.key].bfloat16())
                assert torch.equal(pair.b.cpu(), made.tensors[module.b.key].bfloat16())
            lease.release()
            cache.check_integrity()


def wait_a_moment(cache: AdapterCache, lease: AdapterLease) -> None:
    assert lease.error is None, lease.error
    time.sleep(0.0005)
    cache.poll()


def test_images_lie_in_memory_that_was_pinned_at_start(tmp_path: Path) -> None:
    adapters = [make_adapter(seed, sites=SITES) for seed in range(3)]
    with cache_of(tmp_path, adapters, max_slots=3, arena_bytes=24 * MIB, host_bytes=64 * MIB) as cache:
        for made in adapters:
            lease = cache.acquire(made.digest)
            wait_for(cache, lease)
            borrowed = cache._host.borrow(made.digest)
            assert borrowed is not None
            assert borrowed.image.data.is_pinned()
            borrowed.release()
            lease.release()


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_slot_in_flight_is_read_to_its_end_before_new_bytes_come(tmp_path: Path, own_stream: bool) -> None:
    """A step that was launched reads its adapter although the slot has been given to another meanwhile."""
    old, new = (make_adapter(seed, sites=SITES) for seed in (1, 2))
    size = plan_layout(old.manifest, BY_PATH, torch.bfloat16).num_bytes
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with (
        cache_of(tmp_path, [old, new], max_slots=1, arena_bytes=size) as cache,
        torch.cuda.stream(stream),
    ):
        lease = cache.acquire(old.digest)
        wait_for(cache, lease)
        expected = cache.arena.memory.cpu()
        cache.prefetch(new.digest)
        time.sleep(0.5)
        busy_for(0.3)
        seen, ranks = cache.arena.memory.clone(), cache.arena.tables.ranks.clone()
        lease.release()
        other = cache.acquire(new.digest)
        wait_for(cache, other)
        assert torch.equal(seen.cpu(), expected)
        assert int(ranks.max()) == 8
        assert not torch.equal(cache.arena.memory.cpu(), expected)
        other.release()


def test_the_step_thread_never_waits_for_the_device(tmp_path: Path) -> None:
    """Acquire, poll and release while the device is busy for a second: each returns at once."""
    adapters = [make_adapter(seed, sites=SITES) for seed in range(6)]
    with cache_of(tmp_path, adapters, max_slots=2, arena_bytes=12 * MIB) as cache:
        for made in adapters:
            lease = cache.acquire(made.digest)
            wait_for(cache, lease)
            lease.release()
        torch.cuda.synchronize()
        busy_for(1.0)
        started_s = time.perf_counter()
        lease = cache.acquire(adapters[0].digest)
        for _ in range(20):
            cache.poll()
            time.sleep(0.001)
        lease.release()
        assert time.perf_counter() - started_s < 0.3
        torch.cuda.synchronize()
        cache.poll()


def test_a_table_row_is_written_without_waiting_and_in_order() -> None:
    sites = make_sites(num_layers=32)
    made = make_adapter(1, sites=sites)
    layout = plan_layout(made.manifest, {site.path: site for site in sites}, torch.bfloat16)
    tables = SlotTables(64, len(sites), DEVICE)
    took_s = []
    for start in range(100):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        tables.write(3, start * 64, layout)
        took_s.append(time.perf_counter() - started_s)
    assert statistics.median(took_s) < 200e-6, took_s
    busy_for(0.5)
    started_s = time.perf_counter()
    tables.write(3, 640, layout)
    first = tables.a_offsets[3].clone()
    tables.write(3, 1280, layout)
    second = tables.a_offsets[3].clone()
    tables.clear(3)
    assert time.perf_counter() - started_s < 0.2
    assert tables.is_clear(3)
    for start, seen in ((640, first), (1280, second)):
        assert seen.tolist() == [place.a_offset + start for place in layout.places]


def test_pinned_copies_run_at_the_bus_speed() -> None:
    """One adapter of 83.9 MB in one copy: 1.66 ms at 53 GB/s; unpinned memory takes more than twice that."""
    num_elements = 83_886_080 // 2
    memory = HostMemory(3 * 2 * num_elements, pin=True)
    arena = torch.zeros(2 * num_elements, dtype=torch.bfloat16, device=DEVICE)
    block = memory.allocate(2 * num_elements)
    assert isinstance(block, HostBlock)
    data = block.data.view(torch.bfloat16).normal_()
    image = AdapterImage("0" * 64, ImageLayout(torch.bfloat16, (), num_elements), data, block)
    copier, took_s = SlotCopier(arena), []
    for _ in range(20):
        started_s = time.perf_counter()
        copier.copy(image, num_elements, copier.fence())
        took_s.append(time.perf_counter() - started_s)
    assert torch.equal(arena[num_elements:].cpu(), data)
    rate = block.data.numel() / statistics.median(took_s) / 1e9
    print(f"host to slot: {statistics.median(took_s) * 1e3:.2f} ms, {rate:.1f} GB/s")
    assert rate > 15
    del image, data, block
    memory.close()


def test_memory_is_counted_as_the_driver_counts_it() -> None:
    memory = CudaMemory(DEVICE)
    memory.reset_peak()
    before, outside = memory.reserved_bytes(), memory.outside_bytes()
    block = torch.zeros(256 * MIB, dtype=torch.uint8, device=DEVICE)
    assert memory.reserved_bytes() - before >= 256 * MIB
    assert memory.outside_bytes() == pytest.approx(outside, abs=64 * MIB)
    del block
    assert memory.peak_bytes() - before >= 256 * MIB
    memory.reset_peak()
    assert memory.reserved_bytes() == pytest.approx(before, abs=32 * MIB)
