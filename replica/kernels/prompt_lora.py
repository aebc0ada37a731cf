"""The two halves of grouped LoRA for steps of many rows: t = A x, then d = scale B t, by the matrix units.

A program works on items of (tile, projection, part of K) or (tile, block of columns), one after the other, so that the
grid has a fixed size whatever the step turns out to be. Each value is summed in one order: no atomics, and results do
not depend on timing. What is computed is that of Punica and S-LoRA (arXiv:2310.18547, arXiv:2311.03285).

A tile is one entry, of form 0 and part 0, so that a record's word is the rank.
"""

# Triton kernels are traced: types are those of tensors on the device.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

from replica.kernels.bind import UNIT, expand_item, pick, row_of_b, shrink_item


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
def _load_b(b_offset, rank, first_column, width, level, memory, R: tl.constexpr, BN: tl.constexpr):
    """[BN, R] of B from row `first_column` on; nothing where the rank does not reach."""
    columns = first_column + tl.arange(0, BN)
    r = level + tl.arange(0, R)
    stride = row_of_b(rank)
    mask = (columns < width)[:, None] & (r < stride)[None, :]
    return tl.load(memory + b_offset * UNIT + columns[:, None] * stride + r[None, :], mask=mask, other=0.0)


@triton.jit
def _sum_parts(t, mask, T_SPLIT, SPLITS: tl.constexpr):
    """The sum over the parts of K of what the pointers `t` show."""
    total = tl.load(t, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(t + split * T_SPLIT, mask=mask, other=0.0)
    return total


@triton.jit
def _expand_rows(
    d, t, values, b_offset, rank, scale, start, end, first_column, width, num_out, memory, T_SPLIT, T_STRIDE,
    SPLITS: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d[row, columns] = scale B[columns] t[row] for the rows [start, end) of a tile; `values` is B's first level."""
    rows = start.to(tl.int64) + tl.arange(0, TILE)
    columns = first_column + tl.arange(0, BN)
    in_rows = (rows < end)[:, None]
    r = tl.arange(0, R)
    t_rows = t + rows[:, None] * T_STRIDE + r[None, :]
    own = (_sum_parts(t_rows, in_rows & (r < rank)[None, :], T_SPLIT, SPLITS) * scale).to(values.dtype)
    sums = tl.dot(own, tl.trans(values), input_precision=PRECISION)
    for level in range(R, rank, R):
        in_rank = in_rows & (level + r < rank)[None, :]
        own = (_sum_parts(t_rows + level, in_rank, T_SPLIT, SPLITS) * scale).to(values.dtype)
        more = _load_b(b_offset, rank, first_column, width, level, memory, R, BN)
        sums = tl.dot(own, tl.trans(more), sums, input_precision=PRECISION)
    out = d + rows[:, None] * num_out + columns[None, :]
    tl.store(out, sums.to(d.dtype.element_ty), mask=in_rows & (columns < width)[None, :])


@triton.jit(do_not_specialize=["max_tiles", "site0", "site1", "site2"])
def prompt_expand_kernel(
    d, t, memory, records, words32, floats, words, max_tiles, site0, site1, site2, out0, out1, out2,
    T_SPLIT, T_STRIDE, R_MAX,
    SPLITS: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d[row, columns of p] = scale B_p t[row], and 0 for rows and projections without LoRA.

    `d` is [rows, columns of all]. Rows of B lie so many elements apart as the rank in steps of eight, so that loads are
    16 bytes wide; what fills a row up is zero. While an item is computed, the B of the next one is on its way, and the
    record of the one after.
    """
    blocks0 = tl.cdiv(out0, BN)
    blocks01 = blocks0 + tl.cdiv(out1, BN)
    num_blocks = blocks01 + tl.cdiv(out2, BN)
    num_out = out0 + out1 + out2
    num_items = tl.load(words) * num_blocks
    first = tl.program_id(0)
    step = tl.num_programs(0)
    p, b_offset, rank, scale, start, end = expand_item(
        first, num_items, records, words32, floats, max_tiles, num_blocks, blocks0, blocks01, site0, site1, site2
    )
    next_p, next_b, next_rank, next_scale, next_start, next_end = expand_item(
        first + step, num_items, records, words32, floats, max_tiles, num_blocks, blocks0, blocks01, site0, site1, site2
    )
    column = (first % num_blocks - pick(p, 0, blocks0, blocks01)) * BN
    values = _load_b(b_offset, rank, column, pick(p, out0, out1, out2), 0, memory, R, BN)
    for item in range(first, num_items, step):
        after_p, after_b, after_rank, after_scale, after_start, after_end = expand_item(
            item + 2 * step, num_items, records, words32, floats, max_tiles, num_blocks, blocks0, blocks01,
            site0, site1, site2,
        )  # fmt: skip
        next_column = ((item + step) % num_blocks - pick(next_p, 0, blocks0, blocks01)) * BN
        next_values = _load_b(next_b, next_rank, next_column, pick(next_p, out0, out1, out2), 0, memory, R, BN)
        out = d + pick(p, 0, out0, out0 + out1)
        width = pick(p, out0, out1, out2)
        _expand_rows(
            out, t + p * R_MAX, values, b_offset, rank, scale, start, end, column, width, num_out, memory, T_SPLIT,
            T_STRIDE, SPLITS, R, TILE, BN, PRECISION,
        )  # fmt: skip
        p, b_offset, rank, scale, start, end = next_p, next_b, next_rank, next_scale, next_start, next_end
        next_p, next_b, next_rank, next_scale, next_start, next_end = (
            after_p, after_b, after_rank, after_scale, after_start, after_end,
        )  # fmt: skip
        values, column = next_values, next_column
