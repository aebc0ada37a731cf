"""What tests of kernels share that are interpreted on a CPU and compiled where there is a device."""

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter has no bfloat16

NUMPY_WARNINGS = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
"""Triton's interpreter runs on numpy, which warns of what the interpreter does."""


def random(*shape: int, dtype: torch.dtype, seed: int = 7) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, of `found` from a float64 tensor on the CPU."""
    return float((found.cpu().double() - expected).norm() / expected.norm())
