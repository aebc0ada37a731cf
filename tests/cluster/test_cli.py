"""The `lorafleet` command against a control server on loopback: what is sent, said, and the exit status."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main
from registry.pulse import ReplicaState
from registry.types import AdapterManifest, VersionState
from tests.cluster.cli_harness import Cli, adapter_folder
from tests.cluster.fake_control import (
    FAULTS,
    FakeFleet,
    adapter_record,
    replica_record,
    serving,
    version_record,
)

SECRET = "sk-very-secret"


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet(replicas=[replica_record(0), replica_record(1)])


@pytest.fixture
def cli(fleet: FakeFleet, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    with serving(fleet) as url:
        yield Cli(url, capsys)


def test_push_new_adapter_ends_live_and_says_how_to_call_it(cli: Cli, fleet: FakeFleet, tmp_path: Path) -> None:
    ran = cli("push", "legal", str(adapter_folder(tmp_path)))
    assert ran.status == 0
    assert ran.out.splitlines()[0] == "legal@1 is live on 2 replicas (0.4 s)"
    assert f"curl {cli.url}/v1/chat/completions" in ran.out
    assert '"model": "legal"' in ran.out
    assert "staging on replicas replica-0, replica-1" in ran.err
    assert fleet.uploads == [{"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}]


def test_push_json_prints_the_result_and_nothing_else(cli: Cli, tmp_path: Path) -> None:
    ran = cli("push", "legal", str(adapter_folder(tmp_path)), "--json")
    assert ran.status == 0
    assert ran.json["version"]["number"] == 1
    assert ran.json["activation"]["state"] == "done"
    assert len(ran.out.splitlines()) == 1


def test_push_same_content_again_names_the_version_that_has_it(cli: Cli, fleet: FakeFleet, tmp_path: Path) -> None:
    folder = str(adapter_folder(tmp_path))
    cli("push", "legal", folder)
    ran = cli("push", "legal", folder)
    assert ran.status == 0
    assert "legal@1 already holds this content" in ran.err
    assert len(fleet.adapters["legal"].versions) == 1


def test_push_no_activate_stores_and_says_how_to_activate(cli: Cli, fleet: FakeFleet, tmp_path: Path) -> None:
    ran = cli("push", "legal", str(adapter_folder(tmp_path)), "--no-activate")
    assert ran.status == 0
    assert "lorafleet activate legal@1" in ran.out
    assert '"model": "legal@1"' in ran.out
    assert fleet.activations == {}


def test_push_no_wait_returns_while_pending(cli: Cli, fleet: FakeFleet, tmp_path: Path) -> None:
    ran = cli("push", "legal", str(adapter_folder(tmp_path)), "--no-wait", "--json")
    assert ran.status == 0
    assert ran.json["activation"]["state"] == "pending"
    assert not any("activations" in call for call in fleet.calls)


def test_push_peft_sub_folder_is_found(cli: Cli, fleet: FakeFleet, tmp_path: Path) -> None:
    adapter_folder(tmp_path / "default", b"nested")
    assert cli("push", "legal", str(tmp_path)).status == 0
    assert fleet.uploads[0]["adapter_model.safetensors"] == b"nested"


def test_push_sends_added_tokens_but_no_training_state(cli: Cli, fleet: FakeFleet, tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path)
    (folder / "added_tokens.json").write_text('{"<x>": 1}')
    (folder / "optimizer.pt").write_bytes(b"huge")
    cli("push", "legal", str(folder))
    assert set(fleet.uploads[0]) == {"adapter_config.json", "adapter_model.safetensors", "added_tokens.json"}


def test_push_invalid_adapter_lists_every_fault(cli: Cli, tmp_path: Path) -> None:
    ran = cli("push", "legal", str(adapter_folder(tmp_path, b"broken")))
    assert ran.status == 1
    lines = ran.err.splitlines()[-3:]
    assert lines[0] == "error: the adapter has 2 faults"
    assert lines[1] == f"  {FAULTS[0].code}: {FAULTS[0].message} ({FAULTS[0].hint})"
    assert lines[2] == f"  {FAULTS[1].code}: {FAULTS[1].message}"
    assert ran.out == ""


def test_push_invalid_adapter_json_carries_the_faults(cli: Cli, tmp_path: Path) -> None:
    ran = cli("push", "legal", str(adapter_folder(tmp_path, b"broken")), "--json")
    assert ran.status == 1
    assert ran.json["error"]["code"] == "invalid_adapter"
    assert [fault["code"] for fault in ran.json["error"]["faults"]] == [fault.code for fault in FAULTS]


def test_push_staging_failure_ends_with_the_reason(cli: Cli, fleet: FakeFleet, tmp_path: Path) -> None:
    fleet.staging_error = "replica-1 has no room"
    ran = cli("push", "legal", str(adapter_folder(tmp_path)))
    assert ran.status == 1
    assert ran.err.splitlines()[-1].startswith("error: legal@1 is not live: replica-1 has no room")


def test_push_that_never_arrives_gives_up_after_the_timeout(cli: Cli, fleet: FakeFleet, tmp_path: Path) -> None:
    fleet.num_polls_pending = 10**9
    ran = cli("push", "legal", str(adapter_folder(tmp_path)), "--timeout", "0.2")
    assert ran.status == 1
    assert "gave up after 0.2 s: staging on replicas replica-0, replica-1" in ran.err


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, "has no adapter_config.json"),
        ({"adapter_config.json": b"{}"}, "has no adapter_model.safetensors"),
        ({"adapter_config.json": b"{}", "adapter_model.bin": b"x"}, "a pickle, which is not accepted"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "is empty"),
        (
            {
                "adapter_config.json": b"{}",
                "adapter_model.safetensors": b"version https://git-lfs.github.com/spec/v1\n",
            },
            "git lfs pull",
        ),
        ({"a/adapter_config.json": b"{}", "b/adapter_config.json": b"{}"}, "holds 2 adapters (a, b)"),
    ],
)
def test_push_unusable_folder_is_refused_before_sending(
    cli: Cli, fleet: FakeFleet, tmp_path: Path, content: dict[str, bytes], expected: str
) -> None:
    for name, data in content.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    ran = cli("push", "legal", str(tmp_path))
    assert ran.status == 1
    assert expected in ran.err
    assert len(ran.err.splitlines()) == 1
    assert fleet.calls == []


def test_push_missing_folder_and_file_are_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "does not exist" in cli("push", "legal", str(tmp_path / "gone")).err
    assert "neither a folder nor an archive" in cli("push", "legal", str(tmp_path / "file")).err


def test_ls_shows_each_adapter_and_json_is_the_records(cli: Cli, fleet: FakeFleet) -> None:
    fleet.adapters = {name: adapter_record(name, 2) for name in ("zeta", "legal")}
    lines = cli("ls").out.splitlines()
    assert lines[0].split()[:3] == ["NAME", "LIVE", "VERSIONS"]
    assert [line.split()[0] for line in lines[1:]] == ["legal", "zeta"]
    assert {record["name"] for record in cli("ls", "--json").json} == {"legal", "zeta"}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [({"pending": ("a" * 64,)}, "staging"), ({}, "-"), ({"num_versions": 0}, "-")],
)
def test_ls_says_why_an_adapter_is_not_live(cli: Cli, fleet: FakeFleet, changes: dict[str, Any], shown: str) -> None:
    fleet.adapters["legal"] = adapter_record("legal", **{"aliases": {}, **changes})
    assert cli("ls").out.splitlines()[1].split()[:2] == ["legal", shown]


def test_ls_marks_a_retired_adapter(cli: Cli, fleet: FakeFleet) -> None:
    retired = version_record(1).model_copy(update={"state": VersionState.RETIRED})
    fleet.adapters["legal"] = adapter_record("legal", aliases={}, versions=(retired,))
    assert cli("ls").out.splitlines()[1].split()[:2] == ["legal", "retired"]


def test_json_works_before_and_after_the_command(cli: Cli) -> None:
    assert cli("--json", "ls").json == cli("ls", "--json").json == []


def test_show_adapter_lists_versions_newest_first_with_residency(cli: Cli, fleet: FakeFleet) -> None:
    adapter = adapter_record("legal", 2, aliases={"live": 2, "canary": 1})
    fleet.adapters["legal"] = adapter
    fleet.replicas = [replica_record(0, staged=(adapter.versions[1].digest,), resident=(adapter.versions[1].digest,))]
    lines = cli("show", "legal").out.splitlines()
    assert lines[0] == "legal (owner team-a, callers *, revision 3)"
    assert lines[2].split()[:5] == ["2", "active", "live", "1/1", "1"]
    assert lines[3].split()[:5] == ["1", "active", "canary", "0/1", "0"]


@pytest.mark.parametrize("ref", ["legal@2", "legal@live"])
def test_show_version_by_number_or_alias(cli: Cli, fleet: FakeFleet, ref: str) -> None:
    fleet.adapters["legal"] = adapter_record("legal", 2)
    assert cli("show", ref).out.startswith("legal@2  active")
    shown = cli("show", ref, "--json").json
    assert shown["version"]["number"] == 2
    assert AdapterManifest.model_validate(shown["manifest"]).max_rank == 8


def test_show_unknown_version_says_what_there_is(cli: Cli, fleet: FakeFleet) -> None:
    fleet.adapters["legal"] = adapter_record("legal", 2)
    ran = cli("show", "legal@7")
    assert ran.status == 1
    assert ran.err == "error: legal has no version 7 (versions: 1, 2; aliases: live -> 2)\n"


def test_activate_moves_the_alias(cli: Cli, fleet: FakeFleet) -> None:
    fleet.adapters["legal"] = adapter_record("legal", 2)
    ran = cli("activate", "legal@1", "--alias", "canary")
    assert ran.status == 0
    assert ran.out.startswith("legal@1 is canary on 2 replicas")
    assert '"model": "legal@canary"' in ran.out
    assert fleet.adapters["legal"].aliases == {"live": 2, "canary": 1}


def test_activate_promotes_another_alias(cli: Cli, fleet: FakeFleet) -> None:
    fleet.adapters["legal"] = adapter_record("legal", 2, aliases={"live": 1, "canary": 2})
    assert cli("activate", "legal@canary", "--json").json["number"] == 2
    assert fleet.adapters["legal"].aliases["live"] == 2


def test_rollback_goes_to_the_version_before(cli: Cli, fleet: FakeFleet) -> None:
    fleet.adapters["legal"] = adapter_record("legal", 2)
    assert cli("rollback", "legal").out.startswith("legal@1 is live")
    ran = cli("rollback", "legal")
    assert (ran.status, ran.err) == (1, "error: live has never pointed elsewhere\n")


def test_retire_whole_adapter_and_one_version(cli: Cli, fleet: FakeFleet) -> None:
    fleet.adapters["legal"] = adapter_record("legal", 2)
    assert cli("retire", "legal@1", "--yes").out == "legal@1 is retired\n"
    assert cli("retire", "legal", "--yes", "--json").json == {"name": "legal", "number": None, "retired": True}
    assert fleet.adapters == {}
    assert fleet.calls == ["DELETE /v1/adapters/legal/versions/1", "DELETE /v1/adapters/legal"]


def test_retire_without_terminal_needs_yes(cli: Cli, fleet: FakeFleet) -> None:
    ran = cli("retire", "legal")
    assert ran.status == 2
    assert "--yes" in ran.err
    assert fleet.calls == []


@pytest.mark.parametrize(("answer", "status"), [(True, 0), (False, 1)])
def test_retire_on_a_terminal_asks(
    cli: Cli, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch, answer: bool, status: int
) -> None:
    fleet.adapters["legal"] = adapter_record("legal")
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda question, err: asked.append(question) or answer)
    assert cli("retire", "legal").status == status
    assert ("legal" in fleet.adapters) is not answer
    assert asked == ["retire legal? Requests for it will be refused"]


def test_replicas_shows_slots_and_what_failed(cli: Cli, fleet: FakeFleet) -> None:
    fleet.replicas = [replica_record(0, resident=("a" * 64,), failed={"f" * 64: "cut short"})]
    ran = cli("replicas")
    assert ran.out.splitlines()[1].split()[:4] == ["0", "replica-0", "node-a", "1/4"]
    assert "replica-0 cannot stage ffffffffffff: cut short" in ran.err
    told = [ReplicaState.model_validate(data) for data in cli("replicas", "--json").json]
    assert told == [ReplicaState(**replica.model_dump()) for replica in fleet.replicas]


def test_watch_prints_events_after_a_revision(cli: Cli, fleet: FakeFleet) -> None:
    for number in (1, 2, 3):
        fleet.note("pushed", "legal", number)
    lines = cli("watch", "--after", "1", "--once").out.splitlines()
    assert [line.split()[2:] for line in lines] == [
        ["r2", "pushed", "legal@2", "by", "tester"],
        ["r3", "pushed", "legal@3", "by", "tester"],
    ]
    documents = [json.loads(line) for line in cli("watch", "--once", "--json").out.splitlines()]
    assert [event["revision"] for event in documents] == [1, 2, 3]


def test_key_is_sent_and_never_printed(cli: Cli, fleet: FakeFleet, tmp_path: Path) -> None:
    fleet.key = SECRET
    assert cli("ls").err == "error: no such key (set LORAFLEET_API_KEY or pass --key)\n"
    ran = cli("push", "legal", str(adapter_folder(tmp_path)), "--key", SECRET)
    assert ran.status == 0
    assert "Bearer $LORAFLEET_API_KEY" in ran.out
    for command in (["ls"], ["doctor"], ["wait-ready"], ["show", "nobody"], ["doctor", "--json"], ["top", "--once"]):
        cli("--key", SECRET, *command)
    assert SECRET not in cli.printed


def test_key_and_url_come_from_the_environment(
    cli: Cli, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.key = SECRET
    monkeypatch.setenv("LORAFLEET_URL", cli.url)
    monkeypatch.setenv("LORAFLEET_API_KEY", SECRET)
    assert main(["ls", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"
