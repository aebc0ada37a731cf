"""How many replicas: queues, swaps, idleness and hysteresis, without Ray; and the face that Ray Serve calls."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.autoscaling import Memory, Signals, SwapAwarePolicy, Targets, decide
from cluster.load_report import LoadReport
from replica.messages import ReplicaStatus

TARGETS = Targets(requests=10, swaps_per_s=1, settle_s=60, remember_s=600)


def size(num_replicas: int, requests: float = 0, swaps_per_s: float = 0, memory: Memory | None = None) -> int:
    return decide(Signals(num_replicas, requests, swaps_per_s), TARGETS, memory or Memory(), 1000.0)[0]


@pytest.mark.parametrize(("requests", "wanted"), [(10, 1), (11, 2), (40, 4), (95, 10)])
def test_queues_ask_for_as_many_replicas_as_carry_them(requests: float, wanted: int) -> None:
    assert size(1, requests) == wanted


def test_swaps_ask_for_one_more_while_queues_are_short() -> None:
    assert size(3, requests=5, swaps_per_s=3.5) == 4


def test_swaps_below_the_target_ask_for_nothing() -> None:
    assert size(3, requests=25, swaps_per_s=2.9) == 3


def test_fleet_without_work_goes_to_the_least() -> None:
    assert size(8, 0, 0, Memory(7, 900.0)) == 1


def test_after_growing_for_swaps_the_next_replica_waits_for_the_slots_to_fill() -> None:
    wanted, memory = decide(Signals(2, 5, 9), TARGETS, Memory(), 0.0)
    assert wanted == 3
    for now_s in (10.0, 59.0):
        wanted, memory = decide(Signals(3, 5, 9), TARGETS, memory, now_s)
        assert wanted == 3
    assert decide(Signals(3, 5, 9), TARGETS, memory, 61.0)[0] == 4


def test_replica_that_has_yet_to_start_is_not_asked_for_twice() -> None:
    wanted, memory = decide(Signals(2, 5, 9), TARGETS, Memory(), 0.0)
    assert decide(Signals(2, 5, 9), TARGETS, memory, 300.0)[0] == wanted == 3


def test_size_that_thrashed_is_remembered_and_then_forgotten() -> None:
    _, memory = decide(Signals(2, 5, 9), TARGETS, Memory(), 0.0)
    assert decide(Signals(3, 5, 0), TARGETS, memory, 500.0)[0] == 3
    assert decide(Signals(3, 5, 0), TARGETS, memory, 601.0)[0] == 1


def test_shrinking_needs_room_below_the_target() -> None:
    assert size(4, requests=29) == 4
    assert size(4, requests=20) == 3
    assert size(4, requests=13) == 2


def test_shrinking_waits_while_adapters_still_move_and_goes_by_one_while_some_do() -> None:
    assert size(4, requests=1, swaps_per_s=2) == 4
    assert size(4, requests=1, swaps_per_s=0.4) == 3


@given(
    st.integers(0, 64), st.floats(0, 1e4), st.floats(0, 1e3), st.integers(0, 64), st.floats(0, 1e4), st.floats(0, 2e4)
)
def test_deciding_again_at_the_wanted_size_does_not_swing_back(
    num: int, requests: float, swaps: float, thrashed: int, then_s: float, now_s: float
) -> None:
    signals = Signals(num, requests, swaps)
    wanted, memory = decide(signals, TARGETS, Memory(thrashed, then_s), max(now_s, then_s))
    assert wanted >= 1
    if swaps == 0:
        assert decide(Signals(wanted, requests, 0), TARGETS, memory, max(now_s, then_s))[0] == wanted


def context(policy_state: dict[str, Any] | None = None, **metrics: dict[str, float]) -> Any:
    return SimpleNamespace(
        aggregated_metrics=metrics,
        current_num_replicas=2,
        target_num_replicas=2,
        current_time=5000.0,
        policy_state=policy_state or {},
    )


def test_policy_keeps_the_size_until_replicas_report() -> None:
    assert SwapAwarePolicy()(context())[0] == 2


def test_policy_sums_the_replicas_and_hands_back_its_memory() -> None:
    policy = SwapAwarePolicy(requests=10.0, swaps_per_s=1.0)
    wanted, state = policy(context(requests={"a": 3, "b": 2}, swaps_per_s={"a": 4, "b": 0}))
    assert (wanted, state) == (3, {"thrashed_size": 2, "thrashed_at_s": 5000.0})
    assert policy(context(state, requests={"a": 3, "b": 2}, swaps_per_s={"a": 0, "b": 0}))[0] == 3


def test_policy_counts_a_silent_replica_as_busy_as_the_others() -> None:
    assert SwapAwarePolicy(requests=10.0)(context(requests={"a": 30}))[0] == 6


def test_policy_ignores_what_serve_keeps_beside_its_memory() -> None:
    assert SwapAwarePolicy()(context({"decision_counter": 1}, requests={"a": 1, "b": 1}))[1].keys() == {
        "thrashed_size",
        "thrashed_at_s",
    }


def status(num_evictions: int) -> ReplicaStatus:
    counts = dict.fromkeys(ReplicaStatus.__dataclass_fields__, 0)
    held: dict[str, Any] = {"resident": (), "host_cached": (), "num_running": 3, "num_waiting": 4}
    return ReplicaStatus(**{**counts, **held, "num_evictions": num_evictions})


def test_load_report_gives_evictions_a_second_between_two_calls() -> None:
    times = iter([10.0, 14.0, 14.0])
    report = LoadReport(lambda: next(times))
    assert report.figures(status(100)) == {"requests": 7.0, "swaps_per_s": 0.0}
    assert report.figures(status(108)) == {"requests": 7.0, "swaps_per_s": 2.0}
    assert report.figures(status(109))["swaps_per_s"] == 0.0


@pytest.mark.filterwarnings("ignore")
def test_serve_gets_bounds_delays_and_a_policy_that_survives_its_pickle() -> None:
    from cluster.app import scaled
    from cluster.config import ScalingConfig

    assert scaled({"num_replicas": 2}, ScalingConfig()) == {"num_replicas": 2}
    made = scaled({"num_replicas": 9}, ScalingConfig(max_replicas=4, target_requests=10.0))["autoscaling_config"]
    assert (made.min_replicas, made.initial_replicas, made.max_replicas) == (1, 4, 4)
    policy = made.policy.get_policy()(**made.policy.policy_kwargs)
    assert policy(context(requests={"a": 30, "b": 5}))[0] == 4


@pytest.mark.filterwarnings("ignore")
def test_serve_applies_the_decision_within_its_bounds() -> None:
    """Ray's own wrapper around a policy: factors, delays and limits."""
    from ray.serve.autoscaling_policy import _apply_autoscaling_config

    from cluster.app import autoscaling
    from cluster.config import ScalingConfig

    scaling = ScalingConfig(max_replicas=4, upscale_delay_s=0.0)
    seen = context(requests={"a": 200.0, "b": 200.0})
    seen.config, seen.total_num_requests = autoscaling(scaling, 4, 2), 0.0
    wanted, state = _apply_autoscaling_config(SwapAwarePolicy())(seen)
    assert wanted == 13
    assert state["thrashed_size"] == 0


def test_least_above_most_is_refused() -> None:
    from cluster.config import ConfigError, load_fleet

    with pytest.raises(ConfigError, match="min_replicas is 3, above max_replicas, 2"):
        load_fleet({"replica": {"model": {"base": "x"}}, "scaling": {"min_replicas": 3, "max_replicas": 2}}, {})
