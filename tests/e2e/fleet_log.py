"""What replicas do, written down at their seams, without a look at what they count: the other side of the metrics."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from replica.adapters.cache import AdapterCache
from replica.adapters.eviction import GreedyDualPolicy
from replica.adapters.image_reader import ImageReader
from replica.adapters.residents import Residents
from replica.engine import Engine


class FleetLog:
    """Every event of all replicas of this process, in order of (kind, digest), and what was launched."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.launched: list[tuple[int, int, int]] = []
        """Sequences, tokens and distinct adapters of every step."""

    def count(self, kind: str) -> int:
        return Counter(name for name, _ in self.events)[kind]


@contextmanager
def writing_down() -> Iterator[FleetLog]:
    """Write a log while the block runs."""
    log = FleetLog()
    acquire, publish, evicted = AdapterCache.acquire, Residents.publish, GreedyDualPolicy.evicted
    read, launch = ImageReader.read, Engine._launch

    def acquired(self: AdapterCache, digest: str) -> Any:
        lease = acquire(self, digest)
        log.events.append(("hit" if lease.ready else "miss", digest))
        return lease

    def published(self: Residents, digest: str, *args: Any) -> Any:
        log.events.append(("load", digest))
        return publish(self, digest, *args)

    def gave_up(self: GreedyDualPolicy, digest: str) -> None:
        log.events.append(("evict", digest))
        evicted(self, digest)

    def was_read(self: ImageReader, path: Any, manifest: Any, *args: Any) -> Any:
        log.events.append(("read", manifest.digest))
        return read(self, path, manifest, *args)

    def launched(self: Engine, works: Any) -> Any:
        adapters = {work.sequence.group.adapter for work in works} - {None}
        log.launched.append((len(works), sum(work.num_tokens for work in works), len(adapters)))
        return launch(self, works)

    with (
        patch.object(AdapterCache, "acquire", acquired),
        patch.object(Residents, "publish", published),
        patch.object(GreedyDualPolicy, "evicted", gave_up),
        patch.object(ImageReader, "read", was_read),
        patch.object(Engine, "_launch", launched),
    ):
        yield log
