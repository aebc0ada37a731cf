"""Adapters read by processes of their own, so that no step waits for the interpreter's lock while one is read.

A process reads into memory that it shares with the replica; from there the bytes go to their place in the host cache
in few large copies, during which the lock is free. Page-locked memory cannot be shared as easily: it would have to do
without huge pages.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from mmap import MADV_REMOVE, mmap
from multiprocessing.connection import Connection
from pathlib import Path
from queue import LifoQueue

import numpy as np
import numpy.typing as npt
import torch

from registry.types import AdapterManifest
from replica.adapters.host_memory import HostBlock
from replica.adapters.read_worker import ReadAnswer, ReadRequest, WorkerSetup
from replica.adapters.tensor_file import bytes_of
from replica.adapters.weights import AdapterImage, ImageLayout
from replica.errors import AdapterUnavailable
from replica.model.batch import Site

NUM_PROCESSES = 2
"""While one waits for the disk, the other compares digests."""

_WORKER = "from replica.adapters.read_worker import main; main()"
_NUM_COPIERS = 4
_KEPT_BYTES = 256 << 20
"""What an area keeps of its memory after a larger image."""

_CLOSE_TIMEOUT_S = 5.0


class ReadProcesses:
    """Reads as `ImageReader` does, each adapter with `num_threads` threads of another process. Safe from any thread.

    `area_bytes` is the size of the largest image; of that memory each process takes what its images need.
    """

    def __init__(self, sites: Sequence[Site], dtype: torch.dtype, num_threads: int, area_bytes: int) -> None:
        setup = WorkerSetup(tuple(sites), dtype, num_threads, area_bytes)
        self._lanes = [_Lane(setup) for _ in range(NUM_PROCESSES)]
        self._idle: LifoQueue[_Lane] = LifoQueue()
        for lane in self._lanes:
            self._idle.put(lane)
        self._copiers = ThreadPoolExecutor(_NUM_COPIERS, "adapter-move")

    def __repr__(self) -> str:
        return f"ReadProcesses({self._lanes}, {self._idle.qsize()} idle)"

    def read(
        self, path: Path, manifest: AdapterManifest, layout: ImageLayout, block: HostBlock | None = None
    ) -> AdapterImage:
        """As `ImageReader.read`; raises AdapterUnavailable also when the process ended, and ended once more."""
        if block is None:
            block = HostBlock(torch.empty(layout.num_bytes, dtype=torch.uint8))
        lane = self._idle.get()
        try:
            answer = lane.read(ReadRequest(path, manifest.model_dump_json()))
            if answer.error is not None:
                raise answer.error
            self._move(lane.area[: layout.num_bytes], bytes_of(block.data)[: layout.num_bytes])
        finally:
            lane.shrink(layout.num_bytes)
            self._idle.put(lane)
        return AdapterImage(manifest.digest, layout, block.data.view(layout.dtype), block, answer.convert_share)

    def expect(self, path: Path) -> None:
        """As `ImageReader.expect`."""
        self._lanes[0].expect(path)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        self._copiers.shutdown(wait=True)

    def _move(self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
        share = -(-len(source) // _NUM_COPIERS)
        starts = range(0, len(source), share)
        for _ in self._copiers.map(lambda at: np.copyto(target[at : at + share], source[at : at + share]), starts):
            pass


class _Lane:
    """One process and the memory it shares with this one. `read` is called by one thread at a time."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._memory = os.memfd_create("adapter")
        os.truncate(self._memory, setup.area_bytes)
        self._map = mmap(self._memory, setup.area_bytes)
        self.area: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self._lock = threading.Lock()
        self._start()

    def __repr__(self) -> str:
        return f"process {self._process.pid}"

    def read(self, request: ReadRequest) -> ReadAnswer:
        """Have the process read into `area`; one that has ended, as when the kernel is short of memory, is replaced."""
        for _ in range(2):
            with suppress(EOFError, OSError):
                self._requests.send(request)
                answer: ReadAnswer = self._requests.recv()
                return answer
            self._restart()
        raise AdapterUnavailable(f"{request.path.name}: the process that reads it ended, and so did the next one")

    def expect(self, path: Path) -> None:
        with self._lock, suppress(OSError):
            self._expected.send(path)

    def shrink(self, num_bytes: int) -> None:
        """Give back what the last image took of the area, beyond what is kept."""
        if num_bytes > _KEPT_BYTES:
            self._map.madvise(MADV_REMOVE, _KEPT_BYTES)

    def close(self) -> None:
        self._stop()
        os.close(self._memory)

    def _start(self) -> None:
        (ours, theirs), (told, heard) = socket.socketpair(), socket.socketpair()
        given = (theirs.fileno(), heard.fileno(), self._memory)
        with theirs, heard:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _WORKER, *map(str, given)],
                stdin=subprocess.DEVNULL,
                pass_fds=given,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            )
        self._requests, self._expected = Connection(ours.detach()), Connection(told.detach())
        self._requests.send(self._setup)

    def _restart(self) -> None:
        with self._lock:
            self._stop()
            self._start()

    def _stop(self) -> None:
        self._requests.close()
        self._expected.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
