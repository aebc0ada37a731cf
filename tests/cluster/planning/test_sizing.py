"""Plans: the smallest fleet that meets an objective, its memory, the two other layouts, traces, and bad input."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.planning import traces
from cluster.planning.machine import Machine
from cluster.planning.sizing import (
    CannotPlan,
    Hardware,
    Objective,
    Question,
    _simulate,
    merged,
    per_tenant,
    plan,
    shared,
)
from cluster.planning.traces import BadTrace, read_trace
from cluster.planning.workloads import Workload, zipf

GB = 10**9
HARDWARE = Hardware(80 * GB, 16 * GB, 84_000_000, 128 * 1024)


def question(workload: Workload | None = None, **changes: object) -> Question:
    made = Question(workload or zipf(600, 40, 50, 1.0, 0), Machine(), HARDWARE, Objective(0.5, 30), max_replicas=8)
    return replace(made, **changes)


def test_shared_fleet_meets_the_objective_and_one_replica_less_does_not() -> None:
    asked = question()
    layout = shared(asked)
    assert layout.outcome is not None
    assert asked.objective.is_met(layout.outcome)
    assert layout.num_gpus == 2
    assert not asked.objective.is_met(_simulate(asked, layout.num_gpus - 1, 50))


def test_memory_is_base_reserve_kv_and_slots() -> None:
    lengths = np.full(200, 100)
    workload = replace(zipf(200, 5, 10, 1.0, 0), prompt_tokens=lengths, output_tokens=lengths)
    layout = shared(question(workload))
    kv_bytes = 64 * 200 * 128 * 1024
    assert layout.gpu_memory_bytes == 16 * GB + (2 << 30) + kv_bytes + layout.num_slots * 84_000_000


def test_base_that_leaves_no_room_for_an_adapter_is_refused_with_the_sum() -> None:
    with pytest.raises(CannotPlan, match=r"take \d+\.\d GB; 21\.6 GB of a GPU are usable"):
        shared(question(hardware=replace(HARDWARE, gpu_bytes=24 * GB)))


def test_objective_out_of_reach_is_refused_with_what_is_reached() -> None:
    with pytest.raises(CannotPlan, match="8 replicas give a p99 first token of"):
        shared(question(objective=Objective(0.001, 30)))


def test_deployment_a_tenant_takes_a_gpu_each_and_more_for_the_busy() -> None:
    assert per_tenant(question()).num_gpus == 50
    busy = zipf(600, 400, 50, 1.5, 0)
    assert per_tenant(question(busy)).num_gpus > 50


def test_merged_models_share_gpus_by_memory() -> None:
    idle = zipf(600, 0.5, 50, 0.0, 0)
    layout = merged(question(idle))
    assert 50 * 16 / 72 <= layout.num_gpus <= 50 * 17 / 68
    assert layout.gpu_memory_bytes <= 72 * GB + HARDWARE.reserve_bytes


def test_merged_models_need_more_gpus_when_all_are_busy() -> None:
    assert merged(question(zipf(600, 200, 50, 0.0, 0))).num_gpus > merged(question(zipf(600, 0.5, 50, 0.0, 0))).num_gpus


def test_plan_names_the_three_layouts_and_tells_what_it_simulates() -> None:
    told: list[str] = []
    assert [layout.name for layout in plan(question(), told.append)] == [
        "shared base",
        "one deployment a tenant",
        "merged",
    ]
    assert "simulating 1 replicas with 50 slots" in told


def trace(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_trace_is_sorted_starts_at_zero_and_fills_in_lengths(tmp_path: Path) -> None:
    path = trace(tmp_path, "at_s,adapter,output_tokens\n12,b,\n10,a,7\n")
    workload = read_trace(path, prompt_tokens=100, output_tokens=200)
    assert workload.num_adapters == 2
    assert workload.at_s.tolist() == [0, 2]
    assert (workload.adapters.tolist(), workload.output_tokens.tolist()) == ([0, 1], [7, 200])
    assert workload.prompt_tokens.tolist() == [100, 100]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("time,adapter\n1,a\n", "header lacks at_s"),
        ("at_s,adapter\n1,a\nlater,b\n", "line 3: at_s is 'later', no number"),
        ("at_s,adapter\n1,a\n-1,b\n", r"line 3: at_s is -1; allowed: >= 0"),
        ("at_s,adapter\n1,a\nnan,b\n", "line 3: at_s is nan"),
        ("at_s,adapter\n1,a\n2,\n", "line 3: adapter is empty"),
        ("at_s,adapter\n1,a\n", "at least two requests"),
        ("", "header lacks adapter, at_s"),
    ],
)
def test_bad_trace_is_refused_by_line(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(BadTrace, match=what):
        read_trace(trace(tmp_path, text), 1, 1)


def test_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="No such file"):
        read_trace(tmp_path / "none.csv", 1, 1)


def test_long_trace_is_planned_for_by_its_busiest_stretch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_REQUESTS", 3)
    lines = "".join(f"{at_s},a\n" for at_s in (0, 10, 20, 20.1, 20.2, 30))
    workload = read_trace(trace(tmp_path, f"at_s,adapter\n{lines}"), 1, 1)
    assert workload.at_s.tolist() == pytest.approx([0, 0.1, 0.2])
