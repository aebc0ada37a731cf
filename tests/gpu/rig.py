"""Bases on a GPU with random adapters in a real arena, driven by hand through `tests.replica.model.packed`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu_fixture import ResidentAdapters
from replica.config import ModelConfig
from replica.model.base_model import BaseModel
from replica.model.batch import ForwardBatch, LoraPair
from replica.model.device_runner import DeviceRunner, StepLimits
from tests.replica.model.packed import PackedRunner, Stream

LIMITS = StepLimits(max_rows=1024, max_sequences=32)
BIG_HEADS = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
"""Heads that FlashInfer has kernels for."""


class GpuBase:
    """A base on the GPU with `num_adapters` adapters in its arena. Each forward names the adapters' real slots."""

    def __init__(self, folder: Path, num_adapters: int = 0, rank: int = 8, **fields: object) -> None:
        config = ModelConfig.model_validate({"base": str(folder), "device": "cuda", **fields})
        self.base = BaseModel.load(config)
        assert isinstance(self.base._runner, DeviceRunner)
        torch.cuda.manual_seed(11)
        with torch.inference_mode():
            self.adapters = ResidentAdapters(self.base, max(1, num_adapters), rank)
            self.adapters.arena.memory.mul_(5)
        self._slots = {id(lease.pairs): lease.slot for lease in self.adapters.leases.values()}
        self.sites, self.dtype = self.base.sites, self.base.dtype

    def pairs(self, index: int) -> Mapping[int, LoraPair]:
        return self.adapters.leases[f"a{index}"].pairs

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self.base.allocate_kv(num_blocks, block_size)
        arena = self.adapters.arena
        self.base.attach_adapters(arena.memory, arena.tables, max_rank=64)
        self.report = self.base.prepare(LIMITS)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        segments = tuple(replace(segment, slot=self._slots[id(segment.pairs)]) for segment in batch.segments)
        return self.base.forward(replace(batch, segments=segments)).clone().cpu()


def packed(base: GpuBase) -> PackedRunner:
    return PackedRunner(base, num_blocks=4608)  # type: ignore[arg-type]


def greedy(
    runner: PackedRunner, texts: list[list[int]], num_new: int, pairs: list[Mapping[int, LoraPair] | None]
) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens chosen for each text, and the logits that they were chosen from, [num_new, texts, vocab]."""
    streams = [runner.start(text, num_new, chosen) for text, chosen in zip(texts, pairs, strict=True)]
    logits = [runner.step([(stream, len(stream.tokens)) for stream in streams])]
    for _ in range(num_new - 1):
        _append(streams, logits[-1])
        logits.append(runner.step([(stream, 1) for stream in streams]))
    _append(streams, logits[-1])
    return [stream.tokens[len(text) :] for stream, text in zip(streams, texts, strict=True)], torch.stack(logits)


def forced(
    runner: PackedRunner,
    texts: list[list[int]],
    outputs: list[list[int]],
    pairs: list[Mapping[int, LoraPair] | None],
) -> torch.Tensor:
    """The logits of the same steps with the tokens given, [steps, texts, vocab]."""
    streams = [runner.start(text, len(out), chosen) for text, out, chosen in zip(texts, outputs, pairs, strict=True)]
    logits = [runner.step([(stream, len(stream.tokens)) for stream in streams])]
    for step in range(len(outputs[0]) - 1):
        for stream, output in zip(streams, outputs, strict=True):
            stream.tokens.append(output[step])
        logits.append(runner.step([(stream, 1) for stream in streams]))
    return torch.stack(logits)


def _append(streams: list[Stream], logits: torch.Tensor) -> None:
    for stream, row in zip(streams, logits, strict=True):
        stream.tokens.append(int(row.argmax()))


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, in standard deviations of the logits."""
    return float((ours - theirs).abs().max() / theirs.std())


def distance(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference, in standard deviations of the logits."""
    return float((ours - exact).pow(2).mean().sqrt() / exact.std())
