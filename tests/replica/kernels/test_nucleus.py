"""The nucleus kernel against its definition: interpreted on a CPU, compiled where there is a device."""

import os

import pytest
import torch

from replica.filters import floors_by_bits, total

IS_ON_DEVICE = torch.cuda.is_available()
pytest.importorskip("triton")
if not IS_ON_DEVICE and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from replica.kernels.nucleus import nucleus_floors  # noqa: E402

DEVICE = torch.device("cuda" if IS_ON_DEVICE else "cpu")
TOP_PS = (1e-6, 0.3, 0.9, 0.999, 1.0 - 1e-9)
ROUNDING = 1e-6
"""A nucleus may end a token early or late when its border is this close to the goal, as a part of the whole."""


def weights_of(num_columns: int, scale: float, steps: float = 0.0) -> torch.Tensor:
    """A row for each of TOP_PS, the likeliest at 1; with `steps` many weights are equal."""
    generator = torch.Generator().manual_seed(num_columns)
    scores = torch.randn(len(TOP_PS), num_columns, generator=generator) * scale
    if steps:
        scores = (scores / steps).round() * steps
    return (scores - scores.amax(dim=-1, keepdim=True)).exp().to(DEVICE)


@pytest.mark.parametrize(
    ("num_columns", "scale", "steps"), [(3, 1.0, 0.0), (512, 0.0, 0.0), (1000, 3.0, 1.0), (8193, 2.0, 0.0)]
)
def test_the_floor_splits_each_row_at_its_goal(num_columns: int, scale: float, steps: float) -> None:
    weights = weights_of(num_columns, scale, steps)
    goals = total(weights) * torch.tensor(TOP_PS, dtype=torch.float64, device=DEVICE)
    floors = nucleus_floors(weights, goals)[:, None]
    slack = ROUNDING * total(weights)
    inside = weights >= floors
    lightest = torch.where(inside, weights, torch.inf).amin(dim=-1, keepdim=True)
    assert (torch.where(weights > lightest, weights, 0.0).double().sum(dim=-1) < goals + slack).all()
    assert (torch.where(inside, weights, 0.0).double().sum(dim=-1) >= goals - slack).all()


def test_the_floor_is_that_of_the_plain_form() -> None:
    weights = weights_of(600, 2.0)
    goals = total(weights) * torch.tensor([0.1, 0.5, 0.7, 0.9, 0.95], dtype=torch.float64, device=DEVICE)
    assert torch.equal(nucleus_floors(weights, goals), floors_by_bits(weights, goals))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    weights = weights_of(1000, 2.0)
    goals = total(weights) * 0.9
    together = nucleus_floors(weights, goals)
    weights[0] = torch.nan
    assert torch.equal(nucleus_floors(weights, goals)[1:], together[1:])
    assert torch.equal(nucleus_floors(weights[2:3], goals[2:3]), together[2:3])
