"""A process that reads adapters for a replica, which `read_process` starts.

It ends when the replica closes its end of the connection, or is gone.
"""

import os
import signal
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


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What the worker is told first. Images go to the start of an area of memory of `area_bytes`, which both map."""

    sites: tuple[Site, ...]
    dtype: torch.dtype
    num_threads: int
    area_bytes: int


@dataclass(frozen=True, slots=True)
class ReadRequest:
    path: Path
    manifest: str
    """JSON: to parse it is the worker's."""


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

    def expect(self, path: Path) -> None:
        self._reader.expect(path)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group; the replica decides
    torch.set_num_threads(1)
    requests, expected, area = (int(argument) for argument in sys.argv[1:])
    with Connection(requests) as connection:
        setup: WorkerSetup = connection.recv()
        worker = ReadWorker(setup, mmap(area, setup.area_bytes))
        os.close(area)
        threading.Thread(target=_expect, args=(worker, Connection(expected)), daemon=True).start()
        with suppress(EOFError, ConnectionError):
            while True:
                connection.send(worker.read(connection.recv()))
    os._exit(0)  # the other threads may be anywhere, and nothing is left to be done


def _expect(worker: ReadWorker, connection: Connection) -> None:
    with suppress(EOFError, ConnectionError):
        while True:
            worker.expect(connection.recv())
