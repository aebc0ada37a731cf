"""Blocks under reference counts: a state machine against the plainest model there is."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replica.block_manager import BlockManager

NUM_BLOCKS = 12


class Blocks(RuleBasedStateMachine):
    """Holders take, share and give back; the model is the list of their tables."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, block_size=4)
        self.tables: list[tuple[int, ...]] = []

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, num_blocks: int) -> None:
        in_use = {block for table in self.tables for block in table}
        assert self.manager.can_allocate(num_blocks) == (num_blocks <= NUM_BLOCKS - len(in_use))
        if self.manager.can_allocate(num_blocks):
            table = self.manager.allocate(num_blocks)
            assert len(set(table)) == num_blocks
            assert in_use.isdisjoint(table)
            self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share_a_prefix(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        shared = table[: data.draw(st.integers(0, len(table)))]
        assert self.manager.share(shared) == shared
        self.tables.append(shared)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.manager.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def counts_agree(self) -> None:
        self.manager.check_integrity(self.tables)
        assert self.manager.num_free == NUM_BLOCKS - len({block for table in self.tables for block in table})


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlocks = Blocks.TestCase


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_rounds_up(num_tokens: int, num_blocks: int) -> None:
    assert BlockManager(8, block_size=4).blocks_for(num_tokens) == num_blocks


def test_releasing_twice_is_caught() -> None:
    manager = BlockManager(4, block_size=4)
    table = manager.allocate(2)
    manager.release(table)
    with pytest.raises(AssertionError, match="released twice"):
        manager.release(table)


def test_sharing_a_free_block_is_caught() -> None:
    with pytest.raises(AssertionError, match="is free"):
        BlockManager(4, block_size=4).share((1,))


def test_a_lost_table_fails_the_integrity_check() -> None:
    manager = BlockManager(4, block_size=4)
    manager.allocate(2)
    with pytest.raises(AssertionError, match="block tables say"):
        manager.check_integrity([])
