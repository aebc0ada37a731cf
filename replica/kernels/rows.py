"""Which rows of a step belong to which slot, as one run of int32 words that the kernels read. Knows no weights.

The words of a step with room for `capacity` rows, in order: a head of `HEAD` words (number of segments, number of rank
levels, number of tiles, then for each rank level how many segments reach it), and seven arrays of `capacity` words:
the start, end and slot of each segment; the segment and the slot of each row (-1: base only); the segment and the
first row of each tile. Segments are ordered by falling rank, so that level c concerns the first `levels[c]` of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

RANK_BLOCK = 16
"""A rank level is this many rows of A: level c holds the rows from 16 c on."""

MAX_RANK = 256
LEVELS_AT = 4
HEAD = 32
NUM_ARRAYS = 7
NONE = -1

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

    `capacity` is the number of rows there is room for, `num_tiles` how many tiles to launch (a captured graph takes
    `capacity`, whatever the step turns out to be), `max_rank` an upper bound for the step's ranks.
    """

    words: torch.Tensor
    capacity: int
    tile_rows: int
    num_tiles: int
    max_rank: int


def num_words(capacity: int) -> int:
    """How many int32 words a step with room for `capacity` rows takes."""
    return HEAD + NUM_ARRAYS * capacity


def tile_rows_for(num_rows: int) -> int:
    """Rows a tile: small ones for decode steps, where a segment has few rows, large ones for prompts."""
    return 16 if num_rows <= 512 else 64


def pack_rows(segments: Sequence[RowSegment], capacity: int, out: Words) -> int:
    """Fill `out`, of at least `num_words(capacity)`; returns the number of tiles. Vectorised; writes every word."""
    words = out[: num_words(capacity)]
    words[:HEAD] = 0
    arrays = words[HEAD:].reshape(NUM_ARRAYS, capacity)
    arrays[:] = NONE
    if not segments:
        return 0
    table = np.array([(s.start, s.end, s.slot, s.max_rank) for s in segments], dtype=np.int64)
    table = table[np.argsort(-table[:, 3], kind="stable")]
    num_segments, (starts, ends, slots, ranks) = len(table), table.T
    assert starts.min() >= 0, "a segment begins before the step"
    assert ends.max() <= capacity, "a segment ends beyond the step"
    assert ranks.max() <= MAX_RANK, f"rank {ranks.max()}"
    arrays[0, :num_segments], arrays[1, :num_segments], arrays[2, :num_segments] = starts, ends, slots
    _pack_rows_of(arrays, starts, ends, slots)
    num_tiles = _pack_tiles(arrays, starts, ends, tile_rows_for(capacity))
    levels = [int((ranks > level * RANK_BLOCK).sum()) for level in range(-(-int(ranks.max()) // RANK_BLOCK))]
    words[:3] = num_segments, len(levels), num_tiles
    words[LEVELS_AT : LEVELS_AT + len(levels)] = levels
    return num_tiles


def _pack_rows_of(arrays: Words, starts: NDArray[np.int64], ends: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
    lengths = ends - starts
    segment_of = np.repeat(np.arange(len(starts)), lengths)
    rows = np.arange(len(segment_of)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + starts[segment_of]
    arrays[3, rows] = segment_of
    arrays[4, rows] = slots[segment_of]


def _pack_tiles(arrays: Words, starts: NDArray[np.int64], ends: NDArray[np.int64], tile_rows: int) -> int:
    counts = -(-(ends - starts) // tile_rows)
    segment_of = np.repeat(np.arange(len(starts)), counts)
    nth = np.arange(len(segment_of)) - np.repeat(np.cumsum(counts) - counts, counts)
    arrays[5, : len(segment_of)] = segment_of
    arrays[6, : len(segment_of)] = starts[segment_of] + nth * tile_rows
    return len(segment_of)
