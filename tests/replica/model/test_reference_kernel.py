"""The plain grouped LoRA against sums written out in float64."""

import pytest
import torch

from replica.kernels.reference import SiteSegment, grouped_lora
from replica.model.batch import LoraPair

IN, OUT = 12, 20


def pair(rank: int, scale: float = 0.7, seed: int = 0) -> LoraPair:
    generator = torch.Generator().manual_seed(seed)
    return LoraPair(torch.randn(rank, IN, generator=generator), torch.randn(OUT, rank, generator=generator), scale)


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(count, OUT, generator=generator), torch.randn(count, IN, generator=generator)


def expected(y: torch.Tensor, x: torch.Tensor, segments: list[SiteSegment]) -> torch.Tensor:
    out = y.double().clone()
    for start, end, p in segments:
        for row in range(start, end):
            out[row] += p.scale * (p.b.double() @ (p.a.double() @ x[row].double()))
    return out


@pytest.mark.parametrize("rank", [1, 3, 8, 24])
@pytest.mark.parametrize(
    "bounds",
    [
        [(0, 8)],
        [(0, 1)],
        [(7, 8)],
        [(0, 3), (5, 8)],
        [(row, row + 1) for row in range(8)],
        [(0, 1), (1, 4), (4, 5), (5, 6), (7, 8)],
    ],
)
def test_each_segment_gets_its_own_delta_and_other_rows_nothing(rank: int, bounds: list[tuple[int, int]]) -> None:
    y, x = rows(8)
    segments = [(start, end, pair(rank, seed=start, scale=0.1 + start)) for start, end in bounds]
    want, before = expected(y, x, segments), y.clone()
    grouped_lora(y, x, segments)
    assert (y.double() - want).abs().max() < 1e-4
    covered = {row for start, end in bounds for row in range(start, end)}
    untouched = [row for row in range(8) if row not in covered]
    assert torch.equal(y[untouched], before[untouched])


def test_ranks_may_differ_between_segments() -> None:
    y, x = rows(3)
    segments = [(0, 1, pair(1)), (1, 2, pair(24)), (2, 3, pair(3, scale=-2.0))]
    want = expected(y, x, segments)
    grouped_lora(y, x, segments)
    assert (y.double() - want).abs().max() < 1e-4


def test_views_into_a_flat_arena_work_whatever_their_strides() -> None:
    y, x = rows(2)
    p = pair(4)
    arena = torch.zeros(1000)
    arena[7 : 7 + 4 * IN] = p.a.reshape(-1)
    arena[100 : 100 + 4 * OUT] = p.b.t().reshape(-1)
    views = LoraPair(arena[7 : 7 + 4 * IN].view(4, IN), arena[100 : 100 + 4 * OUT].view(4, OUT).t(), p.scale)
    for bounds in ([(0, 2)], [(0, 1), (1, 2)]):
        got = y.clone()
        grouped_lora(got, x, [(start, end, views) for start, end in bounds])
        assert (got.double() - expected(y, x, [(0, 2, p)])).abs().max() < 1e-4


@pytest.mark.parametrize("bounds", [[(0, 2)], [(0, 1), (1, 2)]])
def test_fp32_pair_over_bfloat16_rows_rounds_once(bounds: list[tuple[int, int]]) -> None:
    y, x = (tensor.bfloat16() for tensor in rows(2))
    p = pair(8)
    want = expected(y, x, [(0, 2, p)])
    grouped_lora(y, x, [(start, end, p) for start, end in bounds])
    assert y.dtype == torch.bfloat16
    half_ulp = want.abs() * 2**-8
    assert ((y.double() - want).abs() <= half_ulp * 1.01 + 1e-6).all()


def test_infinity_of_one_segment_stays_in_it() -> None:
    y, x = rows(3)
    broken = LoraPair(torch.full((2, IN), float("inf")), torch.ones(OUT, 2), 1.0)
    want = expected(y, x, [(1, 2, pair(2))])
    grouped_lora(y, x, [(0, 1, broken), (1, 2, pair(2))])
    assert (y[1:].double() - want[1:]).abs().max() < 1e-4
