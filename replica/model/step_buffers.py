"""One device buffer for all that a step needs to be told, filled by one copy from pinned memory. Knows no meaning.

A captured graph reads fixed addresses, so each section has its place for good. Two host copies take turns: while the
device still reads one, the next step's words go into the other.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """How many words each section has room for."""

    num_rows: int
    num_sequences: int
    num_pages: int
    num_lora_words: int

    def sections(self) -> tuple[tuple[str, torch.dtype, int], ...]:
        """Names, types and lengths in order; the pages come last, since steps use few of them."""
        return (
            ("token_ids", torch.int64, self.num_rows),
            ("positions", torch.int64, self.num_rows),
            ("slots", torch.int64, self.num_rows),
            ("logit_rows", torch.int64, self.num_rows),
            ("lora", torch.int32, self.num_lora_words),
            ("page_starts", torch.int32, self.num_sequences + 1),
            ("last_page_lens", torch.int32, self.num_sequences),
            ("pages", torch.int32, self.num_pages),
        )


class HostWords:
    """One pinned copy: numpy arrays by the sections' names."""

    def __init__(self, sizes: BufferSizes, pinned: bool) -> None:
        self.memory = torch.zeros(_num_bytes(sizes), dtype=torch.uint8, pin_memory=pinned)
        self.arrays: dict[str, NDArray[np.signedinteger]] = {
            name: view.numpy() for name, view in _views(self.memory, sizes).items()
        }
        self.sent: Any = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Block until the device has read the last step's words; normally long ago."""
        if self.sent is not None:
            self.sent.synchronize()

    def put(self, name: str, values: NDArray[np.signedinteger]) -> None:
        self.arrays[name][: len(values)] = values


class StepBuffers:
    """The sections on the device, and two host copies of them."""

    def __init__(self, sizes: BufferSizes, device: torch.device) -> None:
        self.memory = torch.zeros(_num_bytes(sizes), dtype=torch.uint8, device=device)
        self.views = _views(self.memory, sizes)
        self._hosts = [HostWords(sizes, pinned=device.type == "cuda") for _ in range(2)]
        self._pages_at = _num_bytes(sizes) - _padded_bytes(torch.int32, sizes.num_pages)

    def __repr__(self) -> str:
        return f"StepBuffers({self.memory.numel()} bytes)"

    def next_host(self) -> HostWords:
        """The host copy whose turn it is, free to be written."""
        self._hosts.reverse()
        self._hosts[0].wait()
        return self._hosts[0]

    def send(self, host: HostWords, num_pages: int = 0) -> None:
        """Copy the words to the device, with the first `num_pages` pages, in order with the current stream."""
        num_bytes = self._pages_at + num_pages * torch.int32.itemsize
        self.memory[:num_bytes].copy_(host.memory[:num_bytes], non_blocking=True)
        if host.sent is not None:
            host.sent.record()


def _padded_bytes(dtype: torch.dtype, length: int) -> int:
    return -(-length * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _num_bytes(sizes: BufferSizes) -> int:
    return sum(_padded_bytes(dtype, length) for _, dtype, length in sizes.sections())


def _views(memory: torch.Tensor, sizes: BufferSizes) -> dict[str, torch.Tensor]:
    views, start = {}, 0
    for name, dtype, length in sizes.sections():
        views[name] = memory[start : start + length * dtype.itemsize].view(dtype)
        start += _padded_bytes(dtype, length)
    return views
