"""The simulation: requests arrive, a policy places each, replicas serve them, and figures come out."""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cluster.planning.machine import Machine
from cluster.planning.replica_model import Request, SimReplica, Tier
from cluster.planning.workloads import Workload

WARM_UP_SHARE = 0.2
"""The share of requests, from the start, that no figure counts: slots are cold then."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a policy may know when it chooses: requests in flight by replica, and what the replicas published."""

    loads: list[int]
    resident: list[set[int]]
    """Adapters in slots, by replica, as old as the simulation's `news_delay_s`."""
    hosted: list[set[int]]
    """Those in host memory, likewise."""
    in_flight: Counter[int]
    """Requests in flight by adapter."""

    @classmethod
    def of(cls, num_replicas: int) -> "Fleet":
        """Nothing in flight or in memory yet."""
        resident, hosted = ([set[int]() for _ in range(num_replicas)] for _ in range(2))
        return cls([0] * num_replicas, resident, hosted, Counter())


class Policy(Protocol):
    """Chooses a replica for a request."""

    def choose(self, adapter: int, fleet: Fleet, now_s: float) -> int:
        """The index of the replica that takes a request for `adapter`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one run, without its warm-up."""

    slot_hit_rate: float
    loads_per_1000: float
    load_skew: float
    """Largest mean number of requests in flight on a replica, over the mean of all."""
    p50_first_token_s: float
    p99_first_token_s: float
    tokens_per_s_p5: float
    """Tokens a second after the first that all but the slowest twentieth of the streams get."""
    requests_per_s: float


class Simulation:
    """One run of a workload; `run` once, then `outcome`."""

    def __init__(
        self, machine: Machine, num_replicas: int, policy: Policy, workload: Workload, news_delay_s: float = 0.06
    ) -> None:
        self._policy = policy
        self._workload = workload
        self._news_delay_s = news_delay_s
        self._fleet = Fleet.of(num_replicas)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._warm_loads = 0
        self.requests: list[Request] = []
        self.replicas = [
            SimReplica(machine, self.schedule, self._ended, self._publisher(index)) for index in range(num_replicas)
        ]

    def schedule(self, at_s: float, action: Callable[[float], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, action))

    def run(self) -> None:
        """Serve every request to its end."""
        workload = self._workload
        num_warm = int(WARM_UP_SHARE * workload.num_requests)
        columns = (workload.adapters, workload.at_s, workload.prompt_tokens, workload.output_tokens)
        for index, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            if index == num_warm:
                self._warm_loads = self.num_loads
            self._run_until(row[1])
            self._arrive(Request(*row))
        self._run_until(float("inf"))

    @property
    def num_loads(self) -> int:
        return sum(replica.num_loads for replica in self.replicas)

    def outcome(self) -> Outcome:
        """Figures of the requests after the warm-up. Raises ValueError without any."""
        counted = self.requests[int(WARM_UP_SHARE * len(self.requests)) :]
        if not counted:
            raise ValueError("no request to count")
        first_s = np.array([request.first_token_s - request.at_s for request in counted])
        p50, p99 = np.percentile(first_s, [50, 99])
        span_s = max(request.done_s for request in counted) - counted[0].at_s
        return Outcome(
            slot_hit_rate=sum(request.was_hit for request in counted) / len(counted),
            loads_per_1000=1000 * (self.num_loads - self._warm_loads) / len(counted),
            load_skew=_skew(counted, len(self.replicas)),
            p50_first_token_s=float(p50),
            p99_first_token_s=float(p99),
            tokens_per_s_p5=_slow_stream(counted),
            requests_per_s=len(counted) / span_s,
        )

    def check_integrity(self) -> None:
        """Assert that every request was answered and every place given back."""
        assert self._fleet.loads == [0] * len(self.replicas), f"loads {self._fleet.loads}"
        assert all(request.at_s < request.first_token_s <= request.done_s + 1e-9 for request in self.requests)
        for replica in self.replicas:
            replica.check_integrity()

    def _run_until(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            at_s, _, action = heapq.heappop(self._events)
            action(at_s)

    def _arrive(self, request: Request) -> None:
        request.replica = self._policy.choose(request.adapter, self._fleet, request.at_s)
        self._fleet.loads[request.replica] += 1
        self._fleet.in_flight[request.adapter] += 1
        self.requests.append(request)
        self.replicas[request.replica].submit(request, request.at_s)

    def _ended(self, request: Request) -> None:
        self._fleet.loads[request.replica] -= 1
        self._fleet.in_flight[request.adapter] -= 1

    def _publisher(self, index: int) -> Callable[[Tier, int, bool], None]:
        """Tells the policies of a change in a replica's slots or host memory, `news_delay_s` late."""
        told = {"slot": self._fleet.resident[index], "host": self._fleet.hosted[index]}
        pending: dict[tuple[Tier, int], bool] = {}

        def settle(at_s: float) -> None:
            for (tier, adapter), is_there in pending.items():
                (told[tier].add if is_there else told[tier].discard)(adapter)
            pending.clear()

        def changed(tier: Tier, adapter: int, is_there: bool) -> None:
            if not pending:
                self.schedule(self._now_s() + self._news_delay_s, settle)
            pending[tier, adapter] = is_there

        return changed

    def _now_s(self) -> float:
        return self.requests[-1].at_s if self.requests else 0.0


def simulate(machine: Machine, num_replicas: int, policy: Policy, workload: Workload) -> Outcome:
    """Run `workload` on `num_replicas` replicas and return its figures."""
    simulation = Simulation(machine, num_replicas, policy, workload)
    simulation.run()
    return simulation.outcome()


def _skew(requests: Sequence[Request], num_replicas: int) -> float:
    """By Little's law the mean number in flight is the sum of the times in the system, over the span of the run."""
    in_flight_s = np.bincount(
        [request.replica for request in requests],
        [request.done_s - request.at_s for request in requests],
        minlength=num_replicas,
    )
    return float(in_flight_s.max() / in_flight_s.mean())


def _slow_stream(requests: Sequence[Request]) -> float:
    rates = [
        (request.output_tokens - 1) / (request.done_s - request.first_token_s)
        for request in requests
        if request.done_s > request.first_token_s and request.output_tokens > 1
    ]
    return float(np.percentile(rates, 5)) if rates else 0.0
