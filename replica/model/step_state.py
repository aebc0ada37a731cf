"""The step in progress, as the layers of one model find it behind their handles. Knows no planning."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from replica.kernels.rows import RowsView
from replica.model.paged_attention import ScoreRule

MAX_FUSED_ROWS = 128
"""Up to so many rows a step, adapters ride in the base product's own kernel; above, they are added after it."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Projections that read one input, in the order of the merged weight's rows; `sites` index the slot tables."""

    sites: tuple[int, ...]
    out_features: tuple[int, ...]
    in_features: int

    @property
    def num_out(self) -> int:
        return sum(self.out_features)


class LoraKernels(Protocol):
    """The grouped kernels over one arena. `begin` comes first in each step that has adapters."""

    def begin(self, rows: RowsView) -> None: ...
    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: GroupShape, index: int
    ) -> torch.Tensor:
        """`x W^T + bias` plus the adapters' share, [rows, out]."""

    def add(self, y: torch.Tensor, x: torch.Tensor, group: GroupShape) -> None:
        """Add the adapters' share to `y` in place."""


class LayerAttention(Protocol):
    """Attention of the step in progress: writes the rows' keys and values of a layer, then attends."""

    def attend_layer(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule
    ) -> torch.Tensor: ...


class StepState:
    """What all layers of one model share: the step's attention, and its kernels when it has adapters."""

    def __init__(self) -> None:
        self.attention: LayerAttention | None = None
        self.lora: LoraKernels | None = None
        self.num_rows = 0

    def __repr__(self) -> str:
        return f"StepState(num_rows={self.num_rows}, attention={self.attention}, lora={self.lora is not None})"

    @contextmanager
    def running(self, attention: LayerAttention, num_rows: int, lora: LoraKernels | None) -> Iterator[None]:
        """Make these the step's for one forward. Rows from `num_rows` on are padding, which nothing attends to."""
        assert self.attention is None, "one forward at a time"
        self.attention, self.num_rows, self.lora = attention, num_rows, lora
        try:
            yield
        finally:
            self.attention, self.num_rows, self.lora = None, 0, None


@dataclass(eq=False, slots=True, weakref_slot=True)
class GroupOfModel:
    """A projection group of one model. `fused` says whether its weight suits the kernel that does it all."""

    state: StepState
    shape: GroupShape
    index: int
    fused: bool

    def project(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x` is [rows, in], `weight` [out, in]; steps without adapters are the plain product."""
        kernels = self.state.lora
        if kernels is None:
            return functional.linear(x, weight, bias)
        if self.fused and x.shape[0] <= MAX_FUSED_ROWS:
            return kernels.linear(x.contiguous(), weight, bias, self.shape, self.index)
        y = functional.linear(x, weight, bias)
        kernels.add(y, x, self.shape)
        return y


@dataclass(eq=False, slots=True, weakref_slot=True)
class LayerOfModel:
    """The attention of one layer of one model."""

    state: StepState
    layer: int
    rule: ScoreRule

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend with the step's rows; what comes back for padding rows is zero."""
        attention, num_rows = self.state.attention, self.state.num_rows
        assert attention is not None, "attention outside a step"
        if num_rows == q.shape[0]:
            return attention.attend_layer(self.layer, q, k, v, self.rule).contiguous()
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        out[:num_rows] = attention.attend_layer(self.layer, q[:num_rows], k[:num_rows], v[:num_rows], self.rule)
        return out
