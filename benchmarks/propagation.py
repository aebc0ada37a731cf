"""How long an acknowledged upload takes to be visible: staged on both replicas, its alias moved, every gateway told.

The fleet is real, the base tiny. Then the same with one replica hung (SIGSTOP) from before the upload on, and with the
registry killed (-9) as soon as it has acknowledged. Each version that is visible answers a request before it counts.

Run: python -m benchmarks.propagation [--uploads 200] [--hung 10] [--restarts 10]
"""

import argparse
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.provenance import save
from cluster.console.client import ControlClient
from cluster.console.errors import ControlError
from registry.types import UNDER_WAY, Activation, ActivationState, PushResult, StagingState
from tests.fleet_process import REGISTRY, REPLICA, FleetProcess
from tests.tiny_models import make_adapter, make_model

NUM_REPLICAS, NUM_NAMES = 2, 20
LEASE_TTL_S = 10.0
"""As a registry has it by default."""

PATIENCE_S = 120.0
ON_NODE = (StagingState.HELD, StagingState.RESIDENT)


class Uploads:
    """Fresh adapters of a tiny base, pushed one after the other to a few names in turn."""

    def __init__(self, base: Path, folder: Path, fleet: FleetProcess) -> None:
        self._base, self._folder, self.fleet = base, folder, fleet
        self.control = ControlClient(fleet.url)
        self._count = 0

    def push(self) -> tuple[PushResult, float]:
        """The acknowledgement, and how long it took."""
        self._count += 1
        made = self._folder / str(self._count)
        make_adapter(self._base, ("q_proj", "v_proj"), 8, folder=made, seed=self._count)
        with ExitStack() as files:
            parts = [
                ("files", (path.name, files.enter_context(path.open("rb")), "application/octet-stream"))
                for path in made.iterdir()
            ]
            started_s = time.monotonic()
            result = self.control.push(f"tenant-{self._count % NUM_NAMES}", parts, activate=True)
        return result, time.monotonic() - started_s

    def follow(self, result: PushResult) -> Activation:
        """The activation once it has ended, through restarts of the registry."""
        assert result.activation is not None
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            try:
                activation = self.control.activation(result.activation.activation_id, wait_s=30.0)
            except ControlError:
                time.sleep(0.05)
                continue
            if activation.state not in UNDER_WAY:
                return activation
        raise AssertionError(f"not visible within {PATIENCE_S} s: {result}")

    def check(self, result: PushResult, num_replicas: int) -> None:
        """The bytes are on that many nodes' replicas, and a request by alias gets this very version."""
        states = self.control.version_states(result.name, result.version.number, None, 0.0).replicas
        assert sum(each.state in ON_NODE for each in states) >= num_replicas, states
        body = {"model": result.name, "prompt": "Hi", "max_tokens": 1}
        answer = httpx.post(f"{self.fleet.url}/v1/completions", json=body, timeout=60)
        assert answer.json().get("system_fingerprint") == f"fp_{result.version.digest[:16]}", answer.text


def visible_after(
    uploads: Uploads, num_replicas: int, after_push: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """One upload: seconds until it was acknowledged, from there until visible, and the registry's own measure."""
    result, push_s = uploads.push()
    acknowledged_s = time.monotonic()
    after_push()
    ended = uploads.follow(result)
    visible_s = time.monotonic() - acknowledged_s
    assert ended.state is ActivationState.DONE, ended
    uploads.check(result, num_replicas)
    return {"push": push_s, "visible": visible_s, "flip": ended.staged_after_s or 0.0}


def plain(uploads: Uploads, times: int) -> list[dict[str, float]]:
    return [visible_after(uploads, NUM_REPLICAS) for _ in range(times)]


def with_a_hung_replica(uploads: Uploads, times: int) -> list[dict[str, float]]:
    samples = []
    for _ in range(times):
        uploads.fleet.wait_ready(NUM_REPLICAS)
        hung = uploads.fleet.pids(REPLICA)[0]
        uploads.fleet.kill(hung, signal.SIGSTOP)
        try:
            samples.append(visible_after(uploads, 1))
        finally:
            uploads.fleet.kill(hung, signal.SIGCONT)
    return samples


def with_a_restart(uploads: Uploads, times: int) -> list[dict[str, float]]:
    samples = []
    for _ in range(times):
        uploads.fleet.wait_ready(NUM_REPLICAS)
        (pid,) = uploads.fleet.pids(REGISTRY)
        samples.append(visible_after(uploads, NUM_REPLICAS, lambda pid=pid: uploads.fleet.kill(pid)))  # type: ignore[misc]
    return samples


def summary(samples: Sequence[dict[str, float]]) -> dict[str, Any]:
    return {"uploads": len(samples), **{f"{key}_s": spread([each[key] for each in samples]) for key in samples[0]}}


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {
        "min": round(ordered[0], 3),
        "p50": round(statistics.median(ordered), 3),
        "p99": round(p99, 3),
        "max": round(ordered[-1], 3),
    }


def measure(uploads: Uploads, options: argparse.Namespace) -> dict[str, Any]:
    plain(uploads, 5)
    parts = {
        "two_replicas": lambda: plain(uploads, options.uploads),
        "registry_killed_after_the_acknowledgement": lambda: with_a_restart(uploads, options.restarts),
        "one_replica_hung": lambda: with_a_hung_replica(uploads, options.hung),
    }
    results = {}
    for name, part in parts.items():
        results[name] = summary(part())
        print(f"{name:45} {results[name]}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uploads", type=int, default=200)
    parser.add_argument("--hung", type=int, default=10)
    parser.add_argument("--restarts", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        base = make_model(Path(name) / "tiny-llama")
        with FleetProcess(str(base), registry={"lease_ttl_s": LEASE_TTL_S}) as fleet:
            results = measure(Uploads(base, Path(name), fleet), options)
    conditions = {"replicas": NUM_REPLICAS, "gateways": 1, "lease_ttl_s": LEASE_TTL_S, "adapter_names": NUM_NAMES}
    print(save("propagation", "How long until an acknowledged upload is visible?", conditions, results))


if __name__ == "__main__":
    main()
