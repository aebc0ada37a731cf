"""How many homes demand asks for, and that every gateway hears the same, whoever restarts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry.demand import DemandConfig, DemandPlanner
from registry.pulse import FleetPulse, GatewayPulse, HomePlan, ReplicaLoad, ReplicaPulse, Residency
from registry.pulse_board import STALE_S, PulseBoard

CONFIG = DemandConfig(window_s=5.0, cool_down_s=20.0, epoch_s=2.0, idle_s=100.0)


class Run:
    """A planner fed every second with the same concurrency."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.planner = DemandPlanner(CONFIG, 0.0)
        self.seen: list[int] = []

    def go(self, seconds: int, load: dict[str, float], base: float = 0.0, num_replicas: int = 4) -> HomePlan:
        for _ in range(seconds):
            self.now_s += 1.0
            self.planner.observe(load, base, self.now_s)
            plan = self.planner.advance(num_replicas, self.now_s)
            self.seen.append(plan.num_homes.get("hot", 1))
        return self.planner.plan


UNIFORM = {f"t{i}": 0.2 for i in range(199)}


def test_hot_adapter_gets_every_replica_and_the_others_keep_one_home() -> None:
    run = Run()
    plan = run.go(30, {"hot": 36.0} | dict.fromkeys(UNIFORM, 4 / 199))
    assert plan.num_homes == {"hot": 4}
    assert len(plan.active) == 200


def test_uniform_traffic_spreads_nothing_however_much_there_is() -> None:
    assert Run().go(40, dict.fromkeys(UNIFORM, 20.0)).num_homes == {}


def test_adapter_alone_on_an_idle_fleet_keeps_one_home() -> None:
    assert Run().go(40, {"hot": 3.0}).num_homes == {}


def test_work_on_the_base_takes_its_share() -> None:
    assert Run().go(40, {"hot": 40.0}, base=120.0).num_homes == {}
    assert Run().go(40, {"hot": 40.0}, base=0.0).num_homes == {"hot": 4}


def test_homes_shrink_after_the_cool_down_and_by_half_at_most() -> None:
    run = Run()
    run.go(30, {"hot": 100.0}, num_replicas=8)
    assert run.seen[-1] == 8
    run.seen.clear()
    run.go(15, {"other": 1.0}, num_replicas=8)
    assert set(run.seen) == {8}, "no home goes before the cool-down"
    run.go(150, {"other": 1.0}, num_replicas=8)
    changes = [after for before, after in zip(run.seen, run.seen[1:], strict=False) if before != after]
    assert changes == [4, 2, 1]


def test_demand_that_wavers_moves_no_home() -> None:
    run = Run()
    run.go(30, {"hot": 26.0, "rest": 26.0})
    run.seen.clear()
    for _ in range(20):
        run.go(3, {"hot": 29.0, "rest": 26.0})
        run.go(3, {"hot": 23.0, "rest": 26.0})
    assert len(set(run.seen)) == 1


def test_idle_adapter_leaves_the_working_set() -> None:
    run = Run()
    assert run.go(4, {"a": 1.0}).active == ("a",)
    assert run.go(110, {"b": 1.0}).active == ("b",)


@settings(max_examples=40, deadline=None)
@given(
    load=st.dictionaries(st.sampled_from(["hot", "b", "c"]), st.floats(0, 500), max_size=3),
    base=st.floats(0, 500),
    num_replicas=st.integers(0, 64),
)
def test_number_of_homes_is_between_one_and_all(load: dict[str, float], base: float, num_replicas: int) -> None:
    plan = Run().go(20, load, base, num_replicas)
    assert all(1 < count <= num_replicas for count in plan.num_homes.values())
    assert set(plan.num_homes) <= set(plan.active) == set(load)


class Board:
    """A board with a clock of its own, and gateways that remember what they heard."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.board = self.new()
        self.heard: dict[str, FleetPulse] = {}
        self.plans: dict[str, HomePlan] = {}
        self.boards: dict[str, str] = {}

    def new(self) -> PulseBoard:
        return PulseBoard(CONFIG, lambda: self.now_s)

    def restart(self) -> None:
        self.board = self.new()

    def replica(self, replica_id: str, *resident: str) -> None:
        pulse = ReplicaPulse(load=ReplicaLoad(num_running=1), residency=Residency(resident=resident))
        self.board.hear_replica(replica_id, pulse)

    def gateway(self, name: str, busy_s: dict[str, float] | None = None, **in_flight: int) -> FleetPulse:
        before, plan = self.heard.get(name), self.plans.get(name, HomePlan())
        answer = self.board.exchange(
            GatewayPulse(
                gateway_id=name,
                interval_s=1.0,
                busy_s=busy_s or {},
                in_flight=in_flight,
                board_id=before.board_id if before else "",
                seen=before.seen if before else 0,
                epoch=plan.epoch,
                plan=plan if before and before.board_id != self.boards.get(name) else None,
            )
        )
        self.boards[name] = before.board_id if before else answer.board_id
        self.heard[name] = answer
        if answer.plan is not None and answer.plan.epoch > plan.epoch:
            self.plans[name] = answer.plan
        return answer


DIGEST = "a" * 64


def test_gateway_hears_what_the_others_are_serving() -> None:
    board = Board()
    board.gateway("g1", r0=3, r1=1)
    board.gateway("g2", r0=4)
    assert board.gateway("g1", r0=3).in_flight == {"r0": 4}
    assert board.gateway("g3").in_flight == {"r0": 7}
    assert board.gateway("g2", r0=4).num_gateways == 3
    board.now_s += STALE_S + 1
    assert board.gateway("g1").in_flight == {}, "a silent gateway's requests do not count for ever"


def test_residency_is_told_once_and_again_when_it_changes_or_the_board_is_new() -> None:
    board = Board()
    board.replica("r0", DIGEST)
    assert board.gateway("g").residency["r0"].resident == (DIGEST,)
    board.replica("r0", DIGEST)
    answer = board.gateway("g")
    assert (answer.residency, set(answer.loads)) == ({}, {"r0"})
    board.replica("r0")
    assert board.gateway("g").residency["r0"].resident == ()
    board.restart()
    board.replica("r0", DIGEST)
    assert board.gateway("g").residency["r0"].resident == (DIGEST,)


@pytest.mark.parametrize("num_gateways", [1, 3])
def test_gateways_follow_one_plan_and_a_new_board_goes_on_from_it(num_gateways: int) -> None:
    board = Board()
    names = [f"g{i}" for i in range(num_gateways)]

    def second(load: float) -> None:
        board.now_s += 1.0
        for i in range(4):
            board.replica(f"r{i}")
        for name in names:
            board.gateway(name, {"hot": load / num_gateways})

    for _ in range(30):
        second(60.0)
    assert [board.plans[name].num_homes for name in names] == [{"hot": 4}] * num_gateways
    epoch = board.plans["g0"].epoch
    board.restart()
    for _ in range(3):
        second(60.0)
        assert all(board.plans[name].num_homes == {"hot": 4} for name in names), "a restart moves no home"
    for _ in range(3):
        second(60.0)
    assert {board.plans[name].epoch for name in names} == {max(epoch, board.plans["g0"].epoch)}
