"""Which stretches of a line of memory are in use, and by whom. Pure bookkeeping: no memory is touched here."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    """A stretch [start, end) of `size` elements."""

    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class Move:
    """Bring the extent of `owner` down from `source` to `target`. Moves of one plan are made in order."""

    owner: int
    source: Extent
    target: Extent


class ExtentMap:
    """Extents of [0, capacity), one an owner, each in the smallest hole that takes it (best fit)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free_size = capacity
        self._extents: dict[int, Extent] = {}

    def __repr__(self) -> str:
        return f"ExtentMap({len(self._extents)} extents, {self.free_size} of {self.capacity} free)"

    def __getitem__(self, owner: int) -> Extent:
        return self._extents[owner]

    def allocate(self, owner: int, size: int) -> Extent | None:
        """Give `owner` an extent, or None when no hole is large enough."""
        assert owner not in self._extents, owner
        if size > self.free_size:
            return None
        hole = min((hole for hole in self.holes() if hole.size >= size), key=lambda hole: hole.size, default=None)
        if hole is None:
            return None
        self._extents[owner] = Extent(hole.start, size)
        self.free_size -= size
        return self._extents[owner]

    def free(self, owner: int) -> None:
        self.free_size += self._extents.pop(owner).size

    def holes(self) -> list[Extent]:
        """The free stretches between, before and after the extents, in order; some may be of size 0."""
        found, start = [], 0
        for extent in self._in_order():
            found.append(Extent(start, extent.start - start))
            start = extent.end
        return [*found, Extent(start, self.capacity - start)]

    def plan_moves(self, size: int, fixed: Collection[int]) -> list[Move] | None:
        """The moves that open a hole of `size`, the fewest elements moved; None when `fixed` owners stand in the way.

        Neighbours are pushed down against each other, so the holes between them become one hole above them.
        """
        owners = sorted(self._extents, key=lambda owner: self._extents[owner].start)
        holes = self.holes()
        best: tuple[int, int, int] | None = None
        for first in range(len(owners) + 1):
            last = self._first_window(owners, holes, first, size, fixed)
            if last is None:
                continue
            cost = sum(self._extents[owner].size for owner in owners[first:last])
            best = min(best or (cost, first, last), (cost, first, last))
        return None if best is None else self._push_down(owners[best[1] : best[2]], holes[best[1]].start)

    def apply(self, move: Move) -> None:
        assert self._extents[move.owner] == move.source, move
        self._extents[move.owner] = move.target

    def check_integrity(self) -> None:
        """Extents lie inside, do not overlap, and with the free space make up the whole."""
        end = 0
        for extent in self._in_order():
            assert extent.start >= end, f"extents overlap at {extent.start}"
            end = extent.end
        assert end <= self.capacity, repr(self)
        used = sum(extent.size for extent in self._extents.values())
        assert used + self.free_size == self.capacity, repr(self)

    def owners(self) -> set[int]:
        return set(self._extents)

    def _in_order(self) -> list[Extent]:
        return sorted(self._extents.values(), key=lambda extent: extent.start)

    def _first_window(
        self, owners: list[int], holes: list[Extent], first: int, size: int, fixed: Collection[int]
    ) -> int | None:
        """The smallest `last` so that owners[first:last], pushed together, leave a hole of `size`."""
        room = holes[first].size
        last = first
        while room < size:
            if last == len(owners) or owners[last] in fixed:
                return None
            last += 1
            room += holes[last].size
        return last

    def _push_down(self, owners: list[int], start: int) -> list[Move]:
        moves = []
        for owner in owners:
            source = self._extents[owner]
            if source.start != start:
                moves.append(Move(owner, source, Extent(start, source.size)))
            start += source.size
        return moves
