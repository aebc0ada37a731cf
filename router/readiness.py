"""Whether the fleet can serve: some replica says itself that its step loop runs. Knows nothing of HTTP."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

FRESH_S = 1.0
"""An answer that is younger serves for everybody who asks."""


class Prober(Protocol):
    """What readiness needs of the fleet."""

    async def makes_progress(self, replica_id: str) -> bool:
        """Whether the replica answers and its step loop runs; False, and never an error, when it does not answer."""
        ...


class Readiness:
    """Asks the replicas, whoever asks it at most once in FRESH_S."""

    def __init__(self, prober: Prober, clock: Callable[[], float] = time.monotonic) -> None:
        self._prober = prober
        self._clock = clock
        self._asking = asyncio.Lock()
        self._asked: Sequence[str] = ()
        self._asked_at_s = -FRESH_S
        self._answer = False

    async def has_progress(self, replica_ids: Sequence[str]) -> bool:
        """Whether one of these replicas makes progress; the first that says so decides."""
        async with self._asking:
            if replica_ids != self._asked or self._clock() - self._asked_at_s >= FRESH_S:
                self._answer = await self._any(replica_ids)
                self._asked, self._asked_at_s = replica_ids, self._clock()
            return self._answer

    async def _any(self, replica_ids: Sequence[str]) -> bool:
        probes = [asyncio.ensure_future(self._prober.makes_progress(replica_id)) for replica_id in replica_ids]
        try:
            for probe in asyncio.as_completed(probes):
                if await probe:
                    return True
            return False
        finally:
            for probe in probes:
                probe.cancel()
            await asyncio.gather(*probes, return_exceptions=True)
