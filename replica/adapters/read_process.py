"""Adapters read by processes of their own, so that steps do not stand in line for the interpreter's lock meanwhile.

Each reads a share of an adapter and puts it where it belongs in the host memory, which all of them share: nothing is
copied once more. This process asks one of them, the hub, for the whole. Knows nothing of what is kept in the host
memory.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import LifoQueue

import torch

from registry.types import AdapterManifest, ModuleLora
from replica.adapters.host_memory import HostBlock, HostMemory
from replica.adapters.image_reader import ImageReader
from replica.adapters.read_hub import HubSetup
from replica.adapters.read_worker import ReadAnswer, ReadRequest
from replica.adapters.weights import AdapterImage, ImageLayout
from replica.errors import AdapterUnavailable
from replica.model.batch import Site

_HUB = "from replica.adapters.read_hub import main; main()"
_LEAST_SHARE_BYTES = 1 << 20
"""Below, it takes longer to ask another process than to read on."""
_REAP_S = 1.0


class ReadProcesses:
    """Reads as `ImageReader` does, each adapter by up to `num_processes` processes, to blocks of `memory`.

    `memory` is shared; `num_lanes` adapters are read at a time. `read` and `expect` are safe from any thread. Raises
    AdapterUnavailable when the processes cannot be started.
    """

    def __init__(
        self, sites: Sequence[Site], dtype: torch.dtype, num_processes: int, memory: HostMemory, num_lanes: int = 1
    ) -> None:
        self._setup = HubSetup(tuple(sites), dtype, memory.max_bytes, num_processes)
        self._memory = memory
        self._here = ImageReader()
        self._idle: LifoQueue[int] = LifoQueue()
        self._hub: _Hub | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        for lane in range(num_lanes):
            self._idle.put(lane)
        self._num_lanes = num_lanes
        self._running()

    def __repr__(self) -> str:
        return f"ReadProcesses({self._hub}, {self._idle.qsize()} of {self._num_lanes} lanes idle)"

    def read(
        self, path: Path, manifest: AdapterManifest, layout: ImageLayout, block: HostBlock | None = None
    ) -> AdapterImage:
        """As `ImageReader.read`; raises AdapterUnavailable also when two processes in a row ended over it.

        Without a block this process reads, on the calling thread: no other one could see what it took.
        """
        if block is None:
            return self._here.read(path, manifest, layout)
        requests = _requests(path.absolute(), manifest, layout, self._memory.offset_of(block), self._setup.num_workers)
        lane = self._idle.get()
        try:
            answer = self._ask(lane, path, requests)
        finally:
            self._idle.put(lane)
        if answer.error is not None:
            raise answer.error
        return AdapterImage(manifest.digest, layout, block.data.view(layout.dtype), block, answer.convert_share)

    def expect(self, path: Path) -> None:
        """As `ImageReader.expect`: does not wait, and is of no consequence."""
        hub = self._hub
        if hub is not None:
            with suppress(OSError, ValueError):
                hub.expect(os.fsencode(path.absolute()))

    def close(self) -> None:
        """End the processes, and with an error what they read. Idempotent."""
        with self._lock:
            self._is_closed = True
        if self._hub is not None:
            self._hub.kill()

    def _ask(self, lane: int, path: Path, requests: list[ReadRequest]) -> ReadAnswer:
        """When the hub has ended, another one takes its place and reads from the start."""
        for _ in range(2):
            hub = self._running()
            try:
                return hub.ask(lane, requests)
            except BaseException as error:
                hub.kill()  # until then its workers write to the memory, and an answer is still to come
                if not isinstance(error, EOFError | OSError):
                    raise
        raise AdapterUnavailable(f"{path.name}: the processes that read it ended, and so did the next ones")

    def _running(self) -> "_Hub":
        with self._lock:
            if self._is_closed:
                raise AdapterUnavailable("the replica is closed")
            if self._hub is None or self._hub.is_killed:
                try:
                    self._hub = _Hub(self._setup, self._memory.descriptor, self._num_lanes)
                except (OSError, EOFError) as error:
                    raise AdapterUnavailable(f"no process that reads adapters can be started: {error!r}") from error
            return self._hub


def _requests(path: Path, manifest: AdapterManifest, layout: ImageLayout, start: int, most: int) -> list[ReadRequest]:
    """Cut an adapter whose image begins at byte `start` into at most so many shares of about equal size.

    A share is an adapter of fewer modules: their places follow each other, so its image is a part of the whole one.
    """
    least = max(_LEAST_SHARE_BYTES, -(-layout.num_bytes // most))
    modules = {module.path: module for module in manifest.modules}
    starts, shares = [0], list[list[ModuleLora]]([[]])
    for place in layout.places:
        first = place.a_offset * layout.dtype.itemsize
        if first - starts[-1] >= least:
            starts.append(first)
            shares.append([])
        shares[-1].append(modules[place.path])
    ends = [*starts[1:], layout.num_bytes]
    return [
        ReadRequest(path, _part(manifest, share).model_dump_json(), start + first, start + end)
        for share, first, end in zip(shares, starts, ends, strict=True)
    ]


def _part(manifest: AdapterManifest, modules: Sequence[ModuleLora]) -> AdapterManifest:
    return manifest.model_copy(update={"modules": tuple(modules)})


class _Hub:
    """The hub and its workers. Starting it waits until they are there, and raises OSError or EOFError if they end."""

    def __init__(self, setup: HubSetup, memory: int, num_lanes: int) -> None:
        self.is_killed = False
        self._lock = threading.Lock()
        with ExitStack() as ours, ExitStack() as theirs:
            self._lifeline, held = os.pipe()
            ours.callback(os.close, self._lifeline)
            theirs.callback(os.close, held)
            pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
            pairs += [socket.socketpair() for _ in range(num_lanes)]
            for mine, their in pairs:
                ours.enter_context(mine)
                theirs.enter_context(their)
            given = [held, memory, *(their.fileno() for _, their in pairs)]
            self._process = _start([_not_standard(each, theirs) for each in given])
            self._expected, *lanes = (mine for mine, _ in pairs)
            self._lanes = [Connection(lane.detach()) for lane in lanes]
            ours.pop_all()
        try:
            self._lanes[0].send(setup)
            self._lanes[0].recv()
        except BaseException:
            self.kill()
            raise

    def __repr__(self) -> str:
        return f"hub {self._process.pid}{', killed' if self.is_killed else ''}"

    def ask(self, lane: int, requests: list[ReadRequest]) -> ReadAnswer:
        """One caller a lane at a time. Raises EOFError or OSError when the hub ends."""
        try:
            connection = self._lanes[lane]
        except IndexError:
            raise EOFError(f"{self!r}") from None
        connection.send(requests)
        answer: ReadAnswer = connection.recv()
        return answer

    def expect(self, path: bytes) -> None:
        """Raises OSError when nobody listens, or not so soon."""
        self._expected.send(path, socket.MSG_DONTWAIT)

    def kill(self) -> None:
        """Returns when the hub and its workers are gone. Idempotent."""
        with self._lock:
            if self.is_killed:
                return
            with suppress(ProcessLookupError):  # somebody else has waited for it
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            while os.read(self._lifeline, 1):  # ends when nobody holds the other end
                pass
            _reap(self._process.pid)
            self.is_killed = True
            os.close(self._lifeline)
            self._expected.close()
            self._lanes = []  # each closes when nobody waits there any more


def _start(given: Sequence[int]) -> "subprocess.Popen[bytes]":
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _HUB, *map(str, given)],
        stdin=subprocess.DEVNULL,
        pass_fds=given,
        process_group=0,  # what a terminal sends to its group is for the replica to act on
        env={**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
    )


def _not_standard(descriptor: int, until: ExitStack) -> int:
    """The same file under a number that is not one of the three standard streams, which may be closed here."""
    found = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    until.callback(os.close, found)
    return found


def _reap(group: int) -> None:
    """The hub's orphans are this process's if it is the first of a container, and all gone but for this."""
    end_s = time.monotonic() + _REAP_S
    with suppress(ChildProcessError):
        while time.monotonic() < end_s:
            if os.waitpid(-group, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
