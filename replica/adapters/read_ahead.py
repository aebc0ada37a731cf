"""Which adapters to read before the requests that wait for them have their turn, and when. Reads nothing itself."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from replica.adapters.host_cache import HostCache
from replica.adapters.loader import ImageLoader
from replica.adapters.stats import Source
from replica.errors import ReplicaError

MOST_WANTED = 4096
"""Beyond that many the newest are not noted: they are read when their turn comes."""


class ReadAhead:
    """Brings adapters to the host cache in the order in which they were asked for. Safe from any thread.

    Not more of them at once than `most_at_once` from the node's disk and as many from the store behind it, so that a
    request whose turn has come waits behind few, and slow fetches hold up no reading; and none while what was read and
    not yet used takes half of the host's bytes, since what is read for those far behind would push out what those
    before them wait for. `is_needless` says that an adapter sits in a slot.
    """

    def __init__(
        self, loader: ImageLoader, host: HostCache, most_at_once: int, is_needless: Callable[[str], bool]
    ) -> None:
        self._loader, self._host, self._most_at_once = loader, host, most_at_once
        self._is_needless = is_needless
        self._wanted: OrderedDict[str, None] = OrderedDict()
        self._absent: OrderedDict[str, None] = OrderedDict()
        """Those whose turn came while their bytes were not on the node."""
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._wanted) + len(self._absent)

    def want(self, digest: str) -> None:
        """Read an adapter as soon as that disturbs nobody. Raises as `ImageLoader.check` does."""
        self._loader.check(digest)
        if self._host.touch(digest, is_awaited=not self._is_needless(digest)):
            return
        with self._lock:
            if len(self) < MOST_WANTED and digest not in self._absent:
                self._wanted[digest] = None
        self.go_on()

    def go_on(self) -> None:
        """Begin what may begin now, leaving out what is needless."""
        with self._lock:
            while self._wanted and self._may_begin("node"):
                digest, _ = self._wanted.popitem(last=False)
                if self._loader.is_on_node(digest):
                    self._begin(digest)
                else:
                    self._absent[digest] = None
            while self._absent and self._may_begin("blob"):
                digest, _ = self._absent.popitem(last=False)
                self._begin(digest)

    def _begin(self, digest: str) -> None:
        if not self._is_needless(digest):
            with suppress(ReplicaError):
                self._loader.bring(digest)

    def _may_begin(self, tier: Source) -> bool:
        is_free = self._loader.num_in_flight(tier) < self._most_at_once
        return is_free and 2 * self._host.unused_bytes() < self._host.max_bytes
