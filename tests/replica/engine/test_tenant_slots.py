"""What a tenant's adapters cost it, and how many of them a replica works at for it at a time."""

import random
from collections import Counter

import pytest

from replica.errors import InvalidRequest
from replica.limits import RequestLimits
from tests.fakes import FakeAdapters
from tests.replica.engine.harness import Bench, make_request


def adapters_at_work(bench: Bench) -> Counter[str]:
    groups = bench.engine._admission._charged.values()
    return Counter(tenant for tenant, _ in {(group.tenant, group.adapter) for group in groups if group.adapter})


@pytest.mark.parametrize("policy", ["drr", "fcfs"])
def test_a_tenant_holds_no_more_slots_than_its_limit_and_others_take_the_rest(policy: str) -> None:
    bench = Bench(num_slots=4, num_blocks=200, policy=policy)
    for index in range(12):
        bench.submit(f"m{index}", [index] * 3, 8, tenant="many", adapter=f"m{index % 6}", max_slots=2)
    for index in range(4):
        bench.submit(f"o{index}", [index] * 3, 8, tenant="other", adapter=f"o{index % 2}")
    seen = Counter[str]()
    while bench.num_live:
        bench.step()
        seen |= adapters_at_work(bench)
    assert seen == {"many": 2, "other": 2}
    bench.finish()
    assert len(bench.engine._admission._tenant_slots) == 0
    assert all(reason == "length" for reason in bench.outbox.reasons.values())


def test_one_over_its_slots_is_passed_by_its_tenants_other_requests() -> None:
    bench = Bench(num_slots=3, num_blocks=200)
    for name, adapter in (("first", "a"), ("waits", "b"), ("same", "a"), ("base", None)):
        bench.submit(name, [1] * 3, 8, adapter=adapter, max_slots=1)
    for _ in range(4):
        bench.step()
    assert bench.outbox.tokens["same", 0]
    assert bench.outbox.tokens["base", 0]
    assert not bench.outbox.tokens["waits", 0]
    bench.finish()
    assert bench.outbox.tokens["waits", 0] == bench.greedy([1] * 3, 8, "b")


def test_slots_are_given_back_when_requests_are_abandoned_or_their_adapter_is_broken() -> None:
    rng = random.Random(0)
    bench = Bench(adapters=FakeAdapters(2, broken=["x2"], unknown=["x3"]), num_blocks=100, max_waiting=300)
    for index in range(200):
        adapter = f"x{rng.randrange(5)}"
        bench.submit(f"r{index}", [1, 2], 4, tenant=f"t{index % 3}", adapter=adapter, max_slots=rng.choice([1, 2]))
        bench.step()
        if rng.random() < 0.4:
            bench.engine.abort(f"r{rng.randrange(index + 1)}")
    bench.finish()
    assert len(bench.engine._admission._tenant_slots) == 0


def served_while_both_wait(heavy_bytes: int) -> Counter[str]:
    """Two tenants whose every request brings another adapter into the slots, one of them heavy ones."""
    adapters = FakeAdapters(2)
    adapters.sizes = {
        f"{name}{index}": size for name, size in (("heavy", heavy_bytes), ("light", 0)) for index in range(80)
    }
    bench = Bench(adapters=adapters, num_blocks=200, max_waiting=200)
    for index in range(80):
        for name in ("heavy", "light"):
            bench.submit(f"{name}-{index}", [1] * 6, 6, tenant=name, adapter=f"{name}{index}")
    while len(bench.outbox.reasons) < 60:
        bench.step()
    return Counter(name.partition("-")[0] for name, _ in bench.outbox.reasons)


def test_a_tenant_pays_for_the_bytes_that_its_adapters_take() -> None:
    even = served_while_both_wait(0)
    assert abs(even["heavy"] - even["light"]) <= 4
    token_bytes = Bench().model.kv_bytes_per_block(1)
    uneven = served_while_both_wait(24 * token_bytes)
    assert 2.2 <= uneven["light"] / uneven["heavy"] <= 4.0, "12 tokens against 12 and 24 more"


def test_an_adapter_that_does_not_come_is_not_paid_for() -> None:
    adapters = FakeAdapters(2, broken=["bad"])
    adapters.sizes = {"bad": 10**6}
    bench = Bench(adapters=adapters, num_blocks=200)
    bench.submit("first", [1] * 4, 4, tenant="t", adapter="bad")
    bench.step()
    for index in range(40):
        bench.submit(f"other{index}", [1] * 4, 4, tenant="other")
        bench.submit(f"t{index}", [1] * 4, 4, tenant="t")
    for _ in range(24):
        bench.step()
    ended = Counter(name[0] for name, _ in bench.outbox.reasons)
    assert abs(ended["t"] - 1 - ended["o"]) <= 6
    bench.finish()


def test_a_limit_of_no_slots_is_refused() -> None:
    limits = RequestLimits(context_length=100, block_size=4, num_blocks=100, vocab_size=50)
    with pytest.raises(InvalidRequest, match="max_slots"):
        limits.check(make_request("r", [1], 1, max_slots=0))
