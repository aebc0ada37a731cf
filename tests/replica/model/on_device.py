"""The path for GPUs, run on the CPU: no graphs, and plain torch in the kernels' place."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from replica.config import ModelConfig
from replica.kernels.groups import GroupShape
from replica.kernels.reference import grouped_lora
from replica.kernels.rows import HEAD, NUM_ARRAYS, RowsView
from replica.model.base_model import BaseModel
from replica.model.batch import ForwardBatch, LoraPair
from replica.model.device_runner import Adapters, DeviceRunner, StepLimits
from tests.replica.model.packed import PackedRunner

LIMITS = StepLimits(max_rows=96, max_sequences=12)


class FakeKernels:
    """Knows slots' pairs by being told; reads who has which rows from the step's words, as the kernels do."""

    def __init__(self) -> None:
        self.pairs: Mapping[int, Mapping[int, LoraPair]] = {}
        self.num_calls = 0

    def bind(self, rows: RowsView) -> RowsView:
        return rows

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: GroupShape, rows: RowsView
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.shape == (rows.capacity, group.in_features)
        self.num_calls += 1
        delta = x.new_zeros(x.shape[0], sum(group.out_features))
        for site, part in zip(group.sites, delta.split(list(group.out_features), dim=1), strict=True):
            held = [
                (start, end, self.pairs[slot][site])
                for start, end, slot in tiles_of(rows)
                if site in self.pairs.get(slot, {})
            ]
            grouped_lora(part, x, held)
        return functional.linear(x, weight, bias), delta

    def summed(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: GroupShape, rows: RowsView
    ) -> torch.Tensor:
        y, delta = self.linear(x, weight, bias, group, rows)
        return y + delta


def tiles_of(rows: RowsView) -> list[tuple[int, int, int]]:
    """(start, end, slot) of each tile of a step."""
    words = rows.words.numpy()
    assert words[0] <= rows.max_tiles
    arrays = words[HEAD : HEAD + NUM_ARRAYS * rows.capacity].reshape(NUM_ARRAYS, rows.capacity)
    return [(int(start), int(end), int(slot)) for start, end, slot in arrays[:3, : words[0]].T]


class DeviceBase:
    """A base on the path for GPUs, told of each batch's pairs before it runs."""

    def __init__(self, folder: Path, limits: StepLimits = LIMITS, **fields: object) -> None:
        config = ModelConfig.model_validate({"base": str(folder), "device": "cpu", **fields})
        self.base = BaseModel.load(config, on_device=True)
        self.kernels, self.limits = FakeKernels(), limits
        assert isinstance(self.base._runner, DeviceRunner)
        self.runner = self.base._runner
        self.runner.use_adapters(Adapters(self.kernels, max_rank=64))
        self.sites, self.dtype = self.base.sites, self.base.dtype

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self.base.allocate_kv(num_blocks, block_size)
        self.base.prepare(self.limits)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.kernels.pairs = {segment.slot: segment.pairs for segment in batch.segments}
        return self.base.forward(batch).clone()


def packed(base: DeviceBase) -> PackedRunner:
    return PackedRunner(base)  # type: ignore[arg-type]


def differs(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float(np.abs((ours - theirs).numpy()).max())
