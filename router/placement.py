"""Which replica takes a request now: the affinity policy plus this gateway's own count of requests in flight."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from registry.types import ReplicaRecord
from router.affinity import AffinityPolicy, Member
from router.config import PlacementConfig
from router.errors import NoReplica

Kind = Literal["home", "spill", "base"]


@dataclass(slots=True)
class PlacementLease:
    """One request's place in the load of a replica, given back once by `release` or at the end of a `with`."""

    replica_id: str
    kind: Kind
    _loads: Counter[str] = field(repr=False)
    _held: bool = True

    def release(self) -> None:
        """Give the place back; further calls do nothing."""
        if not self._held:
            return
        self._held = False
        self._loads[self.replica_id] -= 1
        if not self._loads[self.replica_id]:
            del self._loads[self.replica_id]

    def __enter__(self) -> "PlacementLease":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Placement:
    """Leases places on replicas. Synchronous, so a choice and its count are one step. `placed` hears of each."""

    def __init__(
        self,
        config: PlacementConfig,
        placed: Callable[[Kind], None] = lambda kind: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = AffinityPolicy(config.load_factor, config.min_load_bound, config.home_factor)
        self._loads: Counter[str] = Counter()
        self._placed = placed
        self._suspect_s = config.suspect_s
        self._suspected_until_s: dict[str, float] = {}
        self._clock = clock

    def __repr__(self) -> str:
        return f"Placement({len(self._policy.members)} replicas, loads {dict(self._loads)})"

    @property
    def policy(self) -> AffinityPolicy:
        return self._policy

    def update(self, names: Iterable[str], replicas: Iterable[ReplicaRecord]) -> None:
        """Take the catalog's adapters and the replicas with a live lease."""
        self._policy.update(names, (Member(replica.ring_id, replica.replica_id) for replica in replicas))

    def load(self, replica_id: str) -> int:
        """Requests of this gateway that the replica is serving."""
        return self._loads.get(replica_id, 0)

    @property
    def num_leases(self) -> int:
        return self._loads.total()

    def place(self, name: str | None, exclude: Collection[str] = ()) -> PlacementLease:
        """Lease a place for the adapter `name` (None: the base); raises NoReplica when none is left to try."""
        suspects = self._suspects()
        ranked = self._policy.rank(name, self._loads, {*exclude, *suspects}) if suspects else []
        ranked = ranked or self._policy.rank(name, self._loads, exclude)
        if not ranked:
            raise NoReplica("no other replica is ready" if exclude else "no replica is ready")
        replica_id = ranked[0]
        kind = self._kind(name, replica_id)
        self._placed(kind)
        self._loads[replica_id] += 1
        return PlacementLease(replica_id, kind, self._loads)

    def suspect(self, replica_id: str) -> None:
        """Ask this replica last for a while: it was just found gone or draining, and its lease has yet to end."""
        self._suspected_until_s[replica_id] = self._clock() + self._suspect_s

    def _suspects(self) -> set[str]:
        now_s = self._clock()
        self._suspected_until_s = {
            replica_id: until_s for replica_id, until_s in self._suspected_until_s.items() if until_s > now_s
        }
        return set(self._suspected_until_s)

    def check_integrity(self) -> None:
        """Assert that no load is negative or kept at zero."""
        assert all(load > 0 for load in self._loads.values()), f"loads {dict(self._loads)}"

    def _kind(self, name: str | None, replica_id: str) -> Kind:
        if name is None:
            return "base"
        home = self._policy.home(name)
        return "home" if home is not None and home.replica_id == replica_id else "spill"
