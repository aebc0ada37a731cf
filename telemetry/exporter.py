"""The metrics of one process: families from its catalogue, what is read at scrape time, and the text of all."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from telemetry.metric import Metric
from telemetry.series import Counter, Family, Gauge, Histogram, S, label_text, sample


class Reading(NamedTuple):
    """A value of this moment, of a counter or gauge that its owner keeps anyway; `values` are those of its labels."""

    metric: Metric
    value: float
    values: tuple[str, ...] = ()


Reader = Callable[[], Iterable[Reading]]


class Exporter:
    """Gives out the families of its catalogue, and no others, and renders them in the catalogue's order."""

    def __init__(self, catalogue: Iterable[Metric]) -> None:
        self.catalogue = tuple(catalogue)
        self._families: dict[str, Family[Any]] = {}
        self._readers: list[Reader] = []

    def __repr__(self) -> str:
        return f"Exporter({len(self._families)} families, {len(self._readers)} readers)"

    def counter(self, metric: Metric) -> Family[Counter]:
        return self._keep(metric, Family(metric, Counter))

    def gauge(self, metric: Metric) -> Family[Gauge]:
        return self._keep(metric, Family(metric, Gauge))

    def histogram(self, metric: Metric) -> Family[Histogram]:
        return self._keep(metric, Family(metric, lambda: Histogram(metric.buckets)))

    def watch(self, reader: Reader) -> None:
        """Ask `reader` for its values whenever the metrics are rendered."""
        self._readers.append(reader)

    def render(self) -> bytes:
        """Prometheus' text format 0.0.4; metrics without a sample are left out. Any thread may call it."""
        lines = {metric: self._family_lines(metric) for metric in self.catalogue}
        for reader in self._readers:
            for metric, value, values in reader():
                lines[metric].append(sample(metric.sample_names[0], label_text(metric.labels, values), value))
        text = "\n".join(line for metric, found in lines.items() if found for line in (*_head(metric), *found))
        return (text + "\n").encode() if text else b""

    def _family_lines(self, metric: Metric) -> list[str]:
        family = self._families.get(metric.name)
        return [] if family is None else list(family.lines())

    def _keep(self, metric: Metric, family: Family[S]) -> Family[S]:
        assert metric in self.catalogue, f"{metric.name} is not in the catalogue"
        assert metric.name not in self._families, f"{metric.name} has an owner"
        self._families[metric.name] = family
        return family


def _head(metric: Metric) -> Iterator[str]:
    yield f"# HELP {metric.shown_name} {metric.text}"
    yield f"# TYPE {metric.shown_name} {metric.kind}"
