"""One packed forward: what the engine hands to the base model. Knows nothing of requests or of how slots are filled."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from registry.types import ModuleKind


@dataclass(frozen=True, slots=True)
class Site:
    """A projection of the base that adapters may touch; `index` is its place in `BaseModel.sites`."""

    index: int
    path: str
    in_features: int
    out_features: int
    kind: ModuleKind


@dataclass(frozen=True, slots=True)
class LoraPair:
    """Views into a slot: `a` [rank, in], `b` [out, rank], in the arena's dtype; `scale` is never folded in."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """Packed rows [start, end) belong to `slot`; `pairs` maps a site's index to its pair (absent: untouched).

    `slot` is the index by which kernels read their device tables.
    """

    start: int
    end: int
    slot: int
    pairs: Mapping[int, LoraPair]


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """`num_tokens` new tokens of a sequence that has `context_length` tokens once they are in the cache.

    `block_table` lists its KV blocks in order; token i lives in block `i // block_size`, offset `i % block_size`.
    """

    num_tokens: int
    context_length: int
    block_table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The packed step. Rows of one slot are neighbours; rows outside every segment are base-only.

    `token_ids` and `positions` are int64 [num_tokens]; `logit_rows` int64 [num_logits] picks the rows whose logits
    are wanted.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    spans: tuple[SequenceSpan, ...]
    logit_rows: torch.Tensor
    segments: tuple[LoraSegment, ...] = ()

    @property
    def is_decode(self) -> bool:
        """Whether every sequence computes one token, so that row i is sequence i."""
        return all(span.num_tokens == 1 for span in self.spans)
