"""The simulation against arithmetic done by hand, its order of policies, and the bound of the fleet's own policy."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.planning import workloads
from cluster.planning.machine import Machine
from cluster.planning.policies import Affinity, BoundedRing, Multiplexing, PowerOfTwo, policies
from cluster.planning.simulator import Fleet, Outcome, Policy, Simulation
from cluster.planning.workloads import Workload, adapter_name, zipf_weights
from router.config import PlacementConfig

SMALL = Machine(
    num_slots=2,
    num_rows=2,
    num_host_adapters=3,
    step_s=1.0,
    lora_step_s=0.0,
    adapter_step_s=0.0,
    prefill_token_s=0.0,
    swap_s=0.5,
    node_load_s=10.0,
)


class Always:
    """Every request to the first replica."""

    def choose(self, adapter: int, fleet: Fleet, now_s: float) -> int:
        return 0


def stream(*requests: tuple[float, int, int], num_adapters: int = 8) -> Workload:
    """Requests of (arrival, adapter, output tokens) with a prompt of one token."""
    at_s, adapters, outputs = zip(*requests, strict=True)
    ones = np.ones(len(requests), dtype=np.int64)
    return Workload("by hand", num_adapters, np.array(at_s, float), np.array(adapters), ones, np.array(outputs))


def run(workload: Workload, machine: Machine = SMALL, policy: Policy | None = None, num: int = 1) -> Simulation:
    simulation = Simulation(machine, num, policy or Always(), workload)
    simulation.run()
    simulation.check_integrity()
    return simulation


def test_first_request_waits_for_disk_and_bus_and_then_takes_a_step_a_token() -> None:
    (request,) = run(stream((0.0, 1, 4))).requests
    assert (request.was_hit, request.first_token_s, request.done_s) == (False, 11.5, 14.5)


def test_resident_adapter_costs_no_load() -> None:
    simulation = run(stream((0.0, 1, 2), (50.0, 1, 2)))
    second = simulation.requests[1]
    assert (second.was_hit, second.first_token_s, simulation.num_loads) == (True, 51.0, 1)


def test_adapter_in_host_memory_costs_the_bus_alone() -> None:
    simulation = run(stream(*[(100.0 * number, adapter, 1) for number, adapter in enumerate((1, 2, 3, 1))]))
    assert simulation.requests[-1].first_token_s == pytest.approx(301.5)
    assert simulation.num_loads == 4


def test_third_request_waits_for_a_row() -> None:
    warm = stream((0.0, 1, 1), (100.0, 1, 4), (100.0, 1, 10), (100.0, 1, 1))
    requests = run(warm).requests
    assert [request.first_token_s for request in requests[1:]] == [101.0, 101.0, 105.0]


def test_third_adapter_waits_until_a_slot_is_unpinned() -> None:
    requests = run(stream((0.0, 1, 4), (0.0, 2, 20), (0.0, 3, 1))).requests
    assert requests[2].first_token_s > requests[0].done_s


def test_loads_of_one_replica_follow_each_other() -> None:
    first, second = run(stream((0.0, 1, 1), (0.0, 2, 1))).requests
    assert (first.first_token_s, second.first_token_s) == (11.5, 22.0)


def test_adapters_in_the_batch_lengthen_the_step_of_everybody() -> None:
    machine = Machine(num_slots=4, num_rows=4, step_s=1, lora_step_s=0.5, adapter_step_s=0.25, swap_s=0, node_load_s=0)
    assert (machine.step_time_s(0), machine.step_time_s(1), machine.step_time_s(3)) == (1, 1.75, 2.25)
    alone = run(stream((0.0, 1, 10)), machine).requests[0].done_s
    beside = run(stream((0.0, 1, 10), (0.0, 2, 10)), machine).requests[0].done_s
    assert (alone, beside) == (pytest.approx(17.5, abs=0.01), pytest.approx(20.0, abs=0.01))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 60), st.integers(0, 7), st.integers(1, 9)), min_size=1, max_size=60),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_every_request_is_answered_whatever_the_sizes(
    requests: list[tuple[float, int, int]], num_replicas: int, num_slots: int, num_rows: int
) -> None:
    workload = stream(*sorted(requests))
    for make in policies(num_replicas, SMALL, 8, PlacementConfig()).values():
        machine = Machine(num_slots=num_slots, num_rows=num_rows, num_host_adapters=2, step_s=0.5)
        simulation = run(workload, machine, make(), num_replicas)
        assert all(request.done_s > request.at_s for request in simulation.requests)


def test_a_first_token_is_never_later_than_the_end_when_the_batch_shrinks() -> None:
    workload = stream((0.0, 0, 1), (0.0, 0, 1), (0.0, 0, 2), (0.0, 0, 2), (0.0, 1, 1))
    machine = Machine(num_slots=2, num_rows=2, num_host_adapters=2, step_s=0.5)
    requests = run(workload, machine).requests
    assert all(request.first_token_s <= request.done_s for request in requests)


def test_same_seed_gives_the_same_figures() -> None:
    made = [workloads.zipf(500, 50, 64, 1.0, seed) for seed in (3, 3, 4)]
    results = [run(each, Machine(), Affinity(2, each.names(), PlacementConfig()), 2).outcome() for each in made]
    assert results[0] == results[1] != results[2]


def test_zipf_weights_follow_the_law() -> None:
    weights = zipf_weights(100, 1.2)
    assert weights.sum() == pytest.approx(1)
    assert weights[9] / weights[0] == pytest.approx(10**-1.2)


@pytest.mark.parametrize("make", [workloads.diurnal, workloads.flash_crowd, workloads.churn])
def test_workload_is_in_order_within_its_adapters_and_at_its_rate(
    make: Callable[[int, float, int, int], Workload],
) -> None:
    workload = make(4000, 100.0, 200, 0)
    assert (np.diff(workload.at_s) >= 0).all()
    assert set(workload.adapters) <= set(range(200))
    busiest = np.histogram(workload.at_s, bins=20)[0].max() / (workload.duration_s / 20)
    assert 85 < busiest < 125


def test_flash_crowd_comes_and_goes() -> None:
    workload = workloads.flash_crowd(10_000, 100.0, 200, 0)
    phase = workload.at_s / workload.duration_s
    hot = workload.adapters == 199
    assert hot[(phase > 0.4) & (phase < 0.6)].mean() > 0.4
    assert hot[phase < 0.39].mean() < 0.01
    assert hot[phase > 0.61].mean() < 0.01


def outcomes(workload: Workload, num_replicas: int, machine: Machine) -> dict[str, Outcome]:
    results = {}
    for name, make in policies(num_replicas, machine, workload.num_adapters, PlacementConfig()).items():
        policy = make()
        results[name] = run(workload, machine, policy, num_replicas).outcome()
        if isinstance(policy, Affinity):
            assert policy.worst_over_bound <= 0
    return results


def test_own_policy_keeps_adapters_in_slots_and_first_tokens_fast() -> None:
    """A small version of benchmarks/routing_sim.py."""
    machine = Machine()
    rate = 0.75 * 4 * machine.requests_per_s(260, 260, 40)
    found = outcomes(workloads.zipf(2500, rate, 512, 1.0, 0), 4, machine)
    own, blind = found["lorafleet"], (found["random"], found["ray power of two"])
    assert all(own.slot_hit_rate > other.slot_hit_rate + 0.1 for other in blind)
    assert all(own.loads_per_1000 < 0.8 * other.loads_per_1000 for other in blind)
    assert own.p99_first_token_s <= 1.1 * min(outcome.p99_first_token_s for outcome in found.values())
    assert own.load_skew < 1.3


def fleet(loads: list[int], *resident: set[int]) -> Fleet:
    return Fleet(loads, list(resident) or [set() for _ in loads], [set() for _ in loads], Counter())


def test_multiplexing_stays_with_replicas_that_have_the_model_until_they_are_full() -> None:
    policy = Multiplexing(max_ongoing=10)
    assert {policy.choose(5, fleet([9, 0, 0], {5}, set(), {6}), 0.0) for _ in range(20)} == {0}
    assert {policy.choose(5, fleet([10, 0, 0], {5}, set(), {6}), 0.0) for _ in range(20)} == {1}


def test_power_of_two_never_takes_the_busiest_of_all() -> None:
    policy = PowerOfTwo()
    assert 0 not in {policy.choose(1, fleet([5, 1, 1]), 0.0) for _ in range(50)}


def test_bounded_ring_leaves_a_replica_that_is_a_quarter_above_the_mean() -> None:
    ring = BoundedRing(4, [adapter_name(index) for index in range(8)])
    home = ring.choose(3, fleet([0, 0, 0, 0]), 0.0)
    loads = [10] * 4
    loads[home] = 15
    assert ring.choose(3, fleet(loads), 0.0) != home
