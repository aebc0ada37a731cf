"""Placement over what a gateway hears of the fleet: others' loads, residency, plans of homes, stopping replicas."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry.pulse import FleetPulse, HomePlan, ReplicaLoad, Residency
from registry.pulse_board import PulseBoard
from router.affinity import COLD, IN_HOST, IN_SLOT, AffinityPolicy
from router.config import PlacementConfig
from router.homes import Demand
from router.placement import Placement
from router.preferences import Member
from tests.router.support import digest, replica_record

NAMES = [f"tenant-{i}" for i in range(60)]
DIGEST = digest(7)


class Bench:
    """A placement over `num_replicas` with a clock that stands still."""

    def __init__(self, num_replicas: int = 4, **config: float) -> None:
        self.now_s = 0.0
        self.placement = Placement(PlacementConfig(**config), clock=lambda: self.now_s)  # type: ignore[arg-type]
        self.placement.update(NAMES, [replica_record(i) for i in range(num_replicas)])
        self.epoch = 0

    def hear(
        self,
        in_flight: dict[str, int] | None = None,
        resident: dict[str, tuple[str, ...]] | None = None,
        cached: dict[str, tuple[str, ...]] | None = None,
        num_homes: dict[str, int] | None = None,
        num_gateways: int = 1,
    ) -> list[tuple[str, str]]:
        members = [member.replica_id for member in self.placement.policy.members]
        plan = None
        if num_homes is not None:
            self.epoch += 1
            plan = HomePlan(epoch=self.epoch, active=tuple(sorted(NAMES)), num_homes=num_homes)
        residency = {
            replica_id: Residency(
                resident=(resident or {}).get(replica_id, ()), host_cached=(cached or {}).get(replica_id, ())
            )
            for replica_id in members
        }
        loads = dict.fromkeys(members, ReplicaLoad())
        return self.placement.hear(
            FleetPulse(
                board_id="b",
                seen=1,
                plan=plan,
                in_flight=in_flight or {},
                num_gateways=num_gateways,
                loads=loads,
                residency=residency,
            )
        )

    def home(self, name: str) -> str:
        home = self.placement.policy.home(name)
        assert home is not None
        return home.replica_id

    def others(self, name: str) -> list[str]:
        """Every other replica, in order of preference."""
        return [m.replica_id for m in self.placement.policy.preference(name) if m.replica_id != self.home(name)]


def test_load_of_other_gateways_sends_a_request_elsewhere_until_the_news_is_stale() -> None:
    bench = Bench(news_stale_s=3.0)
    home = bench.home("tenant-1")
    bench.hear(in_flight={home: 50})
    assert bench.placement.place("tenant-1").replica_id == bench.others("tenant-1")[0]
    assert bench.placement.load(home) == 50
    bench.now_s = 3.5
    assert bench.placement.place("tenant-1").replica_id == home
    bench.placement.check_integrity()


def test_loads_that_are_felt_follow_the_news() -> None:
    """Whatever is heard between: more gateways, fewer, none, and nothing for so long that the news is stale."""
    bench = Bench(news_stale_s=3.0)
    leases = [bench.placement.place(name) for name in NAMES[:9]]
    for num_gateways, in_flight in ((3, {"r0": 9, "gone": 2}), (2, {"r1": 4}), (1, {}), (5, {"r0": 1})):
        bench.hear(in_flight=in_flight, num_gateways=num_gateways)
        bench.placement.check_integrity()
        leases.append(bench.placement.place(None))
        leases.pop(0).release()
        bench.placement.check_integrity()
    bench.now_s = 60.0
    leases.append(bench.placement.place("tenant-1"))
    bench.placement.check_integrity()
    for lease in leases:
        lease.release()
    bench.placement.check_integrity()
    assert bench.placement.loads() == [(f"r{index}", 0, 16) for index in range(4)]


def test_news_about_others_leaves_own_leases_alone() -> None:
    bench = Bench()
    lease = bench.placement.place("tenant-1")
    for count in (5, 0, 2):
        bench.hear(in_flight={lease.replica_id: count})
        assert bench.placement.load(lease.replica_id) == count + 1
        bench.placement.check_integrity()
    lease.release()
    assert bench.placement.load(lease.replica_id) == 2
    assert bench.placement.num_leases == 0
    bench.placement.check_integrity()


def test_spill_prefers_a_slot_then_host_memory_then_preference() -> None:
    bench = Bench()
    home, (first, second, third) = bench.home("tenant-1"), bench.others("tenant-1")
    full = {home: 50}
    bench.hear(in_flight=full)
    assert bench.placement.place("tenant-1", digest=DIGEST).replica_id == first
    bench.hear(in_flight=full, cached={second: (DIGEST,)})
    assert bench.placement.place("tenant-1", digest=DIGEST).replica_id == second
    bench.hear(in_flight=full, cached={second: (DIGEST,)}, resident={third: (DIGEST,)})
    assert bench.placement.place("tenant-1", digest=DIGEST).replica_id == third
    assert bench.placement.place("tenant-1", digest=digest(8)).replica_id == first, "another version is not there"
    bench.now_s = 60.0
    assert bench.placement.place("tenant-1", digest=DIGEST).replica_id == home, "all of that is stale by now"


def test_resident_elsewhere_does_not_draw_requests_from_a_home_with_room() -> None:
    bench = Bench()
    bench.hear(resident=dict.fromkeys(bench.others("tenant-1"), (DIGEST,)))
    assert bench.placement.place("tenant-1", digest=DIGEST).replica_id == bench.home("tenant-1")


def test_new_home_takes_requests_once_the_adapter_is_there() -> None:
    bench = Bench(min_load_bound=100)
    home = bench.home("tenant-1")
    bench.hear(resident={home: (DIGEST,)})
    (new,) = bench.hear(resident={home: (DIGEST,)}, num_homes={"tenant-1": 2})
    assert new[0] == "tenant-1"
    assert new[1] in bench.others("tenant-1")
    leases = [bench.placement.place("tenant-1", digest=DIGEST) for _ in range(10)]
    assert {lease.replica_id for lease in leases} == {home}
    bench.hear(resident={home: (DIGEST,)}, cached={new[1]: (DIGEST,)})
    leases += [bench.placement.place("tenant-1", digest=DIGEST) for _ in range(10)]
    assert Counter(lease.replica_id for lease in leases) == {home: 10, new[1]: 10}
    assert {lease.kind for lease in leases} == {"home"}


def test_plan_that_shrinks_keeps_the_first_homes_and_asks_for_no_prefetch() -> None:
    bench = Bench()
    bench.hear(num_homes={"tenant-1": 4})
    four = bench.placement.policy.homes("tenant-1")
    assert bench.hear(num_homes={"tenant-1": 2}) == []
    assert bench.placement.policy.homes("tenant-1") == four[:2]
    assert bench.hear(num_homes={}) == []
    assert bench.placement.policy.homes("tenant-1") == four[:1]


def test_starting_replica_gets_nothing_while_there_is_another() -> None:
    bench = Bench()
    home = bench.home("tenant-1")
    bench.placement.starting({home})
    assert bench.placement.place("tenant-1").replica_id != home
    bench.placement.starting({home, *bench.others("tenant-1")})
    assert bench.placement.place("tenant-1").replica_id == home
    bench.placement.starting(())
    assert bench.placement.place("tenant-1").replica_id == home


def test_stopping_replica_gets_nothing_while_there_is_another() -> None:
    bench = Bench(num_replicas=2)
    home = bench.home("tenant-1")
    assert bench.placement.leaving({home}) is True
    assert bench.placement.leaving({home}) is False
    assert all(bench.placement.place("tenant-1").replica_id != home for _ in range(30))
    assert bench.placement.pulse("g").gone == (home,)
    bench.placement.leaving({home, *bench.others("tenant-1")})
    assert bench.placement.place(None).replica_id == home, "better a stopping replica than none"


def test_fault_after_fault_suspects_for_longer_until_an_answer() -> None:
    bench = Bench(num_replicas=2, suspect_s=2.0)
    home = bench.home("tenant-1")

    def is_asked_first() -> bool:
        with bench.placement.place("tenant-1") as lease:
            return lease.replica_id == home

    for wait_s in (2.0, 4.0, 8.0):
        bench.placement.suspect(home)
        bench.now_s += wait_s - 0.1
        assert not is_asked_first()
        bench.now_s += 0.2
        assert is_asked_first()
    bench.placement.trust(home)
    bench.placement.suspect(home)
    bench.now_s += 2.1
    assert is_asked_first()


def test_pulse_counts_request_seconds_by_adapter() -> None:
    bench = Bench()
    first, base = bench.placement.place("tenant-1"), bench.placement.place(None)
    bench.now_s = 2.0
    second = bench.placement.place("tenant-1")
    bench.now_s = 5.0
    first.release()
    pulse = bench.placement.pulse("g")
    assert (pulse.busy_s, pulse.base_busy_s, pulse.interval_s) == ({"tenant-1": 5.0 + 3.0}, 5.0, 5.0)
    assert sum(pulse.in_flight.values()) == 2
    bench.now_s = 6.0
    second.release()
    base.release()
    pulse = bench.placement.pulse("g")
    assert (pulse.busy_s, pulse.base_busy_s, pulse.in_flight) == ({"tenant-1": 1.0}, 1.0, {})
    assert bench.placement.pulse("g").busy_s == {}


def test_gateways_that_share_a_board_keep_the_bound_together() -> None:
    """Each of three gateways alone would put 30 requests on the home; together they spread them."""
    now_s, board = 0.0, PulseBoard(clock=lambda: 0.0)
    gateways = [Placement(PlacementConfig(), clock=lambda: now_s) for _ in range(3)]
    for placement in gateways:
        placement.update(NAMES, [replica_record(i) for i in range(4)])
    placed: Counter[str] = Counter()
    for _ in range(20):
        for number, placement in enumerate(gateways):
            placement.hear(board.exchange(placement.pulse(f"g{number}")))
            placed[placement.place("tenant-1").replica_id] += 1
    assert max(placed.values()) <= 1.5 * 61 / 4 + 2, placed


members = st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=1, max_size=8).map(
    lambda weights: [Member(i, f"r{i}", weight) for i, weight in enumerate(weights)]
)


@settings(max_examples=150, deadline=None)
@given(
    members=members,
    loads=st.lists(st.integers(0, 40), min_size=8, max_size=8),
    name=st.sampled_from([None, *NAMES[:6], "unheard-of"]),
    exclude=st.sets(st.integers(0, 7), max_size=3),
    stands=st.lists(st.sampled_from([IN_SLOT, IN_HOST, COLD]), min_size=8, max_size=8),
    num_homes=st.integers(1, 9),
    min_bound=st.integers(1, 12),
    others=st.lists(st.integers(0, 40), min_size=8, max_size=8),
    num_gateways=st.integers(1, 9),
)
def test_choice_is_the_first_of_the_ranking_and_under_the_bound(
    members: list[Member],
    loads: list[int],
    name: str | None,
    exclude: set[int],
    stands: list[int],
    num_homes: int,
    min_bound: int,
    others: list[int],
    num_gateways: int,
) -> None:
    policy = AffinityPolicy(1.5, min_bound, 1.1)
    policy.update(NAMES, members, Demand(None, {NAMES[0]: num_homes}))
    load = {f"r{i}": mine + other for i, (mine, other) in enumerate(zip(loads, others, strict=True))}
    felt = {f"r{i}": mine + other / num_gateways for i, (mine, other) in enumerate(zip(loads, others, strict=True))}
    excluded = {f"r{i}" for i in exclude}

    def standing(replica_id: str) -> int:
        return stands[int(replica_id[1:])]

    ranked = policy.rank(name, load, excluded, standing, felt)
    left = {member.replica_id: member.weight for member in members if member.replica_id not in excluded}
    assert sorted(ranked) == sorted(left)
    chosen = policy.choose(name, load, excluded, standing, felt)
    assert chosen == (ranked[0] if ranked else None)
    if chosen is None:
        return
    if name is None:
        assert felt[chosen] / left[chosen] == min(felt[i] / left[i] for i in left)
        return
    whole = sum(left.values())
    share = math.ceil(1.5 * (math.fsum(felt[i] for i in left) + 1) * (left[chosen] / whole))
    assert load[chosen] < min_bound or felt[chosen] < share


@settings(max_examples=60, deadline=None)
@given(members=members, num_homes=st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9), max_size=5))
def test_homes_keep_to_the_shares_of_unequal_replicas(members: list[Member], num_homes: dict[str, int]) -> None:
    policy, plain = AffinityPolicy(1.5, 10, 1.1), AffinityPolicy(1.5, 10, 1.1)
    policy.update(NAMES, members, Demand(frozenset(NAMES[:40]), num_homes))
    plain.update(NAMES, members, Demand(frozenset(NAMES[:40])))
    whole = sum(member.weight for member in members)
    firsts = Counter(policy.home(name) for name in NAMES[:40])
    for member in members:
        assert firsts[member] <= 1.1 * 40 * member.weight / whole + 1
    for name in NAMES:
        homes = policy.homes(name)
        wanted = num_homes.get(name, 1) if name in NAMES[:40] else 1
        assert len(homes) == len(set(homes)) == min(wanted, len(members))
        assert homes[0] == plain.home(name), "another adapter's demand moves nobody's first home"


def test_sleepers_and_their_number_move_no_adapter_in_use() -> None:
    ring = [Member(i, f"r{i}") for i in range(5)]
    few, many = AffinityPolicy(1.5, 10, 1.1), AffinityPolicy(1.5, 10, 1.1)
    demand = Demand(frozenset(NAMES))
    few.update(NAMES, ring, demand)
    many.update([*NAMES, *(f"sleeper-{i}" for i in range(2000))], ring, demand)
    assert [few.home(name) for name in NAMES] == [many.home(name) for name in NAMES]


@pytest.mark.parametrize("num_replicas", [2, 4, 10, 16])
def test_homes_of_a_thousand_adapters_are_even_and_move_little(num_replicas: int) -> None:
    names = [f"adapter-{i}" for i in range(1000)]
    before, after = AffinityPolicy(1.5, 10, 1.1), AffinityPolicy(1.5, 10, 1.1)
    before.update(names, [Member(i, f"r{i}") for i in range(num_replicas)])
    after.update(names, [Member(i, f"r{i}") for i in range(num_replicas + 1)])
    assert max(Counter(map(before.home, names)).values()) <= 1.15 * 1000 / num_replicas
    moved = sum(before.home(name) != after.home(name) for name in names)
    assert moved / 1000 <= 1 / (num_replicas + 1) + 0.02
