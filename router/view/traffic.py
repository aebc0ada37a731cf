"""Calls by adapter and version: rates and latencies over a window."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from router.view import figures
from router.view.figures import Figure, Key
from router.view.records import VersionTraffic
from router.view.scrape import Buckets
from router.view.window import Window, add, quantile

V = TypeVar("V")
ByVersion = Mapping[Key, float]


@dataclass(frozen=True, slots=True)
class Latency:
    """What was observed of one histogram."""

    bounds: tuple[float, ...]
    by_version: Mapping[Key, Buckets]

    @classmethod
    def of(cls, figure: Figure, window: Window) -> "Latency":
        return cls(figure.metric.buckets, window.buckets(figure))

    def quantiles(self, keys: Iterable[Key]) -> tuple[float | None, float | None]:
        """p50 and p99 over these keys together."""
        together: Buckets | None = None
        for key in keys:
            if key in self.by_version:
                together = add(together, self.by_version[key])
        return quantile(together, self.bounds, 0.5), quantile(together, self.bounds, 0.99)


class Traffic:
    """The calls of every (model, version), read once for all sections. `short` is for rates, `long` for quantiles."""

    def __init__(self, short: Window, long: Window) -> None:
        self.requests = short.values(figures.REQUESTS)
        self.tokens = short.values(figures.TOKENS)
        self.in_flight = short.values(figures.IN_FLIGHT)
        self.requests_per_s = short.rates(figures.REQUESTS)
        self.tokens_per_s = short.rates(figures.TOKENS)
        self._good_per_s = short.rates(figures.GOOD_REQUESTS)
        self._left_per_s = short.rates(figures.LEFT_REQUESTS)
        self.first_token = Latency.of(figures.FIRST_TOKEN, long)
        self.latency = Latency.of(figures.LATENCY, long)
        self.keys: dict[str, list[Key]] = defaultdict(list)
        for key in {**self.requests, **self.in_flight, **self.tokens}:
            self.keys[key[0]].append(key)

    def failures_per_s(self, keys: Iterable[Key]) -> float:
        """Calls that ended with an error, disconnects left out."""
        ended = ((self.requests_per_s, 1), (self._good_per_s, -1), (self._left_per_s, -1))
        return max(0.0, sum(sign * rates.get(key, 0.0) for key in keys for rates, sign in ended))

    def of_version(self, name: str, number: int) -> VersionTraffic:
        key = (name, str(number))
        p50, p99 = self.first_token.quantiles([key])
        return VersionTraffic(
            number=number,
            requests_per_s=self.requests_per_s.get(key, 0.0),
            failures_per_s=self.failures_per_s([key]),
            first_token_p50_s=p50,
            first_token_p99_s=p99,
        )


def total(values: ByVersion, keys: Iterable[Key]) -> float:
    return sum(values.get(key, 0.0) for key in keys)
