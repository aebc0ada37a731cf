"""A model that runs behind the host: the same tokens as in step with it, and steps that do not wait for each other."""

import random
from itertools import pairwise
from typing import Any

import pytest

from replica.messages import GenerateRequest, TokenChunk, TokenLogprob
from tests.fake_device import FakeLink
from tests.fakes import EOS_ID, FakeAdapters
from tests.replica.engine.harness import MAX_STEPS, Bench, make_request

PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 1.0},
    {"frequency_penalty": 0.5, "temperature": 1.0},
    {"repetition_penalty": 1.5},
]


def behind(**fields: Any) -> tuple[Bench, FakeLink]:
    """A bench whose model runs behind the host, and the log of both."""
    link = FakeLink()
    return Bench(link=link, **fields), link


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(40), k=length)


def finish(bench: Bench, rng: random.Random | None = None) -> None:
    """Step to the end; look at the leases only now and then, since a look reads back what is in flight."""
    for _ in range(MAX_STEPS):
        if not bench.num_live:
            break
        assert bench.step() or bench.adapters.num_waiting, f"nothing moves: {bench.engine}"
        if rng is not None and rng.random() < 0.1:
            bench.check()
    bench.finish()


def test_each_step_is_launched_before_the_one_ahead_is_read() -> None:
    bench, link = behind(num_blocks=800, num_slots=8, max_num_seqs=64, max_batch_tokens=256)
    for index in range(64):
        bench.submit(f"r{index}", prompt_of(3, index), 40, adapter=f"a{index % 8}" if index % 9 else None)
    finish(bench)
    launches, reads = (
        [place for place, entry in enumerate(link.log) if entry[0] == kind] for kind in ("launch", "read")
    )
    assert len(launches) == len(reads) >= 40
    assert all(launched < read for launched, read in zip(launches[1:], reads, strict=False))
    for index in range(64):
        adapter = f"a{index % 8}" if index % 9 else None
        assert bench.outbox.tokens[f"r{index}", 0] == bench.greedy(prompt_of(3, index), 40, adapter)


def test_no_row_is_launched_beyond_the_last_token_there_can_be() -> None:
    bench, _ = behind(context_length=20)
    bench.submit("a", prompt_of(5), 7)
    bench.submit("b", prompt_of(9, 1), 100)
    while bench.num_live:
        bench.step()
    computed = sum(batch.token_ids.shape[0] for batch in bench.model.batches)
    assert computed == (5 + 7 - 1) + (20 - 1)
    bench.finish()


def test_a_row_launched_after_the_end_is_given_up() -> None:
    bench, _ = behind()
    text = bench.greedy(prompt_of(5), 20)
    bench.submit("a", prompt_of(5), 20, stop_token_ids=(text[6],), n=2, adapter=None)
    finish(bench)
    end = text.index(text[6]) + 1
    for index in range(2):
        assert bench.outbox.tokens["a", index] == text[:end]
        assert bench.outbox.reasons["a", index] == "stop"


@pytest.mark.parametrize("fields", PENALTIES, ids=str)
def test_a_row_that_looks_back_waits_for_its_last_token(fields: dict[str, Any]) -> None:
    texts = []
    for bench in (Bench(), behind()[0]):
        bench.submit("a", prompt_of(5), 20, seed=3, **fields)
        bench.submit("b", prompt_of(5, 1), 20)
        finish(bench)
        texts.append(dict(bench.outbox.tokens))
    assert texts[0] == texts[1]
    assert texts[0]["b", 0] == bench.greedy(prompt_of(5, 1), 20)


def test_biases_alone_do_not_wait() -> None:
    bench, link = behind()
    bench.submit("a", prompt_of(5), 20, logit_bias={3: 2.0})
    finish(bench)
    assert link.log[:5] == [("launch", 1), ("launch", 2), ("read", 1), ("launch", 3), ("read", 2)]


def test_logits_that_are_not_finite_end_a_choice_whose_next_row_is_launched() -> None:
    bench, _ = behind()
    bench.submit("bad", [1, 2], 10, adapter="bad")
    bench.submit("good", [1, 2], 10, adapter="good")
    for _ in range(4):
        bench.step()
    bench.model.poisoned.add(bench.adapters.key("bad"))
    finish(bench)
    assert bench.outbox.reasons == {("bad", 0): "error", ("good", 0): "length"}
    assert bench.outbox.tokens["good", 0] == bench.greedy([1, 2], 10, "good")
    assert not bench.adapters.leases


def test_an_integrity_check_reads_back_what_is_in_flight() -> None:
    bench, link = behind()
    bench.submit("a", prompt_of(5), 20)
    bench.step()
    assert link.log == [("launch", 1)]
    bench.engine.check_integrity()
    assert link.log == [("launch", 1), ("read", 1)]
    assert not bench.outbox.tokens
    bench.step()
    assert len(bench.outbox.tokens["a", 0]) == 1
    finish(bench)
    assert bench.outbox.tokens["a", 0] == bench.greedy(prompt_of(5), 20)


def test_a_device_that_fails_ends_every_request() -> None:
    bench, _ = behind()
    bench.submit("a", [1], 500, n=2)
    for _ in range(4):
        bench.step()
    bench.model.error = RuntimeError("the device is gone")
    bench.engine.start()
    bench.engine._thread.join(10)
    assert [str(error) for error in bench.fatal] == ["the device is gone"]
    assert set(bench.outbox.reasons.values()) == {"error"}
    bench.engine.check_integrity()


