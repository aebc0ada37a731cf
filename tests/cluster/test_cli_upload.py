"""Bytes counted while an adapter is uploaded, and what is shown of them."""

from io import BytesIO
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from cluster.console.client import ControlClient
from cluster.console.errors import Refused
from cluster.console.folder import CountingReader, find_adapter, upload_parts
from cluster.console.render import Output
from tests.cluster.cli_harness import adapter_folder
from tests.cluster.fake_control import FakeFleet, replica_record, serving

NUM_BYTES = 1_000_000


def test_counting_reader_counts_a_chunk_when_the_next_is_asked_for() -> None:
    sent: list[int] = []
    reader = CountingReader(BytesIO(b"abcde"), sent.append)
    assert reader.read(3) == b"abc"
    assert sent == []
    assert reader.read(3) == b"de"
    assert sent == [3]
    assert reader.read(3) == b""
    assert sent == [3, 2]
    reader.read(3)
    assert sent == [3, 2]


def test_upload_counts_every_byte_once_in_many_chunks(tmp_path: Path) -> None:
    fleet = FakeFleet(replicas=[replica_record(0)])
    folder = find_adapter(adapter_folder(tmp_path, b"w" * NUM_BYTES))
    sent: list[int] = []
    with serving(fleet) as url, ControlClient(url) as client, upload_parts(folder, sent.append) as parts:
        client.push("legal", parts, activate=False)
    assert sum(sent) == folder.num_bytes == NUM_BYTES + 2
    assert len(sent) > 10
    assert len(fleet.uploads[0]["adapter_model.safetensors"]) == NUM_BYTES


def test_upload_announces_its_length(tmp_path: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert int(request.headers["content-length"]) == len(request.content) > NUM_BYTES
        return httpx.Response(503, json={"error": {"message": "later", "code": "not_ready"}})

    folder = find_adapter(adapter_folder(tmp_path, b"w" * NUM_BYTES))
    client = ControlClient("http://host", transport=httpx.MockTransport(answer))
    with upload_parts(folder, lambda num_bytes: None) as parts, pytest.raises(Refused, match="later"):
        client.push("legal", parts, activate=True)


def test_files_are_closed_when_the_server_refuses(tmp_path: Path) -> None:
    folder = find_adapter(adapter_folder(tmp_path))
    with pytest.raises(RuntimeError), upload_parts(folder, lambda num: None) as parts:
        raise RuntimeError
    with pytest.raises(ValueError, match="closed file"):
        parts[0][1][1].read(1)


def terminal_output() -> Output:
    output = Output()
    output.err = Console(file=_Terminal(), force_terminal=True, width=100)
    return output


class _Terminal(BytesIO):
    """Keeps what a terminal would have shown."""

    def write(self, text: str) -> int:  # type: ignore[override]
        return super().write(text.encode())


def test_progress_bar_on_a_terminal_shows_bytes() -> None:
    output = terminal_output()
    with output.uploading("uploading legal", 2_000_000) as advance:
        advance(1_000_000)
    shown = output.err.file.getvalue().decode()  # type: ignore[attr-defined]
    assert "uploading legal" in shown
    assert "1.0/2.0 MB" in shown


def test_waiting_on_a_terminal_is_a_spinner_elsewhere_a_line_per_change(capsys: pytest.CaptureFixture[str]) -> None:
    output = terminal_output()
    with output.waiting() as show:
        show("staging on replica-0")
    with Output().waiting() as show:
        for message in ("a", "a", "b"):
            show(message)
    assert capsys.readouterr().err == "a\nb\n"
