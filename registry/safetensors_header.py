"""Reads the header of a safetensors file strictly: it must describe every byte of the file, once.

Format: 8 bytes little-endian header length, a JSON object from tensor name to dtype, shape and data offsets, the data.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path

from registry.faults import FaultList, shown
from registry.strict_json import StrictJsonError, parse

MAX_HEADER_BYTES = 16 * 1024 * 1024
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
LFS_MAGIC = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the file; `offset` counts from the start of the file."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class _Malformed(ValueError):
    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


def read_header(path: Path, faults: FaultList) -> dict[str, StoredTensor] | None:
    """The tensors of supported dtype by key, or None when the file is not sound enough to speak of tensors."""
    try:
        entries, data_start, data_bytes = _read_entries(path)
        tensors = [_tensor(key, entry, data_start) for key, entry in entries.items()]
        _check_cover(tensors, data_start, data_bytes)
    except _Malformed as malformed:
        faults.add(malformed.code, f"{path.name}: {malformed}", hint=malformed.hint, field=path.name)
        return None
    return {tensor.key: tensor for tensor in tensors if _has_known_dtype(tensor, faults)}


def _read_entries(path: Path) -> tuple[dict[str, object], int, int]:
    """Header entries without metadata, offset of the data and its length."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(len(LFS_MAGIC))
        if prefix == LFS_MAGIC:
            raise _Malformed("lfs_pointer", "a git-lfs pointer, not the weights", "run `git lfs pull` and upload again")
        if num_bytes < 8:
            raise _Malformed("truncated", f"truncated: {num_bytes} bytes cannot hold a header")
        (header_bytes,) = struct.unpack("<Q", prefix[:8])
        if header_bytes > MAX_HEADER_BYTES:
            raise _Malformed("header", f"not a safetensors file: it claims a header of {header_bytes} bytes")
        if 8 + header_bytes > num_bytes:
            raise _Malformed("truncated", f"truncated: the header takes {header_bytes} bytes, the file has {num_bytes}")
        file.seek(8)
        header = file.read(header_bytes)
    return _parse_entries(header), 8 + header_bytes, num_bytes - 8 - header_bytes


def _parse_entries(header: bytes) -> dict[str, object]:
    try:
        entries = parse(header)
    except StrictJsonError as error:
        raise _Malformed("header", f"the header is not sound JSON: {error}") from error
    if not header.startswith(b"{") or not isinstance(entries, dict):
        raise _Malformed("header", "the header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _Malformed("header", "__metadata__ is not a map from strings to strings")
    return entries


def _tensor(key: str, entry: object, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _Malformed("header", f"the entry of {shown(key)} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise _Malformed("header", f"the entry of {shown(key)} has a bad dtype, shape or data_offsets")
    begin, end = offsets
    expected = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
    if end < begin or (dtype in ITEM_BYTES and end - begin != expected):
        raise _Malformed("header", f"{shown(key)}: {dtype} {shape} takes {expected} bytes, its offsets say {offsets}")
    return StoredTensor(key, dtype, tuple(shape), data_start + begin, end - begin)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(tensors: list[StoredTensor], data_start: int, data_bytes: int) -> None:
    """Tensors must lie end to end over the whole data section."""
    position = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != position:
            what = "overlaps its neighbour" if tensor.offset < position else "leaves a gap before it"
            raise _Malformed("header", f"{shown(tensor.key)} {what} at byte {tensor.offset}")
        position += tensor.num_bytes
    end = data_start + data_bytes
    if position > end:
        raise _Malformed("truncated", f"truncated: tensors reach byte {position}, the file has {end}")
    if position < end:
        raise _Malformed("header", f"{end - position} bytes after the last tensor belong to nothing")


def _has_known_dtype(tensor: StoredTensor, faults: FaultList) -> bool:
    if tensor.dtype in ITEM_BYTES:
        return True
    faults.add(
        "dtype",
        f"{shown(tensor.key)} has dtype {shown(tensor.dtype)}; allowed: F32, F16, BF16",
        hint="save the adapter in float32, float16 or bfloat16",
        field=tensor.key[:200],
    )
    return False
