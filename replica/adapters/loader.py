"""From the node store (or behind it) into the host cache, on load threads. Knows nothing of slots.

Single flight: whoever asks for a digest that is on its way joins. Fetches have threads of their own, so a slow blob
store does not hold up adapters whose bytes are on the node.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from registry.types import AdapterManifest
from replica.adapters.fit import ImagePlanner
from replica.adapters.host_cache import HostCache
from replica.adapters.host_memory import HostBlock
from replica.adapters.stats import LoadTimes, Source
from replica.adapters.weights import AdapterImage, ImageLayout
from replica.errors import AdapterUnavailable, ReplicaError, UnknownAdapter

_logger = logging.getLogger(__name__)


class AdapterFiles(Protocol):
    """What the loader needs of the node store."""

    def knows(self, digest: str) -> bool: ...

    def holds(self, digest: str) -> bool: ...

    def path(self, digest: str) -> Path: ...

    def manifest(self, digest: str) -> AdapterManifest: ...

    def open(self, digest: str) -> Path: ...

    def reading(self, manifest: AdapterManifest) -> AbstractContextManager[Path]: ...


class Reader(Protocol):
    """From files to images, in this process or in others. Safe from any thread."""

    def read(
        self, path: Path, manifest: AdapterManifest, layout: ImageLayout, block: HostBlock | None = None
    ) -> AdapterImage: ...

    def expect(self, path: Path) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that ended, at `ended_s`: in the host cache, or with `error`, or without room there for now.

    It took `seconds` in all, of which `read_s` for the reading. `image` is there for those who asked to hold it.
    """

    digest: str
    tier: Source
    seconds: float
    read_s: float
    ended_s: float
    image: AdapterImage | None = None
    error: ReplicaError | None = None


@dataclass(slots=True)
class _Flight:
    digest: str
    started_s: float
    hold: bool
    ahead: bool
    tier: Source
    read_s: float = 0.0


