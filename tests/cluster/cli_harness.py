"""Runs `lorafleet` command lines in this process and keeps what they printed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main


@dataclass
class Ran:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """Runs command lines against the fake server and keeps everything that was printed."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self._capsys = capsys
        self.printed = ""

    def __call__(self, *arguments: str) -> Ran:
        status = main(["--url", self.url, *arguments])
        out, err = self._capsys.readouterr()
        self.printed += out + err
        return Ran(status, out, err)


def adapter_folder(path: Path, weights: bytes = b"weights") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(weights)
    return path
