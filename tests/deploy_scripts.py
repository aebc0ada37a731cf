"""The Python scripts of `deploy/`, which have no suffix, as modules."""

from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

DEPLOY = Path(__file__).parent.parent / "deploy"


def load_script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script's names, without running its `main` or leaving compiled files beside it."""
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    module = ModuleType(name.replace("-", "_"))
    SourceFileLoader(module.__name__, str(DEPLOY / name)).exec_module(module)
    return module
