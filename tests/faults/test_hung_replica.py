"""A replica that hangs in a step, as in a GPU call: the fleet says that it is not ready, and replaces it."""

import threading
from pathlib import Path

import httpx
import pytest

from tests.fleet_process import REPLICA, FleetProcess

pytestmark = [pytest.mark.serve, pytest.mark.soak]
STALL_S = 1.0


def test_replica_that_hangs_in_a_step_is_not_ready_and_is_replaced(tiny_base: Path) -> None:
    """Its process lives and answers; only its step loop says that it makes no progress."""
    replica, build = {"stall_s": STALL_S}, "tests.faults.hanging_fleet:build"
    with FleetProcess(str(tiny_base), num_replicas=1, replica=replica, import_path=build) as fleet:
        model = httpx.get(f"{fleet.url}/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "Hello", "max_tokens": 4, "temperature": 0}

        def ask() -> httpx.Response:
            return httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=120)

        def says(path: str) -> int:
            return httpx.get(f"{fleet.url}/{path}", timeout=30).status_code

        assert ask().status_code == 200
        (hung,) = fleet.pids(REPLICA)
        fleet.hang(hung)
        asking = threading.Thread(target=ask)
        asking.start()
        fleet.wait_until(lambda: says("ready") == 503, "word that the fleet is not ready", 60.0)
        assert says("health") == 200, "the gateway lives"
        fleet.wait_until(lambda: bool(set(fleet.pids(REPLICA)) - {hung}), "another replica", 120.0)
        fleet.wait_until(lambda: says("ready") == 200, "a fleet that is ready again", 120.0)
        assert ask().status_code == 200
        fleet.wait_until(lambda: hung not in fleet.pids(REPLICA), "end of the hung one", 60.0)
        asking.join(120)
        assert not asking.is_alive()
