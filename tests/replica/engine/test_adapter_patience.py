"""Preferring adapters of the batch: how long it may delay whom, that shares stay, and that distinct adapters fall."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.admission import Admission
from replica.arrival_queue import ArrivalQueue, Preference, WaitingQueue
from replica.fair_queue import FairQueue
from replica.sequence import RequestGroup
from tests.fakes import CollectingOutbox, FakeAdapters
from tests.replica.engine.harness import make_request

QUANTUM = 100
MAX_COST = 300


@dataclass(frozen=True)
class Item:
    key: int
    tenant: str
    cost: int
    is_liked: bool
    weight: float = 1.0


def anything(item: Item) -> bool:
    return True


def liked(item: Item) -> bool:
    return item.is_liked


def prefer(patience_s: float, now_s: float) -> Preference[Item]:
    return Preference(liked, patience_s, now_s)


arrivals = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(1, MAX_COST), st.booleans(), st.sampled_from([0.0, 0.3, 1.0, 4.0])),
    min_size=1,
    max_size=60,
)
QUEUES: list[Callable[[], WaitingQueue[Item]]] = [ArrivalQueue, lambda: FairQueue(QUANTUM)]


@pytest.mark.parametrize("make_queue", QUEUES)
@settings(max_examples=150)
@given(arrivals=arrivals, patience_s=st.sampled_from([0.5, 2.0, 10.0]), num_waiting=st.integers(1, 20))
def test_nobody_is_passed_once_its_patience_is_over(
    make_queue: Callable[[], WaitingQueue[Item]],
    arrivals: list[tuple[str, int, bool, float]],
    patience_s: float,
    num_waiting: int,
) -> None:
    """Whoever goes ahead of an earlier request of its tenant does so within the patience of that one."""
    queue, now_s, first_passed_s = make_queue(), 0.0, dict[int, float]()
    waiting: dict[str, list[Item]] = {tenant: [] for tenant in "abcd"}
    taken = list[Item]()
    for key, (tenant, cost, is_liked, gap_s) in enumerate(arrivals):
        item = Item(key, tenant, cost, is_liked)
        queue.push(item)
        waiting[tenant].append(item)
        now_s += gap_s
        while len(queue) >= num_waiting or (key == len(arrivals) - 1 and len(queue)):
            next_one = queue.take(anything, prefer(patience_s, now_s))
            assert next_one is not None
            taken.append(next_one)
            ahead_of = waiting[next_one.tenant][: waiting[next_one.tenant].index(next_one)]
            waiting[next_one.tenant].remove(next_one)
            for passed in ahead_of:
                assert next_one.is_liked
                assert not passed.is_liked
                assert now_s - first_passed_s.setdefault(passed.key, now_s) < patience_s
    assert sorted(item.key for item in taken) == list(range(len(arrivals)))


@settings(max_examples=150)
@given(st.lists(st.sampled_from([0.0, 0.4, 1.1]), min_size=30, max_size=60), st.integers(1, 4))
def test_a_turn_is_passed_by_other_tenants_for_its_patience_at_most(gaps_s: list[float], num_others: int) -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    for key in range(40):
        queue.push(Item(-2 - key, f"other{key % num_others}", 10, is_liked=True))
    for _ in range(13):
        queue.take(anything)
    victim = Item(-1, "victim", 50, is_liked=False)
    queue.push(victim)
    now_s, key = 0.0, 0
    for gap_s in gaps_s:
        for other in range(num_others):
            queue.push(Item(key, f"other{other}", 10, is_liked=True))
            key += 1
        item = queue.take(anything, prefer(2.0, now_s))
        if item is victim:
            return
        assert now_s < 2.0
        now_s += gap_s
    assert now_s < 2.0


costs = st.lists(st.integers(1, MAX_COST), min_size=60, max_size=60)


@given(costs, costs, st.sampled_from([0.5, 1.0, 2.0]), st.floats(0.1, 1e9))
def test_shares_stay_however_long_the_patience(
    first: list[int], second: list[int], weight: float, patience_s: float
) -> None:
    """One tenant's requests are all liked, the other's never; both are backlogged."""
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    for key, cost in enumerate(first):
        queue.push(Item(key, "a", cost, is_liked=True))
    for key, cost in enumerate(second):
        queue.push(Item(1000 + key, "b", cost, is_liked=False, weight=weight))
    served: Counter[str] = Counter()
    left = {"a": len(first), "b": len(second)}
    while all(left.values()):
        item = queue.take(anything, prefer(patience_s, 0.0))
        assert item is not None
        served[item.tenant] += item.cost
        left[item.tenant] -= 1
        assert abs(served["a"] - served["b"] / weight) <= 3 * QUANTUM + MAX_COST * (1 + 1 / weight)


def test_a_tenant_that_comes_back_each_time_goes_ahead_once_a_turn() -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    queue.push(Item(0, "a", 50, is_liked=False))
    queue.push(Item(1, "b", 90, is_liked=True))
    assert queue.take(anything, prefer(10.0, 0.0)) == Item(1, "b", 90, is_liked=True)
    queue.push(Item(2, "b", 90, is_liked=True))
    assert queue.take(anything, prefer(10.0, 1.0)) == Item(0, "a", 50, is_liked=False)
    assert queue.take(anything, prefer(10.0, 2.0)) == Item(2, "b", 90, is_liked=True)


def test_a_passed_tenant_keeps_its_deficit_and_earns_none() -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    queue.push(Item(0, "a", 150, is_liked=False))
    for key in range(1, 21):
        queue.push(Item(key, "b", 20, is_liked=True))
    deficits = []
    while (item := queue.take(anything, prefer(10.0, 0.0))) is not None and item.tenant == "b":
        deficits.append(queue.deficit("a"))
    assert item == Item(0, "a", 150, is_liked=False)
    assert deficits == [200.0] * 10, "what both earned when it was the turn of the other, and no more"


@pytest.mark.parametrize("make_queue", QUEUES)
def test_without_preference_the_order_is_as_ever(make_queue: Callable[[], WaitingQueue[Item]]) -> None:
    with_none, never = make_queue(), make_queue()
    for key in range(30):
        item = Item(key, "abc"[key % 3], 40 + key, is_liked=key % 2 == 0)
        with_none.push(item)
        never.push(item)
    order = [with_none.take(anything) for _ in range(30)]
    assert order == [never.take(anything, prefer(0.0, float(turn))) for turn in range(30)]


def distinct_adapters(policy: str, patience_s: float) -> float:
    """Mean distinct adapters over the batches of 8 that a closed loop with 32 adapters admits."""
    queue: WaitingQueue[RequestGroup] = FairQueue(64) if policy == "drr" else ArrivalQueue()
    now_s = 0.0
    admission = Admission(
        queue, FakeAdapters(32, load_polls=0), num_slots=32, max_loading=8, patience_s=patience_s, clock=lambda: now_s
    )
    for index in range(320):
        adapter = f"adapter{index * 7 % 32}"
        request = make_request(f"r{index}", [1] * 8, 8, tenant=f"t{index % 4}", adapter=adapter)
        admission.push(RequestGroup(request, CollectingOutbox()))
    running, sizes = list[RequestGroup](), list[int]()
    while admission.num_waiting or running:
        admission._adapters.poll()  # type: ignore[attr-defined]
        running += admission.loaded()
        while len(running) + admission.num_loading < 8 and (group := admission.next()) is not None:
            running.append(group)
        sizes.append(len({group.adapter for group in running}))
        if running:
            admission.release(running.pop(0))
        now_s += 1.0
        admission.check_integrity(running)
    return sum(sizes) / len(sizes)


@pytest.mark.parametrize("policy", ["drr", "fcfs"])
def test_distinct_adapters_in_the_batch_fall_with_patience(policy: str) -> None:
    means = [distinct_adapters(policy, patience_s) for patience_s in (0.0, 60.0, 400.0)]
    assert means[1] < means[0] - 0.5, means
    assert means[2] < means[1], means
