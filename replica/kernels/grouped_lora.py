"""Grouped LoRA on a CUDA device: launches the Triton kernels over the slots of an arena. Knows nothing of requests.

`linear` makes a whole projection group of a step of few rows in one launch; `add` adds LoRA to an output that is there
already, for any number of rows. Both read where A and B lie, ranks and scales from the slot tables, so a captured
graph follows whatever the tables say at its replay.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from replica.kernels.fused_linear import fused_linear_kernel
from replica.kernels.rows import RANK_BLOCK, RowsView
from replica.kernels.shrink_expand import expand_kernel, shrink_kernel
from replica.kernels.tuning import FusedConfig, fused_config, shrink_splits

MAX_FUSED_ROWS = 128
MAX_SPLITS = 16


class Tables(Protocol):
    """The slot tables, [num_slots, num_sites]: see `replica.adapters.slot_tables.SlotTables`."""

    a_offsets: torch.Tensor
    b_offsets: torch.Tensor
    ranks: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One to three projections that read the same input: their sites, in the order of the merged weight's rows."""

    sites: tuple[int, ...]
    out_features: tuple[int, ...]
    in_features: int

    @property
    def num_out(self) -> int:
        return sum(self.out_features)


class LoraKernels:
    """The kernels of one base model over one arena. One step at a time: `begin`, then any number of the others.

    `memory` is the arena, 1-D, in the base's dtype; `num_groups` bounds the index given to `linear`.
    """

    def __init__(
        self, memory: torch.Tensor, tables: Tables, *, max_rows: int, max_rank: int, num_groups: int
    ) -> None:
        device = memory.device
        self._memory, self._tables = memory, tables
        self._num_sites = tables.ranks.shape[1]
        self._width = -(-max_rank // RANK_BLOCK) * RANK_BLOCK
        self._max_fused_rows = min(max_rows, MAX_FUSED_ROWS)
        self._counters = torch.zeros(num_groups, dtype=torch.int32, device=device)
        self._partial = torch.empty(MAX_SPLITS, self._max_fused_rows, 3 * self._width, device=device)
        self._precision = "ieee" if memory.dtype == torch.float32 else "tf32"
        self._num_processors = num_processors(device)
        self._rows: RowsView | None = None

    def __repr__(self) -> str:
        return f"LoraKernels(num_groups={len(self._counters)}, num_sites={self._num_sites}, {self._memory.dtype})"

    def can_fuse(self, num_rows: int) -> bool:
        """Whether `linear` takes steps of this many rows."""
        return num_rows <= self._max_fused_rows

    def begin(self, rows: RowsView) -> None:
        """Start a step; in a captured graph, a node of it."""
        self._rows = rows
        self._counters.zero_()

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: GroupShape,
        index: int,
        config: FusedConfig | None = None,
    ) -> torch.Tensor:
        """x W^T + bias + LoRA: `x` [num_rows, in], `weight` [sum of out, in]; each `index` once a step."""
        rows = self._rows
        assert rows is not None, "begin comes first"
        num_rows = x.shape[0]
        assert self.can_fuse(num_rows), f"{num_rows} rows"
        assert x.is_contiguous(), "rows lie one after the other"
        assert weight.is_contiguous(), "rows lie one after the other"
        config = config or fused_config(num_rows, group.num_out, group.in_features, self._num_processors)
        y = torch.empty(num_rows, group.num_out, dtype=x.dtype, device=x.device)
        outs = _three(group.out_features)
        num_tiles = sum(-(-width // config.block_n) for width in outs)
        split_k = _split(group.in_features, config.splits, config.chunk)
        fused_linear_kernel[(config.num_workers + num_tiles,)](
            x, weight, weight if bias is None else bias, y, self._partial,
            *self._slot_arguments(), rows.words, self._counters[index:],
            num_rows, rows.capacity, self._num_sites, *_three(group.sites), *outs, group.in_features, split_k,
            self._partial.stride(0), self._partial.stride(1), self._width,
            P=len(group.sites), HAS_BIAS=bias is not None, NUM_WORKERS=config.num_workers,
            SPLITS=-(-group.in_features // split_k), CHUNK=config.chunk,
            BM=config.block_m, BN=config.block_n, BK=config.block_k, STAGES=config.stages, B_STAGES=config.b_stages,
            UNROLL=config.unroll, EVEN_K=group.in_features % config.block_k == 0, PRECISION=self._precision,
            num_warps=config.num_warps,
        )  # fmt: skip
        return y

    def add(self, y: torch.Tensor, x: torch.Tensor, group: GroupShape) -> None:
        """Add LoRA to `y` [num_rows, sum of out] in place, from `x` [num_rows, in]."""
        rows = self._rows
        assert rows is not None, "begin comes first"
        if not rows.num_tiles:
            return
        block = min(max(RANK_BLOCK, 1 << (rows.max_rank - 1).bit_length()), 64)
        width = -(-rows.max_rank // block) * block
        num_projections = len(group.sites)
        splits = shrink_splits(rows.num_tiles * num_projections, group.in_features, self._num_processors)
        split_k = _split(group.in_features, splits, 128)
        splits = -(-group.in_features // split_k)
        t = torch.empty(splits, x.shape[0], num_projections * width, device=x.device)
        strides = (t.stride(0), t.stride(1), width)
        memory, a_offsets, b_offsets, ranks, scales = self._slot_arguments()
        sites, outs = _three(group.sites), _three(group.out_features)
        shrink_kernel[(num_projections, rows.num_tiles, splits)](
            x, t, memory, a_offsets, ranks, rows.words, rows.capacity, self._num_sites, *sites, group.in_features,
            split_k, *strides, RBLOCK=block, TILE=rows.tile_rows, BK=128, STAGES=3,
            EVEN_K=group.in_features % 128 == 0, PRECISION=self._precision, num_warps=4,
        )  # fmt: skip
        num_blocks = sum(-(-each // 128) for each in outs)
        expand_kernel[(rows.num_tiles, num_blocks)](
            y, t, memory, b_offsets, ranks, scales, rows.words, rows.capacity, self._num_sites, *sites, *outs,
            *strides, SPLITS=splits, RBLOCK=block, TILE=rows.tile_rows, BN=128, PRECISION=self._precision, num_warps=4,
        )  # fmt: skip

    def _slot_arguments(self) -> tuple[torch.Tensor, ...]:
        tables = self._tables
        return self._memory, tables.a_offsets, tables.b_offsets, tables.ranks, tables.scales


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; elsewhere the kernels are interpreted, and a small grid will do."""
    if device.type != "cuda":
        return 4
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)


def _three(values: tuple[int, ...]) -> tuple[int, int, int]:
    """Kernels take three projections; those that are not there have no columns."""
    first, second, third = (*values, 0, 0)[:3]
    return first, second, third


def _split(in_features: int, splits: int, multiple: int) -> int:
    """Length of a part of K: a multiple of `multiple`, so that there are at most `splits` parts."""
    return -(-in_features // (splits * multiple)) * multiple
