"""Which replica an adapter prefers: rendezvous hashing with a bounded working set and a bounded load.

Pure: equal adapters and replicas give equal homes in every gateway. Knows nothing of requests, clocks or Ray.
Rendezvous hashing: Thaler and Ravishankar, 1998. Bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2018.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A replica on the ring. `ring_id` outlives restarts, so it decides; `replica_id` only breaks ties."""

    ring_id: int
    replica_id: str


def hash64(text: str) -> int:
    """64 bits of blake2b, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def load_bound(total: int, num_replicas: int, load_factor: float, min_bound: int) -> int:
    """A replica takes one more request only while its load is below this."""
    return max(min_bound, math.ceil(load_factor * (total + 1) / num_replicas))


class AffinityPolicy:
    """Ranks replicas for an adapter. `update` says what exists; homes are worked out once until it changes."""

    def __init__(self, load_factor: float, min_bound: int, home_factor: float) -> None:
        self._load_factor = load_factor
        self._min_bound = min_bound
        self._home_factor = home_factor
        self._names: frozenset[str] = frozenset()
        self._members: tuple[Member, ...] = ()
        self._preferences: dict[str, tuple[Member, ...]] = {}
        self._homes: dict[str, Member] | None = None

    def __repr__(self) -> str:
        return f"AffinityPolicy({len(self._names)} adapters, {len(self._members)} replicas)"

    @property
    def members(self) -> tuple[Member, ...]:
        return self._members

    def update(self, names: Iterable[str], members: Iterable[Member]) -> None:
        """Take the adapters and replicas that exist now. Keeps what is memoised when neither changed."""
        new_names, new_members = frozenset(names), tuple(sorted(members))
        if new_members != self._members:
            self._preferences.clear()
        if new_members != self._members or new_names != self._names:
            self._homes = None
        for gone in self._names - new_names:
            self._preferences.pop(gone, None)
        self._names, self._members = new_names, new_members

    def preference(self, name: str) -> tuple[Member, ...]:
        """All replicas, the most preferred first. Adding a replica moves only the names that prefer it."""
        known = self._preferences.get(name)
        if known is None:
            known = tuple(sorted(self._members, key=lambda m: (-hash64(f"{m.ring_id}\x00{name}"), m)))
            if name in self._names:
                self._preferences[name] = known
        return known

    def home(self, name: str) -> Member | None:
        """The adapter's home; None without replicas. A name not in the catalog lives at its first preference."""
        if not self._members:
            return None
        if self._homes is None:
            self._homes = self._assign_homes()
        return self._homes.get(name) or self.preference(name)[0]

    def rank(self, name: str | None, loads: Mapping[str, int], exclude: Iterable[str] = ()) -> Sequence[str]:
        """Replica ids to try in order: home, then preference, under the load bound; the rest by load.

        `loads` counts requests in flight by replica id (absent is 0). `name` None, the base model, goes to the
        least loaded.
        """
        excluded = set(exclude)
        order = [m.replica_id for m in self._ordered(name) if m.replica_id not in excluded]
        if name is None or not order:
            return sorted(order, key=lambda replica_id: loads.get(replica_id, 0))
        bound = self.bound(loads, order)
        under = [replica_id for replica_id in order if loads.get(replica_id, 0) < bound]
        over = [replica_id for replica_id in order if loads.get(replica_id, 0) >= bound]
        return under + sorted(over, key=lambda replica_id: loads.get(replica_id, 0))

    def bound(self, loads: Mapping[str, int], replica_ids: Sequence[str]) -> int:
        """The load bound over `replica_ids` at the loads of this moment."""
        total = sum(loads.get(replica_id, 0) for replica_id in replica_ids)
        return load_bound(total, len(replica_ids), self._load_factor, self._min_bound)

    def _ordered(self, name: str | None) -> Sequence[Member]:
        if name is None or not self._members:
            return self._members
        home = self.home(name)
        return sorted(self.preference(name), key=lambda member: member != home)

    def _assign_homes(self) -> dict[str, Member]:
        """Names in hash order, each to the first of its preference list that still has room for a home."""
        room = math.ceil(self._home_factor * len(self._names) / len(self._members))
        counts: Counter[Member] = Counter()
        homes: dict[str, Member] = {}
        for name in sorted(self._names, key=lambda name: (hash64(name), name)):
            home = next(member for member in self.preference(name) if counts[member] < room)
            counts[home] += 1
            homes[name] = home
        return homes
