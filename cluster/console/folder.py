"""An adapter's folder or archive on this machine: found, looked over, and opened for an upload that counts its bytes.

The server judges the content; here only what needs no parsing is said early.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from cluster.console.client import UploadPart
from cluster.console.errors import Refused

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
OPTIONAL_FILES = (
    "added_tokens.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "lorafleet_base.json",
)
"""Sent along because the server judges or remarks on them."""
ARCHIVE_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz")
LFS_MARK = b"version https://git-lfs"

CountSent = Callable[[int], None]


@dataclass(frozen=True)
class AdapterFolder:
    """What will be sent: files by their name, and their bytes in all."""

    path: Path
    files: tuple[Path, ...]
    num_bytes: int


def find_adapter(path: Path) -> AdapterFolder:
    """The adapter in `path`, or in its only sub-folder that has one, or the archive that `path` is.

    Raises Refused naming what is missing.
    """
    if not path.exists():
        raise _unusable(f"{path} does not exist")
    if path.is_file() and path.name.lower().endswith(ARCHIVE_SUFFIXES):
        return AdapterFolder(path, (path,), path.stat().st_size)
    if not path.is_dir():
        raise _unusable(f"{path} is neither a folder nor an archive", hint=f"name the folder that holds {CONFIG_FILE}")
    home = _home(path)
    _check_weights(home)
    optional = [home / name for name in OPTIONAL_FILES if (home / name).is_file()]
    files = (home / CONFIG_FILE, home / WEIGHTS_FILE, *optional)
    return AdapterFolder(home, files, sum(file.stat().st_size for file in files))


@contextmanager
def upload_parts(folder: AdapterFolder, on_sent: CountSent) -> Iterator[list[UploadPart]]:
    """Open the files as multipart parts; `on_sent(n)` is called with the bytes handed to the connection."""
    with ExitStack() as stack:
        parts: list[UploadPart] = []
        for file in folder.files:
            source = stack.enter_context(file.open("rb"))
            reader = cast(BinaryIO, CountingReader(source, on_sent))
            parts.append(("files", (file.name, reader, "application/octet-stream")))
        yield parts


class CountingReader:
    """A file that reports what is read from it. A chunk counts as sent once the next one is asked for."""

    def __init__(self, source: BinaryIO, on_sent: CountSent) -> None:
        self._source = source
        self._on_sent = on_sent
        self._in_flight = 0

    def read(self, size: int = -1) -> bytes:
        self._settle()
        chunk = self._source.read(size)
        self._in_flight = len(chunk)
        return chunk

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._source.seek(offset, whence)

    def tell(self) -> int:
        return self._source.tell()

    def fileno(self) -> int:
        return self._source.fileno()

    def _settle(self) -> None:
        if self._in_flight:
            self._on_sent(self._in_flight)
        self._in_flight = 0


def _home(path: Path) -> Path:
    if (path / CONFIG_FILE).is_file():
        return path
    nested = sorted(child for child in path.iterdir() if (child / CONFIG_FILE).is_file())
    if len(nested) == 1:
        return nested[0]
    if nested:
        names = ", ".join(child.name for child in nested)
        raise _unusable(f"{path} holds {len(nested)} adapters ({names})", hint="name one of these folders")
    raise _unusable(f"{path} has no {CONFIG_FILE}", hint="save it with PEFT: model.save_pretrained(folder)")


def _check_weights(home: Path) -> None:
    weights = home / WEIGHTS_FILE
    if not weights.is_file():
        if (home / PICKLE_FILE).is_file():
            hint = "save it again with model.save_pretrained(folder, safe_serialization=True)"
            raise _unusable(f"{home} has {PICKLE_FILE}, a pickle, which is not accepted", hint=hint)
        raise _unusable(f"{home} has no {WEIGHTS_FILE}")
    with weights.open("rb") as file:
        start = file.read(len(LFS_MARK))
    if not start:
        raise _unusable(f"{weights} is empty")
    if start == LFS_MARK:
        raise _unusable(f"{weights} is a Git LFS pointer, not the weights", hint="run: git lfs pull")


def _unusable(message: str, hint: str | None = None) -> Refused:
    return Refused(message, code="unusable_folder", hint=hint)
