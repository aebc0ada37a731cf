"""Versions on their way to replicas ahead of their requests: one after the other at each, the replicas side by side."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

logger = logging.getLogger("lorafleet.gateway")
Wanted = Mapping[str, Mapping[str, str]]
"""Replica id -> adapter -> digest."""


class Warmer(Protocol):
    """What the prefetcher needs of the fleet."""

    async def prefetch(self, replica_id: str, digest: str) -> None:
        """Raises ReplicaGone when the replica is, or does not answer in time."""
        ...


class Prefetcher:
    """A replica that fails once is left alone until it is asked for the next time: one that hangs costs one timeout."""

    def __init__(self, warmer: Warmer) -> None:
        self._warmer = warmer
        self._tasks: set[asyncio.Task[set[str]]] = set()

    def __repr__(self) -> str:
        return f"Prefetcher({len(self._tasks)} under way)"

    def begin(self, wanted: Wanted) -> None:
        """Bring it while the caller goes on; what does not come is left to its first request."""
        if wanted:
            task = asyncio.create_task(self.bring(wanted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def bring(self, wanted: Wanted) -> set[str]:
        """The adapters that some replica did not get. Never raises."""
        left = await asyncio.gather(*(self._bring_to(replica_id, digests) for replica_id, digests in wanted.items()))
        return set().union(*left)

    async def _bring_to(self, replica_id: str, digests: Mapping[str, str]) -> set[str]:
        left = set(digests)
        try:
            for name, digest in digests.items():
                await self._warmer.prefetch(replica_id, digest)
                left.discard(name)
        except Exception as error:
            logger.warning("%d adapters were not brought to replica %s ahead: %s", len(left), replica_id, error)
        return left
