"""Which resident adapter to give up: recency, frequency and the cost of having it again. Pure.

GreedyDual-Size-Frequency (Cherkasova, HP Labs 1998): priority = inflation + frequency * cost / size, where inflation
is the priority of the last victim, so that what is not used again ages. Frequency counts uses with a half-life, and
is remembered for a while after an eviction: a regular that comes back is not taken for a stranger.
"""

from collections import OrderedDict
from collections.abc import Iterable

_MIN_COST, _MAX_COST = 0.25, 4.0
_SMOOTHING = 0.25


class _Record:
    __slots__ = ("cost", "last_use", "num_uses", "priority")

    def __init__(self) -> None:
        self.num_uses = 0.0
        self.last_use = 0
        self.cost = 1.0
        self.priority = 0.0


class GreedyDualPolicy:
    """Remembers the last `num_remembered` adapters that were used; a use loses half its weight in `half_life` uses."""

    def __init__(self, num_remembered: int, half_life: int) -> None:
        self._num_remembered = num_remembered
        self._half_life = half_life
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._inflation = 0.0
        self._num_uses = 0
        self._mean_cost: float | None = None

    def use(self, digest: str) -> None:
        """Count a use, of a resident adapter or of one that is about to be."""
        self._num_uses += 1
        record = self._records.setdefault(digest, _Record())
        record.num_uses = 1 + record.num_uses * 0.5 ** ((self._num_uses - record.last_use) / self._half_life)
        record.last_use = self._num_uses
        record.priority = self._inflation + record.num_uses * record.cost
        self._records.move_to_end(digest)
        while len(self._records) > self._num_remembered:
            self._records.popitem(last=False)

    def loaded(self, digest: str, num_bytes: int, seconds: float) -> None:
        """Learn what having this adapter again costs: seconds a byte of room, against the mean of all loads."""
        record = self._records.get(digest)
        if record is None:
            return
        cost = seconds / num_bytes
        mean = self._mean_cost or cost
        self._mean_cost = mean + _SMOOTHING * (cost - mean)
        record.cost = min(max(cost / mean, _MIN_COST), _MAX_COST) if mean > 0 else 1.0
        record.priority = self._inflation + record.num_uses * record.cost

    def victim(self, candidates: Iterable[str]) -> str:
        """The candidate that is cheapest to give up; the least recently used among equals."""
        return min(candidates, key=self.rank)

    def rank(self, digest: str) -> tuple[float, int]:
        """Sorts candidates, the first victim first."""
        record = self._records.get(digest)
        return (record.priority, record.last_use) if record else (0.0, 0)

    def evicted(self, digest: str) -> None:
        """Age what stays: later uses start from the priority of what just left."""
        self._inflation = max(self._inflation, self.rank(digest)[0])

    def forget(self, digest: str) -> None:
        self._records.pop(digest, None)
