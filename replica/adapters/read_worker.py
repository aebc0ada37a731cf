"""What a process that reads adapters does: shares of them, from files to their places in the replica's host memory.

It has one thread that reads, and one that tells the disk what comes next. It ends when whoever asked is gone.
"""

import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

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
_AHEAD_BYTES = 2 << 20
_NICENESS = 10
"""Where cores are few, whoever computes a step goes first."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Read the modules of `manifest`, which is JSON and names a part of the adapter's, to bytes [start, end)."""

    path: Path
    manifest: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """The tensors are in their places, or `error` says why not."""

    convert_share: float = 0.0
    error: ReplicaError | None = None


class ReadWorker:
    """Reader number `index` of `num_workers`, for a base with these projections."""

    def __init__(self, sites: tuple[Site, ...], dtype: torch.dtype, memory: mmap, index: int, num_workers: int) -> None:
        self._sites = {site.path: site for site in sites}
        self._dtype = dtype
        self._memory = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
        self._index, self._num_workers = index, num_workers
        self._reader = ImageReader()

    def __repr__(self) -> str:
        return f"ReadWorker({self._index} of {self._num_workers}, {len(self._sites)} sites)"

    def read(self, request: ReadRequest) -> ReadAnswer:
        """Never raises: errors are part of the answer."""
        try:
            manifest = AdapterManifest.model_validate_json(request.manifest)
            layout = plan_layout(manifest, self._sites, self._dtype)
            block = HostBlock(self._memory[request.start : request.end])
            return ReadAnswer(self._reader.read(request.path, manifest, layout, block).convert_share)
        except ReplicaError as error:
            return ReadAnswer(error=error)
        except Exception as error:
            return ReadAnswer(error=AdapterUnavailable(f"{request.path.name} cannot be read: {error!r}"))

    def expect(self, path: Path) -> None:
        """Have the disk begin with this worker's pieces of a file: those of all workers come in the order of the file,
        in which each reads its share."""
        first, step = self._index * _AHEAD_BYTES, self._num_workers * _AHEAD_BYTES
        for start in range(first, path.stat().st_size, step):
            read_ahead(path, start, _AHEAD_BYTES)


def work(worker: ReadWorker, requests: Connection, expected: socket.socket) -> None:
    """A greeting, then an answer for each request, until nobody is there to ask."""
    os.nice(_NICENESS)
    threading.Thread(target=_expect_all, args=(worker, expected), daemon=True).start()
    with suppress(EOFError, ConnectionError):
        requests.send(None)
        while True:
            requests.send(worker.read(receive(requests)))


def receive(connection: Connection) -> Any:
    """The next message. Raises EOFError also when the other side ended amid one."""
    try:
        return connection.recv()
    except OSError as error:
        raise EOFError(str(error)) from error


def _expect_all(worker: ReadWorker, expected: socket.socket) -> NoReturn:
    """Until nobody is there to name a file: then the process ends, whatever it is doing."""
    with suppress(OSError):
        while path := expected.recv(MAX_PATH_BYTES):
            with suppress(OSError, ValueError):
                worker.expect(Path(os.fsdecode(path)))
    os._exit(0)
