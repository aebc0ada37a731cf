"""Adapters that stay in their slots whoever asks for them: a lease is held on each. Knows no requests or files."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from replica.adapters.residents import Resident
from replica.errors import ReplicaError

logger = logging.getLogger(__name__)

LEAST_RETRY_S = 1.0


class Lease(Protocol):
    """What the keeper needs of an `AdapterLease`."""

    error: ReplicaError | None

    @property
    def resident(self) -> Resident | None:
        """Where it is, once it is in a slot."""
        ...

    def release(self) -> None: ...


class Keeper:
    """Holds a lease on every adapter that was asked for last. The step thread settles it; anybody may `want`.

    One that failed is tried again after `retry_after_s` seconds, or LEAST_RETRY_S if that is more.
    """

    def __init__(self, claim: Callable[[str], Lease], clock: Callable[[], float], retry_after_s: float) -> None:
        self._claim, self._clock = claim, clock
        self._retry_after_s = max(retry_after_s, LEAST_RETRY_S)
        self._wanted: tuple[str, ...] = ()
        self._leases: dict[str, Lease] = {}
        self._failed: dict[str, float] = {}
        """Digest -> until when it is left alone."""

    def __repr__(self) -> str:
        return f"Keeper({len(self._leases)} of {len(self._wanted)})"

    def want(self, digests: Sequence[str]) -> None:
        """Keep these and no others from the next `settle` on; what failed before is tried again."""
        self._failed = {}
        self._wanted = tuple(digests)

    @property
    def is_settled(self) -> bool:
        """Whether everything wanted is in its slot, or will not come."""
        leases = dict(self._leases)
        here = {digest for digest, lease in leases.items() if lease.resident is not None}
        return leases.keys() <= set(self._wanted) and set(self._wanted) <= here | dict(self._failed).keys()

    def settle(self) -> None:
        """Let go what is wanted no more, claim what is missing, and note what has come."""
        if not self._leases and not self._wanted:
            return
        wanted, failed, now_s = self._wanted, self._failed, self._clock()
        for digest in self._leases.keys() - set(wanted):
            self.drop(digest)
        for digest in wanted:
            if digest not in self._leases and failed.get(digest, now_s) <= now_s:
                failed.pop(digest, None)
                self._take(digest, failed)
        for digest, lease in tuple(self._leases.items()):
            if lease.resident is not None:
                lease.resident.kept = True
            elif lease.error is not None:
                self._give_up(digest, lease.error, failed)

    def give_way(self) -> bool:
        """Let go, until the next `want`, what is closed for one that has no room else; whether there was any."""
        held = [(digest, lease.resident) for digest, lease in self._leases.items()]
        closed = [digest for digest, resident in held if resident is not None and resident.kept and resident.closed]
        for digest in closed:
            logger.warning("adapter %s is kept no more: another one has no room beside it", digest[:12])
            self._failed[digest] = math.inf
            self.drop(digest)
        return bool(closed)

    def drop(self, digest: str) -> None:
        """Let an adapter go: it is wanted no more, or withdrawn."""
        lease = self._leases.pop(digest, None)
        if lease is None:
            return
        if lease.resident is not None:
            lease.resident.kept = False
        lease.release()

    def _take(self, digest: str, failed: dict[str, float]) -> None:
        try:
            self._leases[digest] = self._claim(digest)
        except ReplicaError as error:
            self._give_up(digest, error, failed)

    def _give_up(self, digest: str, error: ReplicaError, failed: dict[str, float]) -> None:
        logger.warning("cannot keep adapter %s in a slot: %s", digest[:12], error.message)
        failed[digest] = self._clock() + self._retry_after_s
        self.drop(digest)
