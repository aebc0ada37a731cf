"""Content-addressed bytes in a folder or an object store. A blob's name is its sha256; blobs never change.

On a local folder a blob is written aside, synced to disk and renamed, so what exists is whole and survives a crash.
"""

import contextlib
import hashlib
import io
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import fsspec

from registry.errors import BlobNotFound

CHUNK_BYTES = 4 * 1024 * 1024
ABANDONED_AFTER_S = 24 * 3600.0
_SHA256 = re.compile(r"[0-9a-f]{64}")


class StoredBlob(NamedTuple):
    """A blob as the store lists it; `modified_at_s` is None where the store does not say."""

    sha256: str
    num_bytes: int
    modified_at_s: float | None


class BlobStore:
    """Blobs under `url`: a folder, or what fsspec understands (`s3://bucket/prefix`). Safe for many processes."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = str(root).rstrip("/")
        self._is_local = "file" in _protocols(self._fs)
        if self._is_local:
            Path(self._root).mkdir(parents=True, exist_ok=True)
            _remove_abandoned(Path(self._root))

    def __repr__(self) -> str:
        return f"BlobStore({self._url!r})"

    def put_file(self, path: Path) -> str:
        """Store the file's bytes and return their sha256. Storing what is there already changes nothing."""
        with path.open("rb") as source:
            if self._is_local:
                return self._put_local(source)
            sha256 = hashlib.file_digest(source, "sha256").hexdigest()
            if not self._has(sha256, path.stat().st_size):
                self._fs.put_file(str(path), self._path(sha256))
        return sha256

    def put_bytes(self, data: bytes) -> str:
        """Store `data` and return its sha256."""
        sha256 = hashlib.sha256(data).hexdigest()
        if self._has(sha256, len(data)):
            return sha256
        if self._is_local:
            return self._put_local(io.BytesIO(data))
        self._fs.pipe_file(self._path(sha256), data)
        return sha256

    def put_stream(self, pieces: Iterable[bytes], sha256: str) -> None:
        """Store what the pieces make together. Raises ValueError, and stores nothing, when that is not `sha256`."""
        path = self._path(sha256)
        aside = f"{self._root}/tmp-{uuid.uuid4().hex}"
        digest = hashlib.sha256()
        try:
            with self._fs.open(aside, "wb") as target:
                for piece in pieces:
                    digest.update(piece)
                    target.write(piece)
            if digest.hexdigest() != sha256:
                raise ValueError(f"the bytes of blob {sha256[:12]} do not match it")
            self._publish(aside, path)
        finally:
            if self._fs.exists(aside):
                self._fs.rm_file(aside)

    def _publish(self, aside: str, path: str) -> None:
        """Give whole bytes their name; on a local folder they are on the disk first."""
        if not self._is_local:
            self._fs.mv(aside, path)
            return
        with Path(aside).open("rb") as written:
            os.fsync(written.fileno())
        Path(path).parent.mkdir(exist_ok=True)
        Path(aside).replace(path)
        _sync_folder(Path(path).parent)

    def read(self, sha256: str, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset`; fewer at the end. Raises BlobNotFound."""
        if offset < 0 or length < 0:
            raise ValueError(f"offset {offset} and length {length} must not be negative")
        size = self.size(sha256)
        end = min(size, offset + length)
        if offset >= end:
            return b""
        return cast(bytes, self._fs.cat_file(self._path(sha256), start=offset, end=end))

    def size(self, sha256: str) -> int:
        """Number of bytes. Raises BlobNotFound."""
        try:
            return int(self._fs.info(self._path(sha256))["size"])
        except FileNotFoundError as error:
            raise BlobNotFound(f"there is no blob {sha256}") from error

    def exists(self, sha256: str) -> bool:
        try:
            self.size(sha256)
        except BlobNotFound:
            return False
        return True

    def delete(self, sha256: str) -> None:
        """Remove a blob; one that is not there is left alone. The caller sees to it that nothing needs it."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(sha256))

    def list(self) -> Iterator[StoredBlob]:
        """Every blob there is, in no order."""
        self._fs.invalidate_cache()
        for path, info in self._fs.find(self._root, detail=True).items():
            sha256 = str(path).rpartition("/")[2]
            if _SHA256.fullmatch(sha256):
                yield StoredBlob(sha256, int(info["size"]), _modified_at_s(info))

    def _has(self, sha256: str, num_bytes: int) -> bool:
        try:
            return self.size(sha256) == num_bytes
        except BlobNotFound:
            return False

    def _path(self, sha256: str) -> str:
        if not _SHA256.fullmatch(sha256):
            raise BlobNotFound(f"{sha256[:80]!r} is not a sha256 in lower-case hexadecimal")
        return f"{self._root}/{sha256[:2]}/{sha256}"

    def _put_local(self, source: IO[bytes]) -> str:
        aside = Path(self._root) / f"tmp-{uuid.uuid4().hex}"
        try:
            with aside.open("xb") as target:
                sha256 = _copy(source, target)
                target.flush()
                os.fsync(target.fileno())
            final = Path(self._path(sha256))
            final.parent.mkdir(exist_ok=True)
            aside.replace(final)
            _sync_folder(final.parent)
            _sync_folder(Path(self._root))
        finally:
            aside.unlink(missing_ok=True)
        return sha256


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    sha = hashlib.sha256()
    while chunk := source.read(CHUNK_BYTES):
        sha.update(chunk)
        target.write(chunk)
    return sha.hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(root: Path) -> None:
    """Remove what a crash left half written. A write in progress elsewhere is much younger."""
    for aside in root.glob("tmp-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - aside.stat().st_mtime > ABANDONED_AFTER_S:
                aside.unlink()


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _modified_at_s(info: Mapping[str, Any]) -> float | None:
    """When a blob was last written, under whichever name its file system gives it."""
    for name in ("mtime", "LastModified", "updated", "last_modified", "created"):
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None
