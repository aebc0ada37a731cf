"""From an adapter's file to its image, with several threads: read, compare with the manifest, cast, check the values.

A tensor's bytes go straight from the file to their place. Knows nothing of where images are kept.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch

from registry.types import AdapterManifest, TensorInfo
from replica.adapters.files import BytesChanged
from replica.adapters.host_memory import HostBlock
from replica.adapters.tensor_file import (
    BadTensorFile,
    TensorFile,
    bytes_of,
    cast_into,
    cast_rows_into,
    dtype_of,
    is_finite,
    read_ahead,
)
from replica.adapters.weights import AdapterImage, ImageLayout, row_of_b
from replica.errors import AdapterUnavailable

_PIECE_BYTES = 1 << 20
_AHEAD_BYTES = 4 << 20
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor: bytes [start, end) of the file go to elements [first, last) of the image, a row every `stride`.

    One of several `blocks` lies in the file without the zeros beside its diagonal.
    """

    info: TensorInfo
    blocks: int
    start: int
    end: int
    first: int
    last: int
    stride: int

    @property
    def has_zeros(self) -> bool:
        """Whether the image has zeros between the values of the file."""
        return self.info.shape[1] != self.stride

    def lies_as_in(self, data: torch.Tensor) -> bool:
        """Whether the bytes of the file are those of the image."""
        return not self.has_zeros and dtype_of(self.info) is data.dtype


