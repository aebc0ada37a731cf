"""The page table says the same as the plain plan's index tensors, in FlashInfer's form."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.model.attention_plan import AttentionPlan
from replica.model.batch import SequenceSpan
from replica.model.page_table import PADDING_SLOT, PageTable, build_page_table

BLOCK_SIZE = 4


@st.composite
def steps(draw: st.DrawFn) -> list[SequenceSpan]:
    """Sequences with tables of their own, longer than they need."""
    contexts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    blocks = draw(st.permutations(range(100)))
    spans = []
    for context in contexts:
        num_blocks = -(-context // BLOCK_SIZE) + draw(st.integers(0, 1))
        table, blocks = tuple(blocks[:num_blocks]), blocks[num_blocks:]
        spans.append(SequenceSpan(draw(st.integers(1, context)), context, table))
    return spans


def slots_of(table: PageTable, sequence: int) -> list[int]:
    """Every token's slot of a sequence, read as FlashInfer reads it."""
    pages = table.pages[table.page_starts[sequence] : table.page_starts[sequence + 1]]
    length = (len(pages) - 1) * BLOCK_SIZE + table.last_page_lens[sequence]
    assert length == table.contexts[sequence]
    return [int(pages[token // BLOCK_SIZE]) * BLOCK_SIZE + token % BLOCK_SIZE for token in range(length)]


@settings(max_examples=100, deadline=None)
@given(spans=steps())
def test_rows_and_pages_agree_with_the_plain_plan(spans: list[SequenceSpan]) -> None:
    table = build_page_table(spans, BLOCK_SIZE)
    plan = AttentionPlan(spans, BLOCK_SIZE, torch.device("cpu"), torch.float32)
    assert table.slots.tolist() == plan.slot_mapping.tolist()
    assert table.num_rows == plan.num_rows == int(table.row_starts[-1])
    for sequence, span in enumerate(spans):
        rows = slice(table.row_starts[sequence], table.row_starts[sequence + 1])
        expected = slots_of(table, sequence)
        assert table.positions[rows].tolist() == list(range(span.context_length))[-span.num_tokens :]
        assert table.slots[rows].tolist() == expected[-span.num_tokens :]


def test_decode_slots_equal_the_gather_of_the_plain_plan() -> None:
    spans = [SequenceSpan(1, 9, (7, 3, 5)), SequenceSpan(1, 9, (1, 0, 2))]
    (group,) = AttentionPlan(spans, BLOCK_SIZE, torch.device("cpu"), torch.float32).view(None).decodes
    table = build_page_table(spans, BLOCK_SIZE)
    assert group.slots.tolist() == slots_of(table, 0) + slots_of(table, 1)


def test_padding_rows_come_last_and_write_nowhere() -> None:
    padding = [SequenceSpan(1, 1, (50,))] * 2
    table = build_page_table([SequenceSpan(1, 6, (7, 3))], BLOCK_SIZE, padding)
    assert table.num_sequences == table.num_rows == 3
    assert table.slots.tolist() == [13, PADDING_SLOT, PADDING_SLOT]
    assert table.positions.tolist() == [5, 0, 0]
    assert table.page_starts.tolist() == [0, 2, 3, 4]
    assert table.pages.tolist() == [7, 3, 50, 50]
    assert table.last_page_lens.tolist() == [2, 1, 1]


def test_arrays_have_the_types_that_flashinfer_takes() -> None:
    table = build_page_table([SequenceSpan(2, 6, (7, 3))], BLOCK_SIZE)
    for array in (table.row_starts, table.page_starts, table.pages, table.last_page_lens, table.contexts):
        assert array.dtype == np.int32
    assert table.positions.dtype == table.slots.dtype == np.int64


def test_a_short_block_table_is_an_error() -> None:
    with pytest.raises(AssertionError, match="too short"):
        build_page_table([SequenceSpan(1, 9, (7, 3))], BLOCK_SIZE)
