"""Images of adapters in host memory under a byte budget. Knows nothing of files, devices or slots.

One instance belongs to one set of sites and one dtype, so a digest names exactly one image here.
"""

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable

from replica.adapters.host_memory import HostBlock, HostMemory
from replica.adapters.stats import Source
from replica.adapters.weights import AdapterImage

UNUSED_S = 30.0
"""So long an image that was read for a request counts as unused: by then that has had its turn, or gave up."""


class HostLease:
    """Keeps an image in the cache while a copy reads it; release it, or cancel it, exactly once.

    When the image was read for this very copy, `source` is where it came from and `read_s` how long that took; else
    they are the host and 0.
    """

    def __init__(self, cache: "HostCache", image: AdapterImage, source: Source, read_s: float) -> None:
        self.image = image
        self.source = source
        self.read_s = read_s
        self._cache: HostCache | None = cache

    def release(self) -> None:
        self._give_back(is_copied=True)

    def cancel(self) -> None:
        """Give the image back uncopied: what it was read for is still to come."""
        self._give_back(is_copied=False)

    def _give_back(self, is_copied: bool) -> None:
        assert self._cache is not None, "a host lease was released twice"
        cache, self._cache = self._cache, None
        cache._give_back(self, is_copied)


class _Entry:
    __slots__ = ("forgotten", "image", "num_readers", "read_s", "source")

    def __init__(self, image: AdapterImage, source: Source, read_s: float) -> None:
        self.image = image
        self.source = source
        self.read_s = read_s
        self.num_readers = 0
        self.forgotten = False


class HostCache:
    """Least recently used images leave first; one that is being copied never does. Safe from any thread.

    The budget bounds loads in progress too: an image is read into room that was made for it here.
    """

    def __init__(self, memory: HostMemory, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory, self._clock = memory, clock
        self.num_bytes = 0
        self.num_evictions = 0
        self.num_withdrawn = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._unused: OrderedDict[str, float] = OrderedDict()
        """Digest -> when it was read for a request, of those that wait to be used; the oldest first."""
        self._num_unused_bytes = 0
        self._blocks: weakref.WeakSet[HostBlock] = weakref.WeakSet()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"HostCache({len(self._entries)} images, {self.num_bytes} bytes, {self._memory!r})"

    @property
    def max_bytes(self) -> int:
        return self._memory.max_bytes

    @property
    def free_bytes(self) -> int:
        """What can be had without giving up an image, perhaps in several holes."""
        return self._memory.free_bytes

    def unused_bytes(self) -> int:
        """Of images that were read for a request in the last UNUSED_S seconds, and that none has used since."""
        with self._lock:
            since_s = self._clock() - UNUSED_S
            while self._unused and next(iter(self._unused.values())) <= since_s:
                self._note_used(next(iter(self._unused)))
            return self._num_unused_bytes

    def make_room(self, num_bytes: int) -> HostBlock | None:
        """Room for a new image, after giving up as few old ones as it takes.

        None when loads in progress and images that are being copied leave no room.
        """
        with self._lock:
            block = self._memory.allocate(num_bytes)
            idle = [entry.image for entry in self._entries.values() if entry.num_readers == 0]
            if block is None and self._memory.free_bytes + sum(image.num_bytes for image in idle) < num_bytes:
                return None
            digests = [image.digest for image in idle]
            idle.clear()  # the images' memory comes back with their last reference
            for digest in digests:
                if block is not None:
                    break
                self._drop(digest)
                self.num_evictions += 1
                block = self._memory.allocate(num_bytes)
            if block is not None:
                self._blocks.add(block)
            return block

    def add(self, image: AdapterImage, source: Source = "host", read_s: float = 0.0) -> bool:
        """Keep an image; false when it was not read into room of this cache.

        `source` is what the first copy of it counts as: where it came from, or `host` when it was read ahead of need.
        `read_s` is what reading it took for a request, in seconds.
        """
        with self._lock:
            entry = self._entries.get(image.digest)
            if entry is not None:
                entry.forgotten = False
                self._entries.move_to_end(image.digest)
                return True
            if image.block not in self._blocks:
                return False
            self._entries[image.digest] = _Entry(image, source, read_s)
            self.num_bytes += image.num_bytes
            if source != "host":
                self._unused[image.digest] = self._clock()
                self._num_unused_bytes += image.num_bytes
            return True

    def borrow(self, digest: str) -> HostLease | None:
        """Lease an image for a copy and mark it as used; None when it is not here."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None or entry.forgotten:
                return None
            self._entries.move_to_end(digest)
            entry.num_readers += 1
            self._note_used(digest)
            lease = HostLease(self, entry.image, entry.source, entry.read_s)
            entry.source, entry.read_s = "host", 0.0
            return lease

    def touch(self, digest: str, is_awaited: bool = True) -> bool:
        """Mark an image as used now; false when it is not here. Nobody waits for one whose adapter is in a slot."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None or entry.forgotten:
                return False
            self._entries.move_to_end(digest)
            if not is_awaited:
                self._note_used(digest)
            return True

    def holds(self, digest: str) -> bool:
        """Whether an image is here, which does not count as a use."""
        with self._lock:
            entry = self._entries.get(digest)
            return entry is not None and not entry.forgotten

    def forget(self, digest: str) -> None:
        """Drop an image; one that is being copied leaves when the copy ends."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None:
                return
            self.num_withdrawn += not entry.forgotten
            entry.forgotten = True
            if entry.num_readers == 0:
                self._drop(digest)

    def digests(self) -> tuple[str, ...]:
        """What is here, least recently used first."""
        with self._lock:
            return tuple(self._entries)

    def check_integrity(self) -> None:
        with self._lock:
            assert self.num_bytes == sum(entry.image.num_bytes for entry in self._entries.values())
            assert self._num_unused_bytes == sum(self._entries[digest].image.num_bytes for digest in self._unused)
            assert 0 <= self.num_bytes <= self.max_bytes - self._memory.free_bytes, repr(self)
            self._memory.check_integrity()
            for digest, entry in self._entries.items():
                assert entry.image.digest == digest
                assert entry.num_readers > 0 or not entry.forgotten, digest

    def close(self) -> None:
        """Give the memory up; nothing may be copied from here any more."""
        self._memory.close()

    def _note_used(self, digest: str) -> None:
        if self._unused.pop(digest, None) is not None:
            self._num_unused_bytes -= self._entries[digest].image.num_bytes

    def _drop(self, digest: str) -> None:
        self._note_used(digest)
        self.num_bytes -= self._entries.pop(digest).image.num_bytes

    def _give_back(self, lease: HostLease, is_copied: bool) -> None:
        digest = lease.image.digest
        with self._lock:
            entry = self._entries[digest]
            entry.num_readers -= 1
            if not is_copied:
                entry.source, entry.read_s = lease.source, lease.read_s
            if entry.forgotten and entry.num_readers == 0:
                self._drop(digest)
