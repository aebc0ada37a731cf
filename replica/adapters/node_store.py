"""The adapters on a node's disk, shared by the replicas (processes) there. Knows nothing of tensors or slots.

Layout of the folder: `manifests/<digest>.json` (small, kept until forgotten), `bytes/<digest>.safetensors` (as
uploaded; at most `max_bytes` of them, the least recently used leave first) and `partial/` (fetches in progress). A
file's modification time is the time of its last use.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from registry.types import AdapterManifest
from replica.adapters.files import (
    BytesChanged,
    lock_file,
    publish,
    read_lock,
    remove_unread,
    sha256_of,
    sync_file,
    write_whole,
)
from replica.errors import AdapterTooLarge, AdapterUnavailable, ReplicaError, UnknownAdapter

_SUFFIX = ".safetensors"
_MAX_RACES = 100


class BlobSource(Protocol):
    """Where blobs come from: a shared folder, an object store, or the registry."""

    def fetch(self, sha256: str, to: Path) -> None:
        """Write the blob's bytes to `to`; blocks. Raises OSError or AdapterUnavailable."""


class FolderSource:
    """Copies blobs out of a local folder; `locate` maps a sha256 to the blob's path."""

    def __init__(self, locate: Callable[[str], Path]) -> None:
        self._locate = locate

    def fetch(self, sha256: str, to: Path) -> None:
        shutil.copyfile(self._locate(sha256), to)


