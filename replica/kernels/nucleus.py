"""The least weight inside a nucleus, row by row, in one launch. Its plain form is `replica.filters.floors_by_bits`.

A program a row builds the answer two bits a pass: the patterns of the floats from 0 to 1 are in the order of the floats
and fit in 30 bits, so 15 passes over a row, which stays in the L2 cache, find it without a look from the host.
"""

# Triton kernels are traced: types are those of tensors on the device.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined"

import torch
import triton
import triton.language as tl

MAX_BLOCK = 8192


@triton.jit
def _floors(weights, goals, floors, row_stride, NUM_COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    goal = tl.load(goals + row)
    start = weights + row * row_stride
    below = 0
    for turn in range(15):
        unit = 1 << (28 - 2 * turn)
        first = (below + unit).to(tl.float32, bitcast=True)
        second = (below + 2 * unit).to(tl.float32, bitcast=True)
        third = (below + 3 * unit).to(tl.float32, bitcast=True)
        above_first = tl.zeros([BLOCK], tl.float32)
        above_second = tl.zeros([BLOCK], tl.float32)
        above_third = tl.zeros([BLOCK], tl.float32)
        for column in range(0, NUM_COLUMNS, BLOCK):
            i = column + tl.arange(0, BLOCK)
            weight = tl.load(start + i, mask=i < NUM_COLUMNS, other=0.0)
            above_first += tl.where(weight > first, weight, 0.0)
            above_second += tl.where(weight > second, weight, 0.0)
            above_third += tl.where(weight > third, weight, 0.0)
        reached = (tl.sum(above_first.to(tl.float64)) >= goal).to(tl.int32)
        reached += (tl.sum(above_second.to(tl.float64)) >= goal).to(tl.int32)
        reached += (tl.sum(above_third.to(tl.float64)) >= goal).to(tl.int32)
        below += reached * unit
    tl.store(floors + row, (below + 1).to(tl.float32, bitcast=True))


def nucleus_floors(weights: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
    """For each row the least weight above which less than `goals` lies, float32 [rows].

    `weights` is float32 [rows, vocabulary], from 0 to 1, with neighbouring columns; `goals` float64 [rows], above 0.
    A row's result does not depend on the others. A row with NaN gives some number.
    """
    assert weights.stride(1) == 1, "neighbouring columns lie side by side"
    floors = torch.empty(len(weights), dtype=torch.float32, device=weights.device)
    num_columns = weights.shape[1]
    block = min(MAX_BLOCK, triton.next_power_of_2(num_columns))
    _floors[(len(weights),)](
        weights,
        goals,
        floors,
        weights.stride(0),
        NUM_COLUMNS=num_columns,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
    )
    return floors
