"""Deficit round robin: shares, refunds, and who waits how long."""

import random
from collections import Counter
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.arrival_queue import ArrivalQueue
from replica.fair_queue import FairQueue

QUANTUM = 100


@dataclass(frozen=True)
class Item:
    key: int
    tenant: str
    cost: int
    weight: float = 1.0


def anything(item: Item) -> bool:
    return True


def fill(queue: FairQueue[Item], tenant: str, costs: list[int], weight: float = 1.0) -> list[Item]:
    items = [Item(hash((tenant, index)), tenant, cost, weight) for index, cost in enumerate(costs)]
    for item in items:
        queue.push(item)
    return items


tenants = st.dictionaries(st.sampled_from("abcde"), st.lists(st.integers(1, 900), min_size=1, max_size=12), min_size=1)


@given(tenants)
def test_everything_comes_out_once_and_in_arrival_order_within_a_tenant(costs: dict[str, list[int]]) -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    pushed = {tenant: fill(queue, tenant, each) for tenant, each in costs.items()}
    taken = [queue.take(anything) for _ in range(sum(map(len, costs.values())))]
    assert queue.take(anything) is None
    assert len(queue) == 0
    for tenant, items in pushed.items():
        assert [item for item in taken if item is not None and item.tenant == tenant] == items


@given(
    st.lists(st.integers(1, 700), min_size=40, max_size=40),
    st.lists(st.integers(1, 700), min_size=40, max_size=40),
    st.sampled_from([0.5, 1.0, 2.0, 3.0]),
)
def test_backlogged_tenants_get_their_weights_within_a_quantum_and_a_request(
    first: list[int], second: list[int], weight: float
) -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    fill(queue, "a", first)
    fill(queue, "b", second, weight)
    served: Counter[str] = Counter()
    left = {"a": len(first), "b": len(second)}
    while all(left.values()):
        item = queue.take(anything)
        assert item is not None
        served[item.tenant] += item.cost
        left[item.tenant] -= 1
        assert abs(served["a"] - served["b"] / weight) <= 2 * QUANTUM + 700 * (1 + 1 / weight)


@given(tenants)
def test_no_backlogged_tenant_waits_longer_than_the_others_rounds(costs: dict[str, list[int]]) -> None:
    """Between two requests of a tenant another is served no more than what these and its own last one cost."""
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    waiting = {tenant: fill(queue, tenant, each) for tenant, each in costs.items()}
    passed: dict[str, Counter[str]] = {tenant: Counter() for tenant in costs}
    while (item := queue.take(anything)) is not None:
        waiting[item.tenant].pop(0)
        passed[item.tenant].clear()
        for tenant in costs:
            if tenant != item.tenant and waiting[tenant]:
                passed[tenant][item.tenant] += item.cost
                assert passed[tenant][item.tenant] <= QUANTUM + 2 * 900


@given(tenants)
def test_deficits_stay_below_what_the_costliest_request_costs(costs: dict[str, list[int]]) -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    waiting = {tenant: fill(queue, tenant, each) for tenant, each in costs.items()}
    while (item := queue.take(anything)) is not None:
        waiting[item.tenant].pop(0)
        for tenant, items in waiting.items():
            most = max(cost for each in costs.values() for cost in each)
            assert 0 <= queue.deficit(tenant) <= (2 * QUANTUM + most if items else 0)


def test_a_weight_of_two_gets_twice_the_tokens() -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    fill(queue, "a", [10] * 300)
    fill(queue, "b", [10] * 300, weight=2.0)
    served = Counter(item.tenant for item in (queue.take(anything) for _ in range(300)) if item)
    assert served["b"] / served["a"] == pytest.approx(2.0, rel=0.1)


def test_a_costly_request_is_reached_in_one_call() -> None:
    queue: FairQueue[Item] = FairQueue(1)
    fill(queue, "a", [10**9])
    fill(queue, "b", [10**9 + 1])
    first = queue.take(anything)
    assert first is not None
    assert {first.tenant, *(each.tenant for each in [queue.take(anything)] if each)} == {"a", "b"}


def test_an_idle_tenant_saves_nothing() -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    fill(queue, "a", [10])
    queue.take(anything)
    assert queue.deficit("a") == 0
    queue.refund("a", 50)
    assert queue.deficit("a") == 0


def test_a_refund_gives_back_what_was_not_used_and_takes_what_was_used_beyond() -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    fill(queue, "a", [500, 500])
    queue.take(anything)
    before = queue.deficit("a")
    queue.refund("a", 430)
    assert queue.deficit("a") == before + 430
    queue.refund("a", -30)
    assert queue.deficit("a") == before + 400
    queue.refund("unknown", 10**6)
    assert queue.deficits() == {"a": before + 400}


def test_output_that_is_still_to_come_does_not_count_as_served() -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    outstanding = Counter[str]()
    queue.follow(outstanding.__getitem__)
    fill(queue, "a", [500, 60, 60])
    fill(queue, "b", [100, 60, 60])
    assert [queue.take(anything).tenant for _ in range(2)] == ["a", "b"]  # type: ignore[union-attr]
    outstanding["a"] = 450
    assert queue.take(anything).tenant == "a"  # type: ignore[union-attr]
    outstanding["a"] = 300
    assert queue.take(anything).tenant == "b"  # type: ignore[union-attr]


