"""The Triton kernels against float64, on skewed segments: interpreted on a CPU, compiled where there is a device."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from replica.kernels.grouped_lora import LoraKernels
from replica.kernels.groups import GroupShape
from replica.kernels.rows import MAX_DECODE_ROWS, RowSegment, RowsView
from replica.kernels.tuning import ExpandConfig, shrink_config
from tests.replica.kernels.adapters_in_arena import Arena
from tests.replica.kernels.on_any_device import DEVICE, HALF, NUMPY_WARNINGS, distance, random

pytestmark = NUMPY_WARNINGS

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}

QKV = GroupShape((0, 1, 2), (96, 32, 32), 192)
GATE_UP = GroupShape((0, 1), (160, 160), 96)
DOWN = GroupShape((0,), (80,), 1200)
GROUPS = [QKV, GATE_UP, DOWN]

SKEWED = [(2, 1), (-1, 2), (0, 9), (1, 1), (3, 3), (-1, 1), (4, 20)]
MIXED_RANKS = [16, 8, 5, 64, 1]


@pytest.fixture(autouse=True)
def new_memory_is_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels leave unwritten shows."""
    empty = torch.empty

    def poisoned(*shape: int, **options: Any) -> torch.Tensor:
        found = empty(*shape, **options)
        return found.fill_(float("nan") if found.is_floating_point() else 1 << 30)

    monkeypatch.setattr("replica.kernels.grouped_lora.torch.empty", poisoned)


def arena_for(group: GroupShape, ranks: list[int], dtype: torch.dtype, seed: int = 0) -> Arena:
    """One adapter a rank, on all sites of the group; the last one only on its first site."""
    table = [[rank] * len(group.sites) for rank in ranks]
    table[-1] = [ranks[-1]] + [0] * (len(group.sites) - 1)
    return Arena(table, group.in_features, list(group.out_features), dtype, DEVICE, seed)


def run(
    arena: Arena, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: GroupShape, view: RowsView
) -> torch.Tensor:
    """What a step of so many rows does."""
    kernels = LoraKernels(arena.memory, arena.tables)
    bound = kernels.bind(view)
    if view.capacity > MAX_DECODE_ROWS:
        return kernels.summed(x, weight, bias, group, bound)
    y, delta = kernels.linear(x, weight, bias, group, bound)
    return y + delta


def delta_of(arena: Arena, x: torch.Tensor, group: GroupShape, view: RowsView) -> torch.Tensor:
    """What is added to a base product of zeros."""
    weight = torch.zeros(group.num_out, group.in_features, dtype=x.dtype, device=x.device)
    return run(arena, x, weight, None, group, view)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.cpu().double() @ weight.cpu().double().T
    return y if bias is None else y + bias.cpu().double()


def num_rows_of(lengths: list[tuple[int, int]]) -> int:
    return sum(length for _, length in lengths)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("group", GROUPS, ids=["qkv", "gate_up", "down"])
