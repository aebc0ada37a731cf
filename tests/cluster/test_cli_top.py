"""`lorafleet top`: the tables that the fleet's report ends in, printed once and drawn on a terminal."""

import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import pytest

from cluster.console.top import frame_grids, title
from router.view.records import AdapterTable, FleetReport
from tests.cluster.cli_harness import Cli
from tests.cluster.fake_control import FakeFleet, serving
from tests.fleet_reports import adapter_row, fleet_report, replica_view

ROOT = Path(__file__).parent.parent.parent
ROWS, COLUMNS = 24, 120


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


@pytest.fixture
def url(fleet: FakeFleet) -> Iterator[str]:
    with serving(fleet) as found:
        yield found


@pytest.fixture
def cli(url: str, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(url, capsys)


def test_tables_say_who_is_where_and_a_dash_where_a_replica_does_not_answer() -> None:
    replicas, tenants, adapters = frame_grids(fleet_report())
    assert replicas.rows[0] == ("0", "replica-0", "█↓··", "2/4", "2", "2", "3", "25%", "42", "0.50", "90%")
    assert replicas.rows[1][:5] == ("1", "replica-1", "█↓··", "2/4", "2")
    assert set(replicas.rows[1][5:]) == {"-"}
    assert tenants.rows == [("globex", "41", "82%", "0%", "0.0", "0 ms", "3.2 s")]
    assert adapters.rows == [("legal@2", "0", "11", "0.0", "0", "0 ms", "1.5 s")]


def test_tables_without_rows_are_left_out() -> None:
    bare = fleet_report(replicas=(), tenants=(), adapters=AdapterTable(num_total=0, num_matching=0, rows=()))
    assert frame_grids(bare) == ()
    assert "0 replicas" in title(bare)


def test_top_once_prints_what_stands_out_and_the_tables(cli: Cli, fleet: FakeFleet) -> None:
    ran = cli("top", "--once")
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert "2 replicas, 84 tokens/s" in lines[0]
    assert lines[1] == "! globex holds 82 % of the queue"
    assert [line.split()[0] for line in lines if line.isupper()] == ["RING", "TENANT", "ADAPTER"]
    assert fleet.asked[0]["limit"] == "10"


def test_top_once_json_is_the_report(cli: Cli) -> None:
    assert FleetReport.model_validate(cli("top", "--once", "--json").json, strict=False) == fleet_report()


def test_names_cannot_speak_to_the_terminal(cli: Cli, fleet: FakeFleet) -> None:
    evil = adapter_row("evil\x1b]0;owned\x07")
    fleet.report = fleet_report(adapters=AdapterTable(num_total=1, num_matching=1, rows=(evil,)))
    assert "\x1b" not in cli("top", "--once").out


def test_top_is_refused_in_one_line_without_a_key(cli: Cli, fleet: FakeFleet) -> None:
    fleet.key = "lf_right"
    ran = cli("top", "--once")
    assert ran.status == 1
    assert len(ran.err.splitlines()) == 1


ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A pseudo-terminal with a command in it."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        command = [sys.executable, "-m", "cluster.cli", *arguments]
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES"):  # test workers have them, and they would hide the terminal's own size
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=environment, start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    def until(self, text: str, timeout_s: float = 60.0) -> None:
        """Read until `text` has been shown, in whatever colours."""
        deadline_s = time.monotonic() + timeout_s
        while text not in ESCAPE.sub("", self.shown):
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, self.shown[-2000:]
            self._read()

    def interrupt(self) -> int:
        """Press ^C; returns the exit status."""
        os.killpg(self.process.pid, signal.SIGINT)
        while self._read():
            pass
        return self.process.wait(timeout=30)

    def _read(self) -> bool:
        try:
            piece = os.read(self._master, 65536).decode(errors="replace")
        except OSError:  # the other end is closed
            return False
        self.shown += piece
        return bool(piece)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=30)
        os.close(self._master)


@pytest.fixture
def terminal(url: str) -> Iterator[Terminal]:
    made = Terminal("--url", url, "top", "--interval", "0.1")
    yield made
    made.close()


def test_top_draws_in_place_on_a_terminal_follows_and_gives_it_back(terminal: Terminal, fleet: FakeFleet) -> None:
    terminal.until("globex holds 82 % of the queue")
    assert "\x1b[?1049h" in terminal.shown, "not on a screen of its own"
    terminal.until("█↓··")
    fleet.report = fleet_report(findings=(), replicas=(replica_view(7),))
    terminal.until("replica-7")
    assert terminal.interrupt() == 0
    assert terminal.shown.rstrip().endswith("\x1b[?25h") or "\x1b[?1049l" in terminal.shown


def test_top_fits_a_low_terminal(terminal: Terminal, fleet: FakeFleet) -> None:
    many = tuple(adapter_row(f"adapter-{index}") for index in range(40))
    fleet.report = fleet_report(adapters=AdapterTable(num_total=40, num_matching=40, rows=many), findings=())
    terminal.until("adapter-0")
    last = terminal.shown.rsplit("\x1b[H", 1)[-1]
    assert last.count("\n") <= ROWS