class ImageLoader:
    """Loads images in parallel and remembers failures for `failure_ttl_s`. Safe from any thread."""

    def __init__(
        self,
        files: AdapterFiles,
        host: HostCache,
        planner: ImagePlanner,
        reader: Reader,
        readers: Executor,
        fetchers: Executor,
        times: LoadTimes,
        clock: Callable[[], float],
        failure_ttl_s: float,
        on_settled: Callable[[], None],
    ) -> None:
        self._files, self._host, self._planner, self._reader = files, host, planner, reader
        self._readers, self._fetchers = readers, fetchers
        self._times, self._clock = times, clock
        self._failure_ttl_s = failure_ttl_s
        self._on_settled = on_settled
        self._flights: dict[str, _Flight] = {}
        self._failures: dict[str, tuple[float, ReplicaError]] = {}
        self._settled: deque[Loaded] = deque()
        self._lock = threading.Lock()
        self.num_failures = 0

    def request(self, digest: str, hold: bool = False, ahead: bool = False) -> None:
        """Bring an image to the host cache, at once and without blocking; `settled` will tell how it went.

        When loads and copies leave no room there, nothing is read; with `hold` it is, and the result carries the image.
        `ahead` says that no request wants it yet: who comes later finds it in the host.
        """
        tier: Source = "node" if self._files.holds(digest) else "blob"
        with self._lock:
            flight = self._flights.get(digest)
            if flight is not None:
                flight.hold |= hold
                flight.ahead &= ahead
                return
            flight = self._flights[digest] = _Flight(digest, self._clock(), hold, ahead, tier)
        if tier == "node":
            self._readers.submit(self._read, flight)
        else:
            self._fetchers.submit(self._fetch, flight)

    def bring(self, digest: str) -> bool:
        """Request an image unless it is in the host cache, which is true then, and it counts as used now.

        Raises as `check` does.
        """
        self.check(digest)
        is_here = self._host.touch(digest)
        if not is_here:
            self.request(digest)
        return is_here

    def check(self, digest: str) -> None:
        """Raises UnknownAdapter, or what the last load raised while that is not older than the time to live.

        Costs one look at a folder and no reading.
        """
        with self._lock:
            expires_s, error = self._failures.get(digest, (0.0, None))
        if error is not None and self._clock() < expires_s:
            raise type(error)(error.message)
        if not self._files.knows(digest):
            raise UnknownAdapter(f"adapter {digest} was never staged on this node")

    def forget_failure(self, digest: str) -> None:
        with self._lock:
            self._failures.pop(digest, None)

    def settled(self) -> list[Loaded]:
        """The loads that ended since the last call, in the order in which they ended."""
        found = []
        while self._settled:
            found.append(self._settled.popleft())
        return found

    def num_in_flight(self, tier: Source) -> int:
        """Loads under way from the node's disk, or from the blob store behind it."""
        with self._lock:
            return sum(flight.tier == tier for flight in self._flights.values())

    def is_on_node(self, digest: str) -> bool:
        """Whether a load would come from the node's disk; costs one look at a folder."""
        return self._files.holds(digest)

    def _read(self, flight: _Flight) -> None:
        if not flight.hold and self._host.holds(flight.digest):
            self._settle(flight)  # a flight before this one ended while this one was asked for
            return
        try:
            if flight.tier == "node" and not self._files.holds(flight.digest):
                flight.tier = "blob"
                self._fetchers.submit(self._fetch, flight)
                return
            self._reader.expect(self._files.path(flight.digest))
            image = self._load(flight)
        except Exception as error:
            self._settle(flight, error=_as_replica_error(flight.digest, error))
        else:
            self._settle(flight, image=image)

    def _fetch(self, flight: _Flight) -> None:
        try:
            started_s = self._clock()
            self._files.open(flight.digest)
            self._times.observe("fetch", self._clock() - started_s, "blob")
            self._readers.submit(self._read, flight)
        except Exception as error:
            self._settle(flight, error=_as_replica_error(flight.digest, error))

    def _load(self, flight: _Flight) -> AdapterImage | None:
        started_s = self._clock()
        manifest = self._files.manifest(flight.digest)
        layout = self._planner.plan(manifest)
        block = self._host.make_room(layout.num_bytes)
        if block is None and not flight.hold:
            return None
        with self._files.reading(manifest) as path:
            image = self._reader.read(path, manifest, layout, block)
        flight.read_s = took_s = self._clock() - started_s
        if flight.ahead:
            self._host.add(image)
        else:
            self._host.add(image, flight.tier, took_s)
        self._times.observe("read", took_s * (1 - image.convert_share), flight.tier)
        self._times.observe("convert", took_s * image.convert_share, flight.tier)
        return image

    def _settle(self, flight: _Flight, image: AdapterImage | None = None, error: ReplicaError | None = None) -> None:
        now_s = self._clock()
        with self._lock:
            del self._flights[flight.digest]
            if error is not None:
                _logger.warning("%s: %s", error.code, error.message)
                self._remember_failure(flight.digest, error, now_s)
            held, took_s = image if flight.hold else None, now_s - flight.started_s
            self._settled.append(Loaded(flight.digest, flight.tier, took_s, flight.read_s, now_s, held, error))
        self._on_settled()

    def _remember_failure(self, digest: str, error: ReplicaError, now_s: float) -> None:
        self.num_failures += 1
        if isinstance(error, UnknownAdapter):
            return  # forgotten meanwhile: `knows` tells the next one, and changes when it is staged again
        self._failures = {key: known for key, known in self._failures.items() if known[0] > now_s}
        self._failures[digest] = (now_s + self._failure_ttl_s, error)


def _as_replica_error(digest: str, error: Exception) -> ReplicaError:
    """A fresh error without traceback: it is remembered, and must not keep the load's tensors alive."""
    if isinstance(error, ReplicaError):
        return type(error)(error.message)
    return AdapterUnavailable(f"adapter {digest} could not be loaded: {error}")
