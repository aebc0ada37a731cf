"""The step loop over fakes: what comes out, and that nothing is held afterwards."""

import random

import pytest

from replica.errors import AdapterUnavailable, EngineDead, InvalidRequest, Overloaded, ReplicaDraining, UnknownAdapter
from replica.scheduler import MAX_PASSED
from tests.fakes import EOS_ID, FakeAdapters
from tests.replica.engine.harness import Bench, make_request


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(40), k=length)


def test_greedy_text_equals_the_reference_for_one_request() -> None:
    bench = Bench()
    bench.submit("a", prompt_of(5), max_tokens=10)
    bench.finish()
    assert bench.outbox.tokens["a", 0] == bench.greedy(prompt_of(5), 10)
    assert bench.outbox.reasons["a", 0] == "length"


def test_mixed_adapters_give_each_its_own_text() -> None:
    bench = Bench(num_slots=3)
    adapters = [None, "x", "y", "x", None, "z"]
    for index, adapter in enumerate(adapters):
        bench.submit(f"r{index}", prompt_of(3 + index, index), adapter=adapter)
    bench.finish()
    for index, adapter in enumerate(adapters):
        assert bench.outbox.tokens[f"r{index}", 0] == bench.greedy(prompt_of(3 + index, index), 8, adapter)


def test_a_long_prompt_is_computed_in_chunks_within_the_budget() -> None:
    bench = Bench(max_batch_tokens=8)
    bench.submit("long", prompt_of(45), max_tokens=3)
    bench.submit("short", prompt_of(2, 1), max_tokens=12)
    bench.finish()
    assert bench.outbox.tokens["long", 0] == bench.greedy(prompt_of(45), 3)
    assert bench.outbox.tokens["short", 0] == bench.greedy(prompt_of(2, 1), 12)


def test_decoding_goes_on_while_another_prompt_is_computed() -> None:
    bench = Bench(max_batch_tokens=4)
    bench.submit("first", prompt_of(2), max_tokens=30)
    bench.step()
    bench.submit("long", prompt_of(30), max_tokens=1)
    for _ in range(5):
        before = len(bench.outbox.tokens["first", 0])
        bench.step()
        assert len(bench.outbox.tokens["first", 0]) == before + 1
    bench.finish()


def test_rows_of_one_slot_are_neighbours() -> None:
    bench = Bench(num_slots=2)
    for index in range(6):
        bench.submit(f"r{index}", prompt_of(2, index), adapter=["x", None, "y"][index % 3], max_tokens=4)
    seen = 0
    while bench.num_live:
        bench.step()
        for batch in bench.model.batches:
            keys = [segment.pairs[0].scale for segment in batch.segments]
            assert len(keys) == len(set(keys))
            seen = max(seen, len(keys))
        bench.model.batches.clear()
    assert seen == 2


def test_preempted_sequences_keep_their_text() -> None:
    bench = Bench(num_blocks=10, max_num_seqs=6)
    for index in range(6):
        bench.submit(f"r{index}", prompt_of(4, index), max_tokens=20, adapter="x" if index % 2 else None)
    bench.finish()
    assert bench.engine.counts.num_preemptions > 0
    for index in range(6):
        adapter = "x" if index % 2 else None
        assert bench.outbox.tokens[f"r{index}", 0] == bench.greedy(prompt_of(4, index), 20, adapter)


def test_the_request_admitted_first_is_never_preempted() -> None:
    bench = Bench(num_blocks=10, max_num_seqs=6)
    for index in range(6):
        bench.submit(f"r{index}", prompt_of(4, index), max_tokens=30)
    for step in range(1, 31):
        bench.step()
        assert len(bench.outbox.tokens["r0", 0]) == step
    assert bench.engine.counts.num_preemptions > 0
    bench.finish()


@pytest.mark.parametrize("num_blocks", [7, 8, 9])
@pytest.mark.parametrize("num_prompt", range(1, 12))
def test_choices_that_wait_for_blocks_do_not_keep_shared_ones_from_others(num_blocks: int, num_prompt: int) -> None:
    bench = Bench(num_blocks=num_blocks, max_num_seqs=2, max_batch_tokens=4)
    bench.submit("many", prompt_of(17), 1, n=4)
    bench.submit("other", prompt_of(num_prompt), 16)
    bench.finish()
    assert bench.outbox.tokens["other", 0] == bench.greedy(prompt_of(num_prompt), 16)


