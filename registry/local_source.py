"""A source on this machine. Links are followed only as far as their target lies under an allowed root.

The real path decides, and it is opened part by part without following links, so a link that is put in its way after
the check leads nowhere.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from registry.errors import LimitExceeded, SourceNotFound, SourceRefused
from registry.source_urls import Place

MAX_DEPTH = 2
"""An export may stand in one sub-folder."""


class LocalSource:
    """`sources.Store` over one folder or file."""

    def __init__(self, place: Place, roots: Sequence[Place]) -> None:
        self._path = Path(place.path)
        self._roots = [Path(os.path.realpath(root.path)) for root in roots]

    def names(self, max_files: int) -> list[str]:
        real = self._real(self._path)
        if not real.exists():
            raise SourceNotFound(f"{self._path} does not exist")
        if not real.is_dir():
            return [self._path.name]
        names: list[str] = []
        for name in _walk(real, "", MAX_DEPTH):
            names.append(name)
            if len(names) > max_files:
                raise LimitExceeded(f"{self._path} has more than {max_files} files, which is the limit")
        return names

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Raises SourceRefused for what leads out of the roots or is no plain file."""
        whole = self._path if self._path.name == name and not self._path.is_dir() else self._path / name
        real = self._real(whole)
        descriptor = self._open_no_links(real)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise SourceRefused(f"{whole} is not a plain file")
        with os.fdopen(descriptor, "rb") as file:
            yield file

    def _real(self, path: Path) -> Path:
        real = Path(os.path.realpath(path))
        if not any(real.is_relative_to(root) for root in self._roots):
            raise SourceRefused(f"{path} leads out of the roots that `source_roots` allows")
        return real

    def _open_no_links(self, real: Path) -> int:
        """A descriptor of the file at `real`, reached from its root through real folders only."""
        root = next(root for root in self._roots if real.is_relative_to(root))
        *folders, name = real.relative_to(root).parts or (".",)
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for folder in folders:
                inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor)
        except OSError as error:
            raise SourceRefused(f"{real} cannot be opened: {error.strerror}") from error
        finally:
            os.close(descriptor)


def _walk(folder: Path, prefix: str, depth: int) -> Iterator[str]:
    """Names of files and links, and of those in folders (never in links to folders) down to `depth` levels."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise SourceRefused(f"{folder} cannot be read: {error.strerror}") from error
    for entry in entries:
        name = f"{prefix}{entry.name}"
        if not entry.is_dir(follow_symlinks=False):
            yield name
        elif depth > 1:
            yield from _walk(folder / entry.name, f"{name}/", depth - 1)