@pytest.mark.parametrize("num_base_rows", [0, 512], ids=["decode", "prompt"])
def test_linear_equals_float64_on_skewed_segments(group: GroupShape, dtype: torch.dtype, num_base_rows: int) -> None:
    arena = arena_for(group, MIXED_RANKS, dtype)
    lengths = [(-1, num_base_rows), *SKEWED, (0, num_base_rows // 6)]
    num_rows, segments = num_rows_of(lengths), arena.segments(lengths)
    x = random(num_rows, group.in_features, dtype=dtype)
    weight = random(group.num_out, group.in_features, dtype=dtype, seed=8) / group.in_features**0.5
    bias = random(group.num_out, dtype=dtype, seed=9)

    y = run(arena, x, weight, bias, group, arena.view(segments, num_rows))

    base = product(x, weight, bias)
    assert distance(y, base + arena.expected(x, segments, group)) < TOLERANCE[dtype]
    base_only = slice(num_base_rows + 1, num_base_rows + 3)
    assert distance(y[base_only], base[base_only]) < TOLERANCE[dtype]


@pytest.mark.parametrize("group", [QKV, DOWN], ids=["qkv", "down"])
def test_linear_with_every_row_another_tenant(group: GroupShape) -> None:
    ranks = [16, 8, 24, 3, 64] * 2
    arena = arena_for(group, ranks, torch.float32)
    segments = arena.segments([(slot, 1) for slot in range(len(ranks))])
    x = random(len(ranks), group.in_features, dtype=torch.float32)
    weight = random(group.num_out, group.in_features, dtype=torch.float32, seed=8)
    y = run(arena, x, weight, None, group, arena.view(segments, len(ranks)))
    assert distance(y, product(x, weight, None) + arena.expected(x, segments, group)) < 2e-6


@pytest.mark.parametrize("num_rows", [1, 16, 37, 128])
def test_linear_without_adapters_is_the_base_product(num_rows: int) -> None:
    arena = arena_for(DOWN, [8, 8], torch.float32)
    x, weight = random(num_rows, 1200, dtype=torch.float32), random(80, 1200, dtype=torch.float32, seed=8)
    y = run(arena, x, weight, None, DOWN, arena.view([], num_rows))
    assert distance(y, product(x, weight, None)) < 2e-6


def test_a_weight_that_is_stored_the_other_way_round_serves_too() -> None:
    arena = arena_for(DOWN, [8, 8], torch.float32)
    segments = arena.segments([(0, 2), (1, 1)])
    x, weight = random(3, 1200, dtype=torch.float32), random(1200, 80, dtype=torch.float32, seed=8).t()
    y = run(arena, x, weight, None, DOWN, arena.view(segments, 3))
    assert distance(y, product(x, weight, None) + arena.expected(x, segments, DOWN)) < 2e-6


@pytest.mark.parametrize("rank", [1, 7, 8, 17, 40, 100, 256])
@pytest.mark.parametrize("many", [3, 21, 510], ids=["few rows", "many rows", "prompt"])
def test_delta_of_any_rank(rank: int, many: int) -> None:
    arena = arena_for(DOWN, [rank, 3], torch.float32)
    segments = arena.segments([(0, 1), (1, 2), (0, many)])
    x = random(3 + many, DOWN.in_features, dtype=torch.float32)
    delta = delta_of(arena, x, DOWN, arena.view(segments, 3 + many))
    assert distance(delta, arena.expected(x, segments, DOWN)) < 2e-6


@pytest.mark.parametrize("run", [2, 5])
def test_a_prompt_s_columns_in_longer_runs_are_the_same(run: int) -> None:
    arena = arena_for(QKV, [16, 40, 100], torch.float32)
    lengths = [(0, 130), (-1, 200), (1, 33), (2, 170)]
    num_rows, segments = num_rows_of(lengths), arena.segments(lengths)
    x = random(num_rows, QKV.in_features, dtype=torch.float32)
    kernels = LoraKernels(arena.memory, arena.tables)
    bound = kernels.bind(arena.view(segments, num_rows))
    one, several = torch.empty(2, num_rows, QKV.num_out, device=DEVICE)
    t = kernels.shrink(x, one, QKV, bound, shrink_config(bound.rows, 3, QKV.in_features, 4))
    for d, each in ((one, 1), (several, run)):
        kernels.expand(t, d, QKV, bound, ExpandConfig(16, 4, 4, run=each))
    assert torch.equal(several, one)
    assert distance(several, arena.expected(x, segments, QKV)) < 2e-6


@pytest.mark.parametrize("num_base_rows", [0, 512], ids=["decode", "prompt"])
def test_room_for_larger_ranks_changes_no_bit_of_others(num_base_rows: int) -> None:
    arena = arena_for(QKV, [16, 8, 5], HALF)
    segments = arena.segments([(0, 3), (1, 1), (2, 9), (-1, num_base_rows)])
    x = random(13 + num_base_rows, QKV.in_features, dtype=HALF)
    view = arena.view(segments, len(x))
    found = [
        delta_of(arena, x, QKV, RowsView(view.words, view.capacity, view.max_tiles, room)) for room in (16, 24, 128)
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(("first", "many"), [([64, 8, 20], 3), ([64, 8, 20], 21), ([64, 8, 20], 510), ([0, 64, 0], 5)])
def test_delta_of_an_adapter_whose_ranks_differ_between_projections(first: list[int], many: int) -> None:
    arena = Arena([first, [3, 40, 16]], 192, [96, 32, 32], torch.float32, DEVICE)
    segments = arena.segments([(0, 1), (1, 2), (0, many)])
    x = random(3 + many, QKV.in_features, dtype=torch.float32)
    delta = delta_of(arena, x, QKV, arena.view(segments, 3 + many))
    assert distance(delta, arena.expected(x, segments, QKV)) < 2e-6


def test_delta_follows_tables_that_change_between_steps() -> None:
    arena = arena_for(QKV, [16, 8], torch.float32)
    view = arena.view([RowSegment(0, 4, 0, 16)], 4)
    x = random(4, 192, dtype=torch.float32)
    assert bool((delta_of(arena, x, QKV, view) != 0).any())
    arena.tables.ranks[0] = 0
    assert bool((delta_of(arena, x, QKV, view) == 0).all())


def test_delta_repeats_bit_for_bit_and_does_not_depend_on_neighbours() -> None:
    arena = arena_for(QKV, MIXED_RANKS, torch.float32)
    num_rows, segments = num_rows_of(SKEWED), arena.segments(SKEWED)
    x = random(num_rows, 192, dtype=torch.float32)
    whole = delta_of(arena, x, QKV, arena.view(segments, num_rows))
    assert torch.equal(whole, delta_of(arena, x, QKV, arena.view(segments, num_rows)))
    alone = arena.view([segment for segment in segments if segment.slot == 0], num_rows)
    assert torch.equal(whole[3:12], delta_of(arena, x, QKV, RowsView(alone.words, num_rows, alone.max_tiles, 64))[3:12])


def test_rows_of_a_tenant_with_infinities_leave_others_alone() -> None:
    arena = arena_for(DOWN, [8, 8, 4], torch.float32)
    x = random(6, 1200, dtype=torch.float32)
    x[0] = float("inf")
    view = arena.view(arena.segments([(0, 2), (1, 2), (-1, 2)]), 6)
    delta = delta_of(arena, x, DOWN, view)
    assert bool(delta[1:].isfinite().all())


def test_a_step_padded_to_its_bucket_equals_the_step() -> None:
    arena = arena_for(GATE_UP, [16, 8, 5], torch.float32)
    segments = arena.segments([(0, 3), (1, 1), (2, 2)])
    x = random(16, 96, dtype=torch.float32)
    exact = delta_of(arena, x[:6].contiguous(), GATE_UP, arena.view(segments, 6))
    bucket = delta_of(arena, x, GATE_UP, RowsView(arena.view(segments, 16).words, 16, 16, 16))
    assert torch.equal(bucket[:6], exact)
    assert bool((bucket[6:] == 0).all())
