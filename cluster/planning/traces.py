"""Workloads from a file of requests: CSV with a header, `at_s,adapter` and, if known, `prompt_tokens,output_tokens`."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from cluster.planning.workloads import Workload

MAX_REQUESTS = 20_000
"""Longer traces are planned for by their busiest stretch of this many requests."""


class BadTrace(ValueError):
    """The file is no trace; the message names line and column."""


def read_trace(path: Path, prompt_tokens: int, output_tokens: int) -> Workload:
    """The requests of `path`, by time; the two counts stand in where the file has none. Raises BadTrace."""
    rows = sorted(_rows(path, prompt_tokens, output_tokens))
    if len(rows) < 2 or rows[-1][0] <= rows[0][0]:
        raise BadTrace(f"{path}: at least two requests at different times are needed, there are {len(rows)}")
    rows = _busiest(rows)
    index = {name: number for number, name in enumerate(sorted({name for _, name, _, _ in rows}))}
    at_s = np.array([row[0] for row in rows]) - rows[0][0]
    adapters, prompts, outputs = (
        np.array(column, dtype=np.int64)
        for column in ([index[row[1]] for row in rows], [row[2] for row in rows], [row[3] for row in rows])
    )
    return Workload(path.name, len(index), at_s, adapters, prompts, outputs)


def _rows(path: Path, prompt_tokens: int, output_tokens: int) -> Iterator[tuple[float, str, int, int]]:
    try:
        with path.open(newline="") as file:
            lines = csv.DictReader(file)
            missing = {"at_s", "adapter"} - set(lines.fieldnames or ())
            if missing:
                raise BadTrace(f"{path}: the header lacks {', '.join(sorted(missing))}")
            for line in lines:
                where = f"{path}, line {lines.line_num}"
                prompt = _number(line, "prompt_tokens", where, prompt_tokens)
                output = _number(line, "output_tokens", where, output_tokens)
                yield _number(line, "at_s", where), _name(line, where), max(1, int(prompt)), max(1, int(output))
    except (OSError, UnicodeDecodeError) as error:
        raise BadTrace(f"{path}: {error}") from None


def _name(line: Mapping[str, str | None], where: str) -> str:
    name = line.get("adapter")
    if not name:
        raise BadTrace(f"{where}: adapter is empty")
    return name


def _number(line: Mapping[str, str | None], column: str, where: str, default: float | None = None) -> float:
    text = line.get(column)
    if not text and default is not None:
        return default
    try:
        number = float(text or "")
    except ValueError:
        raise BadTrace(f"{where}: {column} is {text!r}, no number") from None
    if not 0 <= number < float("inf"):
        raise BadTrace(f"{where}: {column} is {text}; allowed: >= 0")
    return number


def _busiest(rows: list[tuple[float, str, int, int]]) -> list[tuple[float, str, int, int]]:
    """The stretch of MAX_REQUESTS requests that took the least time."""
    last = len(rows) - MAX_REQUESTS
    if last <= 0:
        return rows
    start = min(range(last + 1), key=lambda first: rows[first + MAX_REQUESTS - 1][0] - rows[first][0])
    return rows[start : start + MAX_REQUESTS]
