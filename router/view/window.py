"""What changed between scrapes: rates and quantiles over a sliding window. Pure; time comes with every scrape."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from router.view.figures import Figure, Key
from router.view.scrape import Buckets, Reading


class Sample(NamedTuple):
    """All members at one moment of a monotonic clock."""

    at_s: float
    readings: Mapping[str, Reading]


class Samples:
    """The scrapes of the last `long_s` seconds; those older than `short_s` are thinned, so that few are kept."""

    def __init__(self, short_s: float, long_s: float, *, thinned_s: float = 10.0) -> None:
        self._short_s, self._long_s, self._thinned_s = short_s, long_s, thinned_s
        self._kept: list[Sample] = []

    def __repr__(self) -> str:
        return f"Samples({len(self._kept)} kept)"

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, sample: Sample) -> None:
        """Take the newest scrape, and let go what no window needs any more."""
        recent = [one for one in self._kept if sample.at_s - one.at_s <= self._long_s]
        self._kept = [*self._thinned(recent, sample.at_s), sample]

    def _thinned(self, samples: Sequence[Sample], now_s: float) -> list[Sample]:
        kept: list[Sample] = []
        for index, one in enumerate(samples):
            is_young = now_s - one.at_s <= self._short_s + self._thinned_s
            gap_s = samples[min(index + 1, len(samples) - 1)].at_s - (kept[-1].at_s if kept else float("-inf"))
            if is_young or gap_s > self._thinned_s:
                kept.append(one)
        return kept

    def short(self) -> "Window":
        return self._window(self._short_s)

    def long(self) -> "Window":
        return self._window(self._long_s)

    def _window(self, span_s: float) -> "Window":
        last = self._kept[-1]
        return Window([one for one in self._kept if last.at_s - one.at_s <= span_s])


class Window:
    """Some scrapes in order of time, at least one. A counter that went down began anew."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.last = samples[-1]
        self.span_s = self.last.at_s - samples[0].at_s
        self._before: dict[str, tuple[float, Reading]] = {}
        for at_s, readings in reversed(samples[:-1]):
            self._before.update({name: (at_s, reading) for name, reading in readings.items()})

    def has(self, instance: str) -> bool:
        """Whether the member answered the last scrape."""
        return instance in self.last.readings

    def num_members(self, figure: Figure) -> int:
        """How many members have told this."""
        return sum(figure in reading.values for reading in self.last.readings.values())

    def values(self, figure: Figure, instance: str | None = None) -> dict[Key, float]:
        """What it is now, over all members or of one."""
        found: dict[Key, float] = defaultdict(float)
        for reading in self._now(instance).values():
            for key, value in reading.values.get(figure, {}).items():
                found[key] += value
        return dict(found)

    def value(self, figure: Figure, instance: str | None = None) -> float:
        return sum(self.values(figure, instance).values())

    def rates(self, figure: Figure, instance: str | None = None) -> dict[Key, float]:
        """Growth a second; a member that was not there before adds nothing yet."""
        found: dict[Key, float] = defaultdict(float)
        for name, reading in self._now(instance).items():
            at_s, before = self._before.get(name, (None, None))
            if at_s is None or before is None:
                continue
            old = before.values.get(figure, {})
            for key, value in reading.values.get(figure, {}).items():
                found[key] += _grown(old.get(key, 0.0), value) / self._since_s(at_s)
        return dict(found)

    def rate(self, figure: Figure, instance: str | None = None) -> float:
        return sum(self.rates(figure, instance).values())

    def buckets(self, figure: Figure, instance: str | None = None) -> dict[Key, Buckets]:
        """What was observed within the window, by bucket, cumulative."""
        found: dict[Key, Buckets] = {}
        for name, reading in self._now(instance).items():
            if name not in self._before:
                continue
            old = self._before[name][1].buckets.get(figure, {})
            for key, now in reading.buckets.get(figure, {}).items():
                grown = _grown_buckets(old.get(key), now)
                if grown[-1]:
                    found[key] = add(found.get(key), grown)
        return found

    def _since_s(self, at_s: float) -> float:
        """Seconds from a scrape to the last one, never zero."""
        return max(self.last.at_s - at_s, 1e-9)

    def _now(self, instance: str | None) -> Mapping[str, Reading]:
        if instance is None:
            return self.last.readings
        return {instance: self.last.readings[instance]} if self.has(instance) else {}


def _grown(old: float, new: float) -> float:
    return new - old if new >= old else new


def _grown_buckets(old: Buckets | None, new: Buckets) -> Buckets:
    if old is None or old[-1] > new[-1] or len(old) != len(new):
        return new
    return tuple([after - before for after, before in zip(new, old, strict=True)])


def add(some: Buckets | None, more: Buckets) -> Buckets:
    return more if some is None else tuple([a + b for a, b in zip(some, more, strict=True)])


def quantile(counts: Buckets | None, bounds: tuple[float, ...], q: float) -> float | None:
    """As Prometheus' histogram_quantile: linear within a bucket, the highest bound for what is above it.

    None when nothing was observed.
    """
    if counts is None or not counts[-1]:
        return None
    rank = q * counts[-1]
    for index, (below, count) in enumerate(pairwise((0.0, *counts))):
        if count >= rank and count > below:
            if index >= len(bounds):
                return bounds[-1]
            low = bounds[index - 1] if index else 0.0
            return low + (bounds[index] - low) * (rank - below) / (count - below)
    return bounds[-1]
