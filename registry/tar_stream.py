"""Reads a tar, plain or gzipped, from front to back in bounded memory.

POSIX.1-2001 (ustar with pax headers) and GNU long names. Python's own reader takes extended headers whole into memory,
whatever size they claim; here they have a limit.
"""

import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, Protocol

from registry.archive_members import ArchiveError, Member
from registry.errors import LimitExceeded

BLOCK = 512
READ_BYTES = 64 * 1024
MAX_EXTENDED_BYTES = 64 * 1024
GZIP_WINDOW = 31
"""zlib's code for a gzip wrapper around a 32 KiB window."""

REGULAR, FOLDER = (b"0", b"\0", b"7"), b"5"
PAX, PAX_GLOBAL, GNU_NAME, GNU_LINK = b"x", b"g", b"L", b"K"
REFUSALS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a named pipe",
    b"S": "a sparse file",
}


class Source(Protocol):
    def read(self, size: int, /) -> bytes: ...


def tar_members(file: BinaryIO, max_bytes: int, *, gzipped: bool) -> Iterator[Member]:
    """The members in order. Raises ArchiveError, and LimitExceeded once more than `max_bytes` have come out of it,
    headers and padding included."""
    source: Source = Gunzip(file) if gzipped else file
    reader = _Reader(source, max_bytes)
    extended = _Extended()
    while (header := reader.block()) is not None:
        if not any(header):
            reader.drain()
            return
        member = _member(header, reader, extended)
        if member is None:
            continue
        extended = _Extended()
        yield member
        reader.skip_rest()


class Gunzip:
    """A gzip stream, a bounded piece at a time. One gzip member only; zeros may follow it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._inflate = zlib.decompressobj(GZIP_WINDOW)
        self._pending = b""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; empty at the end. Raises ArchiveError."""
        while not self._inflate.eof:
            piece = self._pending or self._file.read(READ_BYTES)
            if not piece:
                raise ArchiveError("the gzip stream is truncated")
            try:
                out = self._inflate.decompress(piece, size)
            except zlib.error as error:
                raise ArchiveError(f"the gzip stream is damaged: {error}") from error
            self._pending = self._inflate.unconsumed_tail
            if out:
                return out
        if any(self._inflate.unused_data):
            raise ArchiveError("something follows the gzip stream")
        return b""


class _Reader:
    """Takes blocks and data from the source and counts every byte."""

    def __init__(self, source: Source, max_bytes: int) -> None:
        self._source = source
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._left = 0
        """Bytes of the current member, padding included, that have not been read."""

    def block(self) -> bytes | None:
        """The next header; None at the end of the stream."""
        data = self._exactly(BLOCK, may_end=True)
        return data or None

    def begin(self, size: int) -> None:
        self._left = -(-size // BLOCK) * BLOCK

    def chunks(self, size: int, chunk_bytes: int) -> Iterator[bytes]:
        """The current member's `size` bytes."""
        while size:
            chunk = self._some(min(size, chunk_bytes))
            size -= len(chunk)
            self._left -= len(chunk)
            yield chunk

    def whole(self, size: int) -> bytes:
        """The current member's bytes at once, for extended headers."""
        if size > MAX_EXTENDED_BYTES:
            raise ArchiveError(f"an extended header of {size} bytes; at most {MAX_EXTENDED_BYTES} are read")
        return b"".join(self.chunks(size, MAX_EXTENDED_BYTES))

    def drain(self) -> None:
        """Read to the end, so that a gzip stream is checked to its last byte; only zeros may be left."""
        while (header := self.block()) is not None:
            if any(header):
                raise ArchiveError("something follows the end of the tar")

    def skip_rest(self) -> None:
        for _ in self.chunks(self._left, READ_BYTES):
            pass

    def _exactly(self, size: int, *, may_end: bool = False) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._source.read(size - len(data))
            if not piece:
                if may_end and not data:
                    return b""
                raise ArchiveError("the tar is truncated")
            self._count(len(piece))
            data += piece
        return data

    def _some(self, size: int) -> bytes:
        piece = self._source.read(size)
        if not piece:
            raise ArchiveError("the tar is truncated")
        self._count(len(piece))
        return piece

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self._max_bytes:
            raise LimitExceeded(f"the archive unpacks to more than {self._max_bytes} bytes, which is the limit")


@dataclass
class _Extended:
    """What headers before a member say of it."""

    name: str | None = None
    fields: dict[str, str] = field(default_factory=dict)


def _member(header: bytes, reader: _Reader, extended: _Extended) -> Member | None:
    """The member that the header begins; None when it only extends the next one."""
    _check_sum(header)
    kind, size = header[156:157], _number(header[124:136], "size")
    if kind in (PAX, PAX_GLOBAL, GNU_NAME, GNU_LINK):
        reader.begin(size)
        data = reader.whole(size)
        reader.skip_rest()
        if kind == PAX:
            extended.fields.update(_pax_fields(data))
        elif kind == GNU_NAME:
            extended.name = _text(data.rstrip(b"\0"))
        return None
    name = extended.fields.get("path") or extended.name or _name(header)
    size = _pax_size(extended.fields, size)
    refusal = None if kind in (*REGULAR, FOLDER) else REFUSALS.get(kind, f"of the unknown kind {kind!r}")
    if any(key.startswith("GNU.sparse.") for key in extended.fields):
        refusal = REFUSALS[b"S"]
    is_folder = kind == FOLDER
    size = size if kind in (*REGULAR, b"S") else 0
    reader.begin(size)
    return Member(name, is_folder, refusal, partial(reader.chunks, size))


def _check_sum(header: bytes) -> None:
    blanked = header[:148] + b" " * 8 + header[156:]
    if sum(blanked) != _number(header[148:156], "checksum"):
        raise ArchiveError("a tar header's checksum is wrong")


def _number(data: bytes, what: str) -> int:
    """Octal digits, or GNU's base 256 when the first bit is set."""
    if data[0] & 0x80:
        value = int.from_bytes(data, "big", signed=True) if data[0] == 0xFF else int.from_bytes(data[1:], "big")
    else:
        digits = data.split(b"\0", 1)[0].strip(b" ") or b"0"
        if not digits.isdigit() or b"8" in digits or b"9" in digits:
            raise ArchiveError(f"a tar header's {what} is no octal number")
        value = int(digits, 8)
    if not 0 <= value < 1 << 62:
        raise ArchiveError(f"a tar header's {what} is out of range")
    return value


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return _text(prefix + b"/" + name if prefix else name)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _pax_size(fields: dict[str, str], size: int) -> int:
    text = fields.get("size")
    if text is None:
        return size
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ArchiveError("a pax header's size is no number")
    return int(text)


def _pax_fields(data: bytes) -> dict[str, str]:
    """Records of the form `<length> <key>=<value>` and a line feed."""
    fields: dict[str, str] = {}
    stream = io.BytesIO(data)
    while stream.tell() < len(data):
        start = stream.tell()
        digits = data[start : start + 8].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        record = data[start + len(digits) + 1 : start + length]
        key, equals, value = record.partition(b"=")
        if length <= len(digits) + 1 or start + length > len(data) or not equals or not value.endswith(b"\n"):
            raise ArchiveError("a pax header is malformed")
        fields[_text(key)] = _text(value[:-1])
        stream.seek(start + length)
    return fields
