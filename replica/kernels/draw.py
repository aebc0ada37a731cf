"""Drawing one token a row by weight, in one launch that reads a row twice. Its plain form is `replica.sampler.pick`.

A program a row sums the weights, then looks the target up: first the block in which the running sum passes it, then
the token in that block.
"""

# Triton kernels are traced: types are those of tensors on the device.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined"

import torch
import triton
import triton.language as tl

MAX_BLOCK = 8192
BELOW_ONE: tl.constexpr = tl.constexpr(1.0 - 2.0**-50)
"""Rounding must not lift a target to the whole sum, where no token is left."""


@triton.jit
def _weights(
    values, best, temperature, column, NUM_COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ARE_SCORES: tl.constexpr
):
    i = column + tl.arange(0, BLOCK)
    if ARE_SCORES:
        scores = tl.load(values + i, mask=i < NUM_COLUMNS, other=-float("inf"))
        weights = tl.exp((scores - best) / temperature)
    else:
        weights = tl.load(values + i, mask=i < NUM_COLUMNS, other=0.0)
    return weights.to(tl.float64)


@triton.jit
def _draw(
    values, best, settings, token_ids, num_rows, row_stride,
    NUM_COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ARE_SCORES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = values + row * row_stride
    most = tl.load(best + row)
    temperature = tl.load(settings + num_rows + row).to(tl.float32)
    whole = tl.zeros([BLOCK], tl.float64)
    for column in range(0, NUM_COLUMNS, BLOCK):
        whole += _weights(start, most, temperature, column, NUM_COLUMNS, BLOCK, ARE_SCORES)
    target = tl.load(settings + row) * tl.sum(whole)
    passed = tl.sum(whole) * 0.0
    rest = target
    chosen = 0
    for column in range(0, NUM_COLUMNS, BLOCK):
        total = tl.sum(_weights(start, most, temperature, column, NUM_COLUMNS, BLOCK, ARE_SCORES))
        is_here = (total > 0.0) & (passed <= target)
        chosen = tl.where(is_here, column, chosen)
        rest = tl.where(is_here, target - passed, rest)
        passed += total
    sums = tl.cumsum(_weights(start, most, temperature, chosen, NUM_COLUMNS, BLOCK, ARE_SCORES), 0)
    rest = tl.minimum(rest, tl.max(sums, 0) * BELOW_ONE)
    offset = tl.sum((sums <= rest).to(tl.int32))
    tl.store(token_ids + row, tl.minimum(chosen + offset, NUM_COLUMNS - 1).to(tl.int64))


def draw(values: torch.Tensor, best: torch.Tensor, settings: torch.Tensor, *, are_scores: bool) -> torch.Tensor:
    """Token ids, int64 [rows], drawn by weight; a token without weight is never drawn.

    `values` is float32 [rows, vocabulary] with neighbouring columns: weights, or with `are_scores` scores whose weight
    is exp((score - best) / temperature), `best` being float32 [rows]. `settings` is float64 [2, rows]: numbers in
    [0, 1), and temperatures. A row's token does not depend on the others. A row with NaN gives some token.
    """
    assert values.stride(1) == 1, "neighbouring columns lie side by side"
    assert settings.is_contiguous()
    num_rows, num_columns = values.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    block = min(MAX_BLOCK, triton.next_power_of_2(num_columns))
    _draw[(num_rows,)](
        values, best, settings, token_ids, num_rows, values.stride(0),
        NUM_COLUMNS=num_columns, BLOCK=block, ARE_SCORES=are_scores, num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    return token_ids
