"""From a batch's segments to the kernels' row segments. Remembers each slot's largest rank; knows no weights."""

from collections.abc import Iterable, Mapping, Sequence

from replica.kernels.rows import RowSegment
from replica.model.batch import LoraPair, LoraSegment


class NoPairs(dict[int, LoraPair]):
    """No pairs at all, of an adapter that says it has rank `max_rank`."""

    def __init__(self, max_rank: int) -> None:
        super().__init__()
        self.max_rank = max_rank


class SegmentRanks:
    """The largest rank of each slot's adapter, looked up again only when the slot holds another mapping of pairs."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Mapping[int, LoraPair], int]] = {}

    def rows(self, segments: Iterable[LoraSegment]) -> list[RowSegment]:
        return [RowSegment(s.start, s.end, s.slot, self._rank(s)) for s in segments]

    def _rank(self, segment: LoraSegment) -> int:
        known = self._known.get(segment.slot)
        if known is None or known[0] is not segment.pairs:
            known = self._known[segment.slot] = (segment.pairs, _max_rank(segment.pairs))
        return known[1]


def largest_rank(segments: Sequence[RowSegment]) -> int:
    """Of all the segments: 1 at least, but 0 where there are none."""
    return max((max(1, segment.max_rank) for segment in segments), default=0)


def _max_rank(pairs: Mapping[int, LoraPair]) -> int:
    """Mappings that know it say it; otherwise each pair is looked at, which makes its views."""
    known: int | None = getattr(pairs, "max_rank", None)
    return max((pair.a.shape[0] for pair in pairs.values()), default=0) if known is None else known
