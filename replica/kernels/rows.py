"""Which rows of a step belong to which slot, as one run of int32 words that the kernels read. Knows no weights.

The rows are cut into *tiles*: neighbouring rows of one slot, or of none. Tiles are ordered by falling rank, so that
rank level c (rows of A from 16 c on) concerns the first so many of them. The words of a step with room for `capacity`
rows: a head of `HEAD` words (the number of tiles, the number of rank levels, and from `LEVELS_AT` on how many tiles
each level concerns), then four arrays of `capacity` words: the first row, the end and the slot (`NONE`: base only) of
each tile, and the tile of each row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

HEAD = 32
LEVELS_AT = 4
NUM_ARRAYS = 4
NONE = -1
RANK_BLOCK = 16
MAX_RANK = 256
DECODE_TILE = 16
PROMPT_TILE = 64
MAX_DECODE_ROWS = 512

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


def num_words(capacity: int) -> int:
    """How many int32 words a step with room for `capacity` rows takes."""
    return HEAD + NUM_ARRAYS * capacity


def tile_rows_for(num_rows: int) -> int:
    """Rows a tile: few for decode steps, where a segment has few rows, more for prompts."""
    return DECODE_TILE if num_rows <= MAX_DECODE_ROWS else PROMPT_TILE


def pack_rows(segments: Sequence[RowSegment], capacity: int, out: Words) -> int:
    """Fill `out`, of at least `num_words(capacity)`; returns the number of tiles. Vectorised; writes every word.

    `segments` are in the order of their rows; rows between and after them are base only.
    """
    words = out[: num_words(capacity)]
    words[:HEAD] = 0
    runs = _runs(segments, capacity)
    starts, ends, slots, ranks = runs.T
    assert (starts[1:] == ends[:-1]).all(), "segments are in order and do not overlap"
    assert int(ranks.max()) <= MAX_RANK, f"rank {ranks.max()}"
    tile_rows = tile_rows_for(capacity)
    order = np.argsort(-ranks, kind="stable")
    counts = -(-(ends - starts) // tile_rows)[order]
    run_of = np.repeat(order, counts)
    nth = np.arange(len(run_of)) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = starts[run_of] + nth * tile_rows
    lasts = np.minimum(firsts + tile_rows, ends[run_of])
    num_tiles = len(run_of)
    levels = [int((ranks[run_of] > level).sum()) for level in range(0, int(ranks.max()), RANK_BLOCK)]
    words[0], words[1] = num_tiles, len(levels)
    words[LEVELS_AT : LEVELS_AT + len(levels)] = levels
    arrays = words[HEAD:].reshape(NUM_ARRAYS, capacity)
    arrays[:3, num_tiles:] = NONE
    arrays[0, :num_tiles], arrays[1, :num_tiles], arrays[2, :num_tiles] = firsts, lasts, slots[run_of]
    arrays[3, _rows_of(firsts, lasts)] = np.repeat(np.arange(num_tiles), lasts - firsts)
    return num_tiles


def _rows_of(firsts: NDArray[np.int64], lasts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows of all tiles, tile after tile."""
    lengths = lasts - firsts
    rows: NDArray[np.int64] = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths - firsts, lengths)
    return rows


def _runs(segments: Sequence[RowSegment], capacity: int) -> NDArray[np.int64]:
    """(start, end, slot, largest rank) of segments and of the gaps between them, [num_runs, 4]."""
    runs: list[tuple[int, int, int, int]] = []
    row = 0
    for segment in segments:
        if segment.start > row:
            runs.append((row, segment.start, NONE, 0))
        runs.append((segment.start, segment.end, segment.slot, segment.max_rank))
        row = segment.end
    assert row <= capacity, f"segments end at row {row}, the step has {capacity}"
    if row < capacity:
        runs.append((row, capacity, NONE, 0))
    return np.array(runs, dtype=np.int64).reshape(-1, 4)
