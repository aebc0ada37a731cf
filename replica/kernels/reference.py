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
    for start, end, pair in segments:
        if pair.a.dtype != x.dtype:
            _add_in_dtype_of_pair(y.narrow(0, start, end - start), x.narrow(0, start, end - start), pair)
        elif end - start == 1:
            # A matrix times a vector costs a fifth less than the same product of matrices: decode rows are this case.
            y.select(0, start).addmv_(pair.b, torch.mv(pair.a, x.select(0, start)), alpha=pair.scale)
        else:
            hidden = torch.mm(x.narrow(0, start, end - start), pair.a.t())
            y.narrow(0, start, end - start).addmm_(hidden, pair.b.t(), alpha=pair.scale)


def _add_in_dtype_of_pair(y: torch.Tensor, x: torch.Tensor, pair: LoraPair) -> None:
    """As PEFT does with fp32 pairs over a 16-bit base: compute in the pair's dtype, add in the wider of the two."""
    delta = torch.mm(torch.mm(x.to(pair.a.dtype), pair.a.t()), pair.b.t()) * pair.scale
    y.copy_(y + delta)
