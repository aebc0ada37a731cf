"""What a metric is: name, type, labels and unit, decided once. Knows no values."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of series. `text` is its meaning, `unit` what one of it is; a histogram has the bounds `buckets`."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    text: str
    buckets: tuple[float, ...] = ()

    @property
    def shown_name(self) -> str:
        """The name as queries use it; a histogram's without its suffixes."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names of its samples in Prometheus' text format."""
        return tuple(self.name + suffix for suffix in SUFFIXES[self.kind])


def counter(name: str, unit: str, text: str, *labels: str) -> Metric:
    """A count that only grows. `name` comes without the prefix and without `_total`."""
    return Metric(f"lorafleet_{name}", "counter", labels, unit, text)


def gauge(name: str, unit: str, text: str, *labels: str) -> Metric:
    """What is so at this moment."""
    return Metric(f"lorafleet_{name}", "gauge", labels, unit, text)


def histogram(name: str, unit: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    """How values spread over `buckets`, upper bounds in ascending order."""
    assert list(buckets) == sorted(set(buckets)), name
    return Metric(f"lorafleet_{name}", "histogram", labels, unit, text, buckets)
