"""The Triton kernels against float64, on skewed segments: interpreted on a CPU, compiled where there is a device."""

import pytest
import torch

from replica.kernels.grouped_lora import GroupShape, LoraKernels
from replica.kernels.rows import RowSegment
from tests.replica.kernels.adapters_in_arena import Arena

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
"""Triton's interpreter runs on numpy, which warns of what the interpreter does."""

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter has no bfloat16
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}

QKV = GroupShape((0, 1, 2), (96, 32, 32), 192)
GATE_UP = GroupShape((0, 1), (160, 160), 96)
DOWN = GroupShape((0,), (80,), 1200)
GROUPS = [QKV, GATE_UP, DOWN]

SKEWED = [(2, 1), (-1, 2), (0, 9), (1, 1), (3, 3), (-1, 1), (4, 20)]
MIXED_RANKS = [16, 8, 5, 64, 1]


def arena_for(group: GroupShape, ranks: list[int], dtype: torch.dtype, seed: int = 0) -> Arena:
    """One adapter a rank, on all sites of the group; the last one only on its first site."""
    table = [[rank] * len(group.sites) for rank in ranks]
    table[-1] = [ranks[-1]] + [0] * (len(group.sites) - 1)
    return Arena(table, group.in_features, list(group.out_features), dtype, DEVICE, seed)


def kernels_for(arena: Arena, max_rows: int = 64) -> LoraKernels:
    max_rank = max(max(ranks) for ranks in arena.ranks)
    kernels = LoraKernels(arena.memory, arena.tables, max_rows=max_rows, max_rank=max_rank, num_groups=4)
    kernels._partial.fill_(float("nan"))
    return kernels


def random(*shape: int, dtype: torch.dtype, seed: int = 7) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu().double() - expected).norm() / expected.norm())


def num_rows_of(lengths: list[tuple[int, int]]) -> int:
    return sum(length for _, length in lengths)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("group", GROUPS, ids=["qkv", "gate_up", "down"])
def test_fused_linear_equals_float64_on_skewed_segments(group: GroupShape, dtype: torch.dtype) -> None:
    arena = arena_for(group, MIXED_RANKS, dtype)
    num_rows, segments = num_rows_of(SKEWED), arena.segments(SKEWED)
    x = random(num_rows, group.in_features, dtype=dtype)
    weight = random(group.num_out, group.in_features, dtype=dtype, seed=8) / group.in_features**0.5
    bias = random(group.num_out, dtype=dtype, seed=9)
    kernels = kernels_for(arena)
    kernels.begin(arena.view(segments, num_rows))

    y = kernels.linear(x, weight, bias, group, 2)

    base = x.cpu().double() @ weight.cpu().double().T + bias.cpu().double()
    assert distance(y, base + arena.expected(x, segments, group)) < TOLERANCE[dtype]
    assert distance(y[1:3], base[1:3]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("group", GROUPS, ids=["qkv", "gate_up", "down"])
@pytest.mark.parametrize("scale_rows", [1, 9])
def test_add_equals_float64_on_skewed_segments(group: GroupShape, dtype: torch.dtype, scale_rows: int) -> None:
    arena = arena_for(group, MIXED_RANKS, dtype)
    lengths = [(slot, length * scale_rows) for slot, length in SKEWED]
    num_rows, segments = num_rows_of(lengths), arena.segments(lengths)
    x, before = random(num_rows, group.in_features, dtype=dtype), random(num_rows, group.num_out, dtype=dtype, seed=8)
    y = before.clone()
    kernels = kernels_for(arena)
    kernels.begin(arena.view(segments, num_rows))

    kernels.add(y, x, group)

    expected = before.cpu().double() + arena.expected(x, segments, group)
    assert distance(y, expected) < TOLERANCE[dtype]
    base_only = slice(scale_rows, 3 * scale_rows)
    assert torch.equal(y[base_only], before[base_only])


def test_fused_linear_follows_tables_that_change_between_steps() -> None:
    arena = arena_for(QKV, [16, 8], torch.float32)
    kernels, segments = kernels_for(arena), [RowSegment(0, 4, 0, 16)]
    x, weight = random(4, 192, dtype=torch.float32), random(160, 192, dtype=torch.float32, seed=8)
    view = arena.view(segments, 4)
    kernels.begin(view)
    with_adapter = kernels.linear(x, weight, None, QKV, 0)
    arena.tables.ranks[0] = 0
    kernels.begin(view)
    without = kernels.linear(x, weight, None, QKV, 0)
    base = x.cpu().double() @ weight.cpu().double().T
    assert distance(with_adapter, base + arena.expected(x, segments, QKV)) < 2e-6
    assert distance(without, base) < 2e-6


def test_fused_linear_repeats_bit_for_bit() -> None:
    arena = arena_for(QKV, MIXED_RANKS, torch.float32)
    num_rows, segments = num_rows_of(SKEWED), arena.segments(SKEWED)
    x, weight = random(num_rows, 192, dtype=torch.float32), random(160, 192, dtype=torch.float32, seed=8)
    kernels = kernels_for(arena)
    results = []
    for _ in range(3):
        kernels.begin(arena.view(segments, num_rows))
        results.append(kernels.linear(x, weight, None, QKV, 0))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_rows_of_a_tenant_with_infinities_leave_others_alone() -> None:
    arena = arena_for(DOWN, [8, 8, 4], torch.float32)
    lengths = [(0, 2), (1, 2), (-1, 2)]
    segments = arena.segments(lengths)
    x, weight = random(6, 1200, dtype=torch.float32), random(80, 1200, dtype=torch.float32, seed=8)
    x[0] = float("inf")
    kernels = kernels_for(arena)
    kernels.begin(arena.view(segments, 6))
    y = kernels.linear(x, weight, None, DOWN, 0)
    assert bool(y[1:].isfinite().all())


def test_a_step_padded_to_its_bucket_equals_the_step() -> None:
    arena = arena_for(GATE_UP, [16, 8, 5], torch.float32)
    segments = arena.segments([(0, 3), (1, 1), (2, 2)])
    x, weight = random(16, 96, dtype=torch.float32), random(320, 96, dtype=torch.float32, seed=8)
    kernels = kernels_for(arena)
    kernels.begin(arena.view(segments, 6))
    exact = kernels.linear(x[:6].contiguous(), weight, None, GATE_UP, 0)
    kernels.begin(arena.view(segments, 16))
    bucket = kernels.linear(x, weight, None, GATE_UP, 0)
    assert torch.equal(bucket[:6], exact)
