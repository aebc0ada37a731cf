"""Which routing policy keeps adapters in slots and first tokens fast? A discrete-event simulation.

    python benchmarks/routing_sim.py --seeds 8

Workloads W4 (Zipf 1.0 and 1.2, Poisson) and W5 (two days, a flash crowd, adapters that appear and fade) over 1,024
adapters, at three quarters of what the replicas can do, for 4 to 64 replicas with the step and swap times measured on
an H200. `lorafleet` is the code that gateways run; the others follow their public descriptions
(`cluster/planning/policies.py` names them). The first fifth of a run is not counted.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.intervals import ratio_of  # noqa: E402
from benchmarks.provenance import save  # noqa: E402
from cluster.planning import workloads  # noqa: E402
from cluster.planning.machine import Machine  # noqa: E402
from cluster.planning.policies import Affinity, policies  # noqa: E402
from cluster.planning.simulator import Outcome, Policy, Simulation  # noqa: E402
from cluster.planning.workloads import Workload  # noqa: E402
from router.config import PlacementConfig  # noqa: E402

MEAN_TOKENS = (workloads.SHORTEST_TOKENS + workloads.LONGEST_TOKENS) / 2
TYPICAL_ADAPTERS = 40
"""Distinct adapters in a batch of 64 rows, about; only to set the rate."""
FULL_SIZES, LARGE_SIZE = (4, 16), 64
OURS = "lorafleet"
P99 = "p99_first_token_s"
MEASURED = tuple(field.name for field in fields(Outcome))


def streams(num_replicas: int, arguments: argparse.Namespace) -> Iterator[Workload]:
    """Every workload at the size; at the largest the two that strain a policy most."""
    machine, number, adapters = Machine(), arguments.requests, arguments.adapters
    if num_replicas >= LARGE_SIZE:
        number *= 2
    rate = arguments.utilisation * num_replicas * machine.requests_per_s(MEAN_TOKENS, MEAN_TOKENS, TYPICAL_ADAPTERS)
    yield workloads.zipf(number, rate, adapters, 1.0, arguments.seed)
    yield workloads.flash_crowd(number, rate, adapters, arguments.seed)
    if num_replicas < LARGE_SIZE:
        yield workloads.zipf(number, rate, adapters, 1.2, arguments.seed)
        yield workloads.diurnal(number, rate, adapters, arguments.seed)
        yield workloads.churn(number, rate, adapters, arguments.seed)


def measure(num_replicas: int, workload: Workload, name: str, make: Callable[[], Policy]) -> dict[str, Any]:
    """One cell of the table; asserts that every request was answered and that the fleet's own bound held."""
    policy = make()
    simulation = Simulation(Machine(), num_replicas, policy, workload)
    simulation.run()
    simulation.check_integrity()
    if isinstance(policy, Affinity):
        assert policy.worst_over_bound <= 0, f"{policy.worst_over_bound} above the load bound"
    figures = {key: round(value, 4) for key, value in asdict(simulation.outcome()).items()}
    return {"replicas": num_replicas, "workload": workload.name, "policy": name, **figures}


def placement(arguments: argparse.Namespace) -> PlacementConfig:
    """The fleet's own policy as it is by default, but for what the command line says."""
    return PlacementConfig(load_factor=arguments.load_factor)


def table(arguments: argparse.Namespace, seed: int) -> Iterator[dict[str, Any]]:
    for num_replicas in arguments.replicas:
        for workload in streams(num_replicas, argparse.Namespace(**{**vars(arguments), "seed": seed})):
            if arguments.workloads and workload.name not in arguments.workloads:
                continue
            makers = policies(num_replicas, Machine(), workload.num_adapters, placement(arguments), seed)
            for name, make in makers.items():
                if not arguments.policies or name in arguments.policies:
                    yield {"seed": seed, **measure(num_replicas, workload, name, make)}


def cells(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By cell and policy: the means over the seeds, and its p99 first token over the fleet's, seed by seed."""
    grouped: dict[tuple[int, str], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        grouped.setdefault((row["replicas"], row["workload"]), {}).setdefault(row["policy"], []).append(row)
    found = []
    for (replicas, workload), by_policy in grouped.items():
        ours = [row["p99_first_token_s"] for row in by_policy.get(OURS, ())]
        for policy, seeds in by_policy.items():
            means = {key: round(statistics.fmean(row[key] for row in seeds), 4) for key in MEASURED}
            cell = {"replicas": replicas, "workload": workload, "policy": policy, **means}
            if policy != OURS and len(ours) > 1:
                ratio, low, high = (round(each, 3) for each in ratio_of([row[P99] for row in seeds], ours))
                cell |= {"p99_over_ours": ratio, "interval": [low, high]}
            found.append(cell)
    return found


def markdown(cells: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table of `benchmarks/README.md`: slot hit rate / loads per 1,000 / largest over mean load / p99, ms."""
    names = list(dict.fromkeys(cell["policy"] for cell in cells))
    yield "| replicas, workload | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for replicas, workload in dict.fromkeys((cell["replicas"], cell["workload"]) for cell in cells):
        row = (figures(cell) for cell in cells if (cell["replicas"], cell["workload"]) == (replicas, workload))
        yield f"| {replicas}, {workload} | " + " | ".join(row) + " |"


def figures(cell: dict[str, Any]) -> str:
    loads, skew, p99_ms = cell["loads_per_1000"], cell["load_skew"], cell[P99] * 1e3
    return f"{cell['slot_hit_rate']:.2f} / {loads:.0f} / {skew:.2f} / {p99_ms:.0f}"


def show(row: dict[str, Any]) -> str:
    return (
        f"{row['replicas']:3} {row['workload']:16} {row['policy']:20} hit {row['slot_hit_rate']:.3f}"
        f"  loads/1000 {row['loads_per_1000']:6.1f}  max/mean {row['load_skew']:5.2f}"
        f"  first token p50 {row['p50_first_token_s'] * 1000:7.1f} p99 {row['p99_first_token_s'] * 1000:8.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=12000)
    parser.add_argument("--adapters", type=int, default=1024)
    parser.add_argument("--utilisation", type=float, default=0.75)
    parser.add_argument("--replicas", type=int, nargs="+", default=[*FULL_SIZES, LARGE_SIZE])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="so many from --seed on")
    parser.add_argument("--workloads", nargs="+", help="only these")
    parser.add_argument("--policies", nargs="+", help="only these")
    parser.add_argument("--load-factor", type=float, default=PlacementConfig().load_factor)
    arguments = parser.parse_args()
    rows, began_s = [], time.process_time()
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        for row in table(arguments, seed):
            rows.append(row)
            print(show(row), flush=True)
    took_s = round(time.process_time() - began_s, 1)
    conditions = {**vars(arguments), "machine": asdict(Machine()), "placement": placement(arguments).model_dump()}
    print(f"{took_s} s of processor time")
    conditions["processor_s"] = took_s
    found = cells(rows)
    for line in markdown(found):
        print(line)
    for cell in found:
        if "interval" in cell:
            print(f"{cell['replicas']:3} {cell['workload']:16} {cell['policy']:20} p99 over ours", end=" ")
            print(f"{cell['p99_over_ours']:.3f} {cell['interval']}")
    print(save("routing_sim", __doc__ or "", conditions, found))


if __name__ == "__main__":
    main()
