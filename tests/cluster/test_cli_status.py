"""Exit statuses and one-line errors of `lorafleet`, `doctor`, `wait-ready`, and how fast it starts."""

import json
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from cluster.cli import main
from cluster.console.client import ControlClient, refusal
from cluster.console.errors import Unreachable
from cluster.console.follow import what_is_missing
from tests.cluster.cli_harness import Cli
from tests.cluster.fake_control import FakeFleet, adapter_record, replica_record, serving

UNUSED_URL = "http://127.0.0.1:9"


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet(
        replicas=[replica_record(0)], metrics=['lorafleet_adapter_hits_total{instance="replica-0",tier="slot"} 0\n']
    )


@pytest.fixture
def cli(fleet: FakeFleet, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    with serving(fleet) as url:
        yield Cli(url, capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["push"],
        ["push", "a b", "."],
        ["push", "../up", "."],
        ["show", "legal@0"],
        ["show", "legal@"],
        ["activate", "legal"],
        ["retire", "legal@live", "--yes"],
        ["top", "--interval", "never"],
        ["ls", "--url", "ftp://host"],
        ["ls", "--url", "http://"],
    ],
)
def test_wrong_usage_is_one_line_and_status_2(cli: Cli, fleet: FakeFleet, arguments: list[str]) -> None:
    ran = cli(*arguments)
    assert ran.status == 2
    assert ran.err.startswith("error: ")
    assert len(ran.err.splitlines()) == 1
    assert ran.out == ""
    assert fleet.calls == []


@pytest.mark.parametrize("command", [["ls"], ["replicas"], ["doctor"], ["top", "--once"], ["watch", "--once"]])
def test_no_server_says_how_to_start_one_and_status_3(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert main(["--url", UNUSED_URL, *command]) == 3
    assert capsys.readouterr().err == (
        f"error: nothing answers at {UNUSED_URL} (is the server up? start it with: make serve)\n"
    )


def test_refusal_json_is_an_error_document(cli: Cli) -> None:
    ran = cli("show", "nobody", "--json")
    assert ran.status == 1
    assert ran.json == {
        "error": {"message": "no adapter nobody", "code": "adapter_not_found", "hint": None, "faults": []}
    }
    assert ran.err == "error: no adapter nobody\n"


def test_error_text_from_the_server_stays_one_line_without_escapes(cli: Cli, fleet: FakeFleet) -> None:
    fleet.adapters["legal"] = adapter_record("legal")
    fleet.num_polls_pending = 0
    fleet.staging_error = "first\nsecond \x1b[31mred\x1b[0m [bold]x[/bold]"
    ran = cli("activate", "legal@1")
    assert ran.status == 1
    assert ran.err.splitlines()[-1] == (
        "error: legal@1 is not live: first second [31mred [0m [bold]x[/bold] (live stays where it was)"
    )


@pytest.mark.parametrize("body", [b"<html>nginx</html>", b'{"detail":"Not Found"}', b'"text"', b""])
def test_answer_of_another_server_is_named_for_what_it_is(body: bytes) -> None:
    request = httpx.Request("GET", "http://host:80/v1/adapters?x=1")
    refused = refusal(httpx.Response(404, content=body, request=request))
    assert refused.message == "http://host/v1/adapters answered HTTP 404, not as a lorafleet gateway"
    assert refused.code == "http_404"


def test_unexpected_records_are_an_error_not_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"data": [{"name": "legal"}]}))
    client = ControlClient("http://host", transport=transport)
    with pytest.raises(Exception, match=r"not what this version of lorafleet expects \(0\.owner") as caught:
        client.adapters()
    assert caught.value.exit_status == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("failure", [httpx.ReadTimeout("slow"), httpx.RemoteProtocolError("closed")])
def test_broken_connection_is_unreachable(failure: httpx.TransportError) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise failure

    client = ControlClient("host:1", transport=httpx.MockTransport(fail))
    with pytest.raises(Unreachable, match="http://host:1"):
        client.adapters()


def test_interrupt_ends_with_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(client: ControlClient) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ControlClient, "adapters", interrupt)
    ran = cli("ls")
    assert (ran.status, ran.err) == (130, "interrupted\n")


