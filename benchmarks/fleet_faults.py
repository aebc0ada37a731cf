"""What do clients of a real fleet see of its faults, and how long until it is whole?

    python -m benchmarks.fleet_faults

Real Ray Serve with HAProxy, two gateways, two CPU replicas with a tiny random base and five adapters. Clients ask for
one adapter after the other, half of them as streams, and check every text against PEFT's. Amid that: kill -9 a replica,
SIGSTOP one, hang one in a step, kill HAProxy and its manager, a rolling update to another configuration, 2 -> 4 -> 2
replicas. A request without its answer ends the run with an error, but for streams that had begun on a lost replica and
connections that were open on the killed proxy.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.provenance import save
from tests.faults.trouble import (
    Fault,
    Theatre,
    hang_replica,
    kill_proxy,
    kill_replica,
    roll,
    scale,
    stop_replica,
    theatre,
)
from tests.fleet_process import PROXY, PROXY_MANAGER, FleetProcess
from tests.tiny_fleet import TinyFleet, make_adapters
from tests.tiny_models import make_model

NUM_REPLICAS, NUM_GATEWAYS = 2, 2
STALL_S = 5.0
REGISTRY = {"lease_ttl_s": 10.0}
FLEET = {"gateways": {"count": NUM_GATEWAYS}, "channel_linger_s": 0.5}


def faults(arguments: argparse.Namespace) -> Iterator[tuple[str, int, Fault]]:
    """Name, how often, and what is done."""
    yield "kill -9 a replica", arguments.kills, kill_replica
    yield (
        f"SIGSTOP a replica for {arguments.stop_s:g} s",
        arguments.stops,
        partial(stop_replica, stopped_s=arguments.stop_s),
    )
    yield "a replica hangs in a step", arguments.hangs, hang_replica
    yield "kill -9 HAProxy", arguments.proxies, partial(kill_proxy, kind=PROXY)
    yield "kill -9 HAProxy's manager", arguments.proxies, partial(kill_proxy, kind=PROXY_MANAGER)
    yield "rolling update", 1, partial(roll, coalesce_s=0.03)
    yield "2 -> 4 replicas", 1, partial(scale, num_replicas=4)
    yield "4 -> 2 replicas", 1, partial(scale, num_replicas=2)


def together(rounds: list[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of the table: counts added up, times as median and largest."""
    counts = [key for key in dict.fromkeys(key for each in rounds for key in each) if not key.endswith("_s")]
    times = [key for key in rounds[0] if key.endswith("_s")]
    return {
        "times": len(rounds),
        **{key: sum(each.get(key, 0) for each in rounds) for key in counts},
        **{key: [statistics.median(each[key] for each in rounds), max(each[key] for each in rounds)] for key in times},
    }


def play(stage: Theatre, arguments: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, times, fault in faults(arguments):
        if arguments.only and arguments.only not in name:
            continue
        rounds: list[Mapping[str, Any]] = []
        for _ in range(times):
            rounds.append(stage.inflict(fault))
            print(f"{name:28} {dict(rounds[-1])}", flush=True)
        if rounds:
            results[name] = together(rounds)
    return results


def run(arguments: argparse.Namespace, folder: Path, show: Callable[[str], None] = print) -> dict[str, Any]:
    base = make_model(folder / "tiny-llama")
    adapters = make_adapters(base, folder / "adapters")
    build, replica = "tests.faults.hanging_fleet:build", {"stall_s": STALL_S}
    with FleetProcess(
        str(base), num_replicas=NUM_REPLICAS, fleet=FLEET, registry=REGISTRY, replica=replica, import_path=build
    ) as fleet:
        for name, files in adapters.items():
            fleet.cli("push", name, str(files))
        tiny = TinyFleet(fleet, base, adapters)
        with theatre(tiny, num_clients=arguments.clients, num_tokens=arguments.tokens) as stage:
            results = play(stage, arguments)
    for name, row in results.items():
        show(f"{name:28} {row}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=1)
    parser.add_argument("--hangs", type=int, default=3)
    parser.add_argument("--stop-s", type=float, default=30.0)
    parser.add_argument("--proxies", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--only", help="faults whose name contains this")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = run(arguments, Path(folder))
    conditions = {**vars(arguments), "replicas": NUM_REPLICAS, "gateways": NUM_GATEWAYS}
    if not arguments.only:
        print(save("fleet_faults", __doc__ or "", conditions, results))


if __name__ == "__main__":
    main()
