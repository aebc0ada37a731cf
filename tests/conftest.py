"""What every test shares: how tests spread over two workers, and the real base when it is there."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from tests.tiny_fleet import TinyFleet

ROOT = Path(__file__).parent.parent

if not Path("/dev/nvidia0").exists():
    # Triton reads this when it is imported: without a device its kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# How long an example takes on a machine that does other things besides says nothing about the code.
hypothesis.settings.register_profile("lorafleet", deadline=None)
hypothesis.settings.load_profile("lorafleet")
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


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """A file's tests stay together on one worker, and all tests of the real fleet on one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "fleet" if "pytest.mark.serve" in (ROOT / file).read_text() else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)
