"""How even are bursts of requests, when gateways hear of each other's loads late?

    python -m benchmarks.burst_balance

The real placement of several gateways over simulated replicas and time: 64 requests a replica come at once, each for a
gateway chosen at random; when all have ended the next burst comes. A request takes 256 steps of 6.2 ms + 0.03 ms a row
of its replica. Gateways tell their loads once a second, so news is up to two seconds old: about a burst. `whole` counts
each request of another gateway as one, `parts` as one by the number of gateways (`AffinityPolicy.rank`).
"""

import random
import statistics
from collections import Counter
from typing import Any

from benchmarks.provenance import save
from registry.pulse import FleetPulse
from router.config import PlacementConfig
from router.placement import Placement, PlacementLease
from tests.router.support import replica_record

FLEETS = ((2, 2), (4, 4), (8, 4))
"""(gateways, replicas)."""
LOAD_FACTORS = (1.0, 1.05, 1.25)
PER_REPLICA = 64
NUM_BURSTS = 40
NUM_SEEDS = 5
PULSE_S = 1.0
NUM_STEPS = 256


class Fleet:
    """Gateways over a common clock, and what each of them told last."""

    def __init__(self, num_gateways: int, num_replicas: int, load_factor: float, told_gateways: int, seed: int) -> None:
        self._draw = random.Random(seed)
        self._now_s, self._told_gateways = 0.0, told_gateways
        self._num_requests = PER_REPLICA * num_replicas
        self._names = [f"tenant-{self._draw.random()}" for _ in range(self._num_requests // 8 * 2)]
        config = PlacementConfig(load_factor=load_factor)
        self._gateways = [Placement(config, clock=lambda: self._now_s) for _ in range(num_gateways)]
        for gateway in self._gateways:
            gateway.update(self._names, [replica_record(index) for index in range(num_replicas)])
        self._told: list[Counter[str]] = [Counter() for _ in self._gateways]
        self._next_pulse_s = [self._draw.random() * PULSE_S for _ in self._gateways]

    def burst(self) -> int:
        """The largest number of requests on a replica."""
        leases: list[PlacementLease] = []
        for index in range(self._num_requests):
            self._pass(self._now_s + self._draw.random() * 1.5e-3)
            gateway = self._gateways[self._draw.randrange(len(self._gateways))]
            leases.append(gateway.place(self._names[index % len(self._names)]))
        rows = Counter(lease.replica_id for lease in leases)
        ends = []
        for lease in leases:
            took_s = NUM_STEPS * (6.2e-3 + 0.03e-3 * rows[lease.replica_id])
            ends.append((self._now_s + took_s + self._draw.random() * 0.01, lease))
        for ends_s, lease in sorted(ends, key=lambda end: end[0]):
            self._pass(ends_s)
            lease.release()
        self._pass(self._now_s + 0.05)
        return max(rows.values())

    def _pass(self, until_s: float) -> None:
        """Let time pass, with the heartbeats in it."""
        while min(self._next_pulse_s) <= until_s:
            place = self._next_pulse_s.index(min(self._next_pulse_s))
            self._now_s = self._next_pulse_s[place]
            self._told[place] = Counter(self._gateways[place].pulse(str(place)).in_flight)
            others = sum((told for other, told in enumerate(self._told) if other != place), Counter[str]())
            told = {"in_flight": dict(others), "num_gateways": self._told_gateways}
            self._gateways[place].hear(
                FleetPulse(board_id="b", seen=1, plan=None, loads={}, residency={}, **told)  # type: ignore[arg-type]
            )
            self._next_pulse_s[place] += PULSE_S * (1 + 0.02 * self._draw.random())
        self._now_s = until_s


def measure(num_gateways: int, num_replicas: int, load_factor: float) -> dict[str, Any]:
    row: dict[str, Any] = {"gateways": num_gateways, "replicas": num_replicas, "load_factor": load_factor}
    for name, told in (("whole", 1), ("parts", num_gateways)):
        largest = []
        for seed in range(NUM_SEEDS):
            fleet = Fleet(num_gateways, num_replicas, load_factor, told, seed)
            largest += [fleet.burst() / PER_REPLICA for _ in range(NUM_BURSTS)]
        row |= {f"{name} mean": round(statistics.mean(largest), 2), f"{name} max": round(max(largest), 2)}
    return row


def main() -> None:
    rows = [measure(*fleet, load_factor) for fleet in FLEETS for load_factor in LOAD_FACTORS]
    print("the busiest replica's share of an even burst, mean and largest of all bursts")
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    conditions = {"requests_per_replica": PER_REPLICA, "bursts": NUM_BURSTS, "seeds": NUM_SEEDS, "pulse_s": PULSE_S}
    save("burst_balance", str(__doc__), conditions, rows)


if __name__ == "__main__":
    main()
