"""The fleet grows under load and shrinks when idle, under real Serve; no request is lost on the way."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.fleet_process import FleetProcess

pytestmark = [pytest.mark.serve, pytest.mark.soak]

SCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_requests": 2.0,
    "look_back_s": 10.5,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 2.0,
}


def num_replicas(fleet: FleetProcess) -> int:
    return len(httpx.get(f"{fleet.url}/v1/replicas", timeout=30).json()["data"])


def ask(fleet: FleetProcess, model: str) -> int:
    body = {"model": model, "prompt": "Hello", "max_tokens": 40, "ignore_eos": True}
    return httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=120).status_code


def wait_for(fleet: FleetProcess, wanted: int, timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    while num_replicas(fleet) != wanted:
        assert time.monotonic() < until_s, f"{num_replicas(fleet)} replicas, not {wanted}, after {timeout_s:g} s"
        time.sleep(0.2)


def test_fleet_grows_with_its_load_and_goes_back_when_idle(tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
    build = "benchmarks.paced_fleet:build"
    settings = {"scaling": SCALING, "channel_linger_s": 0.2}
    with FleetProcess(str(tiny_base), num_replicas=1, fleet=settings, import_path=build) as fleet:
        model = httpx.get(f"{fleet.url}/v1/models", timeout=30).json()["data"][0]["id"]
        answers = []
        with ThreadPoolExecutor(8) as clients:
            busy = True

            def work() -> None:
                while busy:
                    answers.append(ask(fleet, model))

            running = [clients.submit(work) for _ in range(8)]
            try:
                wait_for(fleet, 2, 90)
            finally:
                busy = False
        assert [each.result() for each in running] == [None] * 8
        wait_for(fleet, 1, 90)
        assert set(answers) == {200}
