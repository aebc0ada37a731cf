"""Runs regular expressions that came with an upload, exactly as Python's `re` does, within a bound of time.

A pattern can take exponential time, and `re` cannot be interrupted. So whatever is not evidently cheap runs in a child
process whose processor time is limited.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MAX_PATTERN_CHARS = 1000
MAX_CHEAP_MATCHES = 200_000
WALL_CLOCK_FACTOR = 20

SUFFIX_OPEN, SUFFIX_CLOSE = r"(.*\.)?(", ")$"
"""What PEFT puts around a key of `rank_pattern`: it matches a whole path or the part after a dot."""

_PLAIN = r"\^?[A-Za-z0-9_.\-]*\$?"
_CHEAP = re.compile(rf"{_PLAIN}|{re.escape(SUFFIX_OPEN)}{_PLAIN}{re.escape(SUFFIX_CLOSE)}")

_CHILD = """
import json, re, resource, sys
task = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (task["cpu_s"], task["cpu_s"] + 1))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
rows = []
for index, (mode, pattern) in enumerate(task["patterns"]):
    try:
        found = [getattr(re.compile(pattern), mode)(path) for path in task["paths"]]
    except Exception as error:
        print(json.dumps({"bad": index, "why": str(error)}))
        sys.exit()
    rows.append([None if m is None else m.groupdict().get("idx") or "" for m in found])
print(json.dumps({"rows": rows}))
"""


class PatternError(ValueError):
    """A pattern does not compile or takes too long; `index` says which of them, if that is known."""

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression and the method of `re` that applies it. A group named `idx` is reported."""

    mode: Literal["match", "fullmatch"]
    regex: str


def match_all(patterns: Sequence[Pattern], paths: Sequence[str], *, cpu_s: int) -> list[list[str | None]]:
    """For every pattern, one entry a path: None when it does not match, else its `idx` group or "".

    Raises PatternError when a pattern is too long, invalid, or all of them together take over `cpu_s`.
    """
    for index, pattern in enumerate(patterns):
        if len(pattern.regex) > MAX_PATTERN_CHARS:
            raise PatternError(f"longer than {MAX_PATTERN_CHARS} characters", index)
    if not patterns or not paths:
        return [[None] * len(paths) for _ in patterns]
    cheap = len(patterns) * len(paths) <= MAX_CHEAP_MATCHES and all(_CHEAP.fullmatch(p.regex) for p in patterns)
    return _match_here(patterns, paths) if cheap else _match_in_child(patterns, paths, cpu_s)


def _match_here(patterns: Sequence[Pattern], paths: Sequence[str]) -> list[list[str | None]]:
    rows: list[list[str | None]] = []
    for pattern in patterns:
        apply = getattr(re.compile(pattern.regex), pattern.mode)
        rows.append([None if apply(path) is None else "" for path in paths])
    return rows


def _match_in_child(patterns: Sequence[Pattern], paths: Sequence[str], cpu_s: int) -> list[list[str | None]]:
    task = {"cpu_s": cpu_s, "patterns": [[p.mode, p.regex] for p in patterns], "paths": list(paths)}
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            timeout=cpu_s * WALL_CLOCK_FACTOR,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PatternError(f"takes over {cpu_s} s to match") from error
    if child.returncode != 0:
        raise PatternError(f"takes over {cpu_s} s to match")
    answer = json.loads(child.stdout)
    if "bad" in answer:
        raise PatternError(f"not a valid regular expression: {answer['why']}", answer["bad"])
    rows: list[list[str | None]] = answer["rows"]
    return rows
