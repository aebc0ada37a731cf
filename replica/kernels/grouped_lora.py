"""Grouped LoRA on a CUDA device, beside the base product: launches the Triton kernels over the slots of an arena.

Where A and B lie, ranks and scales are read from the slot tables on the device, so a captured graph follows whatever
the tables say at its replay. Knows nothing of requests.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from replica.kernels.bind import bind_kernel
from replica.kernels.decode_lora import decode_expand_kernel, decode_expand_wide_kernel, decode_shrink_kernel
from replica.kernels.groups import GroupShape, SlotTables
from replica.kernels.product import product_kernel
from replica.kernels.prompt_lora import prompt_expand_kernel, prompt_shrink_kernel
from replica.kernels.rows import FEW_ROWS, RowsView
from replica.kernels.tuning import (
    ExpandConfig,
    ProductConfig,
    ShrinkConfig,
    expand_config,
    fit_product,
    product_config,
    shrink_config,
    wide_expand_config,
)


@dataclass(frozen=True, slots=True)
class BoundRows:
    """A step's rows, for each site and entry the record of its adapter, int64 [num_sites, max_entries, 4], and for each
    site how many of them there are, int32 [num_sites, 4]: see `bind.py`.
    """

    rows: RowsView
    records: torch.Tensor
    counts: torch.Tensor

    @property
    def width(self) -> int:
        """Room for the largest rank, in whole blocks."""
        block = self.rows.rank_block
        return -(-self.rows.max_rank // block) * block

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.records, self.records.view(torch.int32)


class LoraKernels:
    """The kernels of one base model over one arena: `memory`, 1-D, in the base's dtype, and its slot tables."""

    def __init__(self, memory: torch.Tensor, tables: SlotTables) -> None:
        self._memory, self._tables = memory, tables
        self._num_sites = tables.ranks.shape[1]
        self._precision = "ieee" if memory.dtype == torch.float32 else "tf32"
        self._num_processors, self._shared_bytes = _processors(memory.device)
        self._turns = torch.zeros(4 * self._num_processors, dtype=torch.int32, device=memory.device)
        self._side, self._wide_stream = _SideStream(memory.device), _SideStream(memory.device)

    def __repr__(self) -> str:
        return f"LoraKernels(num_sites={self._num_sites}, {self._memory.dtype}, {self._memory.device})"

    def bind(self, rows: RowsView) -> BoundRows:
        """Look up the step's adapters, once for all sites; in a captured graph, a node at its start."""
        tables, num_tiles, num_entries = self._tables, max(1, rows.max_tiles), max(1, rows.max_entries)
        records = torch.empty(self._num_sites, num_entries, 4, dtype=torch.int64, device=rows.words.device)
        counts = torch.empty(self._num_sites, 4, dtype=torch.int32, device=rows.words.device)
        bind_kernel[(self._num_sites,)](
            records, counts, rows.words, rows.capacity, num_tiles, num_entries, self._num_sites,
            tables.a_offsets, tables.b_offsets, tables.ranks, tables.scales,
            BLOCK=64, MOST_PARTS=1 << rows.most_form, num_warps=2,
        )  # fmt: skip
        return BoundRows(rows, records, counts)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: GroupShape, bound: BoundRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x W^T + bias, scale B A x for each row's adapter), both [rows, sum of out], to be added.

        `x` is [rows, in], `weight` [sum of out, in]. The second is computed beside the first, on a second stream of the
        same priority: with a higher one its programs come first, and the product waits for the processors they are on.
        The sum is left to whatever reads the two next, which costs less than a launch of its own.
        """
        now = self._side.mark()
        y = self.product(x, weight, bias)
        with self._side.after(now):
            delta = self.delta(x, group, bound)
        self._side.join()
        return y, delta

    def summed(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: GroupShape, bound: BoundRows
    ) -> torch.Tensor:
        """The sum of the two that `linear` returns: the product of many rows adds what it finds in its output.

        Such a product leaves no multiprocessor free, so nothing is gained beside it; it reads the delta while it
        computes, and no later pass over both has to.
        """
        y = self.delta(x, group, bound).addmm_(x, weight.t())
        return y if bias is None else y.add_(bias)

    def delta(self, x: torch.Tensor, group: GroupShape, bound: BoundRows) -> torch.Tensor:
        """scale B A x for each row's adapter, [rows, sum of out] in the dtype of `x`; 0 where a row has none."""
        rows = bound.rows
        cut = shrink_config(rows, len(group.sites), group.in_features, self._num_processors)
        d = torch.empty(rows.capacity, group.num_out, dtype=x.dtype, device=x.device)
        t = self.shrink(x, d, group, bound, cut)
        self.expand(t, d, group, bound, expand_config(rows, group.num_out, self._num_processors))
        return d

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: ProductConfig | None = None
    ) -> torch.Tensor:
        """x W^T + bias, [rows, out]: by a kernel of our own where that is no slower than the library's."""
        num_rows, (num_out, width) = x.shape[0], weight.shape
        cut = config or product_config(num_rows, num_out, width, self._num_processors)
        cut = cut and fit_product(cut, x.element_size(), self._shared_bytes)
        if cut is None or not weight.is_contiguous():
            return torch.nn.functional.linear(x, weight, bias)
        y = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
        num_blocks = -(-num_out // cut.block_n)
        assert cut.parts == 1 or num_blocks <= self._turns.numel(), f"{num_blocks} blocks"
        num_halves = cut.parts * num_blocks * cut.block_n * (cut.block_m + cut.more) if cut.parts > 1 else 0
        halves = torch.empty(num_halves, dtype=torch.float32, device=x.device)
        is_whole = num_rows == cut.block_m + cut.more and num_out % cut.block_n == 0
        product_kernel[(num_blocks * cut.parts,)](
            x, weight, weight if bias is None else bias, y, halves, self._turns, num_rows, num_out, width,
            HAS_BIAS=bias is not None, BM=cut.block_m, MORE=cut.more, BN=cut.block_n, BK=cut.block_k,
            STAGES=cut.stages, BY_COLUMNS=cut.by_columns, PARTS=cut.parts, IS_WHOLE=is_whole,
            EVEN_K=width % cut.block_k == 0, PRECISION=self._precision, num_warps=cut.num_warps,
        )  # fmt: skip
        return y

    def shrink(
        self, x: torch.Tensor, d: torch.Tensor, group: GroupShape, bound: BoundRows, cut: ShrinkConfig
    ) -> torch.Tensor:
        """A x in parts: float32 [parts of K, rows, projections * width], to be summed over the parts.

        In a step of few rows also sets `d`, [rows, sum of out], to zero where a row has no LoRA.
        """
        rows, count = bound.rows, len(group.sites)
        assert x.is_contiguous(), "rows lie one after the other"
        assert x.shape == (rows.capacity, group.in_features), (x.shape, rows.capacity, group.in_features)
        split_k = -(-group.in_features // (cut.splits * cut.block_k)) * cut.block_k
        t = torch.empty(cut.splits, rows.capacity, count * bound.width, dtype=torch.float32, device=x.device)
        shape = (group.in_features, split_k, t.stride(0), t.stride(1), bound.width)
        sites = _three(group.sites)
        if rows.is_decode:
            num_items = rows.max_entries * count * cut.splits // 2
            decode_shrink_kernel[(min(num_items, cut.num_programs),)](
                x, t, d, self._memory, *bound.arguments(), rows.words, rows.max_entries, *sites,
                *_three(group.out_features), *shape,
                P=count, SPLITS=cut.splits, BK=cut.block_k, STAGES=cut.stages, PRECISION=self._precision,
                num_warps=cut.num_warps, maxnreg=cut.max_registers,
            )  # fmt: skip
            return t
        num_items = rows.max_tiles * count * cut.splits
        prompt_shrink_kernel[(min(num_items, cut.num_programs),)](
            x, t, self._memory, *bound.arguments(), rows.words, rows.max_tiles, *sites, *shape,
            P=count, SPLITS=cut.splits, R=rows.rank_block, TILE=rows.tile_rows, BK=cut.block_k,
            STAGES=cut.stages, PRECISION=self._precision, num_warps=cut.num_warps,
        )  # fmt: skip
        return t

    def expand(self, t: torch.Tensor, d: torch.Tensor, group: GroupShape, bound: BoundRows, cut: ExpandConfig) -> None:
        """d = scale B t, from what `shrink` returned and where it left no zeros."""
        rows, outs = bound.rows, _three(group.out_features)
        records = (*bound.arguments(), bound.records.view(torch.float32))
        shape = (*_three(group.sites), *outs, t.stride(0), t.stride(1), bound.width)
        if rows.is_decode:
            assert all(width % 2 == 0 for width in outs), f"a line holds two columns, of {outs}"
            arguments = (d, t, self._memory, *records, bound.counts, rows.max_entries, *shape)
            with self._wide_ranks(rows, outs, arguments, t.shape[0]):
                decode_expand_kernel[(min(_num_items(rows, outs, cut), cut.num_programs),)](
                    *arguments, SPLITS=t.shape[0], LINES=cut.block_n, IS_MIXED=rows.most_form > 1, FEW=FEW_ROWS,
                    PRECISION=self._precision, num_warps=cut.num_warps, maxnreg=cut.max_registers,
                )  # fmt: skip
            return
        run = cut.run * cut.block_n
        num_items = rows.max_tiles * sum(-(-width // run) for width in outs)
        prompt_expand_kernel[(min(num_items, cut.num_programs),)](
            d, t, self._memory, *records, rows.words, rows.max_tiles, *shape, run,
            SPLITS=t.shape[0], R=rows.rank_block, TILE=rows.tile_rows, BN=cut.block_n, STAGES=cut.stages,
            PRECISION=self._precision, num_warps=cut.num_warps, maxnreg=cut.max_registers,
        )  # fmt: skip

    @contextmanager
    def _wide_ranks(
        self, rows: RowsView, outs: tuple[int, ...], arguments: tuple[Any, ...], splits: int
    ) -> Iterator[None]:
        """Expand ranks above 16, where there may be any, beside what is launched inside."""
        if rows.most_form < 2:
            yield
            return
        cut = wide_expand_config(self._num_processors)
        with self._wide_stream.after(self._wide_stream.mark()):
            decode_expand_wide_kernel[(min(_num_items(rows, outs, cut), cut.num_programs),)](
                *arguments, SPLITS=splits, LINES=cut.block_n, MOST_FORM=rows.most_form,
                PRECISION=self._precision, num_warps=cut.num_warps, maxnreg=cut.max_registers,
            )  # fmt: skip
        yield
        self._wide_stream.join()


def _num_items(rows: RowsView, outs: Sequence[int], cut: ExpandConfig) -> int:
    """Items of an expand of few rows, at most."""
    return rows.max_entries * sum(-(-width // (2 * cut.block_n)) for width in outs)


class _SideStream:
    """A second stream that forks from the current one and joins it again; on other devices nothing at all."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> "torch.cuda.Event | None":
        """This point of the current stream's work."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    @contextmanager
    def after(self, mark: "torch.cuda.Event | None") -> Iterator[None]:
        """What is launched inside waits for what came before `mark`, and for nothing after."""
        if self._stream is None or mark is None:
            yield
            return
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What the current stream launches from now on waits for what was launched beside it."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def _processors(device: torch.device) -> tuple[int, int]:
    """Multiprocessors of a CUDA device, and bytes of shared memory that a program may have there.

    Elsewhere the kernels are interpreted, and a small grid will do.
    """
    if device.type != "cuda":
        return 4, 1 << 30
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count), int(properties.shared_memory_per_block_optin)


def _three(values: tuple[int, ...]) -> tuple[int, int, int]:
    """Kernels take three projections; those that are not there have no columns."""
    first, second, third = (*values, 0, 0)[:3]
    return first, second, third
