"""The start of a replica on a GPU: what is measured holds, and what does not fit is said at start."""

from pathlib import Path

import pytest
import torch

from replica.adapters.node_store import FolderSource
from replica.config import MIB, AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from replica.errors import OutOfMemory
from replica.replica import Replica
from tests.fakes import CollectingOutbox
from tests.replica.engine.harness import make_request
from tests.tiny_models import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GIB = 1 << 30


def replica_of(folder: Path, **fields: object) -> Replica:
    adapters = {"node_store": folder / "node", "host_bytes": 64 * MIB, "arena_bytes": 512 * MIB, "max_rank": 16}
    scheduler = {"max_batch_tokens": 1024, "max_num_seqs": 32}
    for name, value in fields.items():
        (adapters if name in AdapterCacheConfig.model_fields else scheduler)[name] = value
    config = ReplicaConfig(
        model=ModelConfig(base=str(make_model(folder / "base")), device="cuda"),
        adapters=AdapterCacheConfig.model_validate(adapters),
        scheduler=SchedulerConfig.model_validate(scheduler),
    )
    return Replica(config, FolderSource(lambda sha256: folder))


def test_the_share_is_kept_from_start_to_the_largest_steps(tmp_path: Path) -> None:
    free, total = torch.cuda.mem_get_info()
    share = min(1.0, (total - free + 8 * GIB) / total)
    replica = replica_of(tmp_path, gpu_memory_utilization=share)
    try:
        replica.load()
        assert replica.status().num_kv_blocks > 32 * 47 // 16
        outbox = CollectingOutbox()
        for index in range(32):
            replica.submit(make_request(f"r{index}", [1 + index] * 31, 16, ignore_eos=True, prompt_logprobs=1), outbox)
        assert replica.engine.wait_idle(60.0)
        assert not outbox.errors
        free_now, _ = torch.cuda.mem_get_info()
        assert total - free_now <= share * total
        assert total - free_now >= share * total - 4 * GIB, "most of the share is in use"
        replica.check_integrity()
    finally:
        replica.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arena_bytes": 1 << 50}, "arena_bytes"),
        ({"kv_bytes": 1 << 50}, "adapter arena 536870912"),
        ({"num_kv_blocks": 1 << 40}, "largest steps"),
        ({"gpu_memory_utilization": 0.001}, "0 are left"),
    ],
)
def test_what_does_not_fit_is_refused_at_start(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    replica = replica_of(tmp_path, **fields)
    with pytest.raises(OutOfMemory, match=message):
        replica.load()
    replica.close()
