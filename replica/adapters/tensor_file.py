"""Memory-mapped reading of a safetensors file, in few and large steps.

A load shares the interpreter's lock with the step thread, so an adapter of 400 tensors must not cost thousands of
torch calls. Format: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON header, data).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from registry.types import TensorInfo

Bytes = npt.NDArray[np.uint8]

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CAST_ELEMENTS = 32768
"""Torch runs operations of up to this many elements on the calling thread, so a load takes no core from the step."""
_CHECK_ELEMENTS = 1 << 18
_EXPONENTS: dict[torch.dtype, tuple[npt.DTypeLike, int]] = {
    torch.float32: (np.uint32, 0x7F80_0000),
    torch.float16: (np.uint16, 0x7C00),
    torch.bfloat16: (np.uint16, 0x7F80),
}


class BadTensorFile(Exception):
    """The file is not what its manifest promises."""


class TensorFile:
    """A file whose tensors are looked up by key. Raises BadTensorFile, and OSError when there is no file."""

    def __init__(self, path: Path) -> None:
        if path.stat().st_size < 8:
            raise BadTensorFile("it has no header")
        mapped: Bytes = np.memmap(path, dtype=np.uint8, mode="c")
        start = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
        try:
            self._header: dict[str, Any] = json.loads(mapped[8:start].tobytes())
        except ValueError as error:
            raise BadTensorFile(f"its header is damaged: {error}") from error
        self._data = mapped[start:]

    def raw(self, info: TensorInfo) -> Bytes:
        """The bytes of a tensor, little-endian and row by row; a view of the file."""
        entry = self._header.get(info.key)
        if entry is None:
            raise BadTensorFile(f"it has no tensor {info.key}")
        start, end = entry["data_offsets"]
        size = torch.Size(info.shape).numel() * dtype_of(info).itemsize
        if entry["dtype"] != info.dtype or tuple(entry["shape"]) != info.shape or end - start != size:
            raise BadTensorFile(f"{info.key} is {entry}, its manifest says {info.dtype} of {info.shape}")
        if end > self._data.size:
            raise BadTensorFile(f"it ends before {info.key} does")
        return self._data[start:end]


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


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value of a 1-D CPU tensor is NaN or infinite (those have all exponent bits set)."""
    kind, exponent = _EXPONENTS[tensor.dtype]
    bits = bytes_of(tensor).view(kind)
    pieces = (bits[start : start + _CHECK_ELEMENTS] for start in range(0, bits.size, _CHECK_ELEMENTS))
    return not any(bool(((piece & exponent) == exponent).any()) for piece in pieces)