def test_doctor_healthy_fleet_is_status_0(cli: Cli) -> None:
    ran = cli("doctor")
    assert ran.status == 0
    checks = {line.split()[1]: line.split()[0] for line in ran.out.splitlines()[1:]}
    assert checks == dict.fromkeys(("server", "key", "ready", "base", "replicas", "adapters", "metrics"), "ok")


def test_doctor_names_what_is_wrong_and_what_to_do(cli: Cli, fleet: FakeFleet) -> None:
    fleet.is_ready, fleet.replicas, fleet.metrics = False, [], ["lorafleet"]
    ran = cli("doctor", "--json")
    assert ran.status == 1
    findings = {finding["question"]: finding for finding in ran.json}
    assert findings["ready"]["detail"] == "not ready: no base yet"
    assert findings["replicas"]["verdict"] == findings["metrics"]["verdict"] == "failed"
    assert "ready: wait for it with: lorafleet wait-ready" in ran.err


def test_doctor_wrong_key_fails_the_guarded_checks_only(cli: Cli, fleet: FakeFleet) -> None:
    fleet.key = "right"
    ran = cli("doctor", "--key", "wrong", "--json")
    assert ran.status == 1
    verdicts = {finding["question"]: finding["verdict"] for finding in ran.json}
    assert verdicts["server"] == verdicts["ready"] == verdicts["metrics"] == "ok"
    assert verdicts["base"] == verdicts["replicas"] == verdicts["adapters"] == "failed"


def test_doctor_warns_of_a_broken_and_a_waiting_adapter(cli: Cli, fleet: FakeFleet) -> None:
    fleet.replicas = [replica_record(0, failed={"f" * 64: "cut short"})]
    fleet.adapters["legal"] = adapter_record("legal", pending=("a" * 64,))
    ran = cli("doctor")
    assert ran.status == 0
    assert "replica-0: cut short" in ran.out
    assert "still staging: legal" in ran.out


def test_wait_ready_prints_the_next_steps(cli: Cli) -> None:
    ran = cli("wait-ready")
    assert ran.status == 0
    assert ran.out.startswith(f"the fleet is ready at {cli.url}")
    for text in ("lorafleet push", '"model": "smol"', f'OpenAI(base_url="{cli.url}/v1"'):
        assert text in ran.out
    assert cli("wait-ready", "--json").json["ready"] is True


def test_wait_ready_timeout_says_what_is_missing(cli: Cli, fleet: FakeFleet) -> None:
    fleet.is_ready = False
    ran = cli("wait-ready", "--timeout", "0")
    assert ran.status == 1
    assert ran.err.splitlines() == [
        "waiting for the fleet: not ready: no base yet",
        "error: not ready: no base yet",
    ]


def test_wait_ready_without_a_server_is_status_3_and_until_it_comes_waits(
    fleet: FakeFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--url", UNUSED_URL, "wait-ready", "--timeout", "0"]) == 3
    assert f"waiting for the fleet: nothing answers at {UNUSED_URL}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"error": {"message": "no replica"}}, "no replica"),
        ({"missing": ["base", "2 replicas"]}, "base, 2 replicas"),
        ({"reason": "staging"}, "staging"),
        ({}, "it is not ready"),
    ],
)
def test_what_is_missing_reads_the_body_of_ready(body: dict[str, object], line: str) -> None:
    assert what_is_missing(body) == line


def test_bare_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("push", "ls", "rollback", "wait-ready"))


def test_help_starts_fast_and_imports_nothing_heavy() -> None:
    code = (
        "import json, sys, time; from cluster.cli import main; status = main(['--help']); "
        "heavy = [name for name in ('ray', 'torch', 'transformers', 'numpy', 'fastapi') if name in sys.modules]; "
        "sys.stderr.write(json.dumps([status, heavy, time.process_time()]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    status, heavy, cpu_s = json.loads(ran.stderr)
    assert (status, heavy) == (0, [])
    assert cpu_s < 1.0
    assert "wait-ready" in ran.stdout


def test_module_is_runnable_and_passes_its_status_on() -> None:
    command = [sys.executable, "-m", "cluster.cli", "--url", UNUSED_URL, "ls"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 3
    assert ran.stdout == ""
