"""Drives a BaseModel by hand: sequences in shuffled KV blocks, packed into steps. The engine's stand-in for tests."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from replica.config import ModelConfig
from replica.model.base_model import BaseModel
from replica.model.batch import ForwardBatch, LoraPair, LoraSegment, SequenceSpan

BLOCK_SIZE = 4

Pairs = Mapping[int, LoraPair]


def load_base(folder: Path, **fields: object) -> BaseModel:
    return BaseModel.load(ModelConfig.model_validate({"base": str(folder), "device": "cpu", **fields}))


def load_pairs(base: BaseModel, adapter_folder: Path) -> dict[int, LoraPair]:
    """Read an adapter as the arena would: site index -> pair, with PEFT's scale (alpha over the pair's own rank)."""
    alpha = json.loads((adapter_folder / "adapter_config.json").read_text())["lora_alpha"]
    tensors = load_file(adapter_folder / "adapter_model.safetensors")
    pairs = {}
    for site in base.sites:
        a = tensors.pop(f"base_model.model.{site.path}.lora_A.weight", None)
        if a is not None:
            b = tensors.pop(f"base_model.model.{site.path}.lora_B.weight")
            pairs[site.index] = LoraPair(a.to(base.dtype), b.to(base.dtype), alpha / a.shape[0])
    assert not tensors, f"unbound: {sorted(tensors)}"
    return pairs


@dataclass
class Stream:
    """One sequence: all its tokens, how many are in the cache, its blocks and its adapter."""

    tokens: list[int]
    blocks: tuple[int, ...]
    pairs: Pairs | None = None
    cached: int = 0


@dataclass
class PackedRunner:
    """Owns the blocks of `base` and runs steps over streams."""

    base: BaseModel
    num_blocks: int = 256
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.base.allocate_kv(self.num_blocks, BLOCK_SIZE)
        self.free = list(range(self.num_blocks))
        random.Random(7).shuffle(self.free)

    def start(self, tokens: Sequence[int], room: int = 0, pairs: Pairs | None = None) -> Stream:
        """A new sequence with blocks for its tokens and `room` more."""
        num_blocks = -(-(len(tokens) + room) // BLOCK_SIZE)
        blocks = tuple(self.free.pop() for _ in range(num_blocks))
        return Stream(list(tokens), blocks, pairs)

    def step(self, work: Sequence[tuple[Stream, int]], *, all_rows: bool = False, lora: bool = True) -> torch.Tensor:
        """Run the next `n` tokens of each (stream, n); logits of each stream's last row, or of every row.

        Streams that share an adapter must be neighbours, as in the engine. `lora` False leaves the segments out.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        spans: list[SequenceSpan] = []
        last_rows: list[int] = []
        for stream, n in work:
            token_ids += stream.tokens[stream.cached : stream.cached + n]
            positions += range(stream.cached, stream.cached + n)
            stream.cached += n
            spans.append(SequenceSpan(n, stream.cached, stream.blocks))
            last_rows.append(len(token_ids) - 1)
        rows = list(range(len(token_ids))) if all_rows else last_rows
        batch = ForwardBatch(
            torch.tensor(token_ids),
            torch.tensor(positions),
            tuple(spans),
            torch.tensor(rows),
            _segments(work) if lora else (),
        )
        return self.base.forward(batch)


def _segments(work: Sequence[tuple[Stream, int]]) -> tuple[LoraSegment, ...]:
    """Each distinct set of pairs counts as a slot, in order of first use."""
    segments: list[LoraSegment] = []
    slots: dict[int, int] = {}
    row = 0
    for stream, n in work:
        if stream.pairs is not None:
            slot = slots.setdefault(id(stream.pairs), len(slots))
            if segments and segments[-1].pairs is stream.pairs and segments[-1].end == row:
                segments[-1] = LoraSegment(segments[-1].start, row + n, slot, stream.pairs)
            else:
                segments.append(LoraSegment(row, row + n, slot, stream.pairs))
        row += n
    return tuple(segments)


def prompts(lengths: Sequence[int], seed: int = 0, vocab: int = 256) -> list[list[int]]:
    """Random token ids, one list a length."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]
