"""Which replica takes a request now: the affinity policy over this gateway's leases and what it heard of the fleet."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from registry.pulse import FleetPulse, GatewayPulse, ReplicaState
from registry.types import ReplicaRecord
from router.affinity import COLD, IN_HOST, IN_SLOT, AffinityPolicy
from router.busy import BusyTime
from router.config import PlacementConfig
from router.errors import NoReplica
from router.fleet_news import FleetNews
from router.preferences import Member
from router.spread import TenantSpread
from router.suspicion import Suspicion

Kind = Literal["home", "spill", "base"]
Held = Literal["slot", "host", "none"]
HELD: dict[int, Held] = {IN_SLOT: "slot", IN_HOST: "host", COLD: "none"}
"""Where a replica has a version, in words; `none` also when nothing recent is known."""


@dataclass(slots=True)
class PlacementLease:
    """One request's place in the load of a replica, given back once by `release` or at the end of a `with`."""

    replica_id: str
    kind: Kind
    _give_back: Callable[[], None] = field(repr=False)
    _held: bool = True

    def release(self) -> None:
        """Give the place back; further calls do nothing."""
        if self._held:
            self._held = False
            self._give_back()

    def __enter__(self) -> "PlacementLease":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Placement:
    """Leases places on replicas. Synchronous, so a choice and its count are one step. `placed` hears of each."""

    def __init__(
        self,
        config: PlacementConfig,
        placed: Callable[[Kind, Held], None] = lambda kind, held: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = AffinityPolicy(config.load_factor, config.min_load_bound, config.home_factor)
        self._weigh_slots = config.weigh_slots
        self.spread = TenantSpread()
        self._own: Counter[str] = Counter()
        self._loads: Counter[str] = Counter()
        """Own requests and, while the news is fresh, those of other gateways."""
        self._others_counted: Counter[str] = Counter()
        self._felt: dict[str, float] = {}
        """The same with each request of another gateway as a part of one: see `AffinityPolicy.rank`."""
        self._news = FleetNews(config.news_stale_s)
        self._busy = BusyTime(clock)
        self._suspicion = Suspicion(config.suspect_s, clock)
        self._names: frozenset[str] = frozenset()
        self._leaving: frozenset[str] = frozenset()
        self._starting: frozenset[str] = frozenset()
        self._placed = placed
        self._clock = clock

    def __repr__(self) -> str:
        return f"Placement({len(self._policy.members)} replicas, loads {dict(self._loads)})"

    @property
    def policy(self) -> AffinityPolicy:
        return self._policy

    def update(self, names: Iterable[str], replicas: Iterable[ReplicaRecord]) -> None:
        """Take the catalog's adapters and the replicas with a live lease."""
        members = [
            Member(
                replica.ring_id,
                replica.replica_id,
                float(max(1, replica.num_slots)) if self._weigh_slots else 1.0,
                replica.num_slots,
            )
            for replica in replicas
        ]
        self._names = frozenset(names)
        self._policy.update(self._names, members, self._news.demand)
        listed = frozenset(member.replica_id for member in members)
        self._leaving &= listed
        self._starting &= listed
        self._suspicion.keep_only(listed)

    def hear(self, pulse: FleetPulse) -> list[tuple[str, str]]:
        """Take the registry's answer to a heartbeat; returns (adapter, replica id) of every home that is new to an
        adapter of several, so that it can be brought there before requests come."""
        before = self._news.demand
        changed = self._news.hear(pulse, self._clock())
        self._count_others()
        if not changed:
            return []
        spread = [name for name in self._news.demand.num_homes if name in self._names]
        homes_before = {name: frozenset(self._policy.homes(name)) for name in spread}
        self._policy.update(self._names, self._policy.members, self._news.demand)
        grown = [name for name in spread if self._news.demand.num_homes[name] > before.num_homes.get(name, 1)]
        return [
            (name, home.replica_id)
            for name in grown
            for home in self._policy.homes(name)
            if home not in homes_before[name]
        ]

    def pulse(self, gateway_id: str) -> GatewayPulse:
        """What to tell the registry now; counts demand since the last call."""
        busy_s, interval_s = self._busy.take()
        return self._news.pulse(gateway_id, interval_s, busy_s, self._own, self._leaving)

    def leaving(self, replica_ids: Iterable[str]) -> bool:
        """These replicas were stopped, or are being stopped: nothing more goes to them while another one is there.

        Returns whether there are new ones among them.
        """
        before = self._leaving
        self._leaving = frozenset(replica_ids) & {member.replica_id for member in self._policy.members}
        return not self._leaving <= before

    def starting(self, replica_ids: Iterable[str]) -> None:
        """These replicas have joined and cannot be called yet: others are asked first while there are any."""
        self._starting = frozenset(replica_ids)

    def load(self, replica_id: str) -> int:
        """Requests that the replica is serving, as far as this gateway knows."""
        return self._loads.get(replica_id, 0)

    def loads(self) -> list[tuple[str, int, int]]:
        """Replica id, load and the load at which it takes no more, of every replica; any thread may ask.

        Of several gateways each keeps to it roughly: see `AffinityPolicy.rank`.
        """
        loads = self._loads
        return [
            (member.replica_id, loads.get(member.replica_id, 0), bound) for member, bound in self._policy.bounds(loads)
        ]

    def states(self, replicas: Iterable[ReplicaRecord]) -> list[ReplicaState]:
        """The replicas with what is known of their loads."""
        told = self._news.loads(self._clock())
        bounds = {member.replica_id: bound for member, bound in self._policy.bounds(self._loads)}
        return [
            ReplicaState(
                **replica.model_dump(),
                load=told.get(replica.replica_id),
                num_requests=self.load(replica.replica_id),
                load_bound=bounds.get(replica.replica_id),
            )
            for replica in replicas
        ]

    @property
    def num_leases(self) -> int:
        return self._own.total()

    def place(self, name: str | None, exclude: Collection[str] = (), digest: str | None = None) -> PlacementLease:
        """Lease a place for the adapter `name` (None: the base) at version `digest`.

        Raises NoReplica when none is left to try.
        """
        replica_id = self._choose(name, exclude, digest)
        if replica_id is None:
            raise NoReplica("no other replica is ready" if exclude else "no replica is ready")
        kind = self._kind(name, replica_id)
        self._placed(kind, HELD[self._news.standing(digest, self._clock())(replica_id)])
        self._own[replica_id] += 1
        self._loads[replica_id] += 1
        self._felt[replica_id] = self._felt.get(replica_id, 0) + 1
        self._busy.begin(name)
        return PlacementLease(replica_id, kind, lambda: self._give_back(name, replica_id))

    def suspect(self, replica_id: str) -> None:
        """Ask this replica last for a while: it was just found gone or draining, and its lease has yet to end."""
        self._suspicion.suspect(replica_id)

    def trust(self, replica_id: str) -> None:
        """The replica answered: it is suspected no more."""
        self._suspicion.clear(replica_id)

    def check_integrity(self) -> None:
        """Assert that no load is negative or kept at zero, and that loads are the sum of their parts."""
        assert all(load > 0 for load in self._own.values()), f"own {dict(self._own)}"
        assert all(load > 0 for load in self._loads.values()), f"loads {dict(self._loads)}"
        assert self._loads == self._own + self._others_counted, repr(self)
        assert self._felt.keys() == self._loads.keys(), f"felt {self._felt}, {self!r}"
        for replica_id in self._loads:
            felt = self._own[replica_id] + self._others_counted[replica_id] / self._news.num_gateways
            assert math.isclose(self._felt[replica_id], felt, abs_tol=1e-6), f"felt {self._felt}, {self!r}"

    def _choose(self, name: str | None, exclude: Collection[str], digest: str | None) -> str | None:
        now_s = self._clock()
        if self._others_counted and not self._news.is_fresh(now_s):
            self._count_others()
        standing = self._news.standing(digest, now_s)
        doubtful = self._suspicion.now() | self._leaving | self._starting
        if doubtful:
            chosen = self._policy.choose(name, self._loads, {*exclude, *doubtful}, standing, self._felt)
            if chosen is not None:
                return chosen
        return self._policy.choose(name, self._loads, exclude, standing, self._felt)

    def _count_others(self) -> None:
        """Put what other gateways are serving into the loads, or take it out when it is too old."""
        self._others_counted = +Counter(self._news.others(self._clock()))
        self._loads = self._own + self._others_counted
        part = 1 / self._news.num_gateways
        self._felt = {name: self._own[name] + self._others_counted[name] * part for name in self._loads}

    def _give_back(self, name: str | None, replica_id: str) -> None:
        self._busy.end(name)
        self._felt[replica_id] -= 1
        for loads in (self._own, self._loads):
            loads[replica_id] -= 1
            if not loads[replica_id]:
                del loads[replica_id]
        if replica_id not in self._loads:
            del self._felt[replica_id]

    def _kind(self, name: str | None, replica_id: str) -> Kind:
        if name is None:
            return "base"
        return "home" if any(home.replica_id == replica_id for home in self._policy.homes(name)) else "spill"