def test_a_leaver_does_not_keep_the_place_of_a_newcomer() -> None:
    bench, _ = behind(max_num_seqs=1)
    for index in range(5):
        bench.submit(f"r{index}", [index], 3)
    finish(bench)
    assert bench.engine.counts.num_steps == 15
    for index in range(5):
        assert bench.outbox.tokens[f"r{index}", 0] == bench.greedy([index], 3)


def random_request(rng: random.Random, name: str) -> GenerateRequest:
    """Any mix of what a request may ask for whose tokens do not depend on when it runs."""
    fields: dict[str, Any] = {
        "n": rng.choice([1, 1, 1, 3]),
        "adapter": rng.choice([None, "a1", "a2", "a3", "bad"]),
        "tenant": rng.choice("ab"),
        "prompt_logprobs": rng.choice([None, None, 0, 2]),
        "logprobs": rng.choice([None, None, 0, 3]),
        "stop_token_ids": tuple(rng.sample(range(50), rng.choice([0, 3]))),
        "ignore_eos": rng.random() < 0.3,
    }
    if rng.random() < 0.6:
        fields |= {"temperature": 1.0, "seed": rng.randrange(1000), "top_p": rng.choice([1.0, 0.8])}
        fields |= {"top_k": rng.choice([0, 0, 5]), "min_p": rng.choice([0.0, 0.0, 0.05])}
    if rng.random() < 0.1:
        fields |= rng.choice(PENALTIES)
    if rng.random() < 0.2:
        fields["logit_bias"] = {EOS_ID: 3.0, 7: -5.0}
    return make_request(name, prompt_of(rng.randint(1, 25), rng.randrange(99)), rng.choice([0, 1, 2, 9, 20]), **fields)


def run(seed: int, link: FakeLink | None) -> tuple[Bench, set[tuple[str, int]]]:
    """One schedule of submissions and aborts; the bench, and the choices that were told to abort."""
    rng = random.Random(seed)
    adapters = FakeAdapters(2, load_polls=rng.randint(0, 3), broken={"bad"} if rng.random() < 0.3 else ())
    bench = Bench(
        link=link,
        num_blocks=rng.choice([13, 20, 60]),
        adapters=adapters,
        max_batch_tokens=rng.choice([6, 16, 64]),
        max_num_seqs=rng.choice([2, 8]),
        policy=rng.choice(["drr", "fcfs"]),
        eos_bias=rng.choice([-100.0, 0.0, 4.0]),
        context_length=rng.choice([30, 256]),
    )
    names = [f"r{index}" for index in range(14)]
    aborted = set()
    for name in names:
        bench.engine.submit(random_request(rng, name), bench.outbox)
        for _ in range(rng.choice([0, 0, 1, 4])):
            bench.step()
        if rng.random() < 0.15:
            victim, index = rng.choice(names), rng.choice([None, 0, 2])
            bench.engine.abort(victim, index)
            aborted |= {(victim, each) for each in range(3) if index in (None, each)}
    finish(bench, rng)
    return bench, aborted


def scores(chunks: list[TokenChunk]) -> dict[tuple[str, int], list[TokenLogprob | None]]:
    """The log-probabilities of each choice, those of its prompt first."""
    found: dict[tuple[str, int], list[TokenLogprob | None]] = {}
    for chunk in chunks:
        found.setdefault((chunk.request_id, chunk.index), []).extend((*(chunk.prompt_logprobs or ()), *chunk.logprobs))
    return found


def same(first: TokenLogprob | None, second: TokenLogprob | None) -> bool:
    if first is None or second is None:
        return first is second
    ids = [[token_id for token_id, _ in each.top] for each in (first, second)]
    return first.token_id == second.token_id and ids[0] == ids[1] and abs(first.logprob - second.logprob) < 1e-5


@pytest.mark.parametrize("seed", range(24))
def test_requests_get_what_they_get_in_step_with_the_host(seed: int) -> None:
    link = FakeLink()
    (calm, told), (ahead, told_again) = run(seed, None), run(seed, link)
    assert told == told_again
    assert calm.outbox.reasons.keys() == ahead.outbox.reasons.keys()
    expected, found = scores(calm.outbox.chunks), scores(ahead.outbox.chunks)
    for key, reason in calm.outbox.reasons.items():
        first, second = calm.outbox.tokens[key], ahead.outbox.tokens[key]
        num_common = min(len(first), len(second))
        assert first[:num_common] == second[:num_common], key
        assert all(same(*pair) for pair in zip(expected[key], found[key], strict=False)), key
        if key not in told:
            assert (first, reason) == (second, ahead.outbox.reasons[key]), key
            assert len(expected[key]) == len(found[key]), key
    assert [kind for kind, _ in link.log].count("read") == ahead.engine.counts.num_steps


def test_the_random_schedules_preempt_abort_and_overlap() -> None:
    num_preemptions = num_aborted = num_overlaps = 0
    for seed in range(100, 112):
        link = FakeLink()
        bench, _ = run(seed, link)
        num_preemptions += bench.engine.counts.num_preemptions
        num_aborted += list(bench.outbox.reasons.values()).count("abort")
        kinds = [kind for kind, _ in link.log]
        num_overlaps += sum(pair == ("launch", "launch") for pair in pairwise(kinds))
    assert min(num_preemptions, num_aborted, num_overlaps) >= 3
