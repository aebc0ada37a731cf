"""Does affinity keep adapters in their slots? A Zipf mix through a real gateway and two real replicas.

    python benchmarks/affinity.py

500 requests over 40 adapters of one size, Zipf(1.0), 16 at a time, 2 replicas with 12 slots each; the same requests
with the fleet's policy and with random placement. A slot hit is a request that finds its adapter in a slot. By
simulation ideal homes give 0.80 and random placement 0.59.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import save  # noqa: E402
from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig  # noqa: E402
from router.placement import Placement  # noqa: E402
from tests.local_fleet import LocalFleet, local_fleet  # noqa: E402
from tests.tiny_models import make_adapter, make_model  # noqa: E402


@dataclass(frozen=True)
class Mix:
    """The workload."""

    num_requests: int = 500
    num_adapters: int = 40
    num_slots: int = 12
    concurrency: int = 16
    exponent: float = 1.0
    max_tokens: int = 8
    seed: int = 0

    def names(self) -> list[str]:
        """The adapter of each request."""
        names = [f"adapter-{index:02}" for index in range(self.num_adapters)]
        weights = [1 / (rank + 1) ** self.exponent for rank in range(self.num_adapters)]
        return random.Random(self.seed).choices(names, weights, k=self.num_requests)


@dataclass(frozen=True)
class Outcome:
    """What one policy did: `worst_over_bound` is the largest load at a choice less the bound then, negative is good."""

    policy: str
    hit_rate: float
    loads_per_1000: float
    requests_by_replica: dict[str, int]
    worst_over_bound: int


class RandomOrder:
    """The policy to compare with: any replica, whatever it holds."""

    def __init__(self, members: Iterable[str], seed: int) -> None:
        self._members = sorted(members)
        self._random = random.Random(seed)

    def choose(
        self,
        name: str | None,
        loads: Mapping[str, int],
        exclude: Iterable[str] = (),
        standing: Any = None,
        felt: Mapping[str, float] | None = None,
    ) -> str | None:
        order = [member for member in self._members if member not in set(exclude)]
        return self._random.choice(order) if order else None

    def homes(self, name: str) -> tuple[()]:
        return ()


class Watcher:
    """Stands before `Placement.place` and compares every choice with the load bound of that moment."""

    def __init__(self, placement: Placement) -> None:
        self.worst_over_bound = -(10**9)
        self._placement, self._place, self._bound = placement, placement.place, placement.policy.bound
        placement.place = self.place  # type: ignore[method-assign]

    def place(self, name: str | None, exclude: Any = (), digest: str | None = None) -> Any:
        replica_ids = [member.replica_id for member in self._members]
        loads = {replica_id: self._placement.load(replica_id) for replica_id in replica_ids}
        bound = self._bound(loads, replica_ids)
        lease = self._place(name, exclude, digest)
        self.worst_over_bound = max(self.worst_over_bound, loads[lease.replica_id] + 1 - bound)
        return lease

    def watch(self, members: Sequence[Any]) -> None:
        self._members = members


async def run_mix(fleet: LocalFleet, mix: Mix, policy: str) -> Outcome:
    """Serve the mix and read the slots' counters before and after."""
    placement = fleet.gateway.placement
    watcher = Watcher(placement)
    watcher.watch(placement.policy.members)
    own = placement._policy
    if policy == "random":
        placement._policy = RandomOrder(fleet.replicas, mix.seed)  # type: ignore[assignment]
    before = {replica_id: replica.status() for replica_id, replica in fleet.replicas.items()}
    queue = iter(mix.names())
    async with fleet.client() as client:

        async def work() -> None:
            for name in queue:
                body = {"model": name, "prompt": "Hello", "max_tokens": mix.max_tokens, "ignore_eos": True}
                response = await client.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text

        await asyncio.gather(*(work() for _ in range(mix.concurrency)))
    placement._policy = own
    del placement.place  # type: ignore[method-assign]
    after = {replica_id: replica.status() for replica_id, replica in fleet.replicas.items()}
    hits = {key: after[key].num_slot_hits - before[key].num_slot_hits for key in after}
    misses = {key: after[key].num_slot_misses - before[key].num_slot_misses for key in after}
    loads = sum(after[key].num_adapter_loads - before[key].num_adapter_loads for key in after)
    total = sum(hits.values()) + sum(misses.values())
    return Outcome(
        policy,
        round(sum(hits.values()) / total, 3),
        round(1000 * loads / mix.num_requests, 1),
        {key: hits[key] + misses[key] for key in after},
        watcher.worst_over_bound,
    )


async def compare(mix: Mix, folder: Path) -> list[Outcome]:
    """Each policy on a fleet of its own that starts cold, with the same adapters."""
    base = make_model(folder / "base")
    outcomes = []
    for policy in ("affinity", "random"):
        config = ReplicaConfig(
            model=ModelConfig(base=str(base), device="cpu", num_threads=1),
            adapters=AdapterCacheConfig(max_slots=mix.num_slots),
            scheduler=SchedulerConfig(num_kv_blocks=256, max_num_seqs=32),
        )
        async with local_fleet(folder / policy, config) as fleet:
            for index in range(mix.num_adapters):
                name = f"adapter-{index:02}"
                await fleet.push(name, make_adapter(base, ("q_proj", "v_proj"), 8, folder=folder / name, seed=index))
            outcomes.append(await run_mix(fleet, mix, policy))
            fleet.check_integrity()
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    mix = Mix(seed=parser.parse_args().seed)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = asyncio.run(compare(mix, Path(folder)))
    for outcome in outcomes:
        print(outcome)
    print(save("affinity", __doc__ or "", vars(mix), [vars(outcome) for outcome in outcomes]))


if __name__ == "__main__":
    main()
