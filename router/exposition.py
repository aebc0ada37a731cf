"""Merges Prometheus text from several processes into one valid exposition, each sample under its `instance`.

Works on lines (format 0.0.4), and on each line as little as it can: a thousand adapters are a hundred thousand samples,
and parsing them into objects would cost a hundred times more.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from telemetry.series import escape

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_OWN_INSTANCE = re.compile(r"(^|,)instance=")
_SUFFIXES = ("_bucket", "_count", "_sum", "_total", "_created", "_info")


@dataclass(slots=True)
class _Family:
    """One metric family: its comment lines once, its samples from everywhere."""

    comments: dict[str, str] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


def merge_expositions(parts: Mapping[str, bytes]) -> bytes:
    """One exposition of all `parts` (instance -> text). The first instance's HELP and TYPE win."""
    families: dict[str, _Family] = {}
    for instance, text in parts.items():
        _Part(instance, families).take(text)
    lines = [
        line for family in families.values() if family.samples for line in (*family.comments.values(), *family.samples)
    ]
    return ("\n".join(lines) + "\n").encode() if lines else b""


class _Part:
    """One member's text on its way into the families of all."""

    def __init__(self, instance: str, families: dict[str, _Family]) -> None:
        self._label = f'instance="{escape(instance)}"'
        self._families = families
        self._declared: set[str] = set()
        self._samples: dict[str, list[str] | None] = {}
        """A sample's name -> where its lines go; None when it is no name."""

    def take(self, text: bytes) -> None:
        for line in text.decode("utf-8", "replace").splitlines():
            if not line.startswith("#"):
                self._sample(line)
            elif line.startswith(("# HELP ", "# TYPE ")):
                self._comment(line)

    def _comment(self, line: str) -> None:
        _, kind, name, *_ = line.split(" ", 3)
        self._declared.add(name)
        self._families.setdefault(name, _Family()).comments.setdefault(kind, line)

    def _sample(self, line: str) -> None:
        name, brace, rest = line.partition("{")
        if not brace:
            name, _, rest = line.partition(" ")
            rest = "} " + rest
        samples = self._samples[name] if name in self._samples else self._place_of(name)
        if samples is None or "} " not in rest:
            return
        if "instance=" in rest:
            labels, end, value = rest.rpartition("} ")
            rest = _OWN_INSTANCE.sub(r"\1exported_instance=", labels) + end + value
        comma = "" if rest.startswith("}") else ","
        samples.append(f"{name}{{{self._label}{comma}{rest}")

    def _place_of(self, name: str) -> list[str] | None:
        """Where the lines of a name go that this part has not had yet."""
        samples = None
        if _NAME.fullmatch(name):
            samples = self._families.setdefault(self._family_name(name), _Family()).samples
        self._samples[name] = samples
        return samples

    def _family_name(self, sample: str) -> str:
        """The declared family of a sample: its own name, or without the suffix of a histogram or counter."""
        if sample in self._declared:
            return sample
        stems = (sample.removesuffix(suffix) for suffix in _SUFFIXES if sample.endswith(suffix))
        return next((stem for stem in stems if stem in self._declared), sample)
