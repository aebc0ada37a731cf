"""What every test on a GPU needs."""

import pytest
import torch


@pytest.fixture(autouse=True)
def forget_compiled() -> None:
    """Each test compiles bases of its own; a process that serves compiles one."""
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
