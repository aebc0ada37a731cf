"""Reads a zip member by member through Python's zipfile, after a look at the directory that bounds its size.

zipfile takes the whole central directory into memory before anybody can count its entries.
"""

import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

from registry.archive_members import ArchiveError, Member
from registry.errors import LimitExceeded

END_RECORD = struct.Struct("<4s4H2LH")
END_MAGIC = b"PK\x05\x06"
ZIP64_LOCATOR = struct.Struct("<4sLQL")
ZIP64_LOCATOR_MAGIC = b"PK\x06\x07"
ZIP64_END = struct.Struct("<4sQ2H2L4Q")
ZIP64_END_MAGIC = b"PK\x06\x06"
MAX_COMMENT_BYTES = 65535
MAX_ENTRY_BYTES = 46 + 1024
"""A generous share of the central directory for one entry: its fixed part, name and extra fields."""

METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
ENCRYPTED = 0x1
BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,
    RuntimeError,
    EOFError,
    OSError,
    ValueError,
    OverflowError,
    LookupError,
    struct.error,
)
"""What zipfile raises for bytes that are not what they claim."""


def zip_members(file: BinaryIO, max_entries: int) -> Iterator[Member]:
    """The members in the directory's order. Raises ArchiveError, and LimitExceeded for too large a directory."""
    _check_directory(file, max_entries)
    try:
        archive = zipfile.ZipFile(file)
    except BROKEN as error:
        raise ArchiveError(f"not a sound zip: {error}") from error
    for info in archive.infolist():
        yield Member(info.filename, info.filename.endswith("/"), _refusal(info), partial(_chunks, archive, info))


def _refusal(info: zipfile.ZipInfo) -> str | None:
    mode = info.external_attr >> 16
    kind = stat.S_IFMT(mode)
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    if kind and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return "neither a file nor a folder"
    if info.flag_bits & ENCRYPTED:
        return "encrypted"
    return None if info.compress_type in METHODS else "compressed in a way that is not read (use deflate)"


def _chunks(archive: zipfile.ZipFile, info: zipfile.ZipInfo, size: int) -> Iterator[bytes]:
    try:
        with archive.open(info) as member:
            while chunk := member.read(size):
                yield chunk
    except BROKEN as error:
        raise ArchiveError(f"the entry {info.filename[:80]!r} is damaged: {error}") from error


def _check_directory(file: BinaryIO, max_entries: int) -> None:
    """Refuse a directory that could hold far more than `max_entries`."""
    num_entries, num_bytes = _directory(file)
    if num_entries > max_entries:
        raise LimitExceeded(f"the archive has {num_entries} entries; at most {max_entries} are allowed")
    if num_bytes > max_entries * MAX_ENTRY_BYTES:
        raise LimitExceeded(f"the archive's directory takes {num_bytes} bytes, too many for {max_entries} entries")
    file.seek(0)


def _directory(file: BinaryIO) -> tuple[int, int]:
    """Entries and bytes of the central directory, from the record at the end that zipfile reads too."""
    end = file.seek(0, 2)
    start = max(0, end - END_RECORD.size - MAX_COMMENT_BYTES)
    file.seek(start)
    tail = file.read(end - start)
    at = len(tail) - END_RECORD.size
    if at < 0 or not (tail.startswith(END_MAGIC, at) and tail.endswith(b"\0\0")):
        at = tail.rfind(END_MAGIC)
    if at < 0 or at + END_RECORD.size > len(tail):
        raise ArchiveError("not a sound zip: it has no end record, as when it is truncated")
    record = END_RECORD.unpack_from(tail, at)
    return _zip64_directory(file, start + at) or (record[4], record[5])


def _zip64_directory(file: BinaryIO, end_record_at: int) -> tuple[int, int] | None:
    locator_at = end_record_at - ZIP64_LOCATOR.size
    if locator_at < ZIP64_END.size:
        return None
    file.seek(locator_at)
    if ZIP64_LOCATOR.unpack(file.read(ZIP64_LOCATOR.size))[0] != ZIP64_LOCATOR_MAGIC:
        return None
    file.seek(locator_at - ZIP64_END.size)
    record = ZIP64_END.unpack(file.read(ZIP64_END.size))
    return (record[7], record[8]) if record[0] == ZIP64_END_MAGIC else None
