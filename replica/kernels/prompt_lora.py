"""The two halves of grouped LoRA for steps of many rows: t = A x, then d = scale B t, by the matrix units.

A program works on items of (tile, projection, part of K) or (tile, run of columns), one after the other, so that the
grid has a fixed size whatever the step turns out to be. Each value is summed in one order: no atomics, and results do
not depend on timing. What is computed is that of Punica and S-LoRA (arXiv:2310.18547, arXiv:2311.03285).

A tile is one entry, of form 0 and part 0, so that a record's word is the rank.
"""

# Triton kernels are traced: types are those of tensors on the device.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

from replica.kernels.bind import UNIT, blocks_of, expand_item, pick, row_of_b, shrink_item, sum_parts


@triton.jit
def _shrink_rows(
    x, a, t, start, end, rank, k0, k1, K, T_STRIDE,
    R: tl.constexpr, TILE: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """t[row, 0:R] = A[0:R, k0:k1] x[row, k0:k1] for the rows [start, end)."""
    r = tl.arange(0, R)
    rows = start + tl.arange(0, TILE)
    in_rows = (rows < end)[:, None]
    x_rows = x + rows.to(tl.int64)[:, None] * K
    sums = tl.zeros([TILE, R], dtype=tl.float32)
    for k in tl.range(k0, k1, BK, num_stages=STAGES):
        ks = k + tl.arange(0, BK)
        inside = (ks < k1)[None, :]
        x_tile = tl.load(x_rows + ks[None, :], mask=in_rows & inside, other=0.0)
        a_tile = tl.load(a + r[:, None] * K + ks[None, :], mask=(r < rank)[:, None] & inside, other=0.0)
        sums = tl.dot(x_tile, tl.trans(a_tile), sums, input_precision=PRECISION)
    tl.store(t + rows.to(tl.int64)[:, None] * T_STRIDE + r[None, :], sums, mask=in_rows)


@triton.jit(do_not_specialize=["max_tiles", "site0", "site1", "site2"])
def prompt_shrink_kernel(
    x, t, memory, records, words32, words, max_tiles, site0, site1, site2, K, split_k, T_SPLIT, T_STRIDE, R_MAX,
    P: tl.constexpr, SPLITS: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """t[split, row, p R_MAX + r] = A_p[r] x[row] over one part of K.

    `x` is [rows, K], `t` float32, `words32` the records as int32. The projections of a tile are neighbours, so that
    `x` comes from memory once. Each item's record is on its way while the one before is computed.
    """
    num_items = tl.load(words) * (P * SPLITS)
    first = tl.program_id(0)
    step = tl.num_programs(0)
    a_offset, rank, start, end = shrink_item(
        first, max_tiles * (P * SPLITS), records, words32, max_tiles, site0, site1, site2, P, SPLITS
    )
    for item in range(first, num_items, step):
        next_a, next_rank, next_start, next_end = shrink_item(
            item + step, num_items, records, words32, max_tiles, site0, site1, site2, P, SPLITS
        )
        split = item // P % SPLITS
        k0 = split * split_k
        k1 = tl.minimum(k0 + split_k, K)
        a = memory + a_offset * UNIT
        for level in range(0, rank, R):
            out = t + split * T_SPLIT + (item % P) * R_MAX + level
            _shrink_rows(
                x, a + level * K, out, start, end, rank - level, k0, k1, K, T_STRIDE, R, TILE, BK, STAGES, PRECISION
            )
        a_offset, rank, start, end = next_a, next_rank, next_start, next_end


@triton.jit
def _load_b(b, rank, first_column, width, level, R: tl.constexpr, BN: tl.constexpr):
    """[BN, R] of B from row `first_column` on; nothing where the rank does not reach."""
    columns = first_column + tl.arange(0, BN)
    r = level + tl.arange(0, R)
    stride = row_of_b(rank)
    mask = (columns < width)[:, None] & (r < stride)[None, :]
    return tl.load(b + columns[:, None] * stride + r[None, :], mask=mask, other=0.0)


@triton.jit
def _store_block(d, rows, end, first_column, last_column, sums, num_out, BN: tl.constexpr):
    columns = first_column + tl.arange(0, BN)
    mask = (rows < end)[:, None] & (columns < last_column)[None, :]
    tl.store(d + rows[:, None] * num_out + columns[None, :], sums.to(d.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["max_tiles", "site0", "site1", "site2"])
def prompt_expand_kernel(
    d, t, memory, records, words32, floats, words, max_tiles, site0, site1, site2, out0, out1, out2,
    T_SPLIT, T_STRIDE, R_MAX, run,
    SPLITS: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """d[row, columns of p] = scale B_p t[row], and 0 for rows and projections without LoRA.

    `d` is [rows, columns of all]. An item is a tile by `run` columns. Up to rank R its t is summed once for all of its
    blocks of BN columns, and the B of a block is on its way while the one before is computed. Rows of B lie so many
    elements apart as the rank in steps of eight, so that loads are 16 bytes wide; what fills a row up is zero.
    """
    blocks0, blocks01, num_blocks = blocks_of(out0, out1, out2, run)
    num_out = out0 + out1 + out2
    num_items = tl.load(words) * num_blocks
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        p, b_offset, rank, scale, start, end = expand_item(
            item, num_items, records, words32, floats, max_tiles, num_blocks, blocks0, blocks01, site0, site1, site2
        )
        width = pick(p, out0, out1, out2)
        first = (item % num_blocks - pick(p, 0, blocks0, blocks01)) * run
        last = tl.minimum(first + run, width)
        rows = start.to(tl.int64) + tl.arange(0, TILE)
        own_t = t + p * R_MAX
        b = memory + b_offset * UNIT
        out = d + pick(p, 0, out0, out0 + out1)
        if rank <= R:
            own = sum_parts(own_t, rows, end, rank, 0, scale, T_SPLIT, T_STRIDE, SPLITS, R).to(memory.dtype.element_ty)
            for column in tl.range(first, last, BN, num_stages=STAGES):
                values = _load_b(b, rank, column, width, 0, R, BN)
                sums = tl.dot(own, tl.trans(values), input_precision=PRECISION)
                _store_block(out, rows, end, column, last, sums, num_out, BN)
        else:
            for column in range(first, last, BN):
                sums = tl.zeros([TILE, BN], dtype=tl.float32)
                for level in tl.range(0, rank, R, num_stages=1):
                    own = sum_parts(own_t, rows, end, rank, level, scale, T_SPLIT, T_STRIDE, SPLITS, R)
                    values = _load_b(b, rank, column, width, level, R, BN)
                    sums = tl.dot(own.to(values.dtype), tl.trans(values), sums, input_precision=PRECISION)
                _store_block(out, rows, end, column, last, sums, num_out, BN)
