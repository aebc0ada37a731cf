"""Which replica an adapter prefers: rendezvous hashing with a bounded working set and a bounded load.

Pure: equal adapters, replicas and demand give equal homes in every gateway. Knows nothing of requests, clocks or Ray.
Bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2018.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat

from router.homes import Demand, assign
from router.preferences import Member, Row, hash64, rows

IN_SLOT, IN_HOST, COLD = 0, 1, 2
"""How far an adapter is from being served on a replica, for `standing`."""

Standing = Callable[[str], int]
"""Replica id -> IN_SLOT, IN_HOST or COLD; also COLD when nothing recent is known."""


def unknown(replica_id: str) -> int:
    """The standing everywhere while there is no news."""
    return COLD


class AffinityPolicy:
    """Ranks replicas for an adapter. `update` says what exists; homes are worked out once until it changes."""

    def __init__(self, load_factor: float, min_bound: int, home_factor: float) -> None:
        self._load_factor = load_factor
        self._min_bound = min_bound
        self._home_factor = home_factor
        self._members: tuple[Member, ...] = ()
        self._ids: tuple[str, ...] = ()
        self._whole = 0.0
        self._hashes: dict[str, int] = {}
        self._rows: dict[str, Row] = {}
        self._demand = Demand()
        self._homes: dict[str, Row] | None = None

    def __repr__(self) -> str:
        return f"AffinityPolicy({len(self._hashes)} adapters, {len(self._members)} replicas)"

    @property
    def members(self) -> tuple[Member, ...]:
        return self._members

    def update(self, names: Iterable[str], members: Iterable[Member], demand: Demand | None = None) -> None:
        """Take what exists now, and with `demand` what is in use. Keeps what is worked out when nothing changed."""
        new_names, new_members = frozenset(names), tuple(sorted(members))
        if new_members != self._members:
            self._rows.clear()
            self._homes = None
        if new_names != self._hashes.keys():
            self._homes = None
        if demand is not None and demand != self._demand:
            self._demand, self._homes = demand, None
        for gone in self._hashes.keys() - new_names:
            del self._hashes[gone]
            self._rows.pop(gone, None)
        self._hashes.update((name, hash64(name)) for name in new_names - self._hashes.keys())
        self._members = new_members
        self._ids = tuple(member.replica_id for member in new_members)
        self._whole = math.fsum(member.weight for member in new_members)
        fresh = [name for name in self._hashes if name not in self._rows]
        self._rows.update(zip(fresh, rows((self._hashes[name] for name in fresh), new_members), strict=True))

    def preference(self, name: str) -> tuple[Member, ...]:
        """All replicas, the most preferred first. Adding a replica moves only the names that prefer it."""
        return tuple(self._members[index] for index in self._row(name))

    def home(self, name: str) -> Member | None:
        """The adapter's first home; None without replicas. A name not in the catalog lives at its first preference."""
        homes = self.homes(name)
        return homes[0] if homes else None

    def homes(self, name: str) -> tuple[Member, ...]:
        """All homes of the adapter, as many as `demand` says; the first does not depend on how many there are."""
        return tuple(self._members[index] for index in self._home_row(name))

    def rank(
        self,
        name: str | None,
        loads: Mapping[str, int],
        exclude: Iterable[str] = (),
        standing: Standing = unknown,
        felt: Mapping[str, float] | None = None,
    ) -> Sequence[str]:
        """Replica ids to try in order. `loads` counts requests in flight by replica id (absent is 0).

        Under the load bound: homes, those that have the adapter first and then the least loaded; then others by
        `standing` and preference. Last the replicas over the bound, by load. `name` None, the base model, goes to the
        least loaded. Loads are weighed by the members' weights.

        `felt` is what is kept even, None for `loads` itself. One of G gateways counts its own requests there, and
        those of others, which it hears of late, as 1 / G each. As wholes, each gateway would make up for the
        imbalance of all others: G - 1 times too much in all, so that bursts swing from one replica to the next. The
        bound is then kept on the whole: what each keeps below it adds up to (2 G - 1) / G of the loads. What each
        rounds up, about G / 2 requests a replica, and what is too new to be heard of come on top.
        """
        order, place = self._places(name, loads, frozenset(exclude), standing, felt)
        return [self._ids[i] for i in sorted(order, key=place)]

    def choose(
        self,
        name: str | None,
        loads: Mapping[str, int],
        exclude: Collection[str] = (),
        standing: Standing = unknown,
        felt: Mapping[str, float] | None = None,
    ) -> str | None:
        """The first of `rank`, at less cost; None when none is left."""
        if name is not None and not exclude and self._members:
            homes = self._home_row(name)
            if len(homes) == 1 and self._has_room(homes[0], loads, loads if felt is None else felt):
                return self._ids[homes[0]]
        order, place = self._places(name, loads, frozenset(exclude), standing, felt)
        return self._ids[min(order, key=place)] if order else None

    def bound(self, loads: Mapping[str, int], replica_ids: Collection[str], weight: float | None = None) -> int:
        """The load bound over `replica_ids` at the loads of this moment, for a replica of that weight (None: mean)."""
        total = sum(loads.get(replica_id, 0) for replica_id in replica_ids)
        whole = math.fsum(member.weight for member in self._members if member.replica_id in replica_ids)
        return self._bound(total, whole, whole / len(replica_ids) if weight is None else weight)

    def bounds(self, loads: Mapping[str, int]) -> list[tuple[Member, int]]:
        """Every member with its load bound over all of them, at the loads of this moment. Any thread may ask."""
        members = self._members
        total = sum(loads.get(member.replica_id, 0) for member in members)
        whole = math.fsum(member.weight for member in members)
        return [(member, self._bound(total, whole, member.weight)) for member in members]

    def _bound(self, total: int, whole: float, weight: float) -> int:
        return max(self._min_bound, self._share(total, whole, weight))

    def _share(self, total: float, whole: float, weight: float) -> int:
        return math.ceil(self._load_factor * (total + 1) * (weight / whole))

    def _has_room(self, index: int, loads: Mapping[str, int], felt: Mapping[str, float]) -> bool:
        """Whether the member is under the bound over all members."""
        if loads.get(self._ids[index], 0) < self._min_bound:
            return True
        total = math.fsum(map(felt.get, self._ids, repeat(0)))
        return felt.get(self._ids[index], 0) < self._share(total, self._whole, self._members[index].weight)

    def _places(
        self,
        name: str | None,
        loads: Mapping[str, int],
        excluded: frozenset[str],
        standing: Standing,
        felt: Mapping[str, float] | None,
    ) -> tuple[Sequence[int], Callable[[int], tuple[int, float, float]]]:
        """Indices of the members that are left, in order of preference, and what to sort them by."""
        ids, members = self._ids, self._members
        order: Sequence[int] = range(len(ids)) if name is None else self._row(name)
        if excluded:
            order = [i for i in order if ids[i] not in excluded]
        load = [(loads if felt is None else felt).get(replica_id, 0) for replica_id in ids]
        if name is None:
            return order, lambda i: (0, 0, load[i] / members[i].weight)
        total = math.fsum([load[i] for i in order])
        whole = self._whole if not excluded else math.fsum([members[i].weight for i in order])
        shares = {weight: self._share(total, whole, weight) for weight in {members[i].weight for i in order}}
        homes = self._home_row(name)

        def place(i: int) -> tuple[int, float, float]:
            weight = members[i].weight
            if load[i] >= shares[weight] and loads.get(ids[i], 0) >= self._min_bound:
                return (2, load[i] / weight, 0)
            stands = standing(ids[i])
            return (0, stands == COLD, load[i] / weight) if i in homes else (1, stands, 0)

        return order, place

    def _row(self, name: str) -> Row:
        known = self._rows.get(name)
        return rows((hash64(name),), self._members)[0] if known is None else known

    def _home_row(self, name: str) -> Row:
        if self._homes is None:
            self._homes = self._assign_homes()
        return self._homes.get(name) or self._row(name)[:1]

    def _assign_homes(self) -> dict[str, Row]:
        if not self._members:
            return {}
        names = sorted(self._hashes, key=lambda name: (self._hashes[name], name))
        return assign(self._rows, names, self._members, self._demand, self._home_factor)
