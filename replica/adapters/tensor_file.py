"""Reading of a safetensors file into memory that is there already, in few and large steps.

Load threads share the interpreter's lock with the step thread, so an adapter of 400 tensors must not cost thousands
of calls. Format: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON header, data).
"""

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from registry.types import TensorInfo

Bytes = npt.NDArray[np.uint8]

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HEADER_BYTES = 100_000_000
_MAX_TARGETS = 1024
"""IOV_MAX of Linux: how many places one call of preadv fills."""
_CAST_ELEMENTS = 32768
"""Torch runs operations of up to this many elements on the calling thread, so a load takes no core from the step."""
_CHECK_ELEMENTS = 1 << 18
_INFINITY: dict[torch.dtype, tuple[npt.DTypeLike, npt.DTypeLike, int, int]] = {
    torch.float32: (np.int32, np.uint32, 0x7F80_0000, 0xFF80_0000),
    torch.float16: (np.int16, np.uint16, 0x7C00, 0xFC00),
    torch.bfloat16: (np.int16, np.uint16, 0x7F80, 0xFF80),
}


class BadTensorFile(Exception):
    """The file is not what its manifest promises."""


class TensorFile:
    """An open file whose tensors are found by key. Raises BadTensorFile, and OSError when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._size = os.fstat(self._descriptor).st_size
            self._start, self._header = self._read_header()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def place(self, info: TensorInfo) -> tuple[int, int]:
        """Where in the file a tensor's bytes are, [start, end): little-endian and row by row."""
        entry = self._header.get(info.key)
        if entry is None:
            raise BadTensorFile(f"it has no tensor {info.key}")
        start, end = entry["data_offsets"]
        size = math.prod(info.shape) * dtype_of(info).itemsize
        if entry["dtype"] != info.dtype or tuple(entry["shape"]) != info.shape or end - start != size:
            raise BadTensorFile(f"{info.key} is {entry}, its manifest says {info.dtype} of {info.shape}")
        if start < 0 or self._start + end > self._size:
            raise BadTensorFile(f"it ends before {info.key} does")
        return self._start + start, self._start + end

    def read_into(self, start: int, targets: Sequence[memoryview]) -> None:
        """Fill `targets`, one after the other, with the bytes from `start` on; the interpreter's lock is free."""
        for first in range(0, len(targets), _MAX_TARGETS):
            start = self._fill(start, list(targets[first : first + _MAX_TARGETS]))

    def _fill(self, start: int, targets: list[memoryview]) -> int:
        while targets:
            num_read = os.preadv(self._descriptor, targets, start)
            if num_read == 0:
                raise BadTensorFile("it ends too early")
            start += num_read
            while targets and num_read >= targets[0].nbytes:
                num_read -= targets.pop(0).nbytes
            if num_read:
                targets[0] = targets[0][num_read:]
        return start

    def _read_header(self) -> tuple[int, dict[str, Any]]:
        start = 8 + int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if not 8 < start <= min(self._size, _MAX_HEADER_BYTES):
            raise BadTensorFile("it has no header")
        try:
            header: dict[str, Any] = json.loads(os.pread(self._descriptor, start - 8, 8))
        except ValueError as error:
            raise BadTensorFile(f"its header is damaged: {error}") from error
        return start, header


def dtype_of(info: TensorInfo) -> torch.dtype:
    return _DTYPES[info.dtype]


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous CPU tensor, shared."""
    array: Bytes = tensor.view(torch.uint8).numpy()
    return array


def cast_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Cast 1-D `source` into 1-D `target` of equal length, on the calling thread."""
    for start in range(0, source.numel(), _CAST_ELEMENTS):
        target[start : start + _CAST_ELEMENTS].copy_(source[start : start + _CAST_ELEMENTS])


def cast_rows_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Cast 2-D `source` into 2-D `target` of equal shape, whose rows may lie apart, on the calling thread."""
    num_rows = max(1, _CAST_ELEMENTS // source.shape[1])
    for start in range(0, source.shape[0], num_rows):
        target[start : start + num_rows].copy_(source[start : start + num_rows])


def is_finite(data: memoryview, dtype: torch.dtype) -> bool:
    """Whether no value of these bytes, as `dtype`, is NaN or infinite.

    Read as integers, those are at or above infinity: the positive ones among the signed, the others among the unsigned.
    """
    signed, unsigned, positive, negative = _INFINITY[dtype]
    bits = np.frombuffer(data, unsigned)
    pieces = (bits[start : start + _CHECK_ELEMENTS] for start in range(0, bits.size, _CHECK_ELEMENTS))
    return all(bool(piece.view(signed).max() < positive and piece.max() < negative) for piece in pieces)


def read_ahead(path: Path, start: int, num_bytes: int) -> None:
    """Tell the kernel that some bytes of a file are about to be read; a file that is gone is left alone."""
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, start, num_bytes, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
