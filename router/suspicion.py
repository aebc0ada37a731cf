"""Replicas that were found gone or draining while the catalog still lists them: asked last, for longer each time."""

from collections.abc import Callable

MAX_DOUBLINGS = 5


class Suspicion:
    """Each new fault of a replica doubles how long it is suspected; an answer clears it."""

    def __init__(self, suspect_s: float, clock: Callable[[], float]) -> None:
        self._suspect_s = suspect_s
        self._clock = clock
        self._until_s: dict[str, float] = {}
        self._faults: dict[str, int] = {}

    def suspect(self, replica_id: str) -> None:
        now_s = self._clock()
        if self._until_s.get(replica_id, 0.0) > now_s:
            return
        faults = self._faults.get(replica_id, 0)
        self._until_s[replica_id] = now_s + self._suspect_s * 2**faults
        self._faults[replica_id] = min(faults + 1, MAX_DOUBLINGS)

    def clear(self, replica_id: str) -> None:
        """The replica answered."""
        if self._faults:
            self._faults.pop(replica_id, None)
            self._until_s.pop(replica_id, None)

    def keep_only(self, replica_ids: frozenset[str]) -> None:
        """Forget replicas that are listed no more."""
        for gone in self._faults.keys() - replica_ids:
            self.clear(gone)

    def now(self) -> set[str]:
        """Those suspected at this moment."""
        if not self._until_s:
            return set()
        now_s = self._clock()
        return {replica_id for replica_id, until_s in self._until_s.items() if until_s > now_s}
