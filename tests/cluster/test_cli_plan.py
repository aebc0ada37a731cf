"""`lorafleet plan`: a table, JSON, and clear words for input it cannot use. It asks no server."""

from pathlib import Path

import pytest

from tests.cluster.cli_harness import Cli

NOWHERE = "http://127.0.0.1:9"
SMALL = ("--adapters", "20", "--rate", "15", "--max-replicas", "4")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(NOWHERE, capsys)


def test_plan_prints_three_layouts_side_by_side(cli: Cli) -> None:
    ran = cli("plan", *SMALL)
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == ["shared base", "one deployment a tenant", "merged"]
    assert "simulating" in ran.err


def test_plan_as_json_has_the_figures(cli: Cli) -> None:
    value = cli("plan", *SMALL, "--json").json
    assert value["workload"]["adapters"] == 20
    fleet = value["layouts"][0]
    assert fleet["num_gpus"] == 1
    assert fleet["outcome"]["p99_first_token_s"] <= value["objective"]["p99_first_token_s"]


def test_plan_reads_a_trace(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("at_s,adapter\n" + "".join(f"{number / 5},tenant-{number % 7}\n" for number in range(200)))
    assert cli("plan", "--trace", str(path), "--json").json["workload"]["adapters"] == 7


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--adapters", "5"), "say what to plan for"),
        (("--trace", "x.csv", "--rate", "5"), "a trace says how many adapters there are"),
        (("--trace", "/nowhere.csv"), "No such file"),
        (("--adapters", "0", "--rate", "1"), "--adapters"),
        (("--adapters", "x", "--rate", "1"), "--adapters"),
    ],
)
def test_wrong_usage_is_named(cli: Cli, arguments: tuple[str, ...], what: str) -> None:
    ran = cli("plan", *arguments)
    assert ran.status == 2
    assert what in ran.err


def test_plan_that_cannot_be_met_is_refused(cli: Cli) -> None:
    ran = cli("plan", *SMALL, "--gpu-gb", "16", "--json")
    assert (ran.status, ran.json["error"]["code"]) == (1, "cannot_plan")
    assert "GB of a GPU are usable" in ran.err
