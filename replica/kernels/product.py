"""The base product of a step of few rows, y = x W^T + bias, as a Triton kernel.

At 64 rows the product reads each weight once and computes little. Where the columns make one round of blocks, or two,
it is about as fast as the library's (7 % faster at 14336 -> 4096 on an H200), and leaves processors to LoRA beside it.
"""

# Triton kernels are traced: types are those of tensors on the device.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def product_kernel(
    x, w, bias, y, num_rows, num_out, K,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BN columns of y for all rows a program. `x` [num_rows, K], `w` [num_out, K], `y` [num_rows, num_out]."""
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.arange(0, BM)
    in_width, in_rows = columns < num_out, rows < num_rows
    sums = tl.zeros([BM, BN], dtype=tl.float32)
    x_rows = x + rows[:, None] * K
    w_rows = w + columns.to(tl.int64)[:, None] * K
    for k in tl.range(0, K, BK, num_stages=STAGES):
        ks = k + tl.arange(0, BK)
        x_mask, w_mask = in_rows[:, None], in_width[:, None]
        if not EVEN_K:
            x_mask, w_mask = x_mask & (ks < K)[None, :], w_mask & (ks < K)[None, :]
        x_tile = tl.load(x_rows + ks[None, :], mask=x_mask, other=0.0)
        w_tile = tl.load(w_rows + ks[None, :], mask=w_mask, other=0.0, eviction_policy="evict_first")
        sums = tl.dot(x_tile, tl.trans(w_tile), sums, input_precision=PRECISION)
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=in_width, other=0.0).to(tl.float32)[None, :]
    out = y + rows.to(tl.int64)[:, None] * num_out + columns[None, :]
    tl.store(out, sums.to(y.dtype.element_ty), mask=in_rows[:, None] & in_width[None, :])
