"""A process that reads adapters for a replica, which `read_process` starts.

It ends when the replica closes its end of the sockets or is gone, whatever it is doing then. Knows nothing of the
replica but the projections of its base.
"""

import os
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from registry.types import AdapterManifest
from replica.adapters.host_memory import HostBlock
from replica.adapters.image_reader import ImageReader
from replica.adapters.weights import plan_layout
from replica.errors import AdapterUnavailable, ReplicaError
from replica.model.batch import Site

MAX_PATH_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What the worker is told first. Images go to the start of an area of memory of `area_bytes`, which both map."""

    sites: tuple[Site, ...]
    dtype: torch.dtype
    num_threads: int
    area_bytes: int


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """`manifest` is JSON."""

    path: Path
    manifest: str


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """The image is in the area, or `error` says why not."""

    convert_share: float = 0.0
    error: ReplicaError | None = None


class ReadWorker:
    """Answers the requests of one replica, one at a time."""

    def __init__(self, setup: WorkerSetup, area: mmap) -> None:
        self._sites = {site.path: site for site in setup.sites}
        self._dtype = setup.dtype
        self._area = torch.from_numpy(np.frombuffer(area, dtype=np.uint8))
        self._reader = ImageReader(setup.num_threads)

    def __repr__(self) -> str:
        return f"ReadWorker({len(self._sites)} sites, {self._dtype}, {self._area.numel()} bytes)"

    def read(self, request: ReadRequest) -> ReadAnswer:
        try:
            manifest = AdapterManifest.model_validate_json(request.manifest)
            layout = plan_layout(manifest, self._sites, self._dtype)
            block = HostBlock(self._area[: layout.num_bytes])
            return ReadAnswer(self._reader.read(request.path, manifest, layout, block).convert_share)
        except ReplicaError as error:
            return ReadAnswer(error=error)
        except Exception as error:
            return ReadAnswer(error=AdapterUnavailable(f"{request.path.name} cannot be read: {error!r}"))

    def expect_all(self, paths: socket.socket) -> None:
        """Have the disk begin with each file that is named, until nobody is there to name one."""
        while path := paths.recv(MAX_PATH_BYTES):
            with suppress(OSError):
                self._reader.expect(Path(os.fsdecode(path)))
        os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    requests, expected, area = (int(argument) for argument in sys.argv[1:])
    connection = Connection(requests)
    setup: WorkerSetup = connection.recv()
    worker = ReadWorker(setup, mmap(area, setup.area_bytes))
    threading.Thread(target=worker.expect_all, args=(socket.socket(fileno=expected),), daemon=True).start()
    with suppress(EOFError, ConnectionError):
        connection.send(None)
        while True:
            connection.send(worker.read(connection.recv()))
    os._exit(0)  # the other threads may be anywhere, and nothing is left to be done
