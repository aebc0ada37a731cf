"""Grouped LoRA in plain torch: the oracle of every other kernel, and the path on CPU. Knows nothing of slots."""

from collections.abc import Sequence

import torch

from replica.model.batch import LoraPair

SiteSegment = tuple[int, int, LoraPair]
"""Rows [start, end) of the packed step and the pair that they use at one site."""


def grouped_lora(y: torch.Tensor, x: torch.Tensor, segments: Sequence[SiteSegment]) -> None:
    """Add `scale * (x @ A^T) @ B^T` to `y` in place, each segment with its own pair; other rows are not touched.

    `y` is [num_tokens, out] and `x` [num_tokens, in], of one dtype. The scale is applied after B. Each segment is a
    product of its own: the sums run as PEFT's do, and no row ever meets another tenant's weights, not even times zero
    (an infinity there would become a NaN here).
    """
    num_rows = x.shape[0]
    if 2 * len(segments) > num_rows:
        # Mostly one row each: one call that makes all the views costs less than a view a segment.
        x_rows, y_rows = x.unbind(0), y.unbind(0)
        for start, end, pair in segments:
            if end - start == 1:
                _add_row(y_rows[start], x_rows[start], pair)
            else:
                _add_rows(y[start:end], x[start:end], pair)
        return
    for start, end, pair in segments:
        if end - start == num_rows:
            _add_rows(y, x, pair)
        else:
            _add_rows(y[start:end], x[start:end], pair)


def _add_row(y: torch.Tensor, x: torch.Tensor, pair: LoraPair) -> None:
    """A matrix times a vector costs a fifth less than the same as a product of matrices."""
    if pair.a.dtype != x.dtype:
        _add_in_dtype_of_pair(y[None], x[None], pair)
    else:
        y.addmv_(pair.b, torch.mv(pair.a, x), alpha=pair.scale)


def _add_rows(y: torch.Tensor, x: torch.Tensor, pair: LoraPair) -> None:
    if pair.a.dtype != x.dtype:
        _add_in_dtype_of_pair(y, x, pair)
    else:
        y.addmm_(torch.mm(x, pair.a.t()), pair.b.t(), alpha=pair.scale)


def _add_in_dtype_of_pair(y: torch.Tensor, x: torch.Tensor, pair: LoraPair) -> None:
    """As PEFT does with fp32 pairs over a 16-bit base: compute in the pair's dtype, add in the wider of the two."""
    delta = torch.mm(torch.mm(x.to(pair.a.dtype), pair.a.t()), pair.b.t()) * pair.scale
    y.copy_(y + delta)
