"""Images of adapters in host memory under a byte budget. Knows nothing of files, devices or slots.

One instance belongs to one set of sites and one dtype, so a digest names exactly one image here.
"""

import threading
import weakref
from collections import OrderedDict

from replica.adapters.host_memory import HostBlock, HostMemory
from replica.adapters.stats import Source
from replica.adapters.weights import AdapterImage


class HostLease:
    """Keeps an image in the cache while a copy reads it; release it exactly once.

    `source` is where the image came from when it was read for this very copy, else the host.
    """

    def __init__(self, cache: "HostCache", image: AdapterImage, source: Source) -> None:
        self.image = image
        self.source = source
        self._cache: HostCache | None = cache

    def release(self) -> None:
        assert self._cache is not None, "a host lease was released twice"
        cache, self._cache = self._cache, None
        cache._give_back(self.image.digest)


class _Entry:
    __slots__ = ("forgotten", "image", "num_readers", "source")

    def __init__(self, image: AdapterImage, source: Source) -> None:
        self.image = image
        self.source = source
        self.num_readers = 0
        self.forgotten = False

    @property
    def unused_bytes(self) -> int:
        return 0 if self.source == "host" else self.image.num_bytes


class HostCache:
    """Least recently used images leave first; one that is being copied never does. Safe from any thread.

    The budget bounds loads in progress too: an image is read into room that was made for it here.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self.num_bytes = 0
        self.num_unused_bytes = 0
        """Of images that were read for a request and never copied into a slot."""
        self.num_evictions = 0
        self.num_withdrawn = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
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

    def add(self, image: AdapterImage, source: Source = "host") -> bool:
        """Keep an image; false when it was not read into room of this cache.

        `source` is what the first copy of it counts as: where it came from, or `host` when it was read ahead of need.
        """
        with self._lock:
            entry = self._entries.get(image.digest)
            if entry is not None:
                entry.forgotten = False
                self._entries.move_to_end(image.digest)
                return True
            if image.block not in self._blocks:
                return False
            self._entries[image.digest] = entry = _Entry(image, source)
            self.num_bytes += image.num_bytes
            self.num_unused_bytes += entry.unused_bytes
            return True

    def borrow(self, digest: str) -> HostLease | None:
        """Lease an image for a copy and mark it as used; None when it is not here."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None or entry.forgotten:
                return None
            self._entries.move_to_end(digest)
            entry.num_readers += 1
            self.num_unused_bytes -= entry.unused_bytes
            source, entry.source = entry.source, "host"
            return HostLease(self, entry.image, source)

    def touch(self, digest: str) -> bool:
        """Mark an image as used now; false when it is not here."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None or entry.forgotten:
                return False
            self._entries.move_to_end(digest)
            return True

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
            assert self.num_unused_bytes == sum(entry.unused_bytes for entry in self._entries.values())
            assert 0 <= self.num_bytes <= self.max_bytes - self._memory.free_bytes, repr(self)
            self._memory.check_integrity()
            for digest, entry in self._entries.items():
                assert entry.image.digest == digest
                assert entry.num_readers > 0 or not entry.forgotten, digest

    def close(self) -> None:
        """Give the memory up; nothing may be copied from here any more."""
        self._memory.close()

    def _drop(self, digest: str) -> None:
        entry = self._entries.pop(digest)
        self.num_bytes -= entry.image.num_bytes
        self.num_unused_bytes -= entry.unused_bytes

    def _give_back(self, digest: str) -> None:
        with self._lock:
            entry = self._entries[digest]
            entry.num_readers -= 1
            if entry.forgotten and entry.num_readers == 0:
                self._drop(digest)
