"""Files that several processes share: locks that end with their holder, and writes that appear whole or not at all.

Knows nothing of adapters. Locks are `flock`s: they hold between threads (each takes its own descriptor) as well as
between processes, and the kernel drops them when a process dies.
"""

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replica.errors import AdapterUnavailable


class BytesChanged(AdapterUnavailable):
    """A file holds other bytes than were published there."""


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold the exclusive lock named by `path`; waits for it. The file is made for the lock and removed with it."""
    descriptor = _open_locked(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def read_lock(path: Path) -> Iterator[None]:
    """Keep an existing file from `remove_unread` while it is read. Raises FileNotFoundError."""
    descriptor = _open_locked(path, os.O_RDONLY, fcntl.LOCK_SH)
    try:
        yield
    finally:
        os.close(descriptor)


def remove_unread(path: Path, wait: bool = False) -> bool:
    """Unlink a file unless someone holds its `read_lock`; with `wait`, wait for them. Returns whether it is gone."""
    try:
        descriptor = _open_locked(path, os.O_RDONLY, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    path.unlink(missing_ok=True)
    os.close(descriptor)
    return True


def _open_locked(path: Path, flags: int, operation: int) -> int:
    """Open and lock the file that `path` names *now*: one that was replaced or unlinked meanwhile is tried again."""
    while True:
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, operation)
            if _is_open_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_open_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def publish(part: Path, path: Path) -> None:
    """Move a finished file of the same file system into place; after this it survives a crash. `part` is synced."""
    os.replace(part, path)
    _sync(path.parent)


def sync_file(path: Path) -> None:
    """Make the bytes of a file durable."""
    _sync(path)


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file so that readers see the old content or the new, never a part."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        publish(Path(name), path)
    finally:
        Path(name).unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
