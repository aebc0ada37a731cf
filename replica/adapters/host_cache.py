"""Images of adapters in host memory under a byte budget. Knows nothing of files, devices or slots.

One instance belongs to one set of sites and one dtype, so a digest names exactly one image here.
"""

import threading
from collections import OrderedDict

from replica.adapters.weights import AdapterImage


class HostLease:
    """Keeps an image in the cache while a copy reads it; release it exactly once."""

    def __init__(self, cache: "HostCache", image: AdapterImage) -> None:
        self.image = image
        self._cache: HostCache | None = cache

    def release(self) -> None:
        assert self._cache is not None, "a host lease was released twice"
        cache, self._cache = self._cache, None
        cache._give_back(self.image.digest)


class _Entry:
    __slots__ = ("forgotten", "image", "num_readers")

    def __init__(self, image: AdapterImage) -> None:
        self.image = image
        self.num_readers = 0
        self.forgotten = False


class HostCache:
    """Least recently used images leave first; one that is being copied never does. Safe from any thread."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_evictions = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"HostCache({len(self._entries)} images, {self.num_bytes} of {self.max_bytes} bytes)"

    def add(self, image: AdapterImage) -> bool:
        """Keep an image; false when what is being copied leaves no room for it."""
        with self._lock:
            entry = self._entries.get(image.digest)
            if entry is not None:
                entry.forgotten = False
                self._entries.move_to_end(image.digest)
                return True
            if not self._make_room(image.num_bytes):
                return False
            self._entries[image.digest] = _Entry(image)
            self.num_bytes += image.num_bytes
            return True

    def borrow(self, digest: str) -> HostLease | None:
        """Lease an image for a copy and mark it as used; None when it is not here."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None or entry.forgotten:
                return None
            self._entries.move_to_end(digest)
            entry.num_readers += 1
            return HostLease(self, entry.image)

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
            assert 0 <= self.num_bytes <= self.max_bytes, repr(self)
            for digest, entry in self._entries.items():
                assert entry.image.digest == digest
                assert entry.num_readers > 0 or not entry.forgotten, digest

    def _make_room(self, num_bytes: int) -> bool:
        idle = [(digest, entry.image.num_bytes) for digest, entry in self._entries.items() if entry.num_readers == 0]
        if self.num_bytes - sum(size for _, size in idle) + num_bytes > self.max_bytes:
            return False
        for digest, _ in idle:
            if self.num_bytes + num_bytes <= self.max_bytes:
                break
            self._drop(digest)
            self.num_evictions += 1
        return True

    def _drop(self, digest: str) -> None:
        self.num_bytes -= self._entries.pop(digest).image.num_bytes

    def _give_back(self, digest: str) -> None:
        with self._lock:
            entry = self._entries[digest]
            entry.num_readers -= 1
            if entry.forgotten and entry.num_readers == 0:
                self._drop(digest)
