"""What placement promises in numbers: how few adapters move, how even homes are, and that no load exceeds its bound."""

import math
from collections import Counter

import numpy as np
import pytest

from router.affinity import AffinityPolicy
from router.config import PlacementConfig
from router.preferences import Member

NAMES = [f"tenant-{index}/model" for index in range(1000)]


def policy(num_replicas: int, names: list[str] = NAMES) -> AffinityPolicy:
    config = PlacementConfig()
    made = AffinityPolicy(config.load_factor, config.min_load_bound, config.home_factor)
    made.update(names, [Member(index, f"r{index}") for index in range(num_replicas)])
    return made


def homes(made: AffinityPolicy, names: list[str] = NAMES) -> list[int]:
    return [member.ring_id for name in names if (member := made.home(name)) is not None]


@pytest.mark.parametrize("num_replicas", range(1, 17))
def test_one_more_replica_moves_its_share_of_adapters_and_two_percent(num_replicas: int) -> None:
    before, after = homes(policy(num_replicas)), homes(policy(num_replicas + 1))
    moved = sum(one != other for one, other in zip(before, after, strict=True)) / len(NAMES)
    assert moved <= 1 / (num_replicas + 1) + 0.02


def test_homes_of_a_thousand_adapters_on_ten_replicas_are_even() -> None:
    for group in range(5):
        names = [f"group-{group}-{index}" for index in range(1000)]
        counts = Counter(homes(policy(10, names), names))
        assert max(counts.values()) / (1000 / 10) <= 1.15


def place_many(num_placements: int, seed: int) -> None:
    """Random requests come and go on fleets of 1 to 64 replicas; every choice is checked against the bound then."""
    random = np.random.default_rng(seed)
    for num_replicas in (1, 2, 3, 4, 8, 16, 64):
        names = NAMES[: int(random.integers(1, 300))]
        _place_on(policy(num_replicas, names), names, num_placements // 7 + 1, random)


def _place_on(made: AffinityPolicy, names: list[str], num_placements: int, random: np.random.Generator) -> None:
    config, ids = PlacementConfig(), [member.replica_id for member in made.members]
    loads, running, total = dict.fromkeys(ids, 0), [], 0
    picks = np.minimum(random.zipf(1.3, num_placements) - 1, len(names) - 1).tolist()
    leaves = random.choice(3, num_placements, p=(0.4, 0.4, 0.2)).tolist()
    most = int(random.integers(1, 40)) * len(ids)
    for pick, leave in zip(picks, leaves, strict=True):
        chosen = made.choose(names[pick], loads)
        assert chosen is not None
        bound = max(config.min_load_bound, math.ceil(config.load_factor * (total + 1) / len(ids)))
        assert loads[chosen] + 1 <= bound, f"{loads[chosen] + 1} on {chosen}, bound {bound}"
        loads[chosen] += 1
        total += 1
        running.append(chosen)
        for _ in range(min(total, max(leave, total - most))):
            loads[running.pop(pick % len(running))] -= 1
            total -= 1


def test_load_never_exceeds_its_bound_over_ten_thousand_placements() -> None:
    place_many(10_000, seed=1)


@pytest.mark.soak
def test_load_never_exceeds_its_bound_over_a_million_placements() -> None:
    place_many(1_000_000, seed=2)
