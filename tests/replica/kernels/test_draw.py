"""The drawing kernel against the plain one: interpreted on a CPU, compiled where there is a device."""

import os

import pytest
import torch

from replica.sampler import pick

IS_ON_DEVICE = torch.cuda.is_available()
pytest.importorskip("triton")
if not IS_ON_DEVICE and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from replica.kernels.draw import draw  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
"""Triton's interpreter runs on numpy, which warns of what the interpreter does."""

DEVICE = torch.device("cuda" if IS_ON_DEVICE else "cpu")
NUM_ROWS = 8


def scores_of(num_columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_columns)
    return (torch.randn(NUM_ROWS, num_columns, generator=generator) * 3).to(DEVICE)


def settings_of(temperature: float = 1.0, last: float = 1 - 2.0**-53) -> torch.Tensor:
    """Numbers from 0 to `last`."""
    numbers = torch.linspace(0, 1, NUM_ROWS, dtype=torch.float64)
    numbers[-1] = last
    return torch.stack([numbers, torch.full_like(numbers, temperature)]).to(DEVICE)


@pytest.mark.parametrize("num_columns", [3, 512, 1000, 8200])
def test_tokens_are_those_of_the_plain_form(num_columns: int) -> None:
    scores, settings = scores_of(num_columns), settings_of(0.7, last=0.999)
    best = scores.amax(dim=-1)
    weights = ((scores - best[:, None]) / 0.7).exp()
    expected = pick(weights, settings[0][:, None])
    assert torch.equal(draw(scores, best, settings, are_scores=True), expected)
    assert torch.equal(draw(weights, best, settings, are_scores=False), expected)


@pytest.mark.parametrize("place", [0, 511, 8191, 8192, 8199])
def test_only_a_token_with_weight_is_drawn(place: int) -> None:
    weights = torch.zeros(NUM_ROWS, 8200, device=DEVICE)
    weights[:, place] = 1.0
    found = draw(weights, weights.amax(dim=-1), settings_of(), are_scores=False)
    assert found.tolist() == [place] * NUM_ROWS


def test_a_broken_neighbour_changes_nothing() -> None:
    scores = scores_of(600)
    best = scores.amax(dim=-1)
    expected = draw(scores, best, settings_of(), are_scores=True)
    scores[3], best[3] = torch.nan, torch.nan
    found = draw(scores, best, settings_of(), are_scores=True)
    kept = [row for row in range(NUM_ROWS) if row != 3]
    assert torch.equal(found[kept], expected[kept])
    assert 0 <= int(found[3]) < 600
