"""The commands of a version's later life, through a real gateway to a real registry; backup and restore beside it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from cluster.cli import main
from registry.types import VersionState
from tests.cluster.cli_harness import Cli
from tests.registry.two_replicas import TwoReplicas
from tests.registry.uploads import open_registry


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[TwoReplicas]:
    setup = TwoReplicas(tmp_path, retention={"min_age_s": 0, "unused_s": 0, "grace_s": 0})
    yield setup
    setup.registry.close()


def test_canary_promote_halt_and_rollback_are_one_command_each(cli: Cli, setup: TwoReplicas) -> None:
    assert cli("canary", "alice@2", "--weight", "0.1", "--no-wait").status == 0
    setup.settle()
    assert setup.registry.adapter("alice").canaries["live"].weight == 0.1
    assert "live:10%" in cli("show", "alice").out
    assert cli("halt", "alice").out == "alice@live is version 1 for everybody\n"
    ran = cli("halt", "alice")
    assert (ran.status, ran.err) == (1, "error: alice@live has no canary\n")
    cli("canary", "alice@2", "--weight", "0.5", "--no-wait")
    setup.settle()
    assert cli("promote", "alice", "--no-wait").status == 0
    setup.settle()
    assert setup.registry.adapter("alice").aliases == {"live": 2}
    assert cli("rollback", "alice", "--no-wait").status == 0
    setup.settle()
    assert setup.registry.adapter("alice").aliases == {"live": 1}


def test_retire_takes_a_deadline(cli: Cli, setup: TwoReplicas) -> None:
    assert cli("retire", "alice@2", "--deadline", "30", "--yes").status == 0
    version = setup.registry.adapter("alice").version(2)
    assert version is not None
    assert (version.state, version.drain_until_s) == (VersionState.DRAINING, setup.clock.now_s + 30)


def test_quarantine_says_what_it_did_and_needs_a_reason(cli: Cli, setup: TwoReplicas) -> None:
    assert cli("quarantine", "alice@2").status == 2
    assert cli("quarantine", "alice@2", "--reason", "leaks").out == "alice@2 is quarantined\n"
    assert setup.state(2) is VersionState.QUARANTINED


def test_unalias_removes_one_alias(cli: Cli, setup: TwoReplicas) -> None:
    assert cli("unalias", "alice@live", "--json").json["aliases"] == {}
    assert cli("unalias", "alice@1").status == 2
    assert cli("unalias", "alice@live").status == 1


def test_where_shows_every_replica(cli: Cli, setup: TwoReplicas) -> None:
    setup.report("r1", **{setup.digests[1]: "disk full"})
    lines = cli("where", "alice@2").out.splitlines()
    assert [line.split()[1:3] for line in lines if line.strip().startswith(("0", "1"))] == [
        ["r0", "held"],
        ["r1", "failed"],
    ]
    assert "disk full" in lines[-1]


def test_gc_dry_run_says_what_would_go_and_changes_nothing(cli: Cli, setup: TwoReplicas) -> None:
    setup.registry.retire("alice", 2, actor="a", deadline_s=0)
    setup.settle()
    ran = cli("gc", "--dry-run")
    assert "collect" in ran.out
    assert "alice@2" in ran.out
    assert setup.state(2) is VersionState.RETIRED
    assert cli("gc", "--json").json["items"][0]["action"] == "collect"
    assert setup.state(2) is VersionState.COLLECTED
    setup.registry.check_integrity()


def test_audit_verify_finds_a_changed_row_and_a_forged_log(cli: Cli, setup: TwoReplicas) -> None:
    ran = cli("audit", "--verify", "--json")
    assert (ran.status, ran.json["verified"]) == (0, True)
    anchor = f"{ran.json['revision']}:{ran.json['hash']}"
    assert cli("audit").out.count("\n") == ran.json["revision"]
    assert cli("audit", "--verify", "--anchor", anchor).status == 0
    assert cli("audit", "--verify", "--anchor", f"{ran.json['revision']}:{'f' * 64}").status == 1
    assert cli("audit", "--verify", "--anchor", "x").status == 2
    engine = create_engine(setup.registry._database._engine.url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE events SET actor = 'somebody' WHERE revision = 2"))
    engine.dispose()
    ran = cli("audit", "--verify")
    assert ran.status == 1
    assert "entry 2 of the audit log does not match its hash" in ran.err


def test_backup_and_restore_are_one_command_each(
    setup: TwoReplicas, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The drill: back up while the registry runs, lose it, restore, and find everything as it was."""
    place = str(tmp_path / "backup")
    assert main(["backup", place, "--data-dir", str(tmp_path / "data"), "--json"]) == 0
    assert '"revision"' in capsys.readouterr().out
    before = setup.registry.adapters()
    setup.push(3, activate=True)
    assert main(["restore", place, "--data-dir", str(tmp_path / "new")]) == 0
    restored = open_registry(tmp_path / "new", setup.clock)
    restored.check_integrity()
    assert restored.adapters() == before
    restored.close()
    assert main(["restore", place, "--data-dir", str(tmp_path / "new")]) == 1
    assert "not empty" in capsys.readouterr().err
    assert main(["backup", place, "--data-dir", str(tmp_path / "nowhere")]) == 2
    assert main(["restore", str(tmp_path / "nothing"), "--data-dir", str(tmp_path / "other")]) == 1
