"""Routing policies to compare in the simulation: the fleet's own code, and its peers as they are publicly described.

Each is given the best case: one gateway, exact loads, one key an adapter.
"""

import bisect
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

from cluster.planning.machine import Machine
from cluster.planning.simulator import Fleet, Policy
from cluster.planning.workloads import adapter_name
from registry.demand import DemandConfig, DemandPlanner
from router.affinity import COLD, IN_HOST, IN_SLOT, AffinityPolicy
from router.config import PlacementConfig
from router.homes import Demand
from router.preferences import Member, hash64


class Affinity:
    """The fleet's own: `router.affinity.AffinityPolicy` as a gateway uses it, with news as old as the simulation's.

    Demand is planned by `registry.demand.DemandPlanner`, as the registry does, from a report a second.
    """

    REPORT_S = 1.0

    def __init__(
        self,
        num_replicas: int,
        names: Sequence[str],
        config: PlacementConfig,
        demand: DemandConfig | None = None,
        num_slots: int = 0,
    ) -> None:
        self._policy = AffinityPolicy(config.load_factor, config.min_load_bound, config.home_factor)
        self._ids = [f"r{index}" for index in range(num_replicas)]
        self._index = {replica_id: index for index, replica_id in enumerate(self._ids)}
        self._members = [Member(index, replica_id, 1.0, num_slots) for index, replica_id in enumerate(self._ids)]
        self._names = names
        self._planner = DemandPlanner(demand or DemandConfig(), 0.0)
        self._epoch = self._planner.plan.epoch
        self._reported_s = 0.0
        self._policy.update(names, self._members)
        self.worst_over_bound = -(10**9)
        """The largest load at a choice, the new request included, less the bound then."""

    def choose(self, adapter: int, fleet: Fleet, now_s: float) -> int:
        if now_s - self._reported_s >= self.REPORT_S:
            self._report(fleet, now_s)
        loads = dict(zip(self._ids, fleet.loads, strict=True))
        chosen = self._policy.choose(
            self._names[adapter], loads, standing=lambda each: self._stands(adapter, each, fleet)
        )
        assert chosen is not None, "there are replicas"
        bound = self._policy.bound(loads, self._ids)
        self.worst_over_bound = max(self.worst_over_bound, loads[chosen] + 1 - bound)
        return self._index[chosen]

    def _stands(self, adapter: int, replica_id: str, fleet: Fleet) -> int:
        index = self._index[replica_id]
        if adapter in fleet.resident[index]:
            return IN_SLOT
        return IN_HOST if adapter in fleet.hosted[index] else COLD

    def _report(self, fleet: Fleet, now_s: float) -> None:
        """What a gateway tells the registry, and the plan that comes back."""
        elapsed_s, self._reported_s = now_s - self._reported_s, now_s
        busy_s = {self._names[adapter]: elapsed_s * count for adapter, count in fleet.in_flight.items() if count}
        self._planner.observe(busy_s, 0.0, now_s)
        plan = self._planner.advance(len(self._ids), now_s)
        if plan.epoch != self._epoch:
            self._epoch = plan.epoch
            demand = Demand(frozenset(plan.active), plan.num_homes)
            self._policy.update(self._names, self._members, demand)


class RandomChoice:
    """Any replica."""

    def __init__(self, num_replicas: int, seed: int = 0) -> None:
        self._num_replicas = num_replicas
        self._random = random.Random(seed)

    def choose(self, adapter: int, fleet: Fleet, now_s: float) -> int:
        return self._random.randrange(self._num_replicas)


