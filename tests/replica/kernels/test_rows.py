"""How a step's rows become tiles and entries."""

import numpy as np
import pytest
import torch

from replica.kernels.rows import (
    HEAD,
    MAX_DECODE_ROWS,
    NONE,
    RowSegment,
    RowsView,
    form_of,
    most_tiles,
    num_words,
    pack_rows,
    rooms_for,
)


def packed(segments: list[RowSegment], capacity: int) -> tuple[int, int, list[tuple[int, ...]]]:
    """(tiles, entries, [(first row, end, slot, form)])."""
    words = np.zeros(num_words(capacity), dtype=np.int32)
    num_tiles = pack_rows(segments, capacity, words)
    tiles = words[HEAD:].reshape(-1, capacity)[:4, :num_tiles].T.tolist()
    assert words[0] == num_tiles
    return num_tiles, int(words[1]), [tuple(tile) for tile in tiles]


@pytest.mark.parametrize(
    ("rank", "form"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2), (32, 2), (33, 3), (64, 3), (65, 4), (256, 5)]
)
def test_form_is_how_often_eight_doubles(rank: int, form: int) -> None:
    assert form_of(rank) == form
    assert packed([RowSegment(0, 1, 0, rank)], 1) == (1, 1 << form, [(0, 1, 0, form)])


def test_tiles_have_the_rows_of_their_form_and_entries_follow_one_another() -> None:
    segments = [RowSegment(1, 13, 0, 8), RowSegment(13, 33, 1, 16), RowSegment(33, 38, 2, 64)]
    assert packed(segments, 40) == (
        7,
        1 + 2 + 4 + 8 + 1,
        [
            (0, 1, NONE, 0),
            (1, 9, 0, 0),
            (9, 13, 0, 0),
            (13, 29, 1, 1),
            (29, 33, 1, 1),
            (33, 38, 2, 3),
            (38, 40, NONE, 0),
        ],
    )


def test_a_step_of_many_rows_has_an_entry_a_tile() -> None:
    rows = MAX_DECODE_ROWS + 100
    num_tiles, num_entries, tiles = packed([RowSegment(0, 100, 3, 64)], rows)
    assert num_tiles == num_entries == len(tiles)
    assert {tile[3] for tile in tiles} == {0}


@pytest.mark.parametrize("capacity", [3, MAX_DECODE_ROWS + 1])
def test_entries_are_never_more_than_the_view_has_room_for(capacity: int) -> None:
    for rank in (1, 8, 16, 31, 100, 256):
        num_tiles, num_entries, _ = packed([RowSegment(0, capacity, 0, rank)], capacity)
        assert num_entries <= RowsView(torch.empty(0), capacity, num_tiles, rank).max_entries


@pytest.mark.parametrize("num_rows", [1, 7, 64, MAX_DECODE_ROWS, MAX_DECODE_ROWS + 1, 2048])
def test_a_recording_has_room_for_the_tiles_of_any_step(num_rows: int) -> None:
    """One segment of any rank, with gaps before and after; and base rows alone."""
    for rank in (1, 8, 9, 16, 64, 256):
        for segments in ([], [RowSegment(0, num_rows, 0, rank)], [RowSegment(num_rows // 3, num_rows // 2, 0, rank)]):
            num_tiles, _, _ = packed(segments, num_rows)
            assert num_tiles <= most_tiles(num_rows, max_segments=max(1, len(segments)))


@pytest.mark.parametrize(
    ("max_rank", "rooms"), [(0, (0,)), (8, (0, 8)), (16, (0, 16)), (17, (0, 16, 17)), (128, (0, 16, 128))]
)
def test_there_is_room_for_no_adapters_for_small_ranks_and_for_the_largest(
    max_rank: int, rooms: tuple[int, ...]
) -> None:
    assert rooms_for(max_rank) == rooms
