"""The base product of a step of few rows with LoRA's second half in the same launch, as a Triton kernel.

y = x W^T + bias + scale B t, where t = A x comes from `shrink_kernel`, launched just before. This kernel starts while
that one still runs (programmatic dependent launch) and waits for t only when its product is done: at 64 rows a product
reads each weight once and computes little, so the adapters' B are read as if W had a few more columns. Tiles of rows
take turns four at a time: t where a row is the tile's own and zero elsewhere, times B. An image holds finite values
only (checked when it is read), so the zeros add nothing to rows of others.
"""

# Triton kernels are traced: types are those of tensors on the device.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from replica.kernels.rows import HEAD, LEVELS_AT, RANK_BLOCK
from replica.kernels.shrink_expand import UNIT, pick

_HEAD = tl.constexpr(HEAD)
_LEVELS_AT = tl.constexpr(LEVELS_AT)
R = tl.constexpr(RANK_BLOCK)


@triton.jit
def _records(tile, num_tiles, base, records, words32):
    """(offset of B in units, row stride of B, first row, end) of some tiles; nothing beyond the last one."""
    exists = tile < num_tiles
    at = base + tile
    b_offset = tl.load(records + at * 4 + 1, mask=exists, other=0)
    rank = tl.load(words32 + at * 8 + 4, mask=exists, other=0)
    start = tl.load(words32 + at * 8 + 6, mask=exists, other=0)
    end = tl.load(words32 + at * 8 + 7, mask=exists, other=0)
    return b_offset, (rank + 7) // 8 * 8, start, end


@triton.jit
def _add_level(
    sums, own, rows, columns, in_width, memory, records, words32, base, num_tiles, level,
    Q: tl.constexpr, B_STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add B t for one rank level; `own` [BM, R] is each row's scaled t. Records are fetched one turn ahead."""
    j = tl.arange(0, Q * R)
    r = level * R + j % R
    wide = tl.reshape(tl.broadcast_to(own[:, None, :], [own.shape[0], Q, R]), [own.shape[0], Q * R])
    b_offset, stride, start, end = _records(j // R, num_tiles, base, records, words32)
    for first in tl.range(0, num_tiles, Q, num_stages=B_STAGES):
        next_b, next_stride, next_start, next_end = _records(first + Q + j // R, num_tiles, base, records, words32)
        offsets = (b_offset * UNIT + r)[None, :] + columns[:, None] * stride[None, :]
        offsets = tl.max_contiguous(tl.multiple_of(offsets, [1, 8]), [1, 8])
        mask = tl.max_constancy(in_width[:, None] & (r < stride)[None, :], [1, 8])
        b_tile = tl.load(memory + offsets, mask=mask, other=0.0)
        is_own = (rows[:, None] >= start[None, :]) & (rows[:, None] < end[None, :])
        sums = tl.dot(tl.where(is_own, wide, 0.0), tl.trans(b_tile), sums, input_precision=PRECISION)
        b_offset, stride, start, end = next_b, next_stride, next_start, next_end
    return sums


@triton.jit
def lora_product_kernel(
    x, w, bias, y, t, memory, records, words32, floats, words, capacity, max_tiles, site0, site1, site2,
    out0, out1, out2, K, T_SPLIT, T_STRIDE, R_MAX,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, Q: tl.constexpr, B_STAGES: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BN columns of one projection for all rows a program.

    `x` is [capacity, K], `w` [out0 + out1 + out2, K], `y` [capacity, out0 + out1 + out2], all contiguous and of one
    dtype; projections that are not there have no columns.
    """
    tile = tl.program_id(0)
    tiles0 = tl.cdiv(out0, BN)
    tiles01 = tiles0 + tl.cdiv(out1, BN)
    p = (tile >= tiles0).to(tl.int32) + (tile >= tiles01).to(tl.int32)
    columns = (tile - pick(p, 0, tiles0, tiles01)) * BN + tl.arange(0, BN)
    in_width = columns < pick(p, out0, out1, out2)
    first = pick(p, 0, out0, out0 + out1)
    rows = tl.arange(0, BM)
    in_rows = rows < capacity
    base = pick(p, site0, site1, site2) * max_tiles
    at = base + tl.load(words + _HEAD + 3 * capacity + rows, mask=in_rows, other=0)
    row_rank = tl.load(words32 + at * 8 + 4, mask=in_rows, other=0)
    row_scale = tl.load(floats + at * 8 + 5, mask=in_rows, other=0.0)

    sums = tl.zeros([BM, BN], dtype=tl.float32)
    x_rows = x + rows[:, None] * K
    w_rows = w + (first + columns).to(tl.int64)[:, None] * K
    for k in tl.range(0, K, BK, num_stages=STAGES):
        ks = k + tl.arange(0, BK)
        x_mask, w_mask = in_rows[:, None], in_width[:, None]
        if not EVEN_K:
            x_mask, w_mask = x_mask & (ks < K)[None, :], w_mask & (ks < K)[None, :]
        x_tile = tl.load(x_rows + ks[None, :], mask=x_mask, other=0.0)
        w_tile = tl.load(w_rows + ks[None, :], mask=w_mask, other=0.0, eviction_policy="evict_first")
        sums = tl.dot(x_tile, tl.trans(w_tile), sums, input_precision=PRECISION)

    if PDL:
        gdc_wait()
    for level in range(tl.load(words + 1)):
        r = level * R + tl.arange(0, R)
        t_rows = t + rows[:, None] * T_STRIDE + p * R_MAX + r[None, :]
        own = tl.zeros([BM, R], dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            own += tl.load(t_rows + split * T_SPLIT, mask=r[None, :] < row_rank[:, None], other=0.0)
        own = (own * row_scale[:, None]).to(x.dtype.element_ty)
        num_tiles = tl.load(words + _LEVELS_AT + level)
        sums = _add_level(
            sums, own, rows, columns, in_width, memory, records, words32, base, num_tiles, level, Q, B_STAGES,
            PRECISION,
        )  # fmt: skip

    if HAS_BIAS:
        sums += tl.load(bias + first + columns, mask=in_width, other=0.0).to(tl.float32)[None, :]
    out = y + rows.to(tl.int64)[:, None] * (out0 + out1 + out2) + (first + columns)[None, :]
    tl.store(out, sums.to(y.dtype.element_ty), mask=in_rows[:, None] & in_width[None, :])