class ImageReader:
    """Reads adapters, each with `num_threads` threads that all reads share; 1 is the calling thread alone."""

    def __init__(self, num_threads: int = 1) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "adapter-piece") if num_threads > 1 else None

    def read(
        self, path: Path, manifest: AdapterManifest, layout: ImageLayout, block: HostBlock | None = None
    ) -> AdapterImage:
        """Read a safetensors file into `block`, or into ordinary memory without one.

        Raises BytesChanged when the file is not what the manifest says, and AdapterUnavailable when it cannot be
        read or a value is not finite in the image's dtype (a float32 beyond 65504 overflows in float16).
        """
        if block is None:
            block = HostBlock(torch.empty(layout.num_bytes, dtype=torch.uint8))
        data = block.data.view(layout.dtype)
        spent = _Spent()
        try:
            with TensorFile(path) as file:
                self._read(file, manifest, layout, data, spent)
        except BadTensorFile as error:
            raise BytesChanged(
                f"adapter {manifest.digest}: its file is not the one that was staged: {error}"
            ) from error
        except OSError as error:
            raise AdapterUnavailable(f"adapter {manifest.digest}: its file cannot be read: {error}") from error
        return AdapterImage(manifest.digest, layout, data, block, spent.convert_share)

    def expect(self, path: Path) -> None:
        """Have the disk begin with a file that will be read soon, in the order of its bytes.

        Does not wait, and does nothing with one thread, nor for a file that is gone.
        """
        if self._threads is None:
            return
        with suppress(FileNotFoundError):
            for start in range(0, path.stat().st_size, _AHEAD_BYTES):
                self._threads.submit(read_ahead, path, start, _AHEAD_BYTES)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True)

    def _read(
        self, file: TensorFile, manifest: AdapterManifest, layout: ImageLayout, data: torch.Tensor, spent: "_Spent"
    ) -> None:
        parts = _parts(file, manifest, layout)
        _clear_gaps(parts, data)
        found = self._run(lambda piece: _read_piece(file, piece, data, spent), _pieces(parts, _PIECE_BYTES))
        bad = next((key for key in found if key is not None), None)
        if bad is not None:
            message = f"{bad} has values that are not finite in {data.dtype}"
            raise AdapterUnavailable(f"adapter {manifest.digest}: {message}")

    def _run(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Apply `function` to all items. When it raises, nothing of it runs on any more."""
        if self._threads is None or len(items) == 1:
            return [function(item) for item in items]
        futures = [self._threads.submit(function, item) for item in items]
        wait(futures)
        return [future.result() for future in futures]


def _parts(file: TensorFile, manifest: AdapterManifest, layout: ImageLayout) -> list[_Part]:
    """All tensors of an adapter, in the order of the file."""
    modules = {module.path: module for module in manifest.modules}
    parts = []
    for place in layout.places:
        module = modules[place.path]
        (a, a_row), (b, b_row) = (place.a_offset, place.in_features), (place.b_offset, row_of_b(place.rank))
        a_end, b_end = a + place.rank * a_row, b + place.out_features * b_row
        parts.append(_Part(module.a, module.a_blocks, *file.place(module.a), a, a_end, a_row))
        parts.append(_Part(module.b, module.b_blocks, *file.place(module.b), b, b_end, b_row))
    return sorted(parts, key=lambda part: part.start)


def _pieces(parts: Iterable[_Part], size: int) -> list[list[_Part]]:
    """Cut into runs of about `size` bytes."""
    pieces: list[list[_Part]] = [[]]
    num_bytes = 0
    for part in parts:
        if num_bytes >= size:
            pieces.append([])
            num_bytes = 0
        pieces[-1].append(part)
        num_bytes += part.end - part.start
    return pieces


def _clear_gaps(parts: Iterable[_Part], data: torch.Tensor) -> None:
    """The padding between tensors holds what was in this memory before."""
    ordered = sorted((part.first, part.last) for part in parts)
    for (_, end), (start, _) in pairwise([*ordered, (data.numel(), data.numel())]):
        if start > end:
            data[end:start] = 0


class _Spent:
    """Seconds of all threads that read one adapter, by what they did. Appending is safe from any of them."""

    def __init__(self) -> None:
        self.read_s: list[float] = []
        self.convert_s: list[float] = []

    @property
    def convert_share(self) -> float:
        convert_s = sum(self.convert_s)
        return convert_s / max(convert_s + sum(self.read_s), 1e-9)


def _read_piece(file: TensorFile, parts: Sequence[_Part], data: torch.Tensor, spent: _Spent) -> str | None:
    """Bring tensors to their places, some by way of scratch memory, and compare their digests.

    Returns the key of one with values that are not finite in the dtype of `data`. A tensor is looked at while the
    processor has it at hand, and with few calls: all threads share the interpreter's lock.
    """
    started_s, converted_s, bad = time.perf_counter(), 0.0, None
    image, size = bytes_of(data).data, data.element_size()
    places = [image[part.first * size : part.last * size] for part in parts]
    targets = [
        place if part.lies_as_in(data) else bytes_of(torch.empty(part.end - part.start, dtype=torch.uint8)).data
        for part, place in zip(parts, places, strict=True)
    ]
    for first, last in _runs(parts):
        file.read_into(parts[first].start, targets[first:last])
    for part, place, target in zip(parts, places, targets, strict=True):
        if hashlib.sha256(target).hexdigest() != part.info.sha256:
            raise BadTensorFile(f"{part.info.key} has other bytes than were uploaded")
        before_s = time.perf_counter()
        if not part.lies_as_in(data):
            source = torch.frombuffer(target, dtype=dtype_of(part.info))
            _convert(part, source, data[part.first : part.last])
        if not is_finite(place, data.dtype):
            bad = bad or part.info.key
        converted_s += time.perf_counter() - before_s
    spent.read_s.append(time.perf_counter() - started_s - converted_s)
    spent.convert_s.append(converted_s)
    return bad


def _convert(part: _Part, source: torch.Tensor, target: torch.Tensor) -> None:
    """Cast a tensor to its place; of a block-diagonal one, block i of the rows goes to block i of the columns."""
    if not part.has_zeros:
        cast_into(target, source)
        return
    num_rows, num_columns = part.info.shape[0] // part.blocks, part.info.shape[1]
    image = target.zero_().view(part.blocks, num_rows, part.stride)
    for block, rows in enumerate(source.view(part.blocks, num_rows, num_columns)):
        first = block * num_columns
        cast_rows_into(image[block, :, first : first + num_columns], rows)


def _runs(parts: Sequence[_Part]) -> Iterable[tuple[int, int]]:
    """Index ranges [first, last) of parts that are neighbours in the file."""
    first = 0
    for index in range(1, len(parts) + 1):
        if index == len(parts) or parts[index].start != parts[index - 1].end:
            yield first, index
            first = index
