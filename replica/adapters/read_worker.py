"""The processes that read adapters for a replica, which `read_process` starts.

One of them reads nothing: it imports what the others need, and each of those is a fork of it, which takes no import and
little memory. All end when the replica closes its end of their sockets or is gone, whatever they are doing then. Knows
nothing of the replica but its host memory and the projections of its base.
"""

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from registry.types import AdapterManifest
from replica.adapters.host_memory import HostBlock
from replica.adapters.image_reader import ImageReader
from replica.adapters.tensor_file import read_ahead
from replica.adapters.weights import plan_layout
from replica.errors import AdapterUnavailable, ReplicaError
from replica.model.batch import Site

MAX_PATH_BYTES = 1 << 16
_NICENESS = 10
"""Where cores are few, whoever computes a step goes first."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a worker is told first: number `index` of `num_workers`. All map the same host memory."""

    sites: tuple[Site, ...]
    dtype: torch.dtype
    memory_bytes: int
    index: int
    num_workers: int


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Read the modules of `manifest`, which is JSON and names a part of the adapter's, to bytes [start, end)."""

    path: Path
    manifest: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """The tensors are in their place, or `error` says why not."""

    convert_share: float = 0.0
    error: ReplicaError | None = None


class ReadWorker:
    """Answers the requests of one replica, one at a time."""

    def __init__(self, setup: WorkerSetup, memory: mmap) -> None:
        self._setup = setup
        self._sites = {site.path: site for site in setup.sites}
        self._memory = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
        self._reader = ImageReader()

    def __repr__(self) -> str:
        return f"ReadWorker({self._setup.index} of {self._setup.num_workers}, {len(self._sites)} sites)"

    def read(self, request: ReadRequest) -> ReadAnswer:
        try:
            manifest = AdapterManifest.model_validate_json(request.manifest)
            layout = plan_layout(manifest, self._sites, self._setup.dtype)
            block = HostBlock(self._memory[request.start : request.end])
            return ReadAnswer(self._reader.read(request.path, manifest, layout, block).convert_share)
        except ReplicaError as error:
            return ReadAnswer(error=error)
        except Exception as error:
            return ReadAnswer(error=AdapterUnavailable(f"{request.path.name} cannot be read: {error!r}"))

    def expect_all(self, paths: socket.socket) -> None:
        """Have the disk begin with this worker's part of each file that is named, until nobody is there to name one."""
        with suppress(OSError):
            while path := paths.recv(MAX_PATH_BYTES):
                with suppress(OSError):
                    self._expect(Path(os.fsdecode(path)))
        os._exit(0)

    def _expect(self, path: Path) -> None:
        size, index, num_workers = path.stat().st_size, self._setup.index, self._setup.num_workers
        start, end = size * index // num_workers, size * (index + 1) // num_workers
        read_ahead(path, start, end - start)


def _work(requests: int, expected: int, memory: int) -> None:
    """A worker's life, over the descriptors of its two sockets and of the memory."""
    connection = Connection(requests)
    with suppress(EOFError, ConnectionError):
        setup: WorkerSetup = connection.recv()
        worker = ReadWorker(setup, mmap(memory, setup.memory_bytes))
        threading.Thread(target=worker.expect_all, args=(socket.socket(fileno=expected),), daemon=True).start()
        connection.send(os.getpid())
        while True:
            connection.send(worker.read(connection.recv()))


def serve_forks(control: socket.socket, work: Callable[[int, int], None]) -> None:
    """Fork a process for each pair of descriptors that comes, to do `work` with them, until nobody sends any."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what ended leaves nothing behind
    while True:
        message, descriptors, *_ = socket.recv_fds(control, 1, 2)
        if not message:
            return
        with suppress(OSError):  # then whoever asked for the process finds that nobody has these open
            if os.fork() == 0:
                _live(control, work, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _live(control: socket.socket, work: Callable[[int, int], None], descriptors: Sequence[int]) -> NoReturn:
    try:
        control.close()
        work(*descriptors)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # the other thread may be anywhere, and nothing is left to be done


def main() -> None:
    torch.set_num_threads(1)
    os.nice(_NICENESS)
    control, memory = (int(argument) for argument in sys.argv[1:])
    serve_forks(socket.socket(fileno=control), lambda requests, expected: _work(requests, expected, memory))
