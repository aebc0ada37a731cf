"""Multipart uploads streamed to temporary files, under limits, without holding a file in memory."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from router.config import UploadLimits
from router.errors import BadRequest, BodyTimeout, BodyTooLarge

WRITE_BYTES = 1024 * 1024
"""The body is parsed and written in pieces of about this size, on a thread."""


@dataclass(frozen=True, slots=True)
class Upload:
    """What a client sent: files by their own name, and form fields."""

    files: Mapping[str, Path]
    fields: Mapping[str, str]


@asynccontextmanager
async def receive_upload(request: Request, limits: UploadLimits) -> AsyncIterator[Upload]:
    """The upload's files, which are deleted at the end; raises BadRequest and BodyTooLarge."""
    boundary = _boundary(request)
    _check_declared_length(request, limits.max_upload_bytes)
    with (
        tempfile.TemporaryDirectory(prefix="lorafleet-upload-") as folder,
        _Parts(Path(folder), boundary, limits) as parts,
    ):
        await _receive_in_time(request, parts, limits)
        yield parts.finish()


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise BadRequest("an upload is multipart/form-data with one part a file", "content-type")
    return bytes(options[b"boundary"])


def _check_declared_length(request: Request, max_bytes: int) -> None:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise BodyTooLarge(f"the upload has {int(declared)} bytes; allowed: at most {max_bytes}")


async def _receive_in_time(request: Request, parts: "_Parts", limits: UploadLimits) -> None:
    """Raises BodyTimeout for a client that stops sending, or takes too long in all."""
    try:
        async with asyncio.timeout(limits.upload_timeout_s) as whole, asyncio.timeout(limits.idle_timeout_s) as idle:
            loop = asyncio.get_running_loop()
            await _receive(
                request, parts, limits.max_upload_bytes, lambda: idle.reschedule(loop.time() + limits.idle_timeout_s)
            )
    except TimeoutError as error:
        if not (whole.expired() or idle.expired()):
            raise
        raise BodyTimeout("the upload did not arrive in time") from error


async def _receive(request: Request, parts: "_Parts", max_bytes: int, arrived: Callable[[], None]) -> None:
    buffer, size = bytearray(), 0
    async for data in request.stream():
        arrived()
        size += len(data)
        if size > max_bytes:
            raise BodyTooLarge(f"the upload has more than {max_bytes} bytes, which is the limit")
        buffer += data
        if len(buffer) >= WRITE_BYTES:
            await asyncio.to_thread(parts.write, bytes(buffer))
            buffer.clear()
    parts.write(bytes(buffer))


class _Parts:
    """Takes the body and writes each file part to a numbered file of `folder`; names never touch the disk."""

    def __init__(self, folder: Path, boundary: bytes, limits: UploadLimits) -> None:
        self._folder = folder
        self._limits = limits
        self._files: dict[str, Path] = {}
        self._fields: dict[str, str] = {}
        self._open = ExitStack()
        self._file: BinaryIO | None = None
        self._value = bytearray()
        self._header = (bytearray(), bytearray())
        self._headers: dict[bytes, bytes] = {}
        self._field_name = ""
        self._complete = False
        self._parser = MultipartParser(boundary, {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._part_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        })  # fmt: skip

    def __enter__(self) -> "_Parts":
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def write(self, data: bytes) -> None:
        """Parse the next piece of the body; raises BadRequest for what is not multipart."""
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise BadRequest(f"the multipart body is malformed: {error}") from error

    def finish(self) -> Upload:
        """What was received; raises BadRequest when the last part or every file is missing."""
        if not self._complete:
            raise BadRequest("the multipart body ends before its last boundary")
        if not self._files:
            raise BadRequest("the upload has no file; send adapter_config.json and adapter_model.safetensors", "files")
        return Upload(self._files, self._fields)

    def _begin_part(self) -> None:
        self._headers = {}
        self._value.clear()

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        name.clear()
        value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._field_name = options.get(b"name", b"").decode("utf-8", "replace")
        if b"filename" in options:
            self._open_file(options[b"filename"].decode("utf-8", "replace"))
        elif len(self._fields) >= self._limits.max_fields:
            raise BadRequest(f"the upload has more than {self._limits.max_fields} form fields")

    def _open_file(self, name: str) -> None:
        if name in ("", ".", "..") or any(char in name for char in "/\\\0"):
            raise BadRequest(f"the file name {name[:80]!r} is not a plain name", "files", "invalid_name")
        if name in self._files:
            raise BadRequest(f"the upload has two files named {name[:80]!r}", "files")
        if len(self._files) >= self._limits.max_files:
            raise BadRequest(f"the upload has more than {self._limits.max_files} files", "files")
        path = self._folder / str(len(self._files))
        self._files[name] = path
        self._file = self._open.enter_context(path.open("wb"))

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._file is not None:
            self._file.write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > self._limits.max_field_bytes:
            raise BadRequest(f"the form field has more than {self._limits.max_field_bytes} bytes", self._field_name)

    def _end_part(self) -> None:
        if self._file is None:
            self._fields[self._field_name] = self._value.decode("utf-8", "replace")
        else:
            self._file.close()
            self._file = None

    def _end(self) -> None:
        self._complete = True
