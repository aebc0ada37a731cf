"""What the device runner asks of attention, and the form of it in plain torch that serves every architecture."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from replica.model.attention_plan import AttentionPlan
from replica.model.page_table import PageTable
from replica.model.paged_attention import KVCache, LayerShape, PagedStep, ScoreRule
from replica.model.step_buffers import StepBuffers
from replica.model.step_state import LayerAttention


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """How one layer attends: its cache's shape, its query heads and its scores."""

    shape: LayerShape
    num_heads: int
    rule: ScoreRule


class StepAttention(LayerAttention, Protocol):
    """Attention that is planned once a step, and then asked layer by layer."""

    can_be_captured: bool

    def begin_decode(self, table: PageTable, buffers: StepBuffers) -> None:
        """Plan a step of one row a sequence, whose table is in `buffers`; fit for a captured graph of that size."""

    def begin(self, table: PageTable, buffers: StepBuffers) -> None:
        """Plan any step."""


@runtime_checkable
class CutAttention(Protocol):
    """Attention in two halves, for steps in pieces: the first is the same for all steps of so many rows."""

    layers: tuple[LayerHeads, ...]

    def write_layer(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Put keys and values into a layer's cache; rows whose slot is negative go nowhere."""

    def read_layer(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attend with `q` [rows, heads, dim], as planned, into `out`."""


class NoAttention:
    """Answers zeros: for warming up layers while the real one is still being built."""

    def attend_layer(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule
    ) -> torch.Tensor:
        return q.new_zeros(*q.shape[:2], v.shape[2])


class TorchAttention:
    """Gathers and SDPA, planned with index tensors: no fixed addresses, so nothing to capture."""

    can_be_captured = False

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._step: PagedStep | None = None

    def begin_decode(self, table: PageTable, buffers: StepBuffers) -> None:
        self.begin(table, buffers)

    def begin(self, table: PageTable, buffers: StepBuffers) -> None:
        keys = self._cache.keys[0]
        self._step = PagedStep(self._cache, AttentionPlan(table.spans, self._cache.block_size, keys.device, keys.dtype))

    def attend_layer(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule
    ) -> torch.Tensor:
        assert self._step is not None, "begin comes before attend_layer"
        return self._step.attend_layer(layer, q, k, v, rule)
