"""How a command speaks: JSON or text on stdout, progress and trouble on stderr. Knows nothing of adapters."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from cluster.console.errors import ControlError, Refused

COLUMN_GAP = "  "
ESCAPES = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


@dataclass(frozen=True)
class Grid:
    """Rows of text under headers; columns named in `right` hold numbers."""

    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    title: str | None = None
    right: frozenset[str] = field(default_factory=frozenset)


ShowWait = Callable[[str], None]
Advance = Callable[[int], None]


class Output:
    """One command's voice. With `as_json`, nothing but JSON reaches stdout."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.out = Console(highlight=False, markup=False, soft_wrap=True)
        self.err = Console(highlight=False, markup=False, soft_wrap=True, stderr=True)

    def value(self, value: Any, *, compact: bool = False) -> None:
        """One JSON document on one line (indented on a terminal unless `compact`); silent without `--json`."""
        if not self.as_json:
            return
        indent = 2 if self.out.is_terminal and not compact else None
        sys.stdout.write(json.dumps(value, indent=indent, ensure_ascii=False) + "\n")
        sys.stdout.flush()

    def line(self, text: str, style: str | None = None) -> None:
        if not self.as_json:
            self.out.print(text, style=style)

    def grid(self, grid: Grid) -> None:
        if self.as_json:
            return
        grid = replace(grid, rows=[tuple(map(one_line, row)) for row in grid.rows])
        self.out.print(rich_table(grid) if self.out.is_terminal else plain_table(grid))

    def note(self, text: str) -> None:
        self.err.print(text)

    def failure(self, error: ControlError) -> None:
        """One line of what went wrong, every fault below it; with `--json` also an error document."""
        hint = f" ({error.hint})" if error.hint else ""
        faults = error.faults if isinstance(error, Refused) else ()
        message = f"the adapter has {count(len(faults), 'fault')}" if faults else error.message
        self.err.print(Text.assemble(("error: ", "bold red"), one_line(message + hint)))
        for fault in faults:
            advice = f" ({fault.hint})" if fault.hint else ""
            self.err.print(f"  {one_line(fault.code)}: {one_line(fault.message + advice)}")
        self.value({"error": error.as_json()})

    @contextmanager
    def uploading(self, label: str, total_bytes: int) -> Iterator[Advance]:
        """A bar over bytes, on a terminal; elsewhere one line. Yields what to call with each count of bytes."""
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        on_terminal = self.err.is_terminal
        if not on_terminal:
            self.note(f"{label} ({human_bytes(total_bytes)})")
        with Progress(*columns, console=self.err, disable=not on_terminal, transient=True) as progress:
            task = progress.add_task(label, total=total_bytes)
            yield lambda num_bytes: progress.advance(task, num_bytes)

    @contextmanager
    def waiting(self) -> Iterator[ShowWait]:
        """Yield a function that shows what is waited for: a spinner on a terminal, elsewhere a line a change."""
        if self.err.is_terminal:
            with self.err.status("") as status:
                yield lambda message: status.update(one_line(message))
        else:
            yield _LinePerChange(self)


class _LinePerChange:
    def __init__(self, output: Output) -> None:
        self._output = output
        self._last = ""

    def __call__(self, message: str) -> None:
        if message != self._last:
            self._output.note(one_line(message))
        self._last = message


def rich_table(grid: Grid) -> Table:
    table = Table(title=grid.title, box=None, header_style="bold", title_style="bold", title_justify="left")
    for header in grid.headers:
        table.add_column(header, justify="right" if header in grid.right else "left", overflow="fold")
    for row in grid.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def plain_table(grid: Grid) -> str:
    """Columns of spaces, no colour and no wrapping, for pipes and logs."""
    lines = (grid.headers, *grid.rows)
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    aligned = (
        COLUMN_GAP.join(_pad(*cell, grid) for cell in zip(line, widths, grid.headers, strict=True)) for line in lines
    )
    text = "\n".join(line.rstrip() for line in aligned)
    return f"{grid.title}\n{text}" if grid.title else text


def one_line(text: str) -> str:
    """`text` without line breaks, escape codes or other control characters, which a server might have sent."""
    return " ".join(ESCAPES.sub(" ", text).split())


def human_bytes(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def human_age(then_s: float, now_s: float | None = None) -> str:
    """How long ago, in the largest unit that fits: `12 s`, `3 min`, `5 h`, `9 d`."""
    age_s = max(0.0, (time.time() if now_s is None else now_s) - then_s)
    for unit, size_s, limit_s in (("s", 1, 60), ("min", 60, 3600), ("h", 3600, 86400)):
        if age_s < limit_s:
            return f"{age_s // size_s:.0f} {unit}"
    return f"{age_s // 86400:.0f} d"


def count(number: int, noun: str) -> str:
    """`1 fault`, `2 faults`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _pad(cell: str, width: int, header: str, grid: Grid) -> str:
    return cell.rjust(width) if header in grid.right else cell.ljust(width)