def test_a_request_that_needs_much_is_passed_only_a_few_times() -> None:
    bench = Bench(num_blocks=16, max_num_seqs=4)
    for index in range(4):
        bench.submit(f"early{index}", prompt_of(4, index), 6 + 3 * index)
    bench.step()
    bench.submit("big", prompt_of(60), 1)
    for index in range(60):
        bench.submit(f"late{index}", prompt_of(4, index), 9)
    bench.finish()
    order = [request_id for request_id, _ in bench.outbox.reasons]
    assert 4 < order.index("big") <= 4 + MAX_PASSED + bench.config.max_num_seqs


def test_a_preempted_sequence_is_passed_by_nobody() -> None:
    bench = Bench(num_blocks=12, max_num_seqs=3)
    bench.submit("old", prompt_of(4), 40)
    bench.submit("young", prompt_of(4, 1), 40)
    while not bench.engine.counts.num_preemptions:
        bench.step()
    for index in range(10):
        bench.submit(f"late{index}", prompt_of(2, index), 2)
    bench.finish()
    assert next(iter(bench.outbox.reasons)) == ("old", 0)


def test_preempted_sampling_draws_the_same_tokens() -> None:
    texts = []
    for num_blocks in (200, 10):
        bench = Bench(num_blocks=num_blocks, max_num_seqs=6)
        for index in range(6):
            bench.submit(f"r{index}", prompt_of(4, index), max_tokens=20, temperature=1.0, seed=index, top_p=0.9)
        bench.finish()
        texts.append((bench.engine.counts.num_preemptions > 0, dict(bench.outbox.tokens)))
    (calm, first), (pressed, second) = texts
    assert (calm, pressed) == (False, True)
    assert first == second


def test_one_request_may_use_the_whole_cache() -> None:
    bench = Bench(num_blocks=6)
    bench.submit("big", prompt_of(20), max_tokens=5)
    bench.submit("small", prompt_of(2), max_tokens=10)
    bench.finish()
    assert bench.outbox.tokens["big", 0] == bench.greedy(prompt_of(20), 5)


def test_eight_adapters_and_two_slots_all_finish() -> None:
    bench = Bench(num_blocks=30, num_slots=2, adapters=FakeAdapters(2, load_polls=3))
    rng = random.Random(5)
    wanted = {}
    for index in range(64):
        adapter = rng.choice([None, *(f"a{number}" for number in range(8))])
        prompt, num_tokens = prompt_of(rng.randint(1, 20), index), rng.randint(1, 20)
        bench.submit(f"r{index}", prompt, num_tokens, adapter=adapter, tenant=f"t{index % 5}")
        wanted[f"r{index}", 0] = bench.greedy(prompt, num_tokens, adapter)
    bench.finish()
    assert bench.outbox.tokens == wanted


def test_a_loading_adapter_does_not_hold_up_others() -> None:
    adapters = FakeAdapters(2)
    adapters.is_held = True
    bench = Bench(adapters=adapters, num_slots=2)
    for index in range(12):
        bench.submit(f"slow{index}", [1, 2], adapter="x")
    bench.submit("base", [3, 4])
    for _ in range(12):
        bench.step()
    assert bench.outbox.reasons == {("base", 0): "length"}
    assert bench.engine.counts.num_waiting == 12
    adapters.is_held = False
    bench.finish()


def test_requests_that_wait_for_one_load_are_admitted_no_further_than_the_batch_holds() -> None:
    adapters = FakeAdapters(2)
    adapters.is_held = True
    bench = Bench(adapters=adapters, num_slots=2, max_num_seqs=4)
    for index in range(20):
        bench.submit(f"r{index}", [1, 2], adapter="x")
    for _ in range(20):
        bench.step()
    assert bench.engine.counts.num_loading == 4
    adapters.is_held = False
    bench.finish()


def test_a_tenant_that_floods_does_not_delay_another() -> None:
    bench = Bench(max_num_seqs=2, quantum_tokens=16)
    for index in range(40):
        bench.submit(f"flood{index}", [1, 2], 6, tenant="a")
    for _ in range(3):
        bench.step()
    for index in range(3):
        bench.submit(f"single{index}", [3, 4], 6, tenant="b")
    bench.finish()
    order = [request_id for request_id, _ in bench.outbox.reasons]
    assert max(order.index(f"single{index}") for index in range(3)) < 14


def test_arrival_order_lets_a_flood_go_first() -> None:
    bench = Bench(max_num_seqs=2, policy="fcfs")
    for index in range(20):
        bench.submit(f"flood{index}", [1, 2], 6, tenant="a")
    bench.submit("single", [3, 4], 6, tenant="b")
    bench.finish()
    assert [request_id for request_id, _ in bench.outbox.reasons][-1] == "single"


