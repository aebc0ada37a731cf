"""The CUDA side of the tiers: pinned images, a copy stream of its own, and steps that do not wait for a load."""

import time
from pathlib import Path

import pytest
import torch

from replica.adapters.cache import AdapterCache
from replica.adapters.node_store import NodeStore
from replica.config import MIB, AdapterCacheConfig
from tests.replica.adapters.made import DictSource, make_adapter, make_sites

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SITES = make_sites(num_layers=4, scale=32)
BY_PATH = {site.path: site for site in SITES}


def test_adapters_come_and_go_bit_equal_while_the_compute_stream_is_busy(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    adapters = [make_adapter(seed, rank=rank, sites=SITES) for seed, rank in enumerate((8, 16, 8, 64, 4))]
    store = NodeStore(tmp_path, DictSource(*adapters), 512 * MIB)
    for made in adapters:
        store.stage(made.manifest)
    config = AdapterCacheConfig(max_slots=3, arena_bytes=24 * MIB)
    cache = AdapterCache.build(config, store, SITES, device, torch.bfloat16)
    busy = torch.randn(2048, 2048, device=device)
    try:
        for turn in range(30):
            made = adapters[turn % len(adapters)]
            lease = cache.acquire(made.digest)
            end_s = time.monotonic() + 20
            while not lease.ready:
                assert lease.error is None, lease.error
                assert time.monotonic() < end_s
                busy = torch.tanh(busy @ busy)
                cache.poll()
            for module in made.manifest.modules:
                pair = lease.pairs[BY_PATH[module.path].index]
                assert torch.equal(pair.a.cpu(), made.tensors[module.a.key].bfloat16())
                assert torch.equal(pair.b.cpu(), made.tensors[module.b.key].bfloat16())
            lease.release()
            cache.check_integrity()
        borrowed = cache._host.borrow(adapters[0].digest)
        assert borrowed is not None
        assert borrowed.image.data.is_pinned()
        borrowed.release()
    finally:
        cache.close()
