"""The step in progress, as the layers of one model find it behind their handles. Knows no planning."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from replica.kernels.groups import GroupShape
from replica.kernels.rows import MAX_DECODE_ROWS, RowsView
from replica.model.paged_attention import ScoreRule


class LoraKernels(Protocol):
    """The grouped kernels over one arena."""

    def bind(self, rows: RowsView) -> Any:
        """Look up the step's adapters, once for all groups; on the device, so that a captured graph does it too."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: GroupShape, bound: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x W^T + bias` and the adapters' share, both [rows, out], to be added. For steps of few rows."""

    def summed(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: GroupShape, bound: Any
    ) -> torch.Tensor:
        """Their sum, [rows, out]. For steps of many rows."""


@dataclass(frozen=True, slots=True)
class StepLora:
    """The kernels, and which rows of the step belong to which slot."""

    kernels: LoraKernels
    rows: RowsView


class LayerAttention(Protocol):
    """Attention of the step in progress: writes the rows' keys and values of a layer, then attends."""

    def attend_layer(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule
    ) -> torch.Tensor: ...


class StepState:
    """What all layers of one model share: the step's attention, and its adapters where it has any.

    `has_lora` and `sums_lora` are what compiled code looks at: it is compiled once for each of the three cases.
    """

    def __init__(self) -> None:
        self.attention: LayerAttention | None = None
        self.lora: StepLora | None = None
        self.bound: Any = None
        self.has_lora, self.sums_lora = False, False
        self.num_rows = 0

    def __repr__(self) -> str:
        return f"StepState(num_rows={self.num_rows}, attention={self.attention}, has_lora={self.has_lora})"

    @contextmanager
    def running(self, attention: LayerAttention, num_rows: int, lora: StepLora | None) -> Iterator[None]:
        """Make these the step's for one forward. Rows from `num_rows` on are padding, which nothing attends to."""
        assert self.attention is None, "one forward at a time"
        self.attention, self.num_rows, self.lora, self.has_lora = attention, num_rows, lora, lora is not None
        self.sums_lora = lora is not None and lora.rows.capacity > MAX_DECODE_ROWS
        self.bound = None if lora is None else lora.kernels.bind(lora.rows)
        try:
            yield
        finally:
            self.attention, self.num_rows, self.lora, self.bound = None, 0, None, None
            self.has_lora, self.sums_lora = False, False


@dataclass(eq=False, slots=True, weakref_slot=True)
class GroupOfModel:
    """A projection group of one model."""

    state: StepState
    shape: GroupShape

    def project(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product and the adapters' share for `x` [rows, in] and `weight` [out, in], in a step with adapters."""
        return self._kernels().linear(x.contiguous(), weight, bias, self.shape, self.state.bound)

    def project_summed(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The sum of the two."""
        return self._kernels().summed(x.contiguous(), weight, bias, self.shape, self.state.bound)

    def _kernels(self) -> LoraKernels:
        lora = self.state.lora
        assert lora is not None, "a step without adapters needs the plain product only"
        return lora.kernels


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
