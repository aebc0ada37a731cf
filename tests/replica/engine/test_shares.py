"""Tenants over their share give way: rows by a pause, KV blocks by preemption, prompt chunks by division."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.sequence import State
from replica.shares import divide
from tests.fake_device import FakeLink
from tests.replica.engine.harness import Bench, make_request


@given(
    st.integers(0, 500),
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(1, 300), st.sampled_from([0.5, 1.0, 3.0]))),
)
def test_a_budget_is_divided_by_weight_and_nothing_is_wasted(budget: int, asked: dict[str, tuple[int, float]]) -> None:
    wants, weights = ({name: pair[place] for name, pair in asked.items()} for place in (0, 1))
    parts = divide(budget, wants, weights)
    assert sum(parts.values()) == min(budget, sum(wants.values()))
    for name, want in wants.items():
        assert parts[name] <= want
        if parts[name] < want:
            for other in parts:
                assert (parts[other] - 1) / weights[other] <= (parts[name] + 1) / weights[name] + 1e-9


def test_a_large_prompt_leaves_another_tenant_its_part_of_the_step() -> None:
    bench = Bench(num_blocks=200, max_batch_tokens=16)
    bench.submit("large", [1] * 200, 2, tenant="noisy")
    bench.step()
    bench.submit("small", [2] * 8, 2, tenant="quiet")
    bench.step()
    assert len(bench.outbox.tokens["small", 0]) == 1
    bench.finish()


def fill_rows(bench: Bench, num_requests: int = 20) -> None:
    for index in range(num_requests):
        bench.submit(f"noisy{index}", [index] * 3, 30, tenant="noisy")
    for _ in range(3):
        bench.step()


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_full_batch_makes_room_at_once_and_computes_nothing_twice(is_asynchronous: bool) -> None:
    bench = Bench(link=FakeLink() if is_asynchronous else None, num_blocks=400, max_num_seqs=4)
    fill_rows(bench)
    bench.submit("quiet", [9, 9], 3, tenant="quiet")
    for _ in range(2):
        bench.step()
    assert bench.outbox.tokens["quiet", 0]
    while bench.num_live:
        bench.step()
    computed = sum(batch.token_ids.shape[0] for batch in bench.model.batches)
    assert computed == 20 * (3 + 29) + 2 + 2
    assert bench.engine.counts.num_pauses > 0
    assert bench.engine.counts.num_preemptions == 0
    for index in range(20):
        assert bench.outbox.tokens[f"noisy{index}", 0] == bench.greedy([index] * 3, 30)


def test_arrival_order_pauses_nobody() -> None:
    bench = Bench(num_blocks=400, max_num_seqs=4, policy="fcfs")
    fill_rows(bench)
    bench.submit("quiet", [9, 9], 3, tenant="quiet")
    bench.step()
    assert not bench.outbox.tokens["quiet", 0]
    bench.finish()
    assert bench.engine.counts.num_pauses == 0


def test_a_tenant_within_its_share_of_blocks_takes_them_from_one_that_is_over() -> None:
    bench = Bench(num_blocks=40, max_num_seqs=8)
    for index in range(6):
        bench.submit(f"noisy{index}", [index] * 20, 40, tenant="noisy")
    for _ in range(20):
        bench.step()
    bench.submit("quiet", [9] * 20, 4, tenant="quiet")
    for _ in range(8):
        bench.step()
    assert len(bench.outbox.tokens["quiet", 0]) == 4
    bench.finish()
    assert bench.outbox.tokens["quiet", 0] == bench.greedy([9] * 20, 4)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_one_within_its_share_never_loses_blocks_to_another_tenant(seed: int, is_asynchronous: bool) -> None:
    rng = random.Random(seed)
    link = FakeLink() if is_asynchronous else None
    bench = Bench(link=link, num_blocks=rng.randint(24, 40), max_num_seqs=8, prefix_cache=rng.random() < 0.5)
    scheduler = bench.engine._scheduler
    preempt = scheduler._preempt

    def watched(sequence: object) -> None:
        held = Counter(each.group.tenant for each in scheduler._holders() for _ in each.blocks)
        tenants = {each.group.tenant for each in (*scheduler._running, *scheduler._ready)}
        victim = sequence.group.tenant  # type: ignore[attr-defined]
        if scheduler._running and not scheduler._stalled:
            others_over = held[victim] * len(tenants) >= bench.engine._blocks.num_blocks
            assert others_over or victim == growing[-1], f"{victim} holds {held} and loses to {growing[-1:]}"
        preempt(sequence)  # type: ignore[arg-type]

    growing: list[str] = [""]
    grow = scheduler._grow
    scheduler._grow = lambda sequence: (growing.append(sequence.group.tenant), grow(sequence))[1]  # type: ignore[method-assign, func-returns-value]
    scheduler._preempt = watched  # type: ignore[method-assign]
    for index in range(14):
        tenant = rng.choice(["huge", "huge", "small"])
        num_prompt = rng.randint(20, 50) if tenant == "huge" else rng.randint(1, 6)
        bench.submit(f"r{index}", [index] * num_prompt, rng.randint(1, 30), tenant=tenant)
        for _ in range(rng.choice([0, 1, 5])):
            bench.step()
    while bench.num_live:
        bench.step()
    bench.finish()
    assert all(reason == "length" for reason in bench.outbox.reasons.values())


def test_a_request_larger_than_its_share_gets_to_its_end_beside_a_stream_of_others() -> None:
    bench = Bench(num_blocks=30, max_num_seqs=6)
    bench.submit("huge", [1] * 80, 30, tenant="huge")
    for index in range(400):
        if bench.outbox.reasons.get(("huge", 0)):
            break
        bench.submit(f"s{index}", [index % 40] * 8, 8, tenant="small")
        bench.step()
    assert bench.outbox.tokens["huge", 0] == bench.greedy([1] * 80, 30)
    bench.finish()


def abandon(num_requests: int, seed: int = 0) -> None:
    """Half of the requests go away at random points; then nothing is owed, held or pinned."""
    rng = random.Random(seed)
    bench = Bench(num_blocks=40, num_slots=3, max_num_seqs=8, max_waiting=num_requests, prefix_cache=True)
    leaving: dict[str, int] = {}
    for index in range(num_requests):
        name = f"r{index}"
        tenant = f"t{rng.randrange(12)}"
        fields = {"tenant": tenant, "adapter": rng.choice([None, "a", "b", "c", "d"]), "n": rng.choice([1, 1, 1, 2])}
        bench.submit(name, [index % 40] * rng.randint(1, 24), rng.randint(1, 8), **fields)
        if rng.random() < 0.5:
            leaving[name] = index + rng.randrange(30)
        bench.step()
        for gone in [each for each, at in leaving.items() if at <= index]:
            bench.engine.abort(gone)
            del leaving[gone]
        if index % 500 == 0:
            bench.check()
        bench.model.batches.clear()
    for name in leaving:
        bench.engine.abort(name)
    bench.finish()
    queue, admission, blocks = bench.engine._admission._queue, bench.engine._admission, bench.engine._blocks
    assert not len(queue)
    assert not queue._tenants  # type: ignore[attr-defined]
    assert not queue._away  # type: ignore[attr-defined]
    assert not admission.num_charged
    assert not admission._resident
    assert blocks.num_free == blocks.num_blocks
    assert all(queue.deficit(f"t{index}") == 0 for index in range(12))  # type: ignore[attr-defined]
    assert not bench.engine._scheduler._running
    assert not [each for each in bench.engine._scheduler._ready if each.state is State.READY]


def test_requests_that_are_abandoned_leave_nothing() -> None:
    abandon(300)


@pytest.mark.soak
def test_ten_thousand_requests_of_which_half_are_abandoned_leave_nothing() -> None:
    abandon(10_000)


@pytest.mark.parametrize(("spread", "most"), [(2, 1.15), (1, 2.5)])
def test_a_tenant_at_two_replicas_counts_once_when_its_requests_say_so(spread: int, most: float) -> None:
    served = Counter[str]()
    for name in ("left", "right"):
        bench = Bench(num_blocks=400, max_num_seqs=6, max_waiting=2000)
        for index in range(60):
            bench.submit(f"{name}{index}", [1] * 6, 6, tenant=name)
            bench.engine.submit(
                replace(make_request(f"b{index}", [2] * 6, 6, tenant="both"), spread=spread), bench.outbox
            )
        for _ in range(60):
            bench.step()
        for request_id, _ in bench.outbox.reasons:
            served["both" if request_id.startswith("b") else name] += 1
    assert (most - 0.6) < served["both"] / ((served["left"] + served["right"]) / 2) <= most


def test_a_tenant_with_a_long_line_gets_rows_of_one_whose_requests_never_end() -> None:
    bench = Bench(num_blocks=600, max_num_seqs=6, max_waiting=200, quantum_tokens=16)
    for index in range(6):
        bench.submit(f"endless{index}", [index] * 4, 200, tenant="endless")
    bench.step()
    for index in range(30):
        bench.submit(f"b{index}", [9] * 6, 10, tenant="many")
    for _ in range(60):
        bench.step()
    assert sum(name.startswith("b") for name, _ in bench.outbox.reasons) >= 10
    bench.finish()


def service_of(bench: Bench, name: str, num_requests: int, max_tokens: int, **fields: object) -> None:
    for index in range(num_requests):
        bench.submit(f"{name}{index}", [index % 40] * 4, max_tokens, tenant=name, **fields)


def test_one_that_reserves_too_much_gets_as_much_as_one_that_knows_its_lengths() -> None:
    """The same real lengths; one tenant's requests are charged ten times as much beforehand."""
    bench = Bench(num_blocks=400, max_num_seqs=6, max_waiting=500)
    service_of(bench, "exact", 150, 8, expected_tokens=8)
    service_of(bench, "careful", 150, 8, expected_tokens=80)
    for _ in range(200):
        bench.step()
    ended = Counter(name[0] for name, _ in bench.outbox.reasons)
    assert min(ended.values()) > 30
    assert abs(ended["e"] - ended["c"]) <= 6
    bench.finish()
