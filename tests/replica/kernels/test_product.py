"""The base product of few rows against float64: interpreted on a CPU, compiled where there is a device."""

import pytest
import torch

pytest.importorskip("triton")

from replica.kernels.grouped_lora import LoraKernels
from replica.kernels.tuning import MOST_BY_ROWS, PRODUCT_ROWS, ProductConfig
from tests.replica.kernels.adapters_in_arena import Arena
from tests.replica.kernels.on_any_device import DEVICE, HALF, NUMPY_WARNINGS, distance, random

pytestmark = NUMPY_WARNINGS

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
FEW_PROCESSORS = 4


@pytest.fixture
def kernels() -> LoraKernels:
    """On a device so small that narrow projections are worth a product of our own."""
    arena = Arena([[8]], 192, [80], torch.float32, DEVICE)
    found = LoraKernels(arena.memory, arena.tables)
    found._num_processors = FEW_PROCESSORS
    return found


@pytest.mark.parametrize(
    ("num_out", "in_features", "dtype"),
    [(70, 600, HALF), (128, 256, torch.float32), (128, 100, HALF), (200, 300, HALF), (600, 200, torch.float32)],
)
@pytest.mark.parametrize("num_rows", [1, 16, 17, 40, 64, 65, 80, 81, 96, 97, 128])
def test_a_product_equals_float64(
    kernels: LoraKernels, num_rows: int, num_out: int, in_features: int, dtype: torch.dtype
) -> None:
    x, weight = random(num_rows, in_features, dtype=dtype, seed=1), random(num_out, in_features, dtype=dtype, seed=2)
    expected = x.cpu().double() @ weight.cpu().double().T
    assert distance(kernels.product(x, weight, None), expected) < TOLERANCE[dtype]
    bias = random(num_out, dtype=dtype, seed=3) * 10
    assert distance(kernels.product(x, weight, bias), expected + bias.cpu().double()) < TOLERANCE[dtype]
    assert not kernels._turns.any(), "each block's two programs are as at the start"


@pytest.mark.parametrize("rows", [rows for rows in PRODUCT_ROWS if sum(rows) > MOST_BY_ROWS])
def test_two_halves_are_the_same_every_time(kernels: LoraKernels, rows: tuple[int, int]) -> None:
    size = 1024 if DEVICE.type == "cuda" else 192
    x, weight = random(sum(rows), size, dtype=HALF, seed=1), random(size, size, dtype=HALF, seed=2)
    cut = ProductConfig(rows[0], 64, 64, 3, 4, more=rows[1], parts=2)
    kernels._turns = torch.zeros(16, dtype=torch.int32, device=DEVICE)
    first = kernels.product(x, weight, None, cut)
    assert distance(first, x.cpu().double() @ weight.cpu().double().T) < TOLERANCE[HALF]
    for _ in range(20 if DEVICE.type == "cuda" else 1):
        assert torch.equal(kernels.product(x, weight, None, cut), first)


def test_more_blocks_than_there_are_turns_for_are_an_error(kernels: LoraKernels) -> None:
    x, weight = random(4, 64, dtype=HALF, seed=1), random(1088, 64, dtype=HALF, seed=2)
    kernels._turns = torch.zeros(16, dtype=torch.int32, device=DEVICE)
    with pytest.raises(AssertionError, match="17 blocks"):
        kernels.product(x, weight, None, ProductConfig(128, 64, 64, 2, 4, parts=2))
