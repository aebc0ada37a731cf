"""Blocks that are found again: by the same tenant and adapter version only, and with the same text as without."""

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replica.block_manager import BlockManager
from replica.prefix_index import Key, extend_keys, root_key
from tests.fake_device import FakeLink
from tests.replica.engine.harness import Bench

NUM_BLOCKS, SIZE = 8, 2


def keys_of(tenant: str, adapter: str | None, tokens: list[int]) -> list[Key]:
    keys: list[Key] = []
    extend_keys(keys, root_key(tenant, adapter), tokens, SIZE, len(tokens) // SIZE)
    return keys


class Prefixes(RuleBasedStateMachine):
    """Holders find, take, write, publish and give back. The model is what each physical block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, SIZE)
        self.contents: dict[int, Key] = {}
        self.tables: list[tuple[int, ...]] = []

    @rule(owner=st.sampled_from(["a", "b"]), adapter=st.sampled_from([None, "x"]), data=st.data())
    def begin(self, owner: str, adapter: str | None, data: st.DataObject) -> None:
        keys = keys_of(owner, adapter, data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=8)))
        found = self.manager.find(keys)
        assert [self.contents[block] for block in found] == keys[: len(found)]
        num_missing = len(keys) - len(found)
        if not self.manager.can_allocate(num_missing):
            self.manager.release(found)
            return
        taken = self.manager.allocate(num_missing)
        held = {block for table in self.tables for block in table} | set(found)
        assert held.isdisjoint(taken)
        table = found + taken
        self.contents.update(zip(taken, keys[len(found) :], strict=True))
        for block, key in zip(table, keys, strict=True):
            self.manager.publish(block, key)
        self.tables.append(table)
        assert self.manager.find(keys) == self.longest(keys)
        self.manager.release(self.longest(keys))

    def longest(self, keys: list[Key]) -> tuple[int, ...]:
        return tuple(self.manager._index.longest(keys))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.manager.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.manager.forget(data.draw(st.sampled_from(self.tables)))

    @invariant()
    def counts_agree(self) -> None:
        self.manager.check_integrity(self.tables)
        assert self.manager.num_free == NUM_BLOCKS - len({block for table in self.tables for block in table})
        assert all(self.contents[block] == key for key, block in self.manager._index)


Prefixes.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestPrefixes = Prefixes.TestCase


def test_the_least_recently_used_goes_first_and_ends_before_beginnings() -> None:
    manager = BlockManager(4, SIZE)
    first, second = keys_of("a", None, [1, 1, 2, 2]), keys_of("a", None, [3, 3, 4, 4])
    for keys in (first, second):
        table = manager.allocate(2)
        for block, key in zip(table, keys, strict=True):
            manager.publish(block, key)
        manager.release(table)
    manager.release(manager.find(first))
    manager.release(manager.allocate(1))
    assert len(manager._index.longest(first)) == 2
    assert len(manager._index.longest(second)) == 1


def found_tokens(first: dict[str, Any], second: dict[str, Any], prompt: list[int]) -> int:
    bench = Bench(prefix_cache=True)
    bench.submit("first", prompt, 4, **first)
    bench.finish()
    bench.submit("second", [*prompt, 5], 4, **second)
    bench.finish()
    assert bench.outbox.tokens["second", 0] == bench.greedy([*prompt, 5], 4, second.get("adapter"))
    return bench.engine.counts.num_found_tokens


PROMPT = list(range(20))


@pytest.mark.parametrize("adapter", [None, "x"])
def test_the_same_tenant_and_adapter_find_the_beginning(adapter: str | None) -> None:
    assert found_tokens({"adapter": adapter}, {"adapter": adapter}, PROMPT) == 20


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"tenant": "a"}, {"tenant": "b"}),
        ({"adapter": "digest-of-1"}, {"adapter": "digest-of-2"}),
        ({"adapter": "x"}, {"adapter": None}),
        ({"adapter": None}, {"adapter": "x"}),
        ({"adapter": "x", "tenant": "a"}, {"adapter": "x", "tenant": "b"}),
    ],
)
def test_others_find_nothing(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert found_tokens(first, second, PROMPT) == 0


def test_nothing_is_found_when_it_is_off() -> None:
    bench = Bench()
    for name in ("first", "second"):
        bench.submit(name, PROMPT, 4)
        bench.finish()
    assert bench.engine.counts.num_found_tokens == 0


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    bench = Bench(num_blocks=10, max_num_seqs=6, prefix_cache=True)
    for index in range(6):
        bench.submit(f"r{index}", [index] * 6, 20)
    bench.finish()
    assert bench.engine.counts.num_preemptions > 0
    assert bench.engine.counts.num_found_tokens > 0
    for index in range(6):
        assert bench.outbox.tokens[f"r{index}", 0] == bench.greedy([index] * 6, 20)


def test_prompt_logprobs_are_computed_all_the_same() -> None:
    bench = Bench(prefix_cache=True)
    for name in ("first", "second"):
        bench.submit(name, PROMPT, 2, prompt_logprobs=0)
        bench.finish()
    scored = [chunk.prompt_logprobs for chunk in bench.outbox.chunks if chunk.prompt_logprobs is not None]
    assert [len(each) for each in scored] == [20, 20]


def test_what_a_broken_request_computed_is_not_found() -> None:
    bench = Bench(prefix_cache=True)
    bench.model.poisoned.add(bench.adapters.key("x"))
    bench.submit("bad", PROMPT, 4, adapter="x")
    bench.finish()
    assert bench.outbox.reasons["bad", 0] == "error"
    bench.submit("next", PROMPT, 1, adapter="x")
    bench.finish()
    assert bench.engine.counts.num_found_tokens == 0


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_texts_are_those_without(seed: int, is_asynchronous: bool) -> None:
    rng = random.Random(seed)
    bench = Bench(link=FakeLink() if is_asynchronous else None, num_blocks=rng.choice([14, 40]), prefix_cache=True)
    starts = [rng.choices(range(40), k=12) for _ in range(2)]
    asked = {}
    for index in range(16):
        prompt = rng.choice(starts)[: rng.randint(1, 12)] + rng.choices(range(40), k=rng.randint(0, 6)) or [1]
        fields = {"adapter": rng.choice([None, "x", "y"]), "tenant": rng.choice("ab"), "n": rng.choice([1, 1, 2])}
        asked[f"r{index}"] = (prompt, rng.randint(1, 14), fields)
        bench.submit(f"r{index}", prompt, asked[f"r{index}"][1], **fields)
        for _ in range(rng.choice([0, 2, 6])):
            bench.step()
    while bench.num_live:
        assert bench.step() or bench.adapters.num_waiting
    bench.finish()
    assert bench.engine.counts.num_found_tokens > 0
    for name, (prompt, num_tokens, fields) in asked.items():
        for index in range(fields["n"]):
            assert bench.outbox.tokens[name, index] == bench.greedy(prompt, num_tokens, fields["adapter"])
