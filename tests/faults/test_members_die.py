"""Replicas and the registry are killed under a real fleet that has traffic; nothing acknowledged is lost."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.fleet_process import LEASE_TTL_S, REGISTRY, REPLICA, FleetProcess
from tests.tiny_fleet import TinyFleet
from tests.tiny_models import make_adapter

pytestmark = pytest.mark.serve


@pytest.fixture
def base(tiny_base: Path) -> Path:
    return tiny_base


@pytest.fixture
def fleet(tiny_fleet: TinyFleet) -> Iterator[FleetProcess]:
    """The run's fleet, whole before and after."""
    tiny_fleet.fleet.wait_ready(2)
    yield tiny_fleet.fleet
    tiny_fleet.fleet.wait_ready(2)


def new_adapter(base: Path, folder: Path, seed: int) -> str:
    return str(make_adapter(base, ("q_proj", "v_proj"), 8, folder=folder / f"adapter-{seed}", seed=seed))


def ask(fleet: FleetProcess, model: str, max_tokens: int = 8) -> httpx.Response:
    body = {"model": model, "prompt": "Hello", "max_tokens": max_tokens, "temperature": 0}
    return httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=60)


class Traffic:
    """Asks for one model again and again on a thread, and keeps every answer."""

    def __init__(self, fleet: FleetProcess, model: str, max_tokens: int) -> None:
        self._fleet, self._model, self._max_tokens = fleet, model, max_tokens
        self._stop = threading.Event()
        self.answers: list[tuple[int, str]] = []
        self.slowest_s = 0.0
        self._threads = [threading.Thread(target=self._run) for _ in range(4)]

    def _run(self) -> None:
        while not self._stop.is_set():
            asked_s = time.monotonic()
            response = ask(self._fleet, self._model, self._max_tokens)
            text = response.json()["choices"][0]["text"] if response.status_code == 200 else response.text
            self.answers.append((response.status_code, text))
            self.slowest_s = max(self.slowest_s, time.monotonic() - asked_s)

    @property
    def failures(self) -> list[tuple[int, str]]:
        return [answer for answer in self.answers if answer[0] != 200]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def traffic(fleet: FleetProcess, model: str, max_tokens: int = 8) -> Iterator[Traffic]:
    running = Traffic(fleet, model, max_tokens)
    running.start()
    try:
        yield running
    finally:
        running.stop()


def test_push_under_traffic_moves_the_alias_after_both_replicas_staged(
    fleet: FleetProcess, base: Path, tmp_path: Path
) -> None:
    fleet.cli("push", "moving", new_adapter(base, tmp_path, 1))
    before = ask(fleet, "moving@1").json()["choices"][0]["text"]
    with traffic(fleet, "moving") as running:
        result = fleet.cli("push", "moving", new_adapter(base, tmp_path, 2))
        time.sleep(0.5)
    digest = result["version"]["digest"]
    assert all(digest in replica["staged"] for replica in fleet.replicas())
    assert result["activation"]["state"] == "done"
    after = ask(fleet, "moving@2").json()["choices"][0]["text"]
    assert before != after
    assert not running.failures
    texts = [text for _, text in running.answers]
    assert set(texts) == {before, after}, "each answer is one version's, never a mixture"
    assert ask(fleet, "moving").json()["choices"][0]["text"] == after


def test_replica_killed_and_replaced_serves_everything(fleet: FleetProcess, base: Path, tmp_path: Path) -> None:
    fleet.cli("push", "survivor", new_adapter(base, tmp_path, 3))
    # One token: a request has had its first token only when it has had all, so that each may be tried elsewhere.
    one_token = ask(fleet, "survivor", 1).json()["choices"][0]["text"]
    expected = ask(fleet, "survivor").json()["choices"][0]["text"]
    old = {replica["replica_id"]: replica["ring_id"] for replica in fleet.replicas()}
    with traffic(fleet, "survivor", max_tokens=1) as running:
        time.sleep(0.3)
        fleet.kill(fleet.pids(REPLICA)[0])
        fleet.wait_until(lambda: len(set(current(fleet)) - set(old)) == 1 and len(current(fleet)) == 2, "replacement")
        time.sleep(1.0)
    assert {text for status, text in running.answers if status == 200} == {one_token}
    assert not running.failures, "a request without a first token is tried elsewhere"
    assert sorted(current(fleet).values()) == sorted(old.values()), "the replacement takes the free ring place"
    for replica in fleet.replicas():
        assert len(replica["staged"]) >= 1
    for _ in range(6):
        assert ask(fleet, "survivor").json()["choices"][0]["text"] == expected


def test_replica_that_hangs_costs_time_and_no_answer(fleet: FleetProcess, base: Path, tmp_path: Path) -> None:
    """A stopped process keeps its connections: only its silence tells that it is gone."""
    fleet.cli("push", "patient", new_adapter(base, tmp_path, 8))
    expected = ask(fleet, "patient").json()["choices"][0]["text"]
    pid = fleet.pids(REPLICA)[0]
    with traffic(fleet, "patient") as running:
        time.sleep(0.3)
        fleet.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(16.0)
        finally:
            fleet.kill(pid, signal.SIGCONT)
    assert set(running.answers) == {(200, expected)}
    assert running.slowest_s < 16.0, "nobody waited for the hung replica beyond its silence and one probe"
    fleet.wait_ready(2)


def test_registry_killed_keeps_every_version_and_watchers_reconnect(
    fleet: FleetProcess, base: Path, tmp_path: Path
) -> None:
    fleet.cli("push", "kept", new_adapter(base, tmp_path, 4))
    before = fleet.cli("ls")
    pid = fleet.pids(REGISTRY)[0]
    fleet.kill(pid)
    fleet.wait_until(lambda: [p for p in fleet.pids(REGISTRY) if p != pid] != [], "new registry actor")
    assert fleet.cli("ls") == before
    fleet.cli("push", "kept", new_adapter(base, tmp_path, 5))
    assert ask(fleet, "kept").status_code == 200
    assert len(fleet.replicas()) == 2


@pytest.mark.parametrize("outage_s", [6.0, pytest.param(60.0, marks=pytest.mark.soak)])
def test_registry_down_inference_goes_on_from_the_last_catalog(
    fleet: FleetProcess, base: Path, tmp_path: Path, outage_s: float
) -> None:
    fleet.cli("push", "outage", new_adapter(base, tmp_path, 6))
    expected = ask(fleet, "outage").json()["choices"][0]["text"]
    fleet.control("delete")
    with traffic(fleet, "outage") as running:
        time.sleep(outage_s)
    assert len(running.answers) > 10
    assert set(running.answers) == {(200, expected)}
    refused = httpx.get(f"{fleet.url}/v1/adapters", timeout=60)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "registry_unavailable"
    fleet.control("run", str(fleet.folder / "registry"), str(LEASE_TTL_S))
    with traffic(fleet, "outage") as running:
        fleet.wait_until(lambda: httpx.get(f"{fleet.url}/v1/adapters").status_code == 200, "registry")
        fleet.cli("push", "outage", new_adapter(base, tmp_path, 7))
    assert not running.failures


def current(fleet: FleetProcess) -> dict[str, int]:
    return {replica["replica_id"]: replica["ring_id"] for replica in fleet.replicas()}
