"""Looks at the bytes of one tensor: its sha256, and whether its values are finite before and after a cast to bf16."""

import hashlib
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from registry.safetensors_header import StoredTensor

CHUNK_BYTES = 4 * 1024 * 1024

BF16_OVERFLOW_BITS = 0x7F7F8000
"""The smallest fp32 magnitude, as bits, that rounds (to nearest, ties to even) to infinity in bf16."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """`num_overflowing` counts finite fp32 values that become infinite in bf16."""

    sha256: str
    num_nonfinite: int
    num_overflowing: int
    is_zero: bool


def look_at(file: BinaryIO, tensor: StoredTensor) -> TensorFacts:
    """Read the tensor in chunks. Raises EOFError when the file has become shorter than its header says."""
    sha = hashlib.sha256()
    num_nonfinite = num_overflowing = 0
    is_zero = True
    file.seek(tensor.offset)
    remaining = tensor.num_bytes
    while remaining:
        chunk = file.read(min(CHUNK_BYTES, remaining))
        if not chunk or (len(chunk) % 4 and len(chunk) != remaining):
            raise EOFError(tensor.key)
        remaining -= len(chunk)
        sha.update(chunk)
        magnitude, infinity = _magnitude(chunk, tensor.dtype)
        nonfinite = int(np.count_nonzero(magnitude >= infinity))
        num_nonfinite += nonfinite
        if tensor.dtype == "F32":
            num_overflowing += int(np.count_nonzero(magnitude >= BF16_OVERFLOW_BITS)) - nonfinite
        is_zero = is_zero and not magnitude.any()
    return TensorFacts(sha.hexdigest(), num_nonfinite, num_overflowing, is_zero)


def _magnitude(chunk: bytes, dtype: str) -> tuple[npt.NDArray[np.unsignedinteger], int]:
    """The values' bits without their sign, and the bits of infinity: what is not below it is infinite or NaN."""
    if dtype == "F32":
        return np.frombuffer(chunk, "<u4") & np.uint32(0x7FFFFFFF), 0x7F800000
    bits = np.frombuffer(chunk, "<u2") & np.uint16(0x7FFF)
    return bits, 0x7F80 if dtype == "BF16" else 0x7C00
