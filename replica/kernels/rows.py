"""Which rows of a step belong to which slot, as one run of int32 words that the kernels read. Knows no weights.

The rows are cut into *tiles*: neighbouring rows of one slot, or of none; every row lies in exactly one. The words of a
step with room for `capacity` rows: a head of `HEAD` words, the first of which is the number of tiles, then three arrays
of `capacity` words: the first row, the end and the slot (`NONE`: base only) of each tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

HEAD = 4
NUM_ARRAYS = 3
NONE = -1
MAX_RANK = 256
DECODE_TILE = 16
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
    def tile_rows(self) -> int:
        return tile_rows_for(self.capacity)

    @property
    def rank_block(self) -> int:
        """Rows of A that a program takes at a time: 16, which matrix units want at least, or more for prompts."""
        if self.capacity <= MAX_DECODE_ROWS or self.max_rank <= 16:
            return 16
        return 32 if self.max_rank <= 32 else 64


def num_words(capacity: int) -> int:
    """How many int32 words a step with room for `capacity` rows takes."""
    return HEAD + NUM_ARRAYS * capacity


def most_tiles(num_rows: int, max_segments: int) -> int:
    """An upper bound of the tiles of a step of `num_rows` rows: segments, gaps between them, and full tiles."""
    return min(num_rows, num_rows // tile_rows_for(num_rows) + 2 * max_segments + 1)


def tile_rows_for(num_rows: int) -> int:
    """Rows a tile: few for decode steps, where a segment has few rows, more for prompts."""
    return DECODE_TILE if num_rows <= MAX_DECODE_ROWS else PROMPT_TILE


def pack_rows(segments: Sequence[RowSegment], capacity: int, out: Words) -> int:
    """Fill `out`, of at least `num_words(capacity)`; returns the number of tiles. Vectorised; writes every word.

    `segments` are in the order of their rows; rows between and after them are base only.
    """
    words = out[: num_words(capacity)]
    words[:] = NONE
    starts, ends, slots = _runs(segments, capacity).T
    assert (starts[1:] == ends[:-1]).all(), "segments are in order and do not overlap"
    tile_rows = tile_rows_for(capacity)
    counts = -(-(ends - starts) // tile_rows)
    run_of = np.repeat(np.arange(len(starts)), counts)
    nth = np.arange(len(run_of)) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = starts[run_of] + nth * tile_rows
    words[0] = num_tiles = len(run_of)
    arrays = words[HEAD:].reshape(NUM_ARRAYS, capacity)[:, :num_tiles]
    arrays[0], arrays[1], arrays[2] = firsts, np.minimum(firsts + tile_rows, ends[run_of]), slots[run_of]
    return num_tiles


def _runs(segments: Sequence[RowSegment], capacity: int) -> NDArray[np.int64]:
    """(start, end, slot) of segments and of the gaps between them, [num_runs, 3]."""
    runs: list[tuple[int, int, int]] = []
    row = 0
    for segment in segments:
        assert segment.max_rank <= MAX_RANK, f"rank {segment.max_rank}"
        if segment.start > row:
            runs.append((row, segment.start, NONE))
        runs.append((segment.start, segment.end, segment.slot))
        row = segment.end
    assert row <= capacity, f"segments reach to row {row}, the step has {capacity}"
    if row < capacity:
        runs.append((row, capacity, NONE))
    return np.array(runs, dtype=np.int64).reshape(-1, 3)