class NodeStore:
    """Digest-named adapter files under a byte budget; any thread of any process of the node may use it.

    `max_bytes` bounds the bytes in place; a fetch in progress comes on top until it is checked and takes its place.
    """

    def __init__(self, folder: Path, source: BlobSource, max_bytes: int) -> None:
        self._folder = folder.expanduser()
        self._source = source
        self.max_bytes = max_bytes
        self.num_evictions = 0
        self.num_withdrawn = 0
        self.num_damaged = 0
        self._manifests = self._folder / "manifests"
        self._bytes = self._folder / "bytes"
        self._partial = self._folder / "partial"
        self._bound = self._folder / "bytes.bound"
        """Written under the admission lock only."""
        for place in (self._manifests, self._bytes, self._partial):
            place.mkdir(parents=True, exist_ok=True)
        self._sweep()

    def __repr__(self) -> str:
        return f"NodeStore({str(self._folder)!r}, {len(self.staged())} staged, {self.num_bytes} bytes)"

    def stage(self, manifest: AdapterManifest) -> Path:
        """Bring a version's bytes onto the node, checked against their sha256; blocks, and may be repeated.

        Raises AdapterTooLarge when the store can never hold it, AdapterUnavailable when no good bytes are to be had.
        """
        path = self._file(manifest.digest)
        if _is_damaged(path, manifest.blob_sha256):
            self.num_damaged += 1
            remove_unread(path, wait=True)
        self._ensure(manifest)
        self.remember(manifest)
        return path

    def remember(self, manifest: AdapterManifest) -> None:
        """Keep only the manifest: the bytes come when they are first opened."""
        write_whole(self._manifest_file(manifest.digest), manifest.model_dump_json().encode())

    def knows(self, digest: str) -> bool:
        """Whether the manifest is here; costs one look at the folder and no reading."""
        return _is_digest(digest) and self._manifest_file(digest).exists()

    def holds(self, digest: str) -> bool:
        """Whether the bytes are here at this moment."""
        return _is_digest(digest) and self._file(digest).exists()

    def path(self, digest: str) -> Path:
        """Where the bytes are, or would be."""
        return self._file(digest)

    def manifest(self, digest: str) -> AdapterManifest:
        """Read a manifest. Raises UnknownAdapter when it was never staged, AdapterUnavailable when it is damaged."""
        try:
            manifest = AdapterManifest.model_validate_json(self._manifest_file(digest).read_bytes())
        except FileNotFoundError:
            raise UnknownAdapter(f"adapter {digest} was never staged on this node") from None
        except ValidationError as error:
            raise AdapterUnavailable(f"adapter {digest}: its manifest is damaged") from error
        if manifest.digest != digest:
            raise AdapterUnavailable(f"adapter {digest}: its manifest names {manifest.digest}")
        return manifest

    def open(self, digest: str) -> Path:
        """The file with the bytes, fetched again if they were evicted; it may leave unless read under `reading`.

        Raises UnknownAdapter, AdapterUnavailable.
        """
        return self._ensure(self.manifest(digest))

    @contextmanager
    def reading(self, manifest: AdapterManifest) -> Iterator[Path]:
        """The file with the bytes, kept from eviction until the block ends.

        The reader compares what it reads with the digests in the manifest, which costs one pass and not two. If it
        raises BytesChanged, the file is thrown away and AdapterUnavailable raised; the next attempt fetches it again.
        Do not stage or open another adapter inside the block: that may wait for this very reader.
        """
        with ExitStack() as locks:
            path = self._lock_for_reading(manifest, locks)
            try:
                yield path
            except BytesChanged as error:
                path.unlink(missing_ok=True)
                self.num_damaged += 1
                message = f"adapter {manifest.digest}: its bytes on this node changed; they were thrown away ({error})"
                raise AdapterUnavailable(message) from error

    def staged(self) -> tuple[str, ...]:
        """The digests whose manifest and bytes are both here, sorted."""
        with_bytes = {name.removesuffix(_SUFFIX) for name in os.listdir(self._bytes)}
        return tuple(sorted(with_bytes.intersection(self.known())))

    def known(self) -> tuple[str, ...]:
        """The digests whose manifest is here, sorted."""
        names = (name.removesuffix(".json") for name in os.listdir(self._manifests))
        return tuple(sorted(name for name in names if _is_digest(name)))

    def forget(self, digest: str) -> None:
        """Drop manifest and bytes; bytes that are being read lose their manifest now and leave with the oldest."""
        self._manifest_file(digest).unlink(missing_ok=True)
        was_here = self._file(digest).exists()
        self.num_withdrawn += remove_unread(self._file(digest)) and was_here

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapters in place."""
        return sum(size for _, size, _ in self._oldest_first())

    def _ensure(self, manifest: AdapterManifest) -> Path:
        """Single flight: the one that gets the lock first fetches, the others find the file in place."""
        path = self._file(manifest.digest)
        if not _touch(path):
            with lock_file(self._partial / f"{manifest.digest}.lock"):
                if not _touch(path):
                    self._fetch(manifest, path)
        return path

    def _fetch(self, manifest: AdapterManifest, path: Path) -> None:
        if manifest.blob_bytes > self.max_bytes:
            raise AdapterTooLarge(
                f"adapter {manifest.digest} is {manifest.blob_bytes} bytes; node_store_bytes is {self.max_bytes}"
            )
        part = self._partial / manifest.digest
        try:
            self._source.fetch(manifest.blob_sha256, part)
            _check_bytes(part, manifest)
            sync_file(part)
            self._admit(part, path)
        except ReplicaError:
            raise
        except Exception as error:
            raise AdapterUnavailable(f"adapter {manifest.digest}: its bytes could not be fetched: {error}") from error
        finally:
            part.unlink(missing_ok=True)

    def _admit(self, part: Path, path: Path) -> None:
        """Old adapters leave only now, when the new one's good bytes are on the disk."""
        with lock_file(self._folder / "admission.lock"):
            self._make_room(part.stat().st_size)
            publish(part, path)

    def _make_room(self, num_bytes: int) -> None:
        """Evict what it takes. While there is plenty of room the bound tells, and nobody looks at every file."""
        bound = self._read_bound()
        if bound is None or bound + num_bytes > self.max_bytes:
            self._evict(num_bytes)
            bound = self.num_bytes
        self._bound.write_text(str(bound + num_bytes))

    def _read_bound(self) -> int | None:
        """At most so many bytes are in place; None when nobody knows. Files that left only make it too high."""
        try:
            return int(self._bound.read_text())
        except (FileNotFoundError, ValueError):
            return None

    def _evict(self, num_bytes: int) -> None:
        """Drop the least recently used files that nobody reads; if that is not enough, wait for readers to end."""
        for wait in (False, True):
            files = self._oldest_first()
            excess = sum(size for _, size, _ in files) + num_bytes - self.max_bytes
            for _, size, path in files:
                if excess <= 0:
                    return
                if remove_unread(path, wait):
                    excess -= size
                    self.num_evictions += 1

    def _oldest_first(self) -> list[tuple[int, int, Path]]:
        """(time of last use in ns, size in bytes, path) of every file in place."""
        found = []
        for path in self._bytes.iterdir():
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            found.append((status.st_mtime_ns, status.st_size, path))
        return sorted(found)

    def _sweep(self) -> None:
        """Remove what fetches that died with their process left behind; fetches in progress hold their lock. The bound
        goes too: who starts looks for itself.
        """
        self._bound.unlink(missing_ok=True)
        for lock in self._partial.glob("*.lock"):
            if remove_unread(lock):
                (self._partial / lock.stem).unlink(missing_ok=True)

    def _lock_for_reading(self, manifest: AdapterManifest, locks: ExitStack) -> Path:
        for _ in range(_MAX_RACES):
            path = self._ensure(manifest)
            try:
                locks.enter_context(read_lock(path))
            except FileNotFoundError:
                continue  # evicted between the fetch and the lock
            return path
        raise AdapterUnavailable(f"adapter {manifest.digest}: node_store_bytes is too small for what is in use")

    def _file(self, digest: str) -> Path:
        return self._bytes / f"{_checked(digest)}{_SUFFIX}"

    def _manifest_file(self, digest: str) -> Path:
        return self._manifests / f"{_checked(digest)}.json"


def _touch(path: Path) -> bool:
    """Mark a file as used now; false when it is not there."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _is_damaged(path: Path, sha256: str) -> bool:
    """A file that is not there is not: another thread may be putting it there."""
    try:
        return sha256_of(path) != sha256
    except FileNotFoundError:
        return False


def _check_bytes(part: Path, manifest: AdapterManifest) -> None:
    size = part.stat().st_size
    if size != manifest.blob_bytes:
        raise AdapterUnavailable(f"adapter {manifest.digest}: got {size} bytes, expected {manifest.blob_bytes}")
    found = sha256_of(part)
    if found != manifest.blob_sha256:
        raise AdapterUnavailable(f"adapter {manifest.digest}: got bytes of sha256 {found}, not {manifest.blob_sha256}")


def _is_digest(name: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{64}", name) is not None


def _checked(digest: str) -> str:
    """A digest becomes part of a path, so anything else is refused."""
    if not _is_digest(digest):
        raise UnknownAdapter(f"{digest!r} is not an adapter digest")
    return digest
