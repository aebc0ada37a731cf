"""Which modules an adapter's configuration targets, and which rank and alpha each gets: PEFT's rules, to the letter.

Lists match a whole path or a suffix that begins at a dot; strings are regular expressions over the whole path; the
keys of `rank_pattern` and `alpha_pattern` are regular expressions over a suffix, and the first that matches wins.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from registry.pattern_match import SUFFIX_CLOSE, SUFFIX_OPEN, Pattern, match_all

ALL_LINEAR = "all-linear"
ANY_LAYER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")

Value = TypeVar("Value", int, float)
Names = frozenset[str] | str


@dataclass(frozen=True, slots=True)
class TargetRules:
    """`targets` None means that the file does not say; `layers` None means every layer."""

    targets: Names | None
    excludes: Names = frozenset()
    layers: frozenset[int] | None = None
    layers_patterns: tuple[str, ...] = ()

    def targeted(self, paths: Sequence[str], *, cpu_s: int) -> frozenset[str]:
        """The members of `paths` that the rules select. Raises PatternError."""
        chosen = self._chosen(paths, cpu_s)
        return chosen - _named(self.excludes, paths, cpu_s)

    def _chosen(self, paths: Sequence[str], cpu_s: int) -> frozenset[str]:
        if self.targets is None or (isinstance(self.targets, str) and self.targets.lower() == ALL_LINEAR):
            return frozenset(paths)
        named = _named(self.targets, paths, cpu_s)
        if isinstance(self.targets, str) or not self.layers:
            return named
        exact = named & self.targets
        return exact | self._in_layers(sorted(named - exact), cpu_s)

    def _in_layers(self, paths: Sequence[str], cpu_s: int) -> frozenset[str]:
        """Keep the paths whose layer number, by the first layers pattern that matches, is wanted."""
        regexes = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in self.layers_patterns]
        rows = match_all([Pattern("match", regex) for regex in regexes], paths, cpu_s=cpu_s)
        rows = rows or [[_first_number(path) for path in paths]]
        kept = set()
        for column, path in enumerate(paths):
            index = next((row[column] for row in rows if row[column] is not None), None)
            if index and int(index) in (self.layers or ()):
                kept.add(path)
        return frozenset(kept)


def resolve_pattern(
    values: Mapping[str, Value], default: Value, paths: Sequence[str], *, cpu_s: int
) -> tuple[dict[str, Value], tuple[str, ...]]:
    """The value of each path (first key that matches, else `default`), and the keys that match no path.

    Raises PatternError, whose `index` counts the keys of `values`.
    """
    keys = list(values)
    rows = match_all([Pattern("match", f"{SUFFIX_OPEN}{key}{SUFFIX_CLOSE}") for key in keys], paths, cpu_s=cpu_s)
    resolved = dict.fromkeys(paths, default)
    for key, row in reversed(list(zip(keys, rows, strict=True))):
        resolved.update({path: values[key] for path, hit in zip(paths, row, strict=True) if hit is not None})
    idle = tuple(key for key, row in zip(keys, rows, strict=True) if all(hit is None for hit in row))
    return resolved, idle


def _named(names: Names, paths: Sequence[str], cpu_s: int) -> frozenset[str]:
    if isinstance(names, str):
        (row,) = match_all([Pattern("fullmatch", names)], paths, cpu_s=cpu_s)
        return frozenset(path for path, hit in zip(paths, row, strict=True) if hit is not None)
    return frozenset(path for path in paths if not names.isdisjoint(dotted_suffixes(path)))


def _first_number(path: str) -> str | None:
    found = ANY_LAYER.match(path)
    return found["idx"] if found else None


def dotted_suffixes(path: str) -> list[str]:
    """`a.b.c` -> [`a.b.c`, `b.c`, `c`]."""
    parts = path.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]
