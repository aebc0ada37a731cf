"""Extents: best fit, and compaction that moves little and never what is fixed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from replica.adapters.extents import Extent, ExtentMap


def fill(*sizes: int, capacity: int) -> ExtentMap:
    extents = ExtentMap(capacity)
    for owner, size in enumerate(sizes):
        assert extents.allocate(owner, size) is not None
    return extents


def test_smallest_hole_that_fits_is_taken() -> None:
    extents = fill(3, 1, 2, 1, 3, capacity=10)
    extents.free(0)
    extents.free(2)
    assert extents.allocate(9, 2) == Extent(4, 2)
    assert extents.allocate(8, 2) == Extent(0, 2)
    assert extents.allocate(7, 2) is None


def test_capacity_of_exactly_one_extent_holds_it_again_and_again() -> None:
    extents = ExtentMap(5)
    for owner in range(3):
        assert extents.allocate(owner, 5) == Extent(0, 5)
        assert extents.allocate(99, 1) is None
        extents.free(owner)


def test_fewest_elements_are_moved() -> None:
    extents = fill(1, 5, 1, 1, 1, 1, capacity=10)
    for owner in (0, 2, 4):
        extents.free(owner)
    moves = extents.plan_moves(2, fixed=())
    assert moves is not None
    assert [(move.owner, move.target.start) for move in moves] == [(3, 6)]


def test_fixed_extent_is_not_moved() -> None:
    extents = fill(1, 1, 1, 1, capacity=4)
    extents.free(0)
    extents.free(2)
    assert extents.plan_moves(2, fixed={1, 3}) is None
    assert extents.plan_moves(2, fixed={3}) is not None


@settings(deadline=None)
@given(st.data())
def test_any_history_keeps_extents_apart_and_compaction_opens_all_free_space(data: st.DataObject) -> None:
    extents = ExtentMap(64)
    for owner in range(data.draw(st.integers(1, 30))):
        extents.allocate(owner, data.draw(st.integers(1, 16)))
        owners = sorted(extents.owners())
        if owners and data.draw(st.booleans()):
            extents.free(data.draw(st.sampled_from(owners)))
        extents.check_integrity()
    if extents.free_size:
        moves = extents.plan_moves(extents.free_size, fixed=())
        assert moves is not None
        for move in moves:
            assert move.target.start < move.source.start
            extents.apply(move)
            extents.check_integrity()
        assert extents.allocate(999, extents.free_size) is not None
        extents.check_integrity()
