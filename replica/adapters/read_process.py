"""Adapters read by processes of their own, so that steps do not stand in line for the interpreter's lock meanwhile.

A process reads into memory that it shares with the replica; from there the bytes go to their place in the host cache
in few large copies, during which the lock is free. Page-locked memory cannot be shared as easily: it would have to do
without huge pages. Knows nothing of where images are kept.
"""

import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
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

_logger = logging.getLogger(__name__)

NUM_PROCESSES = 2
"""While one waits for the disk, the other compares digests."""

_WORKER = "from replica.adapters.read_worker import main; main()"
_NUM_COPIERS = 4
_KEPT_BYTES = 256 << 20
"""What an area keeps of its memory after a larger image."""


class ReadProcesses:
    """Reads as `ImageReader` does, each adapter with `num_threads` threads of another process.

    Of `largest_image_bytes` of memory each process takes what its images need. `read` and `expect` are safe from any
    thread. Raises AdapterUnavailable when the processes cannot be started.
    """

    def __init__(self, sites: Sequence[Site], dtype: torch.dtype, num_threads: int, largest_image_bytes: int) -> None:
        setup = WorkerSetup(tuple(sites), dtype, num_threads, max(1, largest_image_bytes))
        self._lanes: list[_Lane] = []
        self._idle: LifoQueue[_Lane] = LifoQueue()
        self._copiers = ThreadPoolExecutor(_NUM_COPIERS, "adapter-move")
        try:
            for _ in range(NUM_PROCESSES):
                self._lanes.append(_Lane(setup))
                self._idle.put(self._lanes[-1])
            for lane in self._lanes:
                lane.greet()
        except (OSError, EOFError) as error:
            self.close()
            raise AdapterUnavailable(f"no process that reads adapters can be started: {error!r}") from error

    def __repr__(self) -> str:
        return f"ReadProcesses({self._lanes}, {self._idle.qsize()} idle)"

    def read(
        self, path: Path, manifest: AdapterManifest, layout: ImageLayout, block: HostBlock | None = None
    ) -> AdapterImage:
        """As `ImageReader.read`; raises AdapterUnavailable also when two processes in a row ended over it."""
        if block is None:
            block = HostBlock(torch.empty(layout.num_bytes, dtype=torch.uint8))
        request = ReadRequest(path.absolute(), manifest.model_dump_json())
        lane = self._idle.get()
        try:
            answer = lane.read(request)
            if answer.error is not None:
                raise answer.error
            self._move(lane.area[: layout.num_bytes], bytes_of(block.data)[: layout.num_bytes])
        finally:
            lane.shrink(layout.num_bytes)
            self._idle.put(lane)
        return AdapterImage(manifest.digest, layout, block.data.view(layout.dtype), block, answer.convert_share)

    def expect(self, path: Path) -> None:
        """As `ImageReader.expect`: does not wait, and is of no consequence."""
        for lane in self._lanes:
            if lane.expect(path.absolute()):
                return

    def close(self) -> None:
        """End the processes, and with an error what they read. Idempotent."""
        self._copiers.shutdown(wait=True)
        for lane in self._lanes:
            lane.close()

    def _move(self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
        """Returns, or raises, when nothing of it runs on any more."""
        share = max(1, -(-len(source) // _NUM_COPIERS))
        moves = []
        try:
            for start in range(0, len(source), share):
                end = start + share
                moves.append(self._copiers.submit(np.copyto, target[start:end], source[start:end]))
        except RuntimeError as error:
            raise AdapterUnavailable("the replica is closed") from error
        finally:
            wait(moves)
        for move in moves:
            move.result()


class _Lane:
    """One process and the memory it shares with this one. `read` is called by one thread at a time."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._is_closed = self._is_ready = False
        self._requests: Connection
        self._lock = threading.Lock()
        self._file = os.fdopen(os.memfd_create("adapter"), "r+b", buffering=0)
        try:
            self._file.truncate(setup.area_bytes)
            self._map = mmap.mmap(self._file.fileno(), setup.area_bytes)
            self.area: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
            self._start()
        except BaseException:
            self._file.close()
            raise

    def __repr__(self) -> str:
        return f"process {self._process.pid}{'' if self._process.poll() is None else ', ended'}"

    def greet(self) -> None:
        """Wait until the process is ready. Raises EOFError when it has ended instead."""
        if not self._is_ready:
            self._requests.recv()
            self._is_ready = True

    def read(self, request: ReadRequest) -> ReadAnswer:
        """Have the process read into `area`; one that has ended, as when the kernel is short of memory, is replaced."""
        for _ in range(2):
            try:
                self.greet()
                self._requests.send(request)
                answer: ReadAnswer = self._requests.recv()
            except BaseException as error:
                self._restart()  # an answer that is still to come would be taken for the next request's
                if not isinstance(error, EOFError | OSError):
                    raise
            else:
                return answer
        raise AdapterUnavailable(f"{request.path.name}: the process that reads it ended, and so did the next one")

    def expect(self, path: Path) -> bool:
        """False when the process has ended, or does not listen."""
        with suppress(OSError):
            return self._expected.send(os.fsencode(path), socket.MSG_DONTWAIT) > 0
        return False

    def shrink(self, num_bytes: int) -> None:
        """Give back what the last image took of the area, beyond what is kept."""
        if num_bytes > _KEPT_BYTES:
            self._give_back(_KEPT_BYTES)

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._stop()
                self._file.close()
                self._give_back(0)

    def _give_back(self, start: int) -> None:
        """The memory of the area from there on, where the kernel can do that."""
        with suppress(OSError):
            self._map.madvise(mmap.MADV_REMOVE, start)

    def _start(self) -> None:
        self._is_ready = False
        requests, theirs = socket.socketpair()
        self._expected, heard = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = (theirs.fileno(), heard.fileno(), self._file.fileno())
        self._requests = Connection(requests.detach())
        try:
            with theirs, heard:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _WORKER, *map(str, given)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=given,
                    process_group=0,  # what a terminal sends to its group is for the replica to act on
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
                )
            self._requests.send(self._setup)
        except BaseException:
            self._hang_up()
            raise

    def _restart(self) -> None:
        with self._lock:
            if self._is_closed:
                raise AdapterUnavailable("the replica is closed")
            self._stop()
            code = self._process.returncode
            _logger.warning("a process that reads adapters ended with %s; another takes its place", code)
            try:
                self._start()
            except OSError as error:
                raise AdapterUnavailable(f"no process that reads adapters can be started: {error!r}") from error

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._hang_up()

    def _hang_up(self) -> None:
        self._requests.close()
        self._expected.close()
