"""What every test shares: how tests spread over two workers, and the real base when it is there."""

import os
from pathlib import Path

import pytest

GGUF = Path("~/.cache/lorafleet/base/SmolLM2-135M-Instruct.Q4_1.gguf").expanduser()


@pytest.fixture(scope="session")
def real_base() -> Path:
    """The real base as a folder of safetensors: LORAFLEET_BASE (GGUF, folder or hub id) or the cached GGUF file."""
    from replica.config import ModelConfig
    from replica.model.base_files import resolve_base

    base = os.environ.get("LORAFLEET_BASE") or (str(GGUF) if GGUF.is_file() else None)
    if base is None:
        pytest.skip(f"no base: set LORAFLEET_BASE, or run `python examples/fetch_base.py` to get {GGUF}")
    return resolve_base(ModelConfig(base=base, device="cpu"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under pytest-xdist a file's tests stay together, and all tests of real fleets run one after another."""
    for item in items:
        is_fleet = item.get_closest_marker("serve") is not None
        item.add_marker(pytest.mark.xdist_group("fleet" if is_fleet else item.path.as_posix()))
