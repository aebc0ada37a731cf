"""y = x W^T + bias + LoRA in one launch, for steps of few rows (decode), as a Triton kernel.

The first programs of the grid compute t = A x for their share of the adapters and count themselves in; the others
compute a tile of the base product each, wait for that count, and go on over the adapters' B as over more columns of
W: for each segment, the rows of t that are its own, and zeros elsewhere, times its B. An image holds finite values
only (checked when it is read), so the zeros add nothing to rows of others. Each value is summed in one order, so the
result does not depend on timing. After Punica and S-LoRA (arXiv:2310.18547, arXiv:2311.03285) in what is computed;
the shape of the kernel is our own.
"""

# Triton kernels are traced: types are those of tensors on the device.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from replica.kernels.rows import HEAD, LEVELS_AT, RANK_BLOCK

_HEAD = tl.constexpr(HEAD)
_LEVELS_AT = tl.constexpr(LEVELS_AT)
RB = tl.constexpr(RANK_BLOCK)


@triton.jit
def site_of(p, site0, site1, site2):
    """The site of the group's p-th projection."""
    return tl.where(p == 0, site0, tl.where(p == 1, site1, site2))


@triton.jit
def padded(rank):
    """The row stride of B: ranks are stored in steps of eight, so that loads are 16 bytes wide."""
    return (rank + 7) // 8 * 8


@triton.jit
def _shrink_one_row(x, a, t, rank, k0, k1, K, CHUNK: tl.constexpr):
    """t[0:RB] = A[0:RB, k0:k1] x[k0:k1]: products and one sum, without matrix units."""
    r = tl.arange(0, RB)
    sums = tl.zeros([RB, CHUNK], dtype=tl.float32)
    for k in range(k0, k1, CHUNK):
        ks = k + tl.arange(0, CHUNK)
        inside = ks < k1
        values = tl.load(a + r[:, None] * K + ks[None, :], mask=(r < rank)[:, None] & inside[None, :], other=0.0)
        row = tl.load(x + ks, mask=inside, other=0.0)
        sums += values.to(tl.float32) * row.to(tl.float32)[None, :]
    tl.store(t + r, tl.sum(sums, axis=1))


@triton.jit
def _shrink_rows(x, a, t, start, end, rank, k0, k1, K, T_STRIDE, BK: tl.constexpr, PRECISION: tl.constexpr):
    """The same for the rows [start, end), 16 at a time."""
    r = tl.arange(0, RB)
    for first in range(start, end, 16):
        rows = first + tl.arange(0, 16)
        sums = tl.zeros([16, RB], dtype=tl.float32)
        for k in range(k0, k1, BK):
            ks = k + tl.arange(0, BK)
            inside = (ks < k1)[None, :]
            x_tile = tl.load(x + rows[:, None] * K + ks[None, :], mask=(rows < end)[:, None] & inside, other=0.0)
            a_tile = tl.load(a + r[:, None] * K + ks[None, :], mask=(r < rank)[:, None] & inside, other=0.0)
            sums = tl.dot(x_tile, tl.trans(a_tile), sums, input_precision=PRECISION)
        tl.store(t + rows[:, None] * T_STRIDE + r[None, :], sums, mask=(rows < end)[:, None])


