"""One member's Prometheus text as figures. Reads what the view needs and steps over the rest.

Made for a thousand adapters, which are a hundred thousand lines: a line that is not wanted costs one look-up, and the
labels of a line that was there before are known already.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from router.view.figures import FIGURES, Figure, Key

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
KNOWN_LABELS = 1 << 16

Buckets = tuple[float, ...]
"""Cumulative counts, a bound each and the last one without."""


@dataclass(slots=True)
class Reading:
    """The figures of one member at one moment."""

    values: dict[Figure, dict[Key, float]] = field(default_factory=dict)
    buckets: dict[Figure, dict[Key, Buckets]] = field(default_factory=dict)


def _plan(figures: Iterable[Figure]) -> Mapping[str, tuple[Figure, ...]]:
    """The name of a sample -> the figures that it belongs to."""
    plan: dict[str, tuple[Figure, ...]] = {}
    for figure in figures:
        plan[figure.sample_name] = (*plan.get(figure.sample_name, ()), figure)
    return plan


PLAN = _plan(FIGURES)


def read(text: bytes) -> Reading:
    """Parse the text format 0.0.4 as members write it; lines that are something else are left out."""
    reading = Reading()
    counts: dict[Figure, dict[Key, list[float]]] = {}
    for line in text.decode("utf-8", "replace").splitlines():
        name, brace, rest = line.partition("{")
        if not brace:
            name, _, rest = line.partition(" ")
        figures = PLAN.get(name)
        if figures is not None:
            _take(figures, rest, bool(brace), reading, counts)
    for figure, series in counts.items():
        reading.buckets[figure] = {key: tuple(found) for key, found in series.items()}
    return reading


def _take(
    figures: tuple[Figure, ...],
    rest: str,
    has_labels: bool,
    reading: Reading,
    counts: dict[Figure, dict[Key, list[float]]],
) -> None:
    text, _, number = rest.rpartition("} ") if has_labels else ("", "", rest)
    try:
        value = float(number)
    except ValueError:
        return
    if figures[0].has_buckets:
        labels = known_labels(text.rpartition('le="')[0])
        for figure in figures:
            series = counts.setdefault(figure, {}).setdefault(_key(figure, labels), [])
            series.append(value)
        return
    labels = known_labels(text)
    for figure in figures:
        if all(labels.get(name) == wanted for name, wanted in figure.where):
            kept, key = reading.values.setdefault(figure, {}), _key(figure, labels)
            kept[key] = kept.get(key, 0.0) + value


def _key(figure: Figure, labels: Mapping[str, str]) -> Key:
    return tuple([labels.get(name, "") for name in figure.by])


@lru_cache(maxsize=KNOWN_LABELS)
def known_labels(text: str) -> Mapping[str, str]:
    """The labels between the braces of a sample."""
    return {name: _plain(value) for name, value in _LABEL.findall(text)}


def _plain(value: str) -> str:
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], value) if "\\" in value else value
