"""On a GPU: a step with prompts, replayed in pieces, gives bit for bit what the same step gives launched as it is."""

from pathlib import Path

import pytest
import torch

from replica.model.batch import ForwardBatch, LoraSegment, SequenceSpan
from replica.model.device_runner import DeviceRunner
from tests.gpu.rig import BIG_HEADS, GpuBase
from tests.tiny_models import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("num_rows", [40, 300, 768])
@pytest.mark.parametrize(("num_adapters", "rank"), [(0, 8), (2, 8), (2, 24)])
def test_a_recorded_prompt_equals_the_launched_one(num_rows: int, num_adapters: int, rank: int, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = make_model(tmp_path, "llama", max_position_embeddings=1024, **BIG_HEADS)
    gpu = GpuBase(folder, num_adapters=2, rank=rank)
    gpu.allocate_kv(512, 4)
    assert gpu.report.num_prompt_steps > 0
    leases = list(gpu.adapters.leases.values())[:num_adapters]
    share = num_rows // max(1, num_adapters)
    batch = ForwardBatch(
        token_ids=torch.arange(num_rows) % 90 + 3,
        positions=torch.arange(num_rows),
        spans=(SequenceSpan(num_rows, num_rows, tuple(range(-(-num_rows // 4)))),),
        logit_rows=torch.tensor([num_rows - 1]),
        segments=tuple(
            LoraSegment(place * share, (place + 1) * share, lease.slot, lease.pairs)
            for place, lease in enumerate(leases)
        ),
    )
    runner = gpu.base._runner
    assert isinstance(runner, DeviceRunner)
    with torch.inference_mode():
        recorded = gpu.base.forward(batch).clone()
        launched = runner._any_step(batch)
    apart = (recorded - launched).abs().max().item()
    assert torch.equal(recorded, launched), f"{apart} apart, of {launched.abs().max().item()} at most"