def test_a_budget_below_the_number_of_sequences_bounds_the_batch() -> None:
    bench = Bench(max_batch_tokens=3, max_num_seqs=8)
    for index in range(8):
        bench.submit(f"r{index}", prompt_of(7, index), 9)
    bench.finish()
    for index in range(8):
        assert bench.outbox.tokens[f"r{index}", 0] == bench.greedy(prompt_of(7, index), 9)


def test_a_failed_load_costs_only_the_requests_that_want_it() -> None:
    bench = Bench(adapters=FakeAdapters(2, broken={"bad"}, unknown={"gone"}))
    for index in range(3):
        bench.submit(f"bad{index}", [1], adapter="bad", n=2)
        bench.submit(f"gone{index}", [1], adapter="gone")
        bench.submit(f"good{index}", [1], adapter="good")
    bench.finish()
    for index in range(3):
        assert isinstance(bench.outbox.errors[f"bad{index}", 1], AdapterUnavailable)
        assert isinstance(bench.outbox.errors[f"gone{index}", 0], UnknownAdapter)
        assert bench.outbox.tokens[f"good{index}", 0] == bench.greedy([1], 8, "good")


def test_logits_that_are_not_finite_cost_only_their_request() -> None:
    bench = Bench()
    bench.model.poisoned.add(bench.adapters.key("bad"))
    bench.submit("bad", [1, 2], adapter="bad")
    bench.submit("good", [1, 2], adapter="good", temperature=1.0, seed=3)
    bench.submit("random", [1, 2], adapter="bad", temperature=1.0, top_p=0.5, top_k=3, logprobs=2, n=2)
    bench.finish()
    assert isinstance(bench.outbox.errors["bad", 0], AdapterUnavailable)
    assert isinstance(bench.outbox.errors["random", 1], AdapterUnavailable)
    assert bench.outbox.reasons["good", 0] == "length"


@pytest.mark.parametrize("num_prompt", [1, 4, 5, 8, 30])
def test_choices_share_the_prompt_and_differ_by_seed(num_prompt: int) -> None:
    bench = Bench(num_blocks=100, max_num_seqs=8)
    bench.submit("many", prompt_of(num_prompt), 6, n=5, temperature=1.0, seed=10, adapter="x")
    for index in range(5):
        bench.submit(f"one{index}", prompt_of(num_prompt), 6, temperature=1.0, seed=10 + index, adapter="x")
    bench.finish()
    texts = [bench.outbox.tokens["many", index] for index in range(5)]
    assert texts == [bench.outbox.tokens[f"one{index}", 0] for index in range(5)]
    assert len({tuple(text) for text in texts}) > 1


def test_choices_compute_the_prompt_once() -> None:
    bench = Bench(num_blocks=100, max_batch_tokens=64, block_size=4)
    bench.submit("many", prompt_of(33), 1, n=4)
    while bench.num_live:
        bench.step()
    computed = sum(batch.token_ids.shape[0] for batch in bench.model.batches)
    assert computed == 33 + 3 * 1
    bench.model.batches.clear()
    bench.finish()


def test_more_choices_than_the_batch_holds_all_finish() -> None:
    bench = Bench(num_blocks=12, max_num_seqs=4)
    bench.submit("many", prompt_of(9), 12, n=16, adapter="x")
    bench.submit("other", prompt_of(5), 12, n=3)
    bench.finish()
    for index in range(16):
        assert bench.outbox.tokens["many", index] == bench.greedy(prompt_of(9), 12, "x")


def test_eos_ends_a_choice_and_is_its_last_token() -> None:
    bench = Bench(eos_bias=4.0)
    bench.submit("a", prompt_of(5), 100, temperature=1.0, seed=1)
    bench.submit("b", prompt_of(5), 100, temperature=1.0, seed=1, ignore_eos=True)
    bench.finish()
    assert bench.outbox.reasons == {("a", 0): "stop", ("b", 0): "length"}
    stopped, ignored = bench.outbox.tokens["a", 0], bench.outbox.tokens["b", 0]
    assert stopped.index(EOS_ID) == len(stopped) - 1
    assert ignored[: len(stopped)] == stopped
    assert len(ignored) == 100


