"""Which adapters to read before the requests that wait for them have their turn, and when. Reads nothing itself."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from replica.adapters.host_cache import HostCache
from replica.adapters.loader import ImageLoader
from replica.errors import ReplicaError

MOST_WANTED = 4096
"""Beyond that many the oldest are forgotten: they are read when their turn comes."""


class ReadAhead:
    """Brings adapters to the host cache in the order in which they were asked for. Safe from any thread.

    Not more of them at once than `most_at_once`, so that a request whose turn has come waits behind few; and none while
    what was read and not yet used takes half of the host's bytes, since what is read for those far behind would push
    out what those before them wait for.
    """

    def __init__(self, loader: ImageLoader, host: HostCache, most_at_once: int) -> None:
        self._loader, self._host, self._most_at_once = loader, host, most_at_once
        self._wanted: deque[str] = deque(maxlen=MOST_WANTED)
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._wanted)

    def want(self, digest: str) -> None:
        """Read an adapter as soon as that disturbs nobody. Raises as `ImageLoader.check` does."""
        self._loader.check(digest)
        if self._host.touch(digest):
            return
        with self._lock:
            self._wanted.append(digest)
        self.go_on()

    def go_on(self, is_needless: Callable[[str], bool] = lambda digest: False) -> None:
        """Begin what may begin now, leaving out what `is_needless`."""
        with self._lock:
            while self._wanted and self._may_begin():
                digest = self._wanted.popleft()
                if not is_needless(digest):
                    with suppress(ReplicaError):
                        self._loader.bring(digest)

    def _may_begin(self) -> bool:
        return (
            self._loader.num_in_flight < self._most_at_once and 2 * self._host.num_unused_bytes < self._host.max_bytes
        )