@triton.jit
def _shrink_share(
    worker, x, t, memory, a_offsets, ranks, words, capacity, num_sites, site0, site1, site2, K, split_k,
    T_SPLIT, T_STRIDE, R_MAX,
    NUM_WORKERS: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One worker's share of t: every NUM_WORKERS-th of (segment, projection, part of K), for each rank level."""
    segments = words + _HEAD
    for level in range(tl.load(words + 1)):
        num_items = tl.load(words + _LEVELS_AT + level) * (P * SPLITS)
        for item in range(worker, num_items, NUM_WORKERS):
            segment = item // (P * SPLITS)
            p = item // SPLITS % P
            split = item % SPLITS
            slot = tl.load(segments + 2 * capacity + segment)
            row = slot.to(tl.int64) * num_sites + site_of(p, site0, site1, site2)
            rank = tl.load(ranks + row) - level * RB
            if rank > 0:
                start = tl.load(segments + segment)
                end = tl.load(segments + capacity + segment)
                a = memory + tl.multiple_of(tl.load(a_offsets + row), 32) + level * RB * K
                out = t + split * T_SPLIT + p * R_MAX + level * RB
                k0 = split * split_k
                k1 = tl.minimum(k0 + split_k, K)
                if end - start == 1:
                    _shrink_one_row(x + start * K, a, out + start * T_STRIDE, rank, k0, k1, K, CHUNK)
                else:
                    _shrink_rows(x, a, out, start, end, rank, k0, k1, K, T_STRIDE, 128, PRECISION)


@triton.jit
def _expand_segments(
    sums, own, row_segment, columns, in_width, memory, b_offsets, ranks, words, capacity, num_sites, site, level,
    B_STAGES: tl.constexpr, UNROLL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add B t for one rank level: `own` [BM, RB] is each row's scaled t; a segment's B meets its own rows only."""
    ranks_here = level * RB + tl.arange(0, RB)
    num_segments = tl.load(words + _LEVELS_AT + level)
    for segment in tl.range(0, num_segments, UNROLL, num_stages=B_STAGES):
        for u in tl.static_range(UNROLL):
            here = segment + u
            is_one = here < num_segments
            slot = tl.load(words + _HEAD + 2 * capacity + here, mask=is_one, other=0)
            at = slot.to(tl.int64) * num_sites + site
            stride = padded(tl.load(ranks + at, mask=is_one, other=0))
            b = memory + tl.multiple_of(tl.load(b_offsets + at, mask=is_one, other=0), 32)
            mask = in_width[:, None] & (ranks_here < stride)[None, :]
            b_tile = tl.load(b + columns[:, None] * stride + ranks_here[None, :], mask=mask, other=0.0)
            masked = tl.where(row_segment[:, None] == here, own, 0.0).to(own.dtype)
            sums = tl.dot(masked, tl.trans(b_tile), sums, input_precision=PRECISION)
    return sums


@triton.jit
def _tile(
    tile, x, w, bias, y, t, memory, a_offsets, b_offsets, ranks, scales, words, counter,
    num_rows, capacity, num_sites, site0, site1, site2, out0, out1, out2, K, T_SPLIT, T_STRIDE, R_MAX,
    P: tl.constexpr, HAS_BIAS: tl.constexpr, NUM_WORKERS: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, B_STAGES: tl.constexpr,
    UNROLL: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of y: BN columns of one projection, for all rows."""
    tiles0 = tl.cdiv(out0, BN)
    tiles01 = tiles0 + tl.cdiv(out1, BN)
    p = (tile >= tiles0).to(tl.int32) + (tile >= tiles01).to(tl.int32)
    first = tl.where(p == 0, 0, tl.where(p == 1, out0, out0 + out1))
    width = tl.where(p == 0, out0, tl.where(p == 1, out1, out2))
    tile -= tl.where(p == 0, 0, tl.where(p == 1, tiles0, tiles01))
    columns = tile * BN + tl.arange(0, BN)
    in_width = columns < width
    rows = tl.arange(0, BM)
    in_rows = rows < num_rows
    row_segment = tl.load(words + _HEAD + 3 * capacity + rows, mask=in_rows, other=-1)
    row_slot = tl.load(words + _HEAD + 4 * capacity + rows, mask=in_rows, other=-1)
    site = site_of(p, site0, site1, site2)
    entry = row_slot.to(tl.int64) * num_sites + site
    row_rank = tl.load(ranks + entry, mask=row_slot >= 0, other=0)
    row_scale = tl.load(scales + entry, mask=row_slot >= 0, other=0.0)

    sums = tl.zeros([BM, BN], dtype=tl.float32)
    x_rows = x + rows[:, None] * K
    w_rows = w + (first + columns).to(tl.int64)[:, None] * K
    for k in tl.range(0, K, BK, num_stages=STAGES):
        ks = k + tl.arange(0, BK)
        x_mask, w_mask = in_rows[:, None], in_width[:, None]
        if not EVEN_K:
            x_mask, w_mask = x_mask & (ks < K)[None, :], w_mask & (ks < K)[None, :]
        x_tile = tl.load(x_rows + ks[None, :], mask=x_mask, other=0.0)
        w_tile = tl.load(w_rows + ks[None, :], mask=w_mask, other=0.0)
        sums = tl.dot(x_tile, tl.trans(w_tile), sums, input_precision=PRECISION)

    num_levels = tl.load(words + 1)
    if num_levels > 0:
        while tl.atomic_add(counter, 0, sem="acquire") < NUM_WORKERS:
            pass
        for level in range(num_levels):
            ranks_here = level * RB + tl.arange(0, RB)
            t_rows = t + rows[:, None] * T_STRIDE + p * R_MAX + ranks_here[None, :]
            own = tl.zeros([BM, RB], dtype=tl.float32)
            for split in tl.static_range(SPLITS):
                own += tl.load(t_rows + split * T_SPLIT, mask=ranks_here[None, :] < row_rank[:, None], other=0.0)
            own = (own * row_scale[:, None]).to(x.dtype.element_ty)
            sums = _expand_segments(
                sums, own, row_segment, columns, in_width, memory, b_offsets, ranks, words, capacity, num_sites,
                site, level, B_STAGES, UNROLL, PRECISION,
            )  # fmt: skip

    if HAS_BIAS:
        sums += tl.load(bias + first + columns, mask=in_width, other=0.0).to(tl.float32)[None, :]
    num_out = out0 + out1 + out2
    out = y + rows.to(tl.int64)[:, None] * num_out + (first + columns)[None, :]
    tl.store(out, sums.to(y.dtype.element_ty), mask=in_rows[:, None] & in_width[None, :])


@triton.jit
def fused_linear_kernel(
    x, w, bias, y, t, memory, a_offsets, b_offsets, ranks, scales, words, counter,
    num_rows, capacity, num_sites, site0, site1, site2, out0, out1, out2, K, split_k, T_SPLIT, T_STRIDE, R_MAX,
    P: tl.constexpr, HAS_BIAS: tl.constexpr, NUM_WORKERS: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, B_STAGES: tl.constexpr,
    UNROLL: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs [0, NUM_WORKERS) shrink; each further one makes the columns of one tile, for all BM rows.

    `x` is [num_rows, K], `w` [out0 + out1 + out2, K], `y` [num_rows, out0 + out1 + out2], all contiguous and of one
    dtype; `t` float32 scratch; `counter` one int32 that is zero before the launch. Projections that are not there
    have no columns.
    """
    pid = tl.program_id(0)
    if pid < NUM_WORKERS:
        _shrink_share(
            pid, x, t, memory, a_offsets, ranks, words, capacity, num_sites, site0, site1, site2, K, split_k,
            T_SPLIT, T_STRIDE, R_MAX, NUM_WORKERS, P, SPLITS, CHUNK, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()
        tl.atomic_add(counter, 1, sem="release")
    else:
        _tile(
            pid - NUM_WORKERS, x, w, bias, y, t, memory, a_offsets, b_offsets, ranks, scales, words, counter,
            num_rows, capacity, num_sites, site0, site1, site2, out0, out1, out2, K, T_SPLIT, T_STRIDE, R_MAX,
            P, HAS_BIAS, NUM_WORKERS, SPLITS, BM, BN, BK, STAGES, B_STAGES, UNROLL, EVEN_K, PRECISION,
        )  # fmt: skip