def serve(queue: FairQueue[Item], num_requests: int) -> Counter[str]:
    served = Counter[str]()
    for _ in range(num_requests):
        item = queue.take(anything)
        assert item is not None
        served[item.tenant] += item.cost
    return served


def test_one_that_comes_back_has_a_quantum_ahead_and_none_of_what_it_missed() -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    fill(queue, "b", [10])
    fill(queue, "a", [10] * 500)
    serve(queue, 201)
    fill(queue, "b", [10] * 100)
    served = serve(queue, 60)
    assert served["b"] - served["a"] == pytest.approx(QUANTUM, abs=20)


def test_a_quantum_ahead_lapses_for_whoever_has_to_wait() -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    fill(queue, "a", [10] * 500)
    serve(queue, 100)
    fill(queue, "b", [10] * 100)
    assert queue.take_ahead(anything, lambda item: False) is None
    served = serve(queue, 60)
    assert abs(served["b"] - served["a"]) <= 20


def test_one_that_was_served_more_does_not_get_rid_of_it_by_leaving_for_a_moment() -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    fill(queue, "a", [900])
    fill(queue, "b", [10] * 200)
    serve(queue, 30)
    fill(queue, "a", [900])
    assert "a" not in serve(queue, 40)


@given(tenants, st.lists(st.sampled_from("abcde"), max_size=30))
def test_nothing_is_remembered_when_nobody_waits(costs: dict[str, list[int]], comings: list[str]) -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    for name, each in costs.items():
        fill(queue, name, each)
    for key, name in enumerate(comings):
        queue.push(Item(-key, name, 50))
        assert queue.take(anything) is not None
    while queue.take(anything) is not None:
        pass
    assert not queue._away
    assert not queue.deficits()


def test_only_a_short_line_or_one_far_behind_claims_a_place() -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    outstanding = Counter[str]()
    queue.follow(outstanding.__getitem__)
    outstanding["a"] = 500
    fill(queue, "a", [10] * 500)
    serve(queue, 100)
    fill(queue, "short", [40, 40])
    assert queue.take_ahead(anything, anything).tenant == "short"  # type: ignore[union-attr]
    assert queue.take_ahead(anything, anything).tenant == "short"  # type: ignore[union-attr]
    fill(queue, "long", [40] * 40)
    long_may = partial(queue.take_ahead, anything, lambda item: item.tenant == "long")
    assert long_may() is None
    outstanding["a"] -= int(1.9 * QUANTUM)
    assert long_may() is None
    outstanding["a"] -= int(0.2 * QUANTUM)
    assert long_may().tenant == "long"  # type: ignore[union-attr]


def test_a_long_line_alone_takes_no_place_of_one_that_was_served_no_more() -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    outstanding = Counter[str]()
    queue.follow(outstanding.__getitem__)
    fill(queue, "b", [900])
    fill(queue, "a", [10] * 500)
    served = serve(queue, 12)
    assert served == {"b": 900, "a": 110}
    outstanding["b"] = 900 - 120  # it works on, with nothing waiting
    assert queue.take_ahead(anything, anything) is None
    outstanding["b"] -= int(1.8 * QUANTUM)
    assert queue.take_ahead(anything, anything) is None
    outstanding["b"] -= int(0.4 * QUANTUM)
    assert queue.take_ahead(anything, anything).tenant == "a"  # type: ignore[union-attr]


def test_a_tenant_that_may_not_go_keeps_its_deficit_and_earns_none() -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    fill(queue, "a", [150, 250])
    fill(queue, "b", [90] * 20)
    while (item := queue.take(anything)) is not None and item.tenant != "a":
        pass
    kept = queue.deficit("a")
    for _ in range(10):
        item = queue.take(lambda item: item.tenant == "b")
        assert item is not None
        assert item.tenant == "b"
    assert queue.deficit("a") == kept


def test_within_a_tenant_one_that_may_not_go_is_passed() -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    items = fill(queue, "a", [10, 10, 10])
    assert queue.take(lambda item: item != items[0]) == items[1]
    assert queue.take(anything) == items[0]


def test_nothing_comes_when_nothing_may_go() -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    fill(queue, "a", [10])
    assert queue.take(lambda item: False) is None
    assert len(queue) == 1


@settings(max_examples=50)
@given(tenants, st.randoms(use_true_random=False))
def test_removed_requests_never_come_and_are_not_charged(costs: dict[str, list[int]], rng: random.Random) -> None:
    queue: FairQueue[Item] = FairQueue(QUANTUM)
    items = [item for tenant, each in costs.items() for item in fill(queue, tenant, each)]
    removed = {item.key for item in items if rng.random() < 0.5}
    assert all(queue.remove(item) for item in items if item.key in removed)
    assert not any(queue.remove(item) for item in items if item.key in removed)
    left = {item.key for item in queue}
    taken = {item.key for item in iter(lambda: queue.take(anything), None) if item}
    assert left == taken == {item.key for item in items} - removed


def test_arrival_order_ignores_tenants() -> None:
    queue: ArrivalQueue[Item] = ArrivalQueue()
    items = [Item(index, "ab"[index % 2], 10**6) for index in range(6)]
    for item in items:
        queue.push(item)
    assert queue.remove(items[2])
    assert not queue.remove(items[2])
    queue.refund("a", 10)
    assert [queue.take(anything) for _ in range(5)] == [*items[:2], *items[3:]]
    assert queue.take(anything) is None
