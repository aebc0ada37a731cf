"""y += LoRA in two launches, for any number of rows (prompts), as Triton kernels: t = A x, then y += scale B t.

A tile is a few rows of one segment; `RowsView` lists them. Used where a step has too many rows for `fused_linear`.
"""

# Triton kernels are traced: types are those of tensors on the device.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from replica.kernels.fused_linear import padded, site_of
from replica.kernels.rows import HEAD

_HEAD = tl.constexpr(HEAD)


@triton.jit
def _tile_rows(words, capacity, tile, TILE: tl.constexpr):
    """(slot, rows, mask) of a tile; the slot is -1 for tiles that this step does not have."""
    segments = words + _HEAD
    segment = tl.load(segments + 5 * capacity + tile)
    exists = segment >= 0
    slot = tl.load(segments + 2 * capacity + segment, mask=exists, other=-1)
    end = tl.load(segments + capacity + segment, mask=exists, other=0)
    rows = tl.load(segments + 6 * capacity + tile) + tl.arange(0, TILE)
    return slot, rows, rows < end


@triton.jit
def shrink_kernel(
    x, t, memory, a_offsets, ranks, words, capacity, num_sites, site0, site1, site2, K, split_k,
    T_SPLIT, T_STRIDE, R_MAX,
    RBLOCK: tl.constexpr, TILE: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """t[split, row, p R_MAX + r] = A_p[r] x[row] over one part of K. Grid: (projections, tiles, parts of K).

    The projections of a tile are neighbours in the grid, so that `x` comes from memory once.
    """
    slot, rows, mask = _tile_rows(words, capacity, tl.program_id(1), TILE)
    p = tl.program_id(0)
    if slot >= 0:
        entry = slot.to(tl.int64) * num_sites + site_of(p, site0, site1, site2)
        rank = tl.load(ranks + entry)
        a = memory + tl.multiple_of(tl.load(a_offsets + entry), 32)
        k0 = tl.program_id(2) * split_k
        k1 = tl.minimum(k0 + split_k, K)
        x_rows = x + rows.to(tl.int64)[:, None] * K
        for level in range(0, rank, RBLOCK):
            r = level + tl.arange(0, RBLOCK)
            sums = tl.zeros([TILE, RBLOCK], dtype=tl.float32)
            for k in tl.range(k0, k1, BK, num_stages=STAGES):
                ks = k + tl.arange(0, BK)
                x_mask, a_mask = mask[:, None], (r < rank)[:, None]
                if not EVEN_K:
                    x_mask, a_mask = x_mask & (ks < k1)[None, :], a_mask & (ks < k1)[None, :]
                x_tile = tl.load(x_rows + ks[None, :], mask=x_mask, other=0.0)
                a_tile = tl.load(a + r[:, None] * K + ks[None, :], mask=a_mask, other=0.0)
                sums = tl.dot(x_tile, tl.trans(a_tile), sums, input_precision=PRECISION)
            out = t + tl.program_id(2) * T_SPLIT + rows.to(tl.int64)[:, None] * T_STRIDE + p * R_MAX + r[None, :]
            tl.store(out, sums, mask=mask[:, None] & (r < R_MAX)[None, :])


@triton.jit
def expand_kernel(
    y, t, memory, b_offsets, ranks, scales, words, capacity, num_sites, site0, site1, site2, out0, out1, out2,
    T_SPLIT, T_STRIDE, R_MAX,
    SPLITS: tl.constexpr, RBLOCK: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[row, columns of p] += scale B_p t[row]. Grid: (tiles, blocks of BN columns of all projections)."""
    slot, rows, mask = _tile_rows(words, capacity, tl.program_id(0), TILE)
    block = tl.program_id(1)
    blocks0 = tl.cdiv(out0, BN)
    blocks01 = blocks0 + tl.cdiv(out1, BN)
    p = (block >= blocks0).to(tl.int32) + (block >= blocks01).to(tl.int32)
    if slot >= 0:
        entry = slot.to(tl.int64) * num_sites + site_of(p, site0, site1, site2)
        rank = tl.load(ranks + entry)
        if rank > 0:
            first = tl.where(p == 0, 0, tl.where(p == 1, out0, out0 + out1))
            width = tl.where(p == 0, out0, tl.where(p == 1, out1, out2))
            block -= tl.where(p == 0, 0, tl.where(p == 1, blocks0, blocks01))
            columns = block * BN + tl.arange(0, BN)
            in_width = columns < width
            b = memory + tl.multiple_of(tl.load(b_offsets + entry), 32)
            scale = tl.load(scales + entry)
            stride = padded(rank)
            sums = tl.zeros([TILE, BN], dtype=tl.float32)
            for level in range(0, rank, RBLOCK):
                r = level + tl.arange(0, RBLOCK)
                t_rows = t + rows.to(tl.int64)[:, None] * T_STRIDE + p * R_MAX + r[None, :]
                own = tl.zeros([TILE, RBLOCK], dtype=tl.float32)
                for split in range(SPLITS):
                    own += tl.load(t_rows + split * T_SPLIT, mask=mask[:, None] & (r < rank)[None, :], other=0.0)
                b_mask = in_width[:, None] & (r < stride)[None, :]
                b_tile = tl.load(b + columns[:, None] * stride + r[None, :], mask=b_mask, other=0.0)
                own = (own * scale).to(b_tile.dtype)
                sums = tl.dot(own, tl.trans(b_tile), sums, input_precision=PRECISION)
            out = y + rows.to(tl.int64)[:, None] * (out0 + out1 + out2) + (first + columns)[None, :]
            y_mask = mask[:, None] & in_width[None, :]
            old = tl.load(out, mask=y_mask, other=0.0)
            tl.store(out, (old.to(tl.float32) + sums).to(y.dtype.element_ty), mask=y_mask)
