"""Values of metrics, a series each, and their text. Knows nothing of which there are.

Made for the step loop and the gateway's loop: a change costs a tenth of what prometheus_client's do, which lock. A
series is changed by one thread, or under a lock of its owner; any thread may read.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

from telemetry.metric import Metric


class Series(Protocol):
    """One series that can say itself."""

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Its samples; `labels` is the text between the braces."""


class Counter:
    """A number that grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def lines(self, name: str, labels: str) -> Iterator[str]:
        yield sample(f"{name}_total", labels, self.value)


class Gauge:
    """A number that goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self) -> None:
        self.value += 1

    def dec(self) -> None:
        self.value -= 1

    def lines(self, name: str, labels: str) -> Iterator[str]:
        yield sample(name, labels, self.value)


class Histogram:
    """Counts by bucket and the sum; a value on a bound belongs below it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Collection[float]) -> None:
        """As `observe` for each of them, at a third of its price where they are many: a search for each bound."""
        ordered, counts, num_below = sorted(values), self.counts, 0
        for place, bound in enumerate(self.bounds):
            end = bisect_right(ordered, bound, num_below)
            counts[place] += end - num_below
            num_below = end
            if end == len(ordered):
                break
        counts[-1] += len(ordered) - num_below
        self.total += sum(ordered)

    def lines(self, name: str, labels: str) -> Iterator[str]:
        sums, before = list(accumulate(self.counts)), f'{name}_bucket{{{labels}{"," if labels else ""}le="'
        yield from (f'{before}{bound}"}} {count}' for bound, count in zip(self.bounds, sums, strict=False))
        yield f'{before}+Inf"}} {sums[-1]}'
        yield sample(f"{name}_sum", labels, self.total)
        yield sample(f"{name}_count", labels, sums[-1])


S = TypeVar("S", bound=Series)


class Family(Generic[S]):
    """The series of one metric, by the values of its labels; `make` gives a fresh one."""

    def __init__(self, metric: Metric, make: Callable[[], S]) -> None:
        self.metric = metric
        self._make = make
        self._series: dict[tuple[str, ...], S] = {}

    def __repr__(self) -> str:
        return f"Family({self.metric.name}, {len(self._series)} series)"

    def labels(self, *values: str) -> S:
        """The series with these values, made when it is not there."""
        series = self._series.get(values)
        if series is None:
            assert len(values) == len(self.metric.labels), self.metric.name
            series = self._series[values] = self._make()
        return series

    def loose(self) -> S:
        """A series that nobody will see."""
        return self._make()

    def remove(self, *values: str) -> None:
        """Drop a series; one that is not there is left alone."""
        self._series.pop(values, None)

    def lines(self) -> Iterator[str]:
        for values, series in list(self._series.items()):
            yield from series.lines(self.metric.name, label_text(self.metric.labels, values))


def sample(name: str, labels: str, value: float) -> str:
    """One line of the text format."""
    return f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"


def label_text(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """What stands between the braces of a sample."""
    return ",".join(f'{name}="{escape(value)}"' for name, value in zip(names, values, strict=True))


def escape(value: str) -> str:
    """A label's value as the text format wants it."""
    if value.isalnum():
        return value
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