class PowerOfTwo:
    """Ray Serve's default: two replicas at random, the one with fewer requests.

    https://docs.ray.io/en/releases-2.60.0/serve/advanced-guides/custom-request-router.html
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, adapter: int, fleet: Fleet, now_s: float) -> int:
        return self.among(range(len(fleet.loads)), fleet)

    def among(self, candidates: Sequence[int], fleet: Fleet) -> int:
        pair = self._random.sample(candidates, min(2, len(candidates)))
        return min(pair, key=lambda index: fleet.loads[index])


class Multiplexing:
    """Ray Serve's model multiplexing: two choices among replicas that have the model, else among those with fewest.

    A replica at `max_ongoing` refuses, and the request goes to any other.
    https://docs.ray.io/en/releases-2.60.0/serve/model-multiplexing.html
    """

    def __init__(self, max_ongoing: int, seed: int = 0) -> None:
        self._max_ongoing = max_ongoing
        self._pair = PowerOfTwo(seed)

    def choose(self, adapter: int, fleet: Fleet, now_s: float) -> int:
        everyone = range(len(fleet.loads))
        having = [index for index in everyone if adapter in fleet.resident[index]]
        fewest = min(map(len, fleet.resident))
        emptiest = [index for index in everyone if len(fleet.resident[index]) == fewest]
        for candidates in (having, emptiest, everyone):
            open_ones = [index for index in candidates if fleet.loads[index] < self._max_ongoing]
            if open_ones:
                return self._pair.among(open_ones, fleet)
        return self._pair.among(everyone, fleet)


class BoundedRing:
    """KubeAI's prefix hash: a ring of 256 points a replica; a replica takes up to 125 % of the mean load.

    Its key is the adapter and the prompt's start; here all prompts of an adapter start alike.
    https://www.kubeai.org/concepts/load-balancing/, defaults of https://www.kubeai.org/reference/kubernetes-api/
    """

    POINTS, MEAN_FACTOR = 256, 1.25

    def __init__(self, num_replicas: int, names: Sequence[str]) -> None:
        points = sorted((hash64(f"r{i}-{point}"), i) for i in range(num_replicas) for point in range(self.POINTS))
        self._hashes = [key for key, _ in points]
        self._owners = [owner for _, owner in points]
        self._names = names

    def choose(self, adapter: int, fleet: Fleet, now_s: float) -> int:
        start = bisect.bisect_left(self._hashes, hash64(self._names[adapter]))
        most = math.ceil(self.MEAN_FACTOR * (sum(fleet.loads) + 1) / len(fleet.loads))
        for step in range(len(self._owners)):
            owner = self._owners[(start + step) % len(self._owners)]
            if fleet.loads[owner] + 1 <= most:
                return owner
        return self._owners[start % len(self._owners)]


class RendezvousSlots:
    """Dynamo's adapter allocation: rendezvous hashing that skips replicas whose slots are all given away.

    Every `PERIOD_S` each adapter seen lately, the busiest first, gets a set of replicas: as many as its share of the
    load asks for, by descending hash, passing over full ones. Within its set the least loaded takes the request, or
    of all replicas when it has none.
    https://docs.rs/crate/dynamo-llm/1.5.1/source/src/lora/routing/hrw.rs
    """

    PERIOD_S, SMOOTHING = 5.0, 0.5

    def __init__(self, num_replicas: int, num_slots: int, names: Sequence[str]) -> None:
        self._num_replicas = num_replicas
        self._num_slots = num_slots
        self._names = names
        self._orders: dict[int, list[int]] = {}
        self._sets: dict[int, list[int]] = {}
        self._demand: dict[int, float] = {}
        self._seen: Counter[int] = Counter()
        self._next_s = 0.0

    def choose(self, adapter: int, fleet: Fleet, now_s: float) -> int:
        if now_s >= self._next_s:
            self._allocate()
            self._next_s = now_s + self.PERIOD_S
        self._seen[adapter] += 1
        candidates = self._sets.get(adapter) or range(self._num_replicas)
        return min(candidates, key=lambda index: fleet.loads[index])

    def _allocate(self) -> None:
        keep = {adapter: (1 - self.SMOOTHING) * demand for adapter, demand in self._demand.items()}
        for adapter, count in self._seen.items():
            keep[adapter] = keep.get(adapter, 0.0) + self.SMOOTHING * count
        self._demand = {adapter: demand for adapter, demand in keep.items() if demand > 0.01}
        self._seen.clear()
        total, used = sum(self._demand.values()), [0] * self._num_replicas
        self._sets = {}
        for adapter in sorted(self._demand, key=lambda each: (-self._demand[each], each)):
            wanted = max(1, math.ceil(self._num_replicas * self._demand[adapter] / total))
            chosen = [index for index in self._order(adapter) if used[index] < self._num_slots][:wanted]
            for index in chosen:
                used[index] += 1
            self._sets[adapter] = chosen

    def _order(self, adapter: int) -> list[int]:
        known = self._orders.get(adapter)
        if known is None:
            name = self._names[adapter]
            known = sorted(range(self._num_replicas), key=lambda index: -hash64(f"{index}\x00{name}"))
            self._orders[adapter] = known
        return known


def policies(
    num_replicas: int, machine: Machine, num_adapters: int, config: PlacementConfig, seed: int = 0
) -> dict[str, Callable[[], Policy]]:
    """Makers of every policy, by name; the fleet's own is `lorafleet`, as `cluster.config` sets it up.

    With another `seed` adapters have other names, and so other places by their hashes.
    """
    names = [f"{adapter_name(index)}-{seed}" for index in range(num_adapters)]
    config = config.for_rows(machine.num_rows)
    return {
        "lorafleet": lambda: Affinity(num_replicas, names, config, num_slots=machine.num_slots),
        "random": lambda: RandomChoice(num_replicas, seed),
        "ray power of two": lambda: PowerOfTwo(seed),
        "ray multiplexing": lambda: Multiplexing(2 * machine.num_rows, seed),
        "kubeai bounded ring": lambda: BoundedRing(num_replicas, names),
        "dynamo rendezvous": lambda: RendezvousSlots(num_replicas, machine.num_slots, names),
    }
