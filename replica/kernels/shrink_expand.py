"""The two halves of grouped LoRA as Triton kernels: t = A x, then y += scale B t, row by row with the row's adapter.

`bind_kernel` looks up, once a step, where each tile's adapter lies at each site; the others read that one record of
32 bytes. A program works on items of (tile, projection, part of K) or (tile, block of columns), one after the other,
so that the grid has a fixed size whatever the step turns out to be. Tiles of one row (decode, each row another tenant)
are sums of products; tiles of more rows use the matrix units. Each value is summed in one order: no atomics, and
results do not depend on timing. What is computed is that of Punica and S-LoRA (arXiv:2310.18547, arXiv:2311.03285).
"""

# Triton kernels are traced: types are those of tensors on the device.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from replica.kernels.rows import HEAD

_HEAD = tl.constexpr(HEAD)
UNIT = tl.constexpr(32)
"""Records count offsets in steps of so many elements, since images are aligned: so the compiler knows, too."""


@triton.jit
def bind_kernel(
    records, words, capacity, max_tiles, num_sites, a_offsets, b_offsets, ranks, scales, BLOCK: tl.constexpr
):
    """records[site, tile] = (offset of A, offset of B, both in units; rank and scale; first row and end), int64.

    Grid: (sites, blocks of tiles). A tile that has no adapter, or whose adapter leaves the site alone, has rank 0.
    """
    site = tl.program_id(0)
    tile = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = tile < tl.minimum(tl.load(words), max_tiles)
    start = tl.load(words + _HEAD + tile, mask=exists, other=0)
    end = tl.load(words + _HEAD + capacity + tile, mask=exists, other=0)
    slot = tl.load(words + _HEAD + 2 * capacity + tile, mask=exists, other=-1)
    entry = tl.maximum(slot, 0).to(tl.int64) * num_sites + site
    has_slot = slot >= 0
    rank = tl.load(ranks + entry, mask=has_slot, other=0)
    scale = tl.load(scales + entry, mask=has_slot, other=0.0).to(tl.int32, bitcast=True)
    out = records + (site * max_tiles + tile) * 4
    kept = tile < max_tiles
    tl.store(out, tl.load(a_offsets + entry, mask=has_slot, other=0) // UNIT, mask=kept)
    tl.store(out + 1, tl.load(b_offsets + entry, mask=has_slot, other=0) // UNIT, mask=kept)
    tl.store(out + 2, _both(rank, scale), mask=kept)
    tl.store(out + 3, _both(start, end), mask=kept)


@triton.jit
def _both(low, high):
    """Two int32 in one int64."""
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def pick(p, first, second, third):
    """The p-th of three."""
    return tl.where(p == 0, first, tl.where(p == 1, second, third))


@triton.jit
def _shrink_one_row(x, a, t, rank, k0, k1, K, R: tl.constexpr, CHUNK: tl.constexpr):
    """t[0:R] = A[0:R, k0:k1] x[k0:k1]."""
    r = tl.arange(0, R)
    sums = tl.zeros([R, CHUNK], dtype=tl.float32)
    for k in range(k0, k1, CHUNK):
        ks = k + tl.arange(0, CHUNK)
        inside = ks < k1
        values = tl.load(a + r[:, None] * K + ks[None, :], mask=(r < rank)[:, None] & inside[None, :], other=0.0)
        row = tl.load(x + ks, mask=inside, other=0.0)
        sums += values.to(tl.float32) * row.to(tl.float32)[None, :]
    tl.store(t + r, tl.sum(sums, axis=1))


@triton.jit
def _shrink_rows(
    x, a, t, start, end, rank, k0, k1, K, T_STRIDE,
    R: tl.constexpr, TILE: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for the rows [start, end) of a tile."""
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


@triton.jit
def _shrink_record(
    item, num_items, records, words32, max_tiles, site0, site1, site2, P: tl.constexpr, SPLITS: tl.constexpr
):
    """(offset of A in units, rank, first row, end) of an item; rank 0 beyond the last one."""
    exists = item < num_items
    record = pick(item % P, site0, site1, site2) * max_tiles + item // (P * SPLITS)
    a_offset = tl.load(records + record * 4, mask=exists, other=0)
    rank = tl.load(words32 + record * 8 + 4, mask=exists, other=0)
    start = tl.load(words32 + record * 8 + 6, mask=exists, other=0)
    end = tl.load(words32 + record * 8 + 7, mask=exists, other=0)
    return a_offset, rank, start, end


@triton.jit
def shrink_kernel(
    x, t, memory, records, words32, words, max_tiles, site0, site1, site2, K, split_k, T_SPLIT, T_STRIDE, R_MAX,
    P: tl.constexpr, SPLITS: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """t[split, row, p R_MAX + r] = A_p[r] x[row] over one part of K.

    `x` is [rows, K], `t` float32, `words32` the records as int32. The projections of a tile are neighbours, so that
    `x` comes from memory once. Each item's record is on its way while the one before is computed.
    """
    if PDL:
        gdc_launch_dependents()
    num_items = tl.load(words) * (P * SPLITS)
    first = tl.program_id(0)
    step = tl.num_programs(0)
    a_offset, rank, start, end = _shrink_record(
        first, max_tiles * (P * SPLITS), records, words32, max_tiles, site0, site1, site2, P, SPLITS
    )
    for item in range(first, num_items, step):
        next_a, next_rank, next_start, next_end = _shrink_record(
            item + step, num_items, records, words32, max_tiles, site0, site1, site2, P, SPLITS
        )
        split = item // P % SPLITS
        k0 = split * split_k
        k1 = tl.minimum(k0 + split_k, K)
        a = memory + a_offset * UNIT
        for level in range(0, rank, R):
            out = t + split * T_SPLIT + (item % P) * R_MAX + level
            if end - start == 1:
                row = start.to(tl.int64)
                _shrink_one_row(x + row * K, a + level * K, out + row * T_STRIDE, rank - level, k0, k1, K, R, CHUNK)
            else:
                _shrink_rows(
                    x, a + level * K, out, start, end, rank - level, k0, k1, K, T_STRIDE, R, TILE, BK, STAGES,
                    PRECISION,
                )  # fmt: skip
        a_offset, rank, start, end = next_a, next_rank, next_start, next_end


@triton.jit
def _expand_record(
    item, num_items, records, words32, floats, max_tiles, num_blocks, blocks0, blocks01, site0, site1, site2
):
    """(offset of B in units, rank, scale, first row, end) of an item."""
    exists = item < num_items
    block = item % num_blocks
    p = (block >= blocks0).to(tl.int32) + (block >= blocks01).to(tl.int32)
    record = pick(p, site0, site1, site2) * max_tiles + item // num_blocks
    b_offset = tl.load(records + record * 4 + 1, mask=exists, other=0)
    rank = tl.load(words32 + record * 8 + 4, mask=exists, other=0)
    scale = tl.load(floats + record * 8 + 5, mask=exists, other=0.0)
    start = tl.load(words32 + record * 8 + 6, mask=exists, other=0)
    end = tl.load(words32 + record * 8 + 7, mask=exists, other=0)
    return b_offset, rank, scale, start, end


@triton.jit
def _expand(
    t, b, rows, in_rows, rank, scale, in_width, columns, T_SPLIT, T_STRIDE,
    SPLITS: tl.constexpr, RB: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scale B[columns] t for the rows of a tile, float32 [TILE, BN]."""
    stride = (rank + 7) // 8 * 8
    sums = tl.zeros([TILE, BN], dtype=tl.float32)
    for level in range(0, rank, RB):
        r = level + tl.arange(0, RB)
        mask = in_width[:, None] & (r < stride)[None, :]
        values = tl.load(b + columns[:, None] * stride + r[None, :], mask=mask, other=0.0)
        t_rows = t + rows[:, None] * T_STRIDE + r[None, :]
        own = tl.zeros([TILE, RB], dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            own += tl.load(t_rows + split * T_SPLIT, mask=in_rows[:, None] & (r < rank)[None, :], other=0.0)
        sums = tl.dot((own * scale).to(values.dtype), tl.trans(values), sums, input_precision=PRECISION)
    return sums


@triton.jit
def expand_kernel(
    y, t, memory, records, words32, floats, words, max_tiles, site0, site1, site2, out0, out1, out2,
    T_SPLIT, T_STRIDE, R_MAX,
    SPLITS: tl.constexpr, RB: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[row, columns of p] += scale B_p t[row]; rows and projections without LoRA are left alone.

    `y` is [rows, columns of all]. Rows of B lie `stride` elements apart, the rank in steps of eight, so that loads are
    16 bytes wide; what fills a row up is zero.
    """
    blocks0 = tl.cdiv(out0, BN)
    blocks01 = blocks0 + tl.cdiv(out1, BN)
    num_blocks = blocks01 + tl.cdiv(out2, BN)
    num_out = out0 + out1 + out2
    num_items = tl.load(words) * num_blocks
    first = tl.program_id(0)
    step = tl.num_programs(0)
    b_offset, rank, scale, start, end = _expand_record(
        first, max_tiles * num_blocks, records, words32, floats, max_tiles, num_blocks, blocks0, blocks01,
        site0, site1, site2,
    )  # fmt: skip
    for item in range(first, num_items, step):
        next_b, next_rank, next_scale, next_start, next_end = _expand_record(
            item + step, num_items, records, words32, floats, max_tiles, num_blocks, blocks0, blocks01,
            site0, site1, site2,
        )  # fmt: skip
        if rank > 0:
            block = item % num_blocks
            p = (block >= blocks0).to(tl.int32) + (block >= blocks01).to(tl.int32)
            columns = (block - pick(p, 0, blocks0, blocks01)) * BN + tl.arange(0, BN)
            in_width = columns < pick(p, out0, out1, out2)
            rows = start.to(tl.int64) + tl.arange(0, TILE)
            in_rows = rows < end
            out = y + pick(p, 0, out0, out0 + out1) + rows[:, None] * num_out + columns[None, :]
            mask = in_rows[:, None] & in_width[None, :]
            before = tl.load(out, mask=mask, other=0.0)
            sums = _expand(
                t + p * R_MAX, memory + b_offset * UNIT, rows, in_rows, rank, scale, in_width, columns, T_SPLIT,
                T_STRIDE, SPLITS, RB, TILE, BN, PRECISION,
            )  # fmt: skip
            tl.store(out, (before.to(tl.float32) + sums).to(y.dtype.element_ty), mask=mask)
        b_offset, rank, scale, start, end = next_b, next_rank, next_scale, next_start, next_end
