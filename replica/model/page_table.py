"""A step's sequences as arrays: rows' positions and KV slots, sequences' pages. Pure numpy, no device.

The form is FlashInfer's: `page_starts` (its indptr) cuts `pages` (its indices) into one run a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from replica.model.batch import SequenceSpan

PADDING_SLOT = -1


@dataclass(frozen=True, slots=True)
class PageTable:
    """Arrays over sequences are int32, those over rows int64. The last `num_padding` sequences are padding rows.

    `row_starts` and `page_starts` are [num_sequences + 1], `pages` [page_starts[-1]]; `last_page_lens` counts the
    tokens in a sequence's last page, 1 to `block_size`; `contexts` are the sequences' lengths, this step included.
    """

    spans: tuple[SequenceSpan, ...]
    row_starts: NDArray[np.int32]
    page_starts: NDArray[np.int32]
    pages: NDArray[np.int32]
    last_page_lens: NDArray[np.int32]
    contexts: NDArray[np.int32]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    @property
    def num_sequences(self) -> int:
        return len(self.contexts)


def build_page_table(spans: Sequence[SequenceSpan], block_size: int, padding: Sequence[SequenceSpan] = ()) -> PageTable:
    """Lay out `spans`, then the one-token `padding` spans, whose keys and values go nowhere."""
    everything = (*spans, *padding)
    num_tokens = np.array([span.num_tokens for span in everything], dtype=np.int64)
    contexts = np.array([span.context_length for span in everything], dtype=np.int64)
    counts = -(-contexts // block_size)
    assert all(len(s.block_table) >= n for s, n in zip(everything, counts, strict=True)), "a block table is too short"
    tables = (span.block_table[:count] for span, count in zip(everything, counts.tolist(), strict=True))
    pages = np.fromiter(chain.from_iterable(tables), dtype=np.int32, count=int(counts.sum()))
    row_starts, page_starts = _starts(num_tokens), _starts(counts)
    sequences = np.repeat(np.arange(len(everything)), num_tokens)
    positions = np.arange(len(sequences)) - row_starts[sequences] + (contexts - num_tokens)[sequences]
    slots = pages[page_starts[sequences] + positions // block_size].astype(np.int64) * block_size
    slots += positions % block_size
    if padding:
        slots[len(slots) - len(padding) :] = PADDING_SLOT
    return PageTable(
        spans=everything,
        row_starts=row_starts,
        page_starts=page_starts,
        pages=pages,
        last_page_lens=(contexts - (counts - 1) * block_size).astype(np.int32),
        contexts=contexts.astype(np.int32),
        positions=positions,
        slots=slots,
    )


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int32]:
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
