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


def paced(bench: Bench) -> Bench:
    """A second of loading costs a token."""
    bench.engine._admission._tokens_per_s = lambda: 1.0
    return bench


def served_while_both_wait(heavy_load_s: float) -> Counter[str]:
    """Two tenants whose every request brings another adapter into the slots, one of them heavy ones."""
    adapters = FakeAdapters(2)
    adapters.load_times_s = {f"heavy{index}": heavy_load_s for index in range(80)}
    bench = paced(Bench(adapters=adapters, num_blocks=200, max_waiting=200))
    for index in range(80):
        for name in ("heavy", "light"):
            bench.submit(f"{name}-{index}", [1] * 6, 6, tenant=name, adapter=f"{name}{index}")
    while len(bench.outbox.reasons) < 60:
        bench.step()
    return Counter(name.partition("-")[0] for name, _ in bench.outbox.reasons)


def test_a_tenant_pays_for_the_time_that_its_adapters_take_to_load() -> None:
    even = served_while_both_wait(0)
    assert abs(even["heavy"] - even["light"]) <= 4
    uneven = served_while_both_wait(24)
    assert 2.2 <= uneven["light"] / uneven["heavy"] <= 4.0, "12 tokens against 12 and 24 more"


def test_the_price_of_a_load_is_what_the_replica_computes_meanwhile() -> None:
    bench = Bench()
    assert bench.engine._admission._tokens_per_s() == 0
    bench.submit("r", [1] * 20, 10)
    bench.finish()
    computed = 20 + 10 - 1  # the last token is sampled and never computed
    assert bench.engine._admission._tokens_per_s() == pytest.approx(computed / bench.engine.busy_s)


def served_beside_another(
    adapters: FakeAdapters, *, leaves: bool = False, joins: bool = False
) -> tuple[Counter[str], Bench]:
    """`other` keeps the rows busy while `t` asks for an adapter; then each tenant sends many small requests."""
    bench = paced(Bench(adapters=adapters, num_blocks=200, max_num_seqs=2, max_waiting=400, quantum_tokens=8))
    for index in range(120):
        bench.submit(f"other{index}", [1] * 4, 4, tenant="other")
    bench.step()
    bench.submit("first", [1] * 4, 4, tenant="t", adapter="big")
    while "first" not in bench.engine._admission._charged and not bench.outbox.reasons.get(("first", 0)):
        bench.step()
    if joins:
        bench.submit("joined", [1] * 4, 4, tenant="joiner", adapter="big")
        while "joined" not in bench.engine._admission._charged:
            bench.step()
    if leaves:
        bench.engine.abort("first")
        bench.step()
    adapters.is_held = False
    for index in range(80):
        for name in ("t", "joiner"):
            bench.submit(f"{name}{index}", [1] * 4, 4, tenant=name)
    before = Counter(tenant_of(name) for name, _ in bench.outbox.reasons)
    while len(bench.outbox.reasons) < 100:
        bench.step()
    return Counter(tenant_of(name) for name, _ in bench.outbox.reasons) - before, bench


def tenant_of(name: str) -> str:
    return "".join(char for char in name if not char.isdigit())


def held(load_s: float, **kinds: list[str]) -> FakeAdapters:
    adapters = FakeAdapters(2, **kinds)
    adapters.is_held, adapters.load_times_s = True, {"big": load_s}
    return adapters


def test_a_load_that_its_request_left_is_paid_by_who_began_it_and_not_by_who_joined() -> None:
    free, _ = served_beside_another(held(0), leaves=True, joins=True)
    assert abs(free["t"] - free["joiner"]) <= 3
    paid, bench = served_beside_another(held(80), leaves=True, joins=True)
    assert bench.outbox.reasons["first", 0] == "abort"
    assert bench.outbox.reasons["joined", 0] == "length"
    assert 7 <= paid["joiner"] - paid["t"] <= 13, "80 tokens are ten requests"
    assert abs(paid["joiner"] - paid["other"]) <= 4


def test_an_adapter_that_does_not_come_is_not_paid_for() -> None:
    served, bench = served_beside_another(held(10**6, broken=["big"]))
    assert bench.outbox.reasons["first", 0] == "error"
    assert abs(served["t"] - served["joiner"]) <= 4


def test_a_limit_of_no_slots_is_refused() -> None:
    limits = RequestLimits(context_length=100, block_size=4, num_blocks=100, vocab_size=50)
    with pytest.raises(InvalidRequest, match="max_slots"):
        limits.check(make_request("r", [1], 1, max_slots=0))
