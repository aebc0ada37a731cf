"""`lorafleet usage` through a real gateway to a real registry."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry.usage_ledger import UsageLedger
from registry.usage_records import Consumer
from tests.cluster.cli_harness import Cli
from tests.cluster.test_cli_tenants import serving
from tests.registry.two_replicas import TwoReplicas


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    setup = TwoReplicas(tmp_path, retention={"usage_s": 1e9})
    ledger = UsageLedger("g", setup.clock)
    ledger.add(
        Consumer("acme", "alice", 1, "d" * 64), requests=3, prompt_tokens=5, output_tokens=7, device_ns=1_500_000_000
    )
    ledger.add(Consumer("beta"), requests=1, prompt_tokens=1, output_tokens=1)
    batch = ledger.batch()
    assert batch is not None
    setup.registry.usage.take(batch)
    with serving(setup) as url:
        yield Cli(url, capsys)
    setup.registry.close()


def test_table_shows_who_used_what(cli: Cli) -> None:
    lines = cli("usage").out.splitlines()
    assert lines[0].split() == [
        "TENANT",
        "ADAPTER",
        "VERSION",
        "DIGEST",
        "REQUESTS",
        "PROMPT",
        "TOKENS",
        "OUTPUT",
        "TOKENS",
        "DEVICE",
        "S",
    ]
    assert lines[1].split() == ["acme", "alice", "1", "d" * 12, "3", "5", "7", "1.500"]
    assert lines[2].split() == ["beta", "base", "-", "-", "1", "1", "1", "0.000"]


def test_json_and_csv_are_the_servers_own(cli: Cli) -> None:
    rows = cli("usage", "--json", "--tenant", "acme").json["data"]
    assert [(row["adapter"], row["device_s"]) for row in rows] == [("alice", 1.5)]
    ran = cli("usage", "--csv", "--group-by", "tenant")
    assert [row["requests"] for row in csv.DictReader(io.StringIO(ran.out))] == ["3", "1"]
    assert ran.err == ""


def test_time_that_holds_nothing_gives_an_empty_report(cli: Cli) -> None:
    ran = cli("usage", "--to", "1970-01-01", "--json")
    assert (ran.status, ran.json["data"]) == (0, [])
    assert cli("usage", "--to", "1970-01-01").status == 0


@pytest.mark.parametrize("words", [("--from", "yesterday"), ("--group-by", "model"), ("--csv", "--json")])
def test_wrong_question_is_one_line(cli: Cli, words: tuple[str, ...]) -> None:
    ran = cli("usage", *words)
    assert ran.status in (1, 2)
    assert len(ran.err.splitlines()) == 1
