"""Fetches an upload from where it lies: a folder of this machine, S3, GCS, or a hub repository at a pinned commit.

Only what is under a configured root is read. Everything is copied, under the limits of an upload, so that what is
checked is what is stored.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from registry.adapter_files import KEPT_FILES, is_shard
from registry.config import RegistryConfig
from registry.errors import LimitExceeded, SourceRefused, SourceUnavailable
from registry.local_source import LocalSource
from registry.remote_source import RemoteSource
from registry.source_urls import FILE, HUB, BadUrl, Place, is_commit, parse_place
from registry.types import AdapterSource

CHUNK_BYTES = 1024 * 1024


class Store(Protocol):
    """What one source holds."""

    def names(self, max_files: int) -> list[str]:
        """Relative names of its files; one plain name when the source is a file itself. Raises SourceNotFound."""
        ...

    def open(self, name: str) -> AbstractContextManager[BinaryIO]: ...


@contextmanager
def fetched(source: AdapterSource, config: RegistryConfig) -> Iterator[Mapping[str, Path]]:
    """The source's files (relative name -> file on this machine), which are deleted at the end.

    Raises SourceRefused, SourceNotFound, SourceUnavailable and LimitExceeded.
    """
    place, roots = _allowed(source, config)
    store: Store = LocalSource(place, roots) if place.scheme == FILE else RemoteSource(place, source.revision)
    with tempfile.TemporaryDirectory(prefix="lorafleet-source-") as folder:
        yield _Copying(Path(folder), config).copy(store)


def _allowed(source: AdapterSource, config: RegistryConfig) -> tuple[Place, list[Place]]:
    """The place and the roots that allow it."""
    try:
        place = parse_place(source.url)
    except BadUrl as error:
        raise SourceRefused(f"{source.url[:200]!r} is no source: {error}") from error
    roots = [root for root in map(parse_place, config.source_roots) if place.is_under(root)]
    if not roots:
        raise SourceRefused(f"{str(place)[:200]!r} is under none of the roots that `source_roots` allows")
    if place.scheme == HUB:
        _check_hub(place, source.revision)
    elif source.revision is not None:
        raise SourceRefused("a revision belongs to a source of the hub (hf://owner/repository)")
    return place, roots


def _check_hub(place: Place, revision: str | None) -> None:
    if "@" in place.path or "/" not in place.path:
        raise SourceRefused("a source of the hub is hf://owner/repository, with its commit in `revision`")
    if not is_commit(revision):
        raise SourceRefused("a source of the hub needs `revision`, a full commit hash of 40 hexadecimal digits")


class _Copying:
    """Copies what matters of a source into a folder, counting bytes and time."""

    def __init__(self, folder: Path, config: RegistryConfig) -> None:
        self._folder = folder
        self._config = config
        self._num_bytes = 0
        self._ends_at_s = time.monotonic() + config.source_timeout_s

    def copy(self, store: Store) -> dict[str, Path]:
        names = store.names(self._config.max_files)
        wanted = names if len(names) == 1 else [name for name in names if _matters(name)]
        files = {name: self._folder / str(number) for number, name in enumerate(wanted)}
        for name, path in files.items():
            with store.open(name) as source, path.open("wb") as target:
                self._copy(source, target)
        return files

    def _copy(self, source: BinaryIO, target: BinaryIO) -> None:
        while chunk := source.read(CHUNK_BYTES):
            self._num_bytes += len(chunk)
            if self._num_bytes > self._config.max_unpacked_bytes:
                raise LimitExceeded(f"the source holds more than {self._config.max_unpacked_bytes} bytes")
            if time.monotonic() > self._ends_at_s:
                raise SourceUnavailable(f"the source took longer than {self._config.source_timeout_s:g} s")
            target.write(chunk)


def _matters(name: str) -> bool:
    base_name = name.rpartition("/")[2]
    return base_name in KEPT_FILES or is_shard(base_name)