def test_stop_token_ids_end_a_choice_even_when_eos_is_ignored() -> None:
    bench = Bench()
    text = bench.greedy(prompt_of(5), 20)
    bench.submit("a", prompt_of(5), 20, stop_token_ids=(text[6],), ignore_eos=True)
    bench.finish()
    assert bench.outbox.tokens["a", 0] == text[: text.index(text[6]) + 1]
    assert bench.outbox.reasons["a", 0] == "stop"


def test_the_context_length_ends_a_choice() -> None:
    bench = Bench(context_length=16)
    bench.submit("a", prompt_of(10), 50)
    bench.finish()
    assert len(bench.outbox.tokens["a", 0]) == 6
    assert bench.outbox.reasons["a", 0] == "length"


@pytest.mark.parametrize("n", [1, 3])
def test_zero_tokens_finish_at_once_without_a_forward(n: int) -> None:
    bench = Bench()
    bench.submit("a", [1, 2, 3], 0, n=n, adapter="x")
    bench.finish()
    assert bench.outbox.reasons == {("a", index): "length" for index in range(n)}
    assert not any(bench.outbox.tokens.values())
    assert bench.engine.counts.num_steps == 0


@pytest.mark.parametrize(("num_prompt", "max_tokens", "n"), [(1, 0, 1), (1, 2, 1), (21, 0, 2), (21, 3, 2), (16, 1, 1)])
def test_prompt_logprobs_equal_the_full_forward(num_prompt: int, max_tokens: int, n: int) -> None:
    bench = Bench(max_batch_tokens=6)
    prompt = prompt_of(num_prompt)
    bench.submit("other", prompt_of(3, 9), 20)
    bench.submit("a", prompt, max_tokens, prompt_logprobs=2, adapter="x", n=n)
    bench.finish()
    first, *later = [chunk for chunk in bench.outbox.chunks if (chunk.request_id, chunk.index) == ("a", 0)]
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == num_prompt
    assert first.prompt_logprobs[0] is None
    assert all(chunk.prompt_logprobs is None for chunk in later)
    history = [(token, bench.adapters.key("x")) for token in prompt]
    for position, entry in enumerate(first.prompt_logprobs[1:], start=1):
        expected = bench.model.logits(tuple(history[:position])).log_softmax(-1)
        assert entry is not None
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(expected[prompt[position]]), abs=1e-5)
        assert [token for token, _ in entry.top] == expected.topk(2).indices.tolist()
    assert len(bench.outbox.tokens["a", 0]) == max_tokens


def test_prompt_logprobs_survive_a_preemption() -> None:
    bench = Bench(num_blocks=13, max_batch_tokens=6, max_num_seqs=4)
    for index in range(3):
        bench.submit(f"r{index}", prompt_of(3, index), 16)
    for _ in range(4):
        bench.step()
    bench.submit("a", prompt_of(22), 2, prompt_logprobs=0)
    bench.finish()
    assert bench.engine.counts.num_preemptions > 0
    chunk = next(chunk for chunk in bench.outbox.chunks if chunk.request_id == "a")
    assert [entry and entry.token_id for entry in chunk.prompt_logprobs or ()] == [None, *prompt_of(22)[1:]]


def test_logprobs_come_with_each_token() -> None:
    bench = Bench()
    bench.submit("a", prompt_of(4), 5, logprobs=3)
    bench.submit("b", prompt_of(4), 5, logprobs=0)
    bench.submit("c", prompt_of(4), 5)
    bench.finish()
    for chunk in bench.outbox.chunks:
        expected = {"a": 3, "b": 0, "c": None}[chunk.request_id]
        assert [len(entry.top) for entry in chunk.logprobs] == ([] if expected is None else [expected])
        assert all(entry.token_id == chunk.token_ids[0] for entry in chunk.logprobs)


def test_all_chunks_of_a_step_come_in_one_call() -> None:
    bench = Bench()
    for index in range(5):
        bench.submit(f"r{index}", [index], 4)
    bench.step()
    assert [len(put) for put in bench.outbox.puts] == [5]
    bench.finish()


