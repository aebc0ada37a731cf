"""Host memory for adapter images: one stretch taken at start, cut into blocks. Knows nothing of what lies in them.

Page-locking memory takes tens of milliseconds for an adapter, so on CUDA all of it is locked once, at start.
"""

import mmap
import os
import threading
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count

import numpy as np
import torch

from replica.adapters.extents import ExtentMap
from replica.errors import OutOfMemory

ALIGNMENT_BYTES = 128
_TOUCH_BYTES = 64 << 20
_NUM_TOUCHERS = 8
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of the process."""


class HostBlock:
    """`data`, a 1-D uint8 tensor with undefined content. The memory is its own until the block is garbage."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data


class HostMemory:
    """`max_bytes` of host memory, page-locked with `pin`. Safe from any thread. Raises OutOfMemory.

    With `share` other processes can map it, by `descriptor`.
    """

    def __init__(self, max_bytes: int, pin: bool, share: bool = False) -> None:
        self._descriptor = _memory_file(max_bytes) if share else -1
        self._is_pinned = False
        try:
            self._memory = _map(max_bytes, self._descriptor)
            if pin:
                _touch(self._memory)
                _page_lock(self._memory)
                self._is_pinned = True
        except BaseException:
            self.close()
            raise
        self._extents = ExtentMap(max_bytes)
        self._owners = count()
        self._given_back: deque[int] = deque()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"HostMemory({self.free_bytes} of {self.max_bytes} bytes free, pinned={self._is_pinned})"

    @property
    def max_bytes(self) -> int:
        return self._extents.capacity

    @property
    def descriptor(self) -> int:
        """Of the file that the memory is, open until `close`."""
        assert self._descriptor >= 0, "the memory is not shared, or closed"
        return self._descriptor

    def offset_of(self, block: HostBlock) -> int:
        """Where a block begins, in bytes."""
        return block.data.data_ptr() - self._memory.data_ptr()

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._take_back()
            return self._extents.free_size

    def allocate(self, num_bytes: int) -> HostBlock | None:
        """A block, or None when no hole is large enough. Blocks begin at multiples of 128 bytes if all sizes are."""
        with self._lock:
            self._take_back()
            owner = next(self._owners)
            extent = self._extents.allocate(owner, num_bytes)
        if extent is None:
            return None
        block = HostBlock(self._memory[extent.start : extent.end])
        # A finalizer may run wherever the last reference ends, also inside the lock: it only leaves a note.
        weakref.finalize(block, self._given_back.append, owner).atexit = False
        return block

    def close(self) -> None:
        """Unlock the pages. Nothing may copy from here any more. Idempotent."""
        if self._is_pinned:
            self._is_pinned = False
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def check_integrity(self) -> None:
        with self._lock:
            self._take_back()
            self._extents.check_integrity()

    def _take_back(self) -> None:
        while self._given_back:
            self._extents.free(self._given_back.popleft())


def _memory_file(num_bytes: int) -> int:
    """A file without a name or a disk, empty so far."""
    descriptor = -1
    try:
        descriptor = os.memfd_create("adapters")
        os.truncate(descriptor, num_bytes)
    except (OSError, OverflowError) as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise _not_given(num_bytes, error) from error
    return descriptor


def _not_given(num_bytes: int, error: Exception) -> OutOfMemory:
    return OutOfMemory(f"adapters.host_bytes is {num_bytes}; the host cannot give them: {error}")


def _map(num_bytes: int, descriptor: int) -> torch.Tensor:
    """Memory that costs nothing until it is written to, in huge pages where the kernel has them; without a file, -1."""
    flags = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        area = mmap.mmap(descriptor, num_bytes, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise _not_given(num_bytes, error) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(area, dtype=np.uint8))


def _touch(memory: torch.Tensor) -> None:
    """Have the kernel give the pages now, with several threads: one alone needs a second for few GiB."""
    array = memory.numpy()
    with ThreadPoolExecutor(_NUM_TOUCHERS) as threads:
        starts = range(0, array.size, _TOUCH_BYTES)
        list(threads.map(lambda start: array[start : start + _TOUCH_BYTES].fill(0), starts))


def _page_lock(memory: torch.Tensor) -> None:
    error = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
        memory.data_ptr(), memory.numel(), _PORTABLE
    )
    if int(error) != 0:
        raise OutOfMemory(f"adapters.host_bytes is {memory.numel()}; they cannot be page-locked: {error}")
