"""The base product of a step of few rows, y = x W^T + bias, as a Triton kernel.

Such a product reads each weight once and computes little. Where the columns make one round of blocks, or two, it is
about as fast as the library's (7 % faster at 14336 -> 4096 with 64 rows on an H200), and leaves processors to LoRA
beside it. What a block reads of `x` comes from the L2 cache, and with more than 64 rows there is so much of that, that
few blocks of many columns are faster, two programs to each, a half of K for either.
"""

# Triton kernels are traced: types are those of tensors on the device.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def product_kernel(
    x, w, bias, y, halves, turns, num_rows, num_out, K,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, MORE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, BY_COLUMNS: tl.constexpr, PARTS: tl.constexpr, IS_WHOLE: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BN columns of y for all rows, BM + MORE at most, by PARTS programs, 1 or 2. `x` [num_rows, K], `w` [num_out, K],
    `y` [num_rows, num_out].

    BY_COLUMNS computes W x^T instead, for which the matrix units want 64 columns at least, and take any number of rows.
    Two programs leave their halves in `halves`, float32 [blocks, 2, BN, BM + MORE], and the one that is done last adds
    the other's to its own: a sum of two is the same in either order. `turns`, int32 [blocks], is 0 before and after.
    IS_WHOLE says that there are BM + MORE rows and whole blocks of columns: most of what a block computes would else be
    masks.
    """
    tl.static_assert(BY_COLUMNS or (PARTS == 1 and MORE == 0), "only by columns")
    block = tl.program_id(0) // PARTS
    nth = tl.program_id(0) % PARTS
    columns = block * BN + tl.arange(0, BN)
    rows, more_rows = tl.arange(0, BM), BM + tl.arange(0, max(MORE, 16))
    w_rows = w + columns.to(tl.int64)[:, None] * K
    in_width, in_rows, in_more = columns < num_out, rows < num_rows, more_rows < num_rows
    if IS_WHOLE:
        in_width, in_rows, in_more = columns >= 0, rows >= 0, more_rows >= 0
    in_width, in_rows, in_more = in_width[:, None], in_rows[:, None], in_more[:, None]
    sums = tl.zeros([BN, BM] if BY_COLUMNS else [BM, BN], dtype=tl.float32)
    more = tl.zeros([BN, more_rows.numel], dtype=tl.float32)
    part_k = tl.cdiv(K, PARTS * BK) * BK
    for k in tl.range(nth * part_k, tl.minimum((nth + 1) * part_k, K), BK, num_stages=STAGES):
        ks = (k + tl.arange(0, BK))[None, :]
        w_mask, x_mask, more_mask = in_width, in_rows, in_more
        if not EVEN_K:
            w_mask, x_mask, more_mask = in_width & (ks < K), in_rows & (ks < K), in_more & (ks < K)
        x_tile = tl.load(x + rows[:, None] * K + ks, mask=x_mask, other=0.0)
        w_tile = tl.load(w_rows + ks, mask=w_mask, other=0.0, eviction_policy="evict_first")
        if BY_COLUMNS:
            sums = tl.dot(w_tile, tl.trans(x_tile), sums, input_precision=PRECISION)
        else:
            sums = tl.dot(x_tile, tl.trans(w_tile), sums, input_precision=PRECISION)
        if MORE > 0:
            more_tile = tl.load(x + more_rows[:, None] * K + ks, mask=more_mask, other=0.0)
            more = tl.dot(w_tile, tl.trans(more_tile), more, input_precision=PRECISION)
    is_last = True
    if PARTS == 2:
        half = halves + block * (PARTS * BN * (BM + MORE)) + tl.arange(0, BN)[:, None] * (BM + MORE)
        own, other = half + nth * (BN * (BM + MORE)), half + (1 - nth) * (BN * (BM + MORE))
        tl.store(own + rows[None, :], sums)
        if MORE > 0:
            tl.store(own + more_rows[None, :], more)
        tl.debug_barrier()
        is_last = tl.atomic_add(turns + block, 1, sem="acq_rel") == 1
        if is_last:
            tl.store(turns + block, 0)
            sums += tl.load(other + rows[None, :], cache_modifier=".cg")
            if MORE > 0:
                more += tl.load(other + more_rows[None, :], cache_modifier=".cg")
    if is_last:
        if BY_COLUMNS:
            _store(y, tl.trans(sums), bias, rows, columns, num_rows, num_out, HAS_BIAS)
        else:
            _store(y, sums, bias, rows, columns, num_rows, num_out, HAS_BIAS)
        if MORE > 0:
            _store(y, tl.trans(more), bias, more_rows, columns, num_rows, num_out, HAS_BIAS)


@triton.jit
def _store(y, sums, bias, rows, columns, num_rows, num_out, HAS_BIAS: tl.constexpr):
    """`sums` is [rows, columns]."""
    in_width = columns < num_out
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=in_width, other=0.0).to(tl.float32)[None, :]
    out = y + rows.to(tl.int64)[:, None] * num_out + columns[None, :]
    tl.store(out, sums.to(y.dtype.element_ty), mask=(rows < num_rows)[:, None] & in_width[None, :])
