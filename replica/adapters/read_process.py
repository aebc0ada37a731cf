"""Adapters read by processes of their own, so that steps do not stand in line for the interpreter's lock meanwhile.

Each process has one thread, reads a share of an adapter and puts it where it belongs in the host memory, which all of
them share: nothing is copied once more, and nobody stands in line there either. Knows nothing of what is kept in the
host memory.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from registry.types import AdapterManifest, ModuleLora
from replica.adapters.host_memory import HostBlock, HostMemory
from replica.adapters.image_reader import ImageReader
from replica.adapters.read_worker import ReadAnswer, ReadRequest, WorkerSetup
from replica.adapters.weights import AdapterImage, ImageLayout
from replica.errors import AdapterUnavailable
from replica.model.batch import Site

_logger = logging.getLogger(__name__)

_FORKER = "from replica.adapters.read_worker import main; main()"
_LEAST_SHARE_BYTES = 1 << 20
"""Below, it takes longer to ask another process than to read on."""


class ReadProcesses:
    """Reads as `ImageReader` does, each adapter by up to `num_processes` processes, to blocks of `memory`.

    `memory` is shared. `read` and `expect` are safe from any thread. Raises AdapterUnavailable when the processes
    cannot be started.
    """

    def __init__(self, sites: Sequence[Site], dtype: torch.dtype, num_processes: int, memory: HostMemory) -> None:
        self._memory = memory
        self._here = ImageReader()
        self._turns = count()
        self._forker = _Forker(memory.descriptor)
        self._processes: list[_Process] = []
        try:
            self._forker.start()
            for index in range(num_processes):
                setup = WorkerSetup(tuple(sites), dtype, memory.max_bytes, index, num_processes)
                self._processes.append(_Process(self._forker, setup))
            for process in self._processes:
                process.greet()
        except (OSError, EOFError) as error:
            self.close()
            raise AdapterUnavailable(f"no process that reads adapters can be started: {error!r}") from error
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"ReadProcesses({self._processes}, {self._memory})"

    def read(
        self, path: Path, manifest: AdapterManifest, layout: ImageLayout, block: HostBlock | None = None
    ) -> AdapterImage:
        """As `ImageReader.read`; raises AdapterUnavailable also when two processes in a row ended over it.

        Without a block this process reads, on the calling thread: what it took from no other process could see.
        """
        if block is None:
            return self._here.read(path, manifest, layout)
        start, first = self._memory.offset_of(block), next(self._turns)
        reads: list[Future[float]] = []
        try:
            for index, share in enumerate(_shares(manifest, layout, len(self._processes))):
                process = self._processes[(first + index) % len(self._processes)]
                part = manifest.model_copy(update={"modules": tuple(share.modules)})
                reads.append(process.submit(path, part, start + share.start, start + share.end))
        finally:
            wait(reads)  # until then they write to the block, also when one of them has failed
        shares = [read.result() for read in reads]
        convert_share = sum(shares) / max(1, len(shares))
        return AdapterImage(manifest.digest, layout, block.data.view(layout.dtype), block, convert_share)

    def expect(self, path: Path) -> None:
        """As `ImageReader.expect`: does not wait, and is of no consequence."""
        name = os.fsencode(path.absolute())
        for process in self._processes:
            process.expect(name)

    def close(self) -> None:
        """End the processes, and with an error what they read. Idempotent."""
        self._forker.close()
        for process in self._processes:
            process.close()


@dataclass(slots=True)
class _Share:
    """Bytes [start, end) of an image, and the modules that lie there."""

    start: int
    end: int = 0
    modules: list[ModuleLora] = field(default_factory=list)


def _shares(manifest: AdapterManifest, layout: ImageLayout, most: int) -> list[_Share]:
    """Cut an image into at most so many shares of about equal size, each of whole modules."""
    least = max(_LEAST_SHARE_BYTES, -(-layout.num_bytes // most))
    modules = {module.path: module for module in manifest.modules}
    shares: list[_Share] = []
    for place in layout.places:
        start = place.a_offset * layout.dtype.itemsize
        if not shares or start - shares[-1].start >= least:
            shares.append(_Share(start))
        shares[-1].modules.append(modules[place.path])
    for share, end in _ends(shares, layout.num_bytes):
        share.end = end
    return shares


def _ends(shares: Sequence[_Share], num_bytes: int) -> Iterator[tuple[_Share, int]]:
    for share, following in pairwise(shares):
        yield share, following.start
    if shares:
        yield shares[-1], num_bytes


class _Process:
    """One process that reads, and the thread that waits for it: shares are read in the order in which they come."""

    def __init__(self, forker: "_Forker", setup: WorkerSetup) -> None:
        self._forker, self._setup = forker, setup
        self._pid: int | None = None
        self._socket: socket.socket
        self._requests: Connection
        self._expected: socket.socket
        self._thread = ThreadPoolExecutor(1, "adapter-share")
        self._start()

    def __repr__(self) -> str:
        return f"process {self._pid}"

    def greet(self) -> None:
        """Wait until the process is ready. Raises EOFError when it has ended instead."""
        if self._pid is None:
            self._pid = self._requests.recv()

    def submit(self, path: Path, manifest: AdapterManifest, start: int, end: int) -> Future[float]:
        """Have a share read to bytes [start, end) of the memory; tells which part of the time went into values."""
        request = ReadRequest(path.absolute(), manifest.model_dump_json(), start, end)
        try:
            return self._thread.submit(self._read, request)
        except RuntimeError as error:
            raise AdapterUnavailable("the replica is closed") from error

    def expect(self, name: bytes) -> None:
        """Have it read ahead its part of a file, if it listens."""
        with suppress(OSError):
            self._expected.send(name, socket.MSG_DONTWAIT)

    def close(self) -> None:
        """After the forker: what it reads ends with an error."""
        self._thread.shutdown(wait=True)
        self._hang_up()

    def _read(self, request: ReadRequest) -> float:
        """A process that has ended, as when the kernel is short of memory, is replaced."""
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
                if answer.error is not None:
                    raise answer.error
                return answer.convert_share
        raise AdapterUnavailable(f"{request.path.name}: the process that reads it ended, and so did the next one")

    def _start(self) -> None:
        self._pid = None
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._expected, heard = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._requests = Connection(os.dup(self._socket.fileno()))
            try:
                with heard:
                    self._forker.fork((theirs.fileno(), heard.fileno()))
                theirs.close()
                self._requests.send(self._setup)
            except BaseException:
                theirs.close()
                self._hang_up()
                raise

    def _restart(self) -> None:
        _logger.warning("a process that reads adapters, %s, ended; another takes its place", self._pid)
        self._hang_up()
        try:
            self._start()
        except OSError as error:
            raise AdapterUnavailable(f"no process that reads adapters can be started: {error!r}") from error

    def _hang_up(self) -> None:
        """Returns when the process is gone: until then it may write to the memory."""
        with suppress(OSError), self._socket:  # it is closed already the second time
            self._expected.close()
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(1 << 16):
                pass
        self._requests.close()


class _Forker:
    """The process that all others are forks of; one that has ended is replaced, and its forks end then.

    `fork` is safe from any thread. Both raise OSError, and AdapterUnavailable when it was closed.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._is_closed = False
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"_Forker({self._process and self._process.pid})"

    def start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = (theirs.fileno(), self._memory)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _FORKER, *map(str, given)],
                stdin=subprocess.DEVNULL,
                pass_fds=given,
                process_group=0,  # what a terminal sends to its group is for the replica to act on
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            )

    def fork(self, descriptors: tuple[int, int]) -> None:
        """A new process that has these open."""
        with self._lock:
            if self._is_closed:
                raise AdapterUnavailable("the replica is closed")
            try:
                self._send(descriptors)
            except OSError:
                self._stop()
                self.start()
                self._send(descriptors)

    def close(self) -> None:
        """Kill it and its forks. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._stop()

    def _send(self, descriptors: tuple[int, int]) -> None:
        assert self._control is not None
        socket.send_fds(self._control, [b"+"], descriptors)

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