@pytest.mark.parametrize("num_steps", range(8))
def test_an_abort_gives_everything_back_within_two_steps(num_steps: int) -> None:
    bench = Bench(adapters=FakeAdapters(2, load_polls=3), max_batch_tokens=4)
    bench.submit("a", prompt_of(14), 50, n=2, adapter="x")
    for _ in range(num_steps):
        bench.step()
    bench.engine.abort("a")
    bench.engine.abort("a")
    bench.step()
    bench.step()
    assert not bench.adapters.leases
    assert bench.engine.counts.num_free_blocks == 64
    assert set(bench.outbox.reasons.values()) == {"abort"}
    assert len(bench.outbox.reasons) == 2
    bench.finish()


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("num_steps", range(8))
def test_aborting_one_choice_leaves_the_others(index: int, num_steps: int) -> None:
    bench = Bench(adapters=FakeAdapters(2, load_polls=2), max_batch_tokens=4, num_blocks=12)
    bench.submit("a", prompt_of(14), 6, n=3, adapter="x")
    for _ in range(num_steps):
        bench.step()
    bench.engine.abort("a", index)
    bench.finish()
    for other in {0, 1, 2} - {index}:
        assert bench.outbox.tokens["a", other] == bench.greedy(prompt_of(14), 6, "x")
    assert bench.outbox.reasons["a", index] in ("abort", "length")


@pytest.mark.parametrize("seed", range(10))
def test_random_aborts_leak_nothing(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(
        num_blocks=rng.choice([15, 40]),
        adapters=FakeAdapters(2, load_polls=rng.randint(0, 4), broken={"a3"}, unknown={"a4"}),
        policy=rng.choice(["drr", "fcfs"]),
        quantum_tokens=16,
    )
    names = [f"r{index}" for index in range(30)]
    for index, name in enumerate(names):
        bench.submit(
            name,
            prompt_of(rng.randint(1, 25), index),
            rng.randint(0, 20),
            n=rng.choice([1, 1, 3]),
            adapter=rng.choice([None, "a1", "a2", "a3", "a4", "a5"]),
            tenant=rng.choice("abc"),
            weight=rng.choice([0.5, 1.0, 2.0]),
            prompt_logprobs=rng.choice([None, 1]),
            temperature=rng.choice([0.0, 1.0]),
        )
        if rng.random() < 0.5:
            bench.step()
            bench.check()
        if rng.random() < 0.4:
            bench.engine.abort(rng.choice(names), rng.choice([None, 0, 1, 2]))
    bench.finish()
    assert {name for name, _ in bench.outbox.reasons} == set(names)


def test_a_full_queue_refuses_and_takes_again_when_it_moves() -> None:
    bench = Bench(max_waiting=3)
    for index in range(3):
        bench.submit(f"r{index}", [1], 3)
    with pytest.raises(Overloaded, match="max_waiting is 3"):
        bench.submit("late", [1])
    bench.step()
    bench.submit("late", [1])
    bench.finish()


def test_a_request_id_in_use_is_refused_and_free_afterwards() -> None:
    bench = Bench()
    bench.submit("a", [1], 2)
    with pytest.raises(InvalidRequest, match="in use"):
        bench.submit("a", [2], 2)
    bench.finish()
    bench.outbox.reasons.clear()
    bench.submit("a", [2], 2)
    bench.finish()


def test_a_draining_engine_finishes_what_it_has() -> None:
    bench = Bench()
    bench.submit("a", [1], 5)
    bench.engine.refuse(ReplicaDraining("draining"))
    with pytest.raises(ReplicaDraining):
        bench.submit("b", [1])
    bench.finish()
    assert bench.outbox.reasons == {("a", 0): "length"}


def test_a_failing_forward_ends_every_request_and_reports() -> None:
    bench = Bench(num_slots=1, adapters=FakeAdapters(1))
    bench.submit("a", [1], 500, adapter="x", n=2)
    bench.submit("b", [1], 500, adapter="y")
    for _ in range(4):
        bench.step()
    bench.submit("c", [1], 5)
    bench.model.error = RuntimeError("the device is gone")
    bench.engine.start()
    bench.engine._thread.join(10)
    assert [str(error) for error in bench.fatal] == ["the device is gone"]
    assert set(bench.outbox.reasons) == {("a", 0), ("a", 1), ("b", 0), ("c", 0)}
    assert all(isinstance(error, EngineDead) for error in bench.outbox.errors.values())
    with pytest.raises(EngineDead):
        bench.submit("d", [1])
    assert not bench.engine.is_alive(1.0)
    assert not bench.adapters.leases
    bench.engine.check_integrity()


def test_an_outbox_that_raises_costs_only_its_own_chunks() -> None:
    class Broken:
        def put(self, chunks: object) -> None:
            raise ValueError("full")

    bench = Bench()
    bench.submit("a", [1], 3)
    bench.engine.submit(make_request("b", [1], 3), Broken())
    bench.finish()
    assert bench.outbox.reasons == {("a", 0): "length"}
