"""Which rows of a step belong to which slot, as one run of int32 words that the kernels read. Knows no weights.

The rows are cut into *tiles*: neighbouring rows of one slot, or of none; every row lies in exactly one. A tile is the
work of one or more *entries*, all of about the same number of bytes: in a step of few rows a tile has the *form* of its
adapter's largest rank, and 2^form entries, each a part of its columns and ranks. Form 0 is rank 8 or less, 1 is 16, 2
is 32, and so on. In a step of many rows each tile is one entry.

The words of a step with room for `capacity` rows: a head of `HEAD` words, of which the first two are the numbers of
tiles and of entries, then four arrays of `capacity` words: the first row, the end, the slot (`NONE`: base only) and the
form of each tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

HEAD = 4
NUM_ARRAYS = 4
FORM_BITS = 3
NARROW_RANK = 8
"""The largest rank of form 0."""
ROW_STEP = 8
"""A row of B takes a multiple of so many elements, with zeros behind its rank."""
NONE = -1
MAX_RANK = 256
DECODE_TILE = 16
NARROW_TILE = 8
"""Rows of a tile of form 0: the matrix units take each of them twice, with two parts of K."""
PROMPT_TILE = 64
MAX_DECODE_ROWS = 512
FEW_ROWS = 4

Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Packed rows [start, end) use `slot`; `max_rank` is the largest rank of its adapter, over all sites."""

    start: int
    end: int
    slot: int
    max_rank: int


@dataclass(frozen=True, slots=True)
class RowsView:
    """A step's words on the device, and what the host needs for sizing launches.

    `capacity` is the number of rows of the step, `max_tiles` and `max_rank` upper bounds (a captured graph takes
    `capacity` and the configured rank, whatever its steps turn out to be).
    """

    words: torch.Tensor
    capacity: int
    max_tiles: int
    max_rank: int

    @property
    def is_decode(self) -> bool:
        """Whether it is a step of few rows, as most are in which everybody decodes."""
        return self.capacity <= MAX_DECODE_ROWS

    @property
    def tile_rows(self) -> int:
        """The most rows of a tile: few for decode steps, where a segment has few rows, more for prompts."""
        return DECODE_TILE if self.is_decode else PROMPT_TILE

    @property
    def most_form(self) -> int:
        """The form of the largest rank; 0 in a step of many rows."""
        return form_of(self.max_rank) if self.is_decode else 0

    @property
    def max_entries(self) -> int:
        """An upper bound."""
        return self.max_tiles << self.most_form

    @property
    def rank_block(self) -> int:
        """Rows of A that a program takes at a time: 16, which matrix units want at least, or more for prompts."""
        if self.is_decode or self.max_rank <= 16:
            return 16
        return 32 if self.max_rank <= 32 else 64


def num_words(capacity: int) -> int:
    """How many int32 words a step with room for `capacity` rows takes."""
    return HEAD + NUM_ARRAYS * capacity


def most_tiles(num_rows: int, max_segments: int) -> int:
    """An upper bound of the tiles of a step of `num_rows` rows: segments, gaps between them, and full tiles."""
    full = NARROW_TILE if num_rows <= MAX_DECODE_ROWS else PROMPT_TILE
    return min(num_rows, num_rows // full + 2 * max_segments + 1)


def form_of(rank: int) -> int:
    """The form of an adapter of this rank."""
    return ((max(rank, 1) - 1) // NARROW_RANK).bit_length()


def rooms_for(max_rank: int) -> tuple[int, ...]:
    """For which largest ranks to record a step, where adapters have ranks up to `max_rank`; 0: there are none.

    Most adapters have ranks of which a column of B is no more than a line, and should not pay for what a few need.
    """
    return tuple(sorted({0, min(2 * NARROW_RANK, max_rank), max_rank}))


def pack_rows(segments: Sequence[RowSegment], capacity: int, out: Words) -> int:
    """Fill `out`, of at least `num_words(capacity)`; returns the number of tiles. Vectorised; writes every word.

    `segments` are in the order of their rows; rows between and after them are base only.
    """
    words = out[: num_words(capacity)]
    words[:] = NONE
    starts, ends, slots, ranks = _runs(segments, capacity).T
    assert (starts[1:] == ends[:-1]).all(), "segments are in order and do not overlap"
    forms, tile_rows = np.zeros_like(ranks), np.full_like(ranks, PROMPT_TILE)
    if capacity <= MAX_DECODE_ROWS:
        forms = np.searchsorted(NARROW_RANK << np.arange(1 << FORM_BITS), ranks)
        tile_rows = np.where(forms == 0, NARROW_TILE, DECODE_TILE)
    counts = -(-(ends - starts) // tile_rows)
    run_of = np.repeat(np.arange(len(starts)), counts)
    nth = np.arange(len(run_of)) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = starts[run_of] + nth * tile_rows[run_of]
    words[0] = num_tiles = len(run_of)
    words[1] = (1 << forms[run_of]).sum()
    arrays = words[HEAD:].reshape(NUM_ARRAYS, capacity)[:, :num_tiles]
    arrays[0], arrays[1], arrays[2] = firsts, np.minimum(firsts + tile_rows[run_of], ends[run_of]), slots[run_of]
    arrays[3] = forms[run_of]
    return num_tiles


def _runs(segments: Sequence[RowSegment], capacity: int) -> NDArray[np.int64]:
    """(start, end, slot, largest rank) of segments and of the gaps between them, [num_runs, 4]."""
    runs: list[tuple[int, int, int, int]] = []
    row = 0
    for segment in segments:
        assert segment.max_rank <= MAX_RANK, f"rank {segment.max_rank}"
        if segment.start > row:
            runs.append((row, segment.start, NONE, 0))
        runs.append((segment.start, segment.end, segment.slot, segment.max_rank))
        row = segment.end
    assert row <= capacity, f"segments reach to row {row}, the step has {capacity}"
    if row < capacity:
        runs.append((row, capacity, NONE, 0))
    return np.array(runs, dtype=np.int64).reshape(-1, 4)
