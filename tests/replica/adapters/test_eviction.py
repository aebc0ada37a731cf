"""The eviction policy: regulars survive strangers, and what is dear to reload stays."""

import random
from collections import OrderedDict

import pytest

from replica.adapters.eviction import GreedyDualPolicy


def mixed_trace(num_requests: int, one_off_share: float, seed: int) -> list[str]:
    """Sixteen regulars by Zipf's law, and strangers that come once."""
    random_ = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(16)]
    return [
        f"stranger-{i}" if random_.random() < one_off_share else f"regular-{random_.choices(range(16), weights)[0]}"
        for i in range(num_requests)
    ]


def num_loads_with_lru(trace: list[str], num_slots: int) -> int:
    resident: OrderedDict[str, None] = OrderedDict()
    loads = 0
    for digest in trace:
        if digest not in resident:
            loads += 1
            if len(resident) == num_slots:
                resident.popitem(last=False)
        resident[digest] = None
        resident.move_to_end(digest)
    return loads


def num_loads(trace: list[str], num_slots: int, policy: GreedyDualPolicy) -> int:
    resident: set[str] = set()
    loads = 0
    for digest in trace:
        policy.use(digest)
        if digest in resident:
            continue
        loads += 1
        if len(resident) == num_slots:
            victim = policy.victim(resident)
            policy.evicted(victim)
            resident.remove(victim)
        resident.add(digest)
        policy.loaded(digest, num_bytes=1, seconds=1.0)
    return loads


@pytest.mark.parametrize("one_off_share", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("num_slots", [4, 8])
def test_fewer_loads_than_lru_on_regulars_and_strangers(one_off_share: float, num_slots: int) -> None:
    trace = mixed_trace(3000, one_off_share, seed=7)
    ours = num_loads(trace, num_slots, GreedyDualPolicy(16 * num_slots, 64 * num_slots))
    assert ours < 0.9 * num_loads_with_lru(trace, num_slots)


def test_new_regulars_replace_the_old_ones() -> None:
    policy = GreedyDualPolicy(64, 256)
    num_loads(["old-1", "old-2", "old-3", "old-4"] * 500, 4, policy)
    assert num_loads(["new-1", "new-2", "new-3", "new-4"] * 100, 4, policy) < 40


def test_dearer_adapter_stays() -> None:
    policy = GreedyDualPolicy(8, 64)
    for digest, seconds in (("cheap", 1.0), ("dear", 3.0), ("usual", 1.0)):
        policy.use(digest)
        policy.loaded(digest, num_bytes=1000, seconds=seconds)
    assert policy.victim(["dear", "cheap"]) == "cheap"
    assert policy.victim(["dear", "usual"]) == "usual"


def test_larger_adapter_leaves_first_when_it_is_as_quick_to_reload() -> None:
    policy = GreedyDualPolicy(8, 64)
    for digest, num_bytes in (("small", 1000), ("large", 3000)):
        policy.use(digest)
        policy.loaded(digest, num_bytes=num_bytes, seconds=1.0)
    assert policy.victim(["small", "large"]) == "large"


def test_unknown_and_forgotten_adapters_leave_first() -> None:
    policy = GreedyDualPolicy(8, 64)
    policy.use("known")
    policy.use("gone")
    policy.forget("gone")
    assert policy.victim(["known", "gone"]) == "gone"
