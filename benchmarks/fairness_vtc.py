"""How far apart do tenants' shares drift? Deficit round robin against virtual token counters and arrival order.

    python benchmarks/fairness_vtc.py

The workloads of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, arXiv:2401.00588), with their
scheduler as a queue of the same engine. The model takes no time; time is turns of the step loop. Service is prompt
tokens + output tokens as they are served, which is what all three count. The figure is the largest difference, at any
moment, of accumulated service for each unit of weight between two tenants that have had requests waiting ever since
both began to.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import save  # noqa: E402
from benchmarks.tenant_engine import Arrival, Run, arrival, make_run, quantile  # noqa: E402
from replica.arrival_queue import ArrivalQueue, Preference  # noqa: E402
from replica.config import SchedulerConfig  # noqa: E402
from replica.sequence import RequestGroup  # noqa: E402

OUTPUT_COST = 1.0
NUM_BLOCKS = 1250
LIMITS: dict[str, Any] = {"max_num_seqs": 32, "max_batch_tokens": 512, "max_waiting": 100_000}

May = Callable[[RequestGroup], bool]


class VtcQueue:
    """Algorithm 2 of the paper: a counter a tenant, and the tenant with the least goes first.

    A tenant is charged its prompt when a request is admitted and each output token when it is sampled. One that comes
    back from having nothing waiting is lifted to the least counter of those that wait, or to the last one that left.
    """

    def __init__(self) -> None:
        self._queues: dict[str, ArrivalQueue[RequestGroup]] = {}
        self._counters: Counter[str] = Counter()
        self._weights: dict[str, float] = {}
        self._last_left = ""
        self._running: dict[str, tuple[RequestGroup, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[RequestGroup]:
        return (item for queue in self._queues.values() for item in queue)

    def push(self, item: RequestGroup) -> None:
        self._charge_outputs()
        if item.tenant not in self._queues:
            floor = min((self._counters[name] for name in self._queues), default=self._counters[self._last_left])
            self._counters[item.tenant] = max(self._counters[item.tenant], floor)
            self._queues[item.tenant] = ArrivalQueue()
        self._weights[item.tenant] = item.weight
        self._queues[item.tenant].push(item)

    def take(self, may_admit: May, preference: Preference[RequestGroup] | None = None) -> RequestGroup | None:
        self._charge_outputs()
        for name in sorted(self._queues, key=lambda name: self._counters[name]):
            item = self._queues[name].take(may_admit)
            if item is not None:
                self._charge(name, len(item.request.prompt))
                self._running[item.key] = (item, 0)
                self._forget_idle(name)
                return item
        return None

    def take_ahead(self, may_admit: May, claims: May) -> RequestGroup | None:
        return None

    def remove(self, item: RequestGroup) -> bool:
        queue = self._queues.get(item.tenant)
        if queue is None or not queue.remove(item):
            return False
        self._forget_idle(item.tenant)
        return True

    def refund(self, tenant: str, tokens: int) -> None:
        """Nothing was charged ahead."""

    def deficits(self) -> dict[str, float]:
        return {}

    def follow(self, outstanding: Callable[[str], int]) -> None:
        """It looks itself."""

    def _charge(self, name: str, cost: float) -> None:
        self._counters[name] += cost / self._weights[name]

    def _charge_outputs(self) -> None:
        for key, (group, charged) in list(self._running.items()):
            output = sum(sequence.num_output for sequence in group.sequences)
            self._charge(group.tenant, OUTPUT_COST * (output - charged))
            self._running[key] = (group, output)
            if group.is_ended:
                del self._running[key]

    def _forget_idle(self, name: str) -> None:
        if not len(self._queues[name]):
            del self._queues[name]
            self._last_left = name


@dataclass(frozen=True)
class Client:
    """A tenant of a workload: a request every `every` turns while it is on; `on` and `off` in turns, 0 is always on."""

    name: str
    every: float
    sizes: tuple[int, int, int, int] = (32, 96, 32, 96)
    """Least and most prompt tokens, least and most output tokens."""
    weight: float = 1.0
    on: int = 0
    off: int = 0

    def arrivals(self, num_ticks: int, seed: int) -> Iterator[Arrival]:
        draw, tick, index = Random(f"{self.name}{seed}"), 0.0, 0
        while (tick := tick + draw.expovariate(1 / self.every)) < num_ticks:
            sizes = draw.randint(*self.sizes[:2]), draw.randint(*self.sizes[2:])
            if not self.on or tick % (self.on + self.off) < self.on:
                yield arrival(int(tick), f"{self.name}-{index}", self.name, *sizes, weight=self.weight)
                index += 1


SHORT, LONG = (16, 32, 16, 32), (150, 250, 100, 200)

WORKLOADS: dict[str, list[Client]] = {
    "overload by one": [Client("a", 1.0), Client("b", 3.5)],
    "8 tenants": [Client(f"t{index}", 4.0 + index) for index in range(8)],
    "weights 1:2:3:4": [Client(f"w{weight}", 2.0, weight=weight) for weight in (1, 2, 3, 4)],
    "on and off": [Client("steady", 2.0), Client("switching", 1.2, on=400, off=400)],
    "short and long": [Client("short", 0.6, SHORT), Client("long", 5.0, LONG)],
}


@dataclass
class Watch:
    """Follows the differences: for each pair of tenants, from the moment both have requests waiting."""

    weights: dict[str, float]
    worst: float = 0.0
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    _spans: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def __call__(self, run: Run) -> None:
        waiting = run.waiting()
        for pair in combinations(self.weights, 2):
            if not all(waiting[name] for name in pair):
                self._spans.pop(pair, None)
                continue
            first, second = (run.service[name] / self.weights[name] for name in pair)
            least, most = self._spans.get(pair, (first - second, first - second))
            self._spans[pair] = min(least, first - second), max(most, first - second)
            self.worst = max(self.worst, self._spans[pair][1] - self._spans[pair][0])


def serve(clients: Iterable[Client], scheduler: str, num_ticks: int, seed: int) -> dict[str, float]:
    """One workload under one scheduler, for `num_ticks` turns of the loop."""
    clients = list(clients)
    policy = "drr" if scheduler == "drr" else "fcfs"
    queue = VtcQueue() if scheduler == "vtc" else None
    run = make_run(SchedulerConfig(policy=policy, **LIMITS), NUM_BLOCKS, queue=queue, output_cost=OUTPUT_COST)  # type: ignore[arg-type]
    watch = Watch({client.name: client.weight for client in clients})
    run.on_tick = watch
    trace = [each for client in clients for each in client.arrivals(num_ticks, seed)]
    with torch.inference_mode():
        run.serve(trace, until_tick=num_ticks)
    shares = [run.service[client.name] / client.weight for client in clients]
    waits = {
        client.name: [
            float(record.steps_to_first if record.first_tick >= 0 else num_ticks - record.submitted_tick)
            for record in run.records.values()
            if record.tenant == client.name
        ]
        for client in clients
    }
    return {
        "worst_difference": round(watch.worst),
        "jain": round(sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares)), 4),
        "service": round(sum(run.service.values())),
        "least_share": round(min(shares) / max(shares), 4),
        "first_token_p50_of_best_off": min(quantile(each, 0.5) for each in waits.values()),
        "first_token_p50_of_worst_off": max(quantile(each, 0.5) for each in waits.values()),
    }


def compare(clients: Iterable[Client], num_ticks: int, seed: int) -> dict[str, dict[str, float]]:
    """The same trace under each of the schedulers."""
    return {each: serve(clients, each, num_ticks, seed) for each in ("drr", "vtc", "fcfs")}


def ratios(found: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Differences seed by seed, and what part `drr` has of the other two: seed by seed, and of the largest of all."""
    differences = {each: [run[each]["worst_difference"] for run in found] for each in found[0]}
    worst = {each: max(values) for each, values in differences.items()}
    by_seed = [round(drr / vtc, 3) for drr, vtc in zip(differences["drr"], differences["vtc"], strict=True)]
    return {
        **differences,
        "drr_of_vtc_by_seed": by_seed,
        "seeds_above_1.25": sum(each > 1.25 for each in by_seed),
        "drr_of_vtc": round(worst["drr"] / worst["vtc"], 3),
        "drr_of_fcfs": round(worst["drr"] / worst["fcfs"], 3),
        "least_jain_of_drr": min(run["drr"]["jain"] for run in found),
        "least_share_of_drr": min(run["drr"]["least_share"] for run in found),
        "service_of_fcfs": round(min(run["drr"]["service"] / run["fcfs"]["service"] for run in found), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ticks", type=int, default=1600)
    parser.add_argument("--seeds", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name, clients in WORKLOADS.items():
        found = [compare(clients, options.ticks, seed) for seed in range(options.seeds)]
        results[name] = {"over_seeds": ratios(found), "by_seed": found}
        print(name, results[name]["over_seeds"], flush=True)
    print(save("fairness_vtc", str(__doc__), {**vars(options), **LIMITS, "num_blocks": NUM_BLOCKS}, results))


if __name__ == "__main__":
    main()
