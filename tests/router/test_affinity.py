"""Rendezvous hashing with bounded homes and bounded load."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.affinity import AffinityPolicy, Member
from router.config import PlacementConfig
from router.errors import NoReplica
from router.homes import rooms
from router.placement import Placement
from tests.router.support import replica_record

NAMES = [f"tenant-{i}" for i in range(400)]


def members(count: int) -> list[Member]:
    return [Member(i, f"r{i}") for i in range(count)]


def policy(num_replicas: int, names: list[str] = NAMES, **changes: float) -> AffinityPolicy:
    made = AffinityPolicy(
        changes.get("load_factor", 1.5), int(changes.get("min_bound", 10)), changes.get("home_factor", 1.1)
    )
    made.update(names, members(num_replicas))
    return made


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5, 8])
def test_preferences_move_little_when_a_replica_joins(num_replicas: int) -> None:
    before, after = policy(num_replicas), policy(num_replicas + 1)
    moved = sum(before.preference(name)[0] != after.preference(name)[0] for name in NAMES)
    expected = 1 / (num_replicas + 1)
    slack = 0.02 + 2 * math.sqrt(expected * (1 - expected) / len(NAMES))
    assert moved / len(NAMES) <= expected + slack
    new = Member(num_replicas, f"r{num_replicas}")
    assert all(after.preference(n)[0] == new for n in NAMES if before.preference(n)[0] != after.preference(n)[0]), (
        "a preference may only move to the new replica"
    )


def test_homes_may_lie_uneven_while_slots_hold_them() -> None:
    """The bound keeps adapters in slots; where there are slots to spare it need not move any."""

    def room(num_homes: int, num_slots: int) -> int:
        (found,) = set(rooms(num_homes, [Member(i, f"r{i}", 1.0, num_slots) for i in range(16)], 1.1))
        return found

    assert room(16 * 16, 64) == 22, "1.5 standard deviations above 16"
    assert room(16 * 16, 4) == 18, "1.1 x the mean"
    assert room(16 * 100, 64) == room(16 * 100, 0), "more than the slots hold"
    assert room(16 * 4, 6) == 6, "no more than the slots"


def test_preferences_of_many_names_move_as_rendezvous_hashing_promises() -> None:
    names = [f"n{i}" for i in range(20_000)]
    before, after = policy(3, []), policy(4, [])
    moved = sum(before.preference(n)[0] != after.preference(n)[0] for n in names) / len(names)
    assert 0.25 - 0.02 <= moved <= 0.25 + 0.02


@pytest.mark.parametrize(("num_replicas", "num_names"), [(2, 8), (3, 10), (4, 400), (7, 100), (16, 20)])
def test_homes_are_bounded_by_the_mean(num_replicas: int, num_names: int) -> None:
    names = NAMES[:num_names]
    made = policy(num_replicas, names)
    homes = Counter(made.home(name) for name in names)
    assert max(homes.values()) <= math.ceil(1.1 * num_names / num_replicas)


def test_homes_agree_between_gateways_whatever_the_order_of_news() -> None:
    one, other = policy(3), policy(1, [])
    other.update(reversed(NAMES[:100]), reversed(members(2)))
    assert other.home(NAMES[0]) is not None
    other.update(reversed(NAMES), reversed(members(3)))
    assert [one.home(name) for name in NAMES] == [other.home(name) for name in NAMES]


def test_home_survives_a_restart_under_the_same_ring_id() -> None:
    before = policy(3)
    ring = {name: before.home(name).ring_id for name in NAMES}  # type: ignore[union-attr]
    before.update(NAMES, [Member(0, "r0"), Member(1, "reborn"), Member(2, "r2")])
    assert {name: before.home(name).ring_id for name in NAMES} == ring  # type: ignore[union-attr]
    assert "reborn" in {before.home(name).replica_id for name in NAMES}  # type: ignore[union-attr]


def test_home_of_a_name_outside_the_catalog_is_its_first_preference() -> None:
    made = policy(4)
    assert made.home("unheard-of") == made.preference("unheard-of")[0]


def test_rank_puts_the_home_first_and_the_overloaded_last() -> None:
    made = policy(3, min_bound=2)
    name = NAMES[0]
    home = made.home(name)
    assert home is not None
    assert made.rank(name, {})[0] == home.replica_id
    loads = {member.replica_id: 0 for member in made.members} | {home.replica_id: 50}
    ranked = made.rank(name, loads)
    assert ranked[-1] == home.replica_id
    assert ranked[0] == next(m.replica_id for m in made.preference(name) if m != home)


def test_rank_of_the_base_is_by_load() -> None:
    assert list(policy(3).rank(None, {"r0": 5, "r1": 1, "r2": 3})) == ["r1", "r2", "r0"]


def test_bounds_are_each_replicas_bound_over_all() -> None:
    made = policy(1, min_bound=1)
    weighed = [Member(index, f"r{index}", weight=weight) for index, weight in enumerate((1.0, 2.0, 5.0))]
    made.update(NAMES, weighed)
    loads = {"r0": 7, "r1": 1, "r2": 30}
    ids = [member.replica_id for member in weighed]
    assert made.bounds(loads) == [(member, made.bound(loads, ids, member.weight)) for member in weighed]
    made.update(NAMES, [])
    assert made.bounds(loads) == []


def test_bounds_are_of_one_moment_though_replicas_leave_meanwhile() -> None:
    """A scrape asks from a thread of its own."""
    made = policy(3)

    class LastReplicasLeave(dict[str, int]):
        def get(self, key: str, default: object = 0) -> int:  # type: ignore[override]
            made.update(NAMES, [])
            return 0

    assert [member.replica_id for member, _ in made.bounds(LastReplicasLeave())] == ["r0", "r1", "r2"]


def test_load_bound_is_never_below_one_in_a_large_idle_fleet() -> None:
    """100 replicas and 3 requests in flight: a rounded-down mean would make every replica look full."""
    made = policy(100, load_factor=1.0, min_bound=1)
    loads = {"r1": 1, "r2": 1, "r3": 1}
    assert made.bound(loads, [f"r{index}" for index in range(100)]) == 1
    assert loads.get(made.rank("some-name", loads)[0], 0) == 0


def test_traffic_is_spread_over_many_replicas_without_virtual_nodes() -> None:
    made = policy(20, [])
    counts = Counter(made.preference(f"n{i}")[0] for i in range(10_000))
    assert max(counts.values()) <= 1.2 * 500
    assert min(counts.values()) >= 0.8 * 500


@settings(max_examples=60, deadline=None)
@given(
    num_replicas=st.integers(1, 9),
    min_bound=st.integers(1, 6),
    load_factor=st.floats(1.0, 3.0),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=150),
)
def test_load_of_the_chosen_is_below_the_bound(
    num_replicas: int, min_bound: int, load_factor: float, steps: list[tuple[bool, int]]
) -> None:
    placement = Placement(PlacementConfig(load_factor=load_factor, min_load_bound=min_bound))
    placement.update(NAMES[:20], [replica_record(i) for i in range(num_replicas)])
    held = []
    for place, pick in steps:
        if place:
            loads = {f"r{i}": placement.load(f"r{i}") for i in range(num_replicas)}
            lease = placement.place(NAMES[pick])
            held.append(lease)
            total = sum(loads.values())
            assert loads[lease.replica_id] < max(min_bound, math.ceil(load_factor * (total + 1) / num_replicas))
        elif held:
            held.pop(pick % len(held)).release()
    assert placement.num_leases == len(held)
    for lease in held:
        lease.release()
        lease.release()
    placement.check_integrity()
    assert placement.num_leases == 0


def test_place_skips_what_was_tried_and_says_when_nothing_is_left() -> None:
    placement = Placement(PlacementConfig())
    placement.update(["a"], [replica_record(0), replica_record(1)])
    first = placement.place("a")
    second = placement.place("a", {first.replica_id})
    assert {first.replica_id, second.replica_id} == {"r0", "r1"}
    assert (first.kind, second.kind) == ("home", "spill")
    with pytest.raises(NoReplica):
        placement.place("a", {"r0", "r1"})
    assert Placement(PlacementConfig()).num_leases == 0


def test_place_of_the_base_balances() -> None:
    placement = Placement(PlacementConfig())
    placement.update([], [replica_record(0), replica_record(1)])
    assert sorted(placement.place(None).replica_id for _ in range(4)) == ["r0", "r0", "r1", "r1"]


def test_suspect_is_asked_last_until_its_time_is_up() -> None:
    now_s = [0.0]
    placement = Placement(PlacementConfig(suspect_s=2.0), clock=lambda: now_s[0])
    placement.update(["alpha"], [replica_record(0), replica_record(1)])
    with placement.place("alpha") as lease:
        home = lease.replica_id
    placement.suspect(home)
    with placement.place("alpha") as lease:
        other = lease.replica_id
    assert other != home
    placement.suspect(other)
    with placement.place("alpha") as lease:
        assert lease.replica_id == home, "when all are suspect the home is still the first to ask"
    now_s[0] = 2.5
    with placement.place("alpha") as lease:
        assert lease.replica_id == home
