"""Several gateways that hear of each other late: what a burst of requests puts on each replica."""

import random
from collections import Counter

import pytest

from registry.pulse import FleetPulse
from router.config import PlacementConfig
from router.placement import Placement
from tests.router.support import replica_record

NUM_REPLICAS, NUM_REQUESTS, NUM_BURSTS, LOAD_FACTOR = 4, 256, 8, 1.05
NAMES = [f"tenant-{index}" for index in range(64)]


def largest_loads(num_gateways: int, told_gateways: int, seed: int) -> list[int]:
    """The largest load of a replica in each of several bursts.

    Every gateway hears what the others had in flight in the burst before, when that is over already.
    """
    draw = random.Random(seed)
    gateways = [Placement(PlacementConfig(load_factor=LOAD_FACTOR), clock=lambda: 0.0) for _ in range(num_gateways)]
    for gateway in gateways:
        gateway.update(NAMES, [replica_record(index) for index in range(NUM_REPLICAS)])
    found = []
    before: list[Counter[str]] = [Counter() for _ in gateways]
    for _ in range(NUM_BURSTS):
        for gateway, mine in zip(gateways, before, strict=True):
            others = sum(before, Counter[str]()) - mine
            told = {"in_flight": dict(others), "num_gateways": told_gateways}
            gateway.hear(FleetPulse(board_id="b", seen=1, plan=None, loads={}, residency={}, **told))
        leases = [
            gateways[draw.randrange(num_gateways)].place(NAMES[index % len(NAMES)]) for index in range(NUM_REQUESTS)
        ]
        before = [Counter(gateway.pulse("g").in_flight) for gateway in gateways]
        found.append(max(Counter(lease.replica_id for lease in leases).values()))
        for lease in leases:
            lease.release()
        for gateway in gateways:
            gateway.check_integrity()
    return found


@pytest.mark.parametrize("num_gateways", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_bursts_stay_even_though_news_is_late(num_gateways: int, seed: int) -> None:
    even = NUM_REQUESTS / NUM_REPLICAS
    assert max(largest_loads(num_gateways, num_gateways, seed)) <= LOAD_FACTOR * even + 2 * num_gateways


def test_gateways_that_each_make_up_for_all_others_would_swing() -> None:
    """What this guards against: requests of others counted as whole ones."""
    assert max(largest_loads(num_gateways=4, told_gateways=1, seed=0)) > 1.5 * NUM_REQUESTS / NUM_REPLICAS
