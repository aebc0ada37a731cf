"""What every test shares: how tests spread over two workers, and the real base when it is there."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.tiny_fleet import TinyFleet

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


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny_models import make_model

    return make_model(tmp_path_factory.mktemp("base") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_fleet(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[TinyFleet]":
    """The one real fleet of a test run; tests that kill its members wait until it is whole again."""
    from tests.tiny_fleet import make_adapters, running_tiny_fleet

    with running_tiny_fleet(tiny_base, make_adapters(tiny_base, tmp_path_factory.mktemp("adapters"))) as fleet:
        yield fleet


def pytest_itemcollected(item: pytest.Item) -> None:
    """Under pytest-xdist a file's tests stay together, and all tests of the real fleet run one after another."""
    is_fleet = item.get_closest_marker("serve") is not None
    item.add_marker(pytest.mark.xdist_group("fleet" if is_fleet else item.path.as_posix()))
