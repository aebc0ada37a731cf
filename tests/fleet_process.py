"""A real fleet for tests: `deploy/serve` in a process group of its own, on loopback ports and folders of its own."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

ROOT = Path(__file__).parent.parent
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 30.0
LEASE_TTL_S = 3.0
REPLICA, GATEWAY, REGISTRY = "fleet:Replica", "fleet:Gateway", "registry:RegistryActor"
HANG = "hang"
"""The file, beside the node store, with the process ids that `tests.faults.hanging_fleet` makes hang."""
PROXY, PROXY_MANAGER = "haproxy", "ray::HAProxyManager"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class FleetProcess:
    """Starts in the constructor's `with` block and leaves nothing behind."""

    def __init__(
        self,
        base: str,
        *,
        num_replicas: int = 2,
        replica: Mapping[str, Any] | None = None,
        registry: Mapping[str, Any] | None = None,
        fleet: Mapping[str, Any] | None = None,
        import_path: str = "cluster.app:build_fleet",
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lf-"))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.port, "request_timeout_s": 600},
            "logging_config": {"enable_access_log": False},
            "applications": [
                {
                    "name": "registry",
                    "route_prefix": None,
                    "import_path": "cluster.app:build_registry",
                    "args": {"data_dir": str(self.folder / "registry"), "lease_ttl_s": LEASE_TTL_S, **(registry or {})},
                },
                {
                    "name": "fleet",
                    "route_prefix": "/",
                    "import_path": import_path,
                    "args": {
                        "replicas": {"count": num_replicas},
                        "replica": merged(
                            {
                                "model": {"base": base, "num_threads": 1, "device": "cpu"},
                                "adapters": {"node_store": str(self.folder / "node")},
                            },
                            replica or {},
                        ),
                        **(fleet or {}),
                    },
                },
            ],
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "FleetProcess":
        config = self.folder / "fleet.yaml"
        config.write_text(yaml.safe_dump(self._config))
        with (self.folder / "serve.log").open("wb") as log:
            self._process = subprocess.Popen(
                [str(ROOT / "deploy" / "serve"), str(config)],
                cwd=ROOT,
                env=self._environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _environment(self) -> dict[str, str]:
        stats, metrics, ingress = free_port(), free_port(), free_port()
        proxy = self.folder / "haproxy"
        return {
            **{key: value for key, value in os.environ.items() if not key.startswith(("LORAFLEET_", "RAY_"))},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "LORAFLEET_URL": self.url,
            "RAY_TMPDIR": str(self.folder),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(proxy / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(proxy / "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(proxy),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(proxy / "server-state"),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ingress),
        }

    def driver_environment(self) -> dict[str, str]:
        """For another Ray driver that joins this fleet: a machine may run several, and Ray's own search takes any."""
        arguments = [argument for process in self._descendants() for argument in process.cmdline()]
        address = next(text.partition("=")[2] for text in arguments if text.startswith("--gcs-address="))
        loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        return {**self._environment(), **loopback, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}

    def deploy(self, *, fleet: Mapping[str, Any] | None = None, num_replicas: int | None = None) -> None:
        """Change the running fleet's configuration: its `args`, which replaces replicas and gateways a few at a time,
        or the number of its replicas, which replaces none. Returns when Serve has taken it, not when it is done."""
        application = self._config["applications"][1]  # type: ignore[index]
        merged(application["args"], fleet or {})
        if num_replicas is not None:
            application["deployments"] = [{"name": "Replica", "num_replicas": num_replicas}]
        (self.folder / "fleet.yaml").write_text(yaml.safe_dump(self._config))
        self.control("deploy", str(self.folder / "fleet.yaml"))

    def control(self, *arguments: str) -> None:
        """Run `tests/control_script.py` on this fleet's Ray."""
        subprocess.run(
            [sys.executable, str(ROOT / "tests" / "control_script.py"), *arguments],
            env=self.driver_environment(),
            cwd=ROOT,
            check=True,
            timeout=START_TIMEOUT_S,
            capture_output=True,
        )

    def log(self) -> str:
        return (self.folder / "serve.log").read_text(errors="replace")

    def wait_ready(self, num_replicas: int | None = None) -> None:
        """Until the gateway is ready and as many replicas as configured (or asked for) have joined."""
        wanted = num_replicas or self._config["applications"][1]["args"]["replicas"]["count"]  # type: ignore[index]
        self.wait_until(
            lambda: httpx.get(f"{self.url}/ready").status_code == 200 and len(self.replicas()) >= wanted,
            f"{wanted} ready replicas",
            START_TIMEOUT_S,
        )

    def wait_until(self, question: Callable[[], bool], what: str, timeout_s: float = 30.0) -> float:
        """Seconds until `question` answered yes; fails with the end of the fleet's log."""
        started_s = time.monotonic()
        while time.monotonic() - started_s < timeout_s:
            assert self._process is not None
            if self._process.poll() is not None:
                raise AssertionError(f"the fleet ended: {self.log()[-3000:]}")
            with contextlib.suppress(httpx.TransportError):
                if question():
                    return time.monotonic() - started_s
            time.sleep(0.05)
        raise AssertionError(f"no {what} within {timeout_s} s: {self.log()[-3000:]}")

    def replicas(self) -> list[dict[str, Any]]:
        response = httpx.get(f"{self.url}/v1/replicas")
        data: list[dict[str, Any]] = response.json()["data"] if response.status_code == 200 else []
        return data

    def cli(self, *arguments: str) -> Any:
        """Run `lorafleet --json ...` and return what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "cluster.cli", "--json", *arguments],
            cwd=ROOT,
            env={**os.environ, "LORAFLEET_URL": self.url},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def pids(self, deployment: str) -> list[int]:
        """Processes of one deployment of this fleet (Ray gives them a title)."""
        found = []
        for process in self._descendants():
            with contextlib.suppress(psutil.Error):
                if f"ServeReplica:{deployment}" in " ".join(process.cmdline()):
                    found.append(process.pid)
        return sorted(found)

    def proxy_pids(self, kind: str = PROXY) -> list[int]:
        """HAProxy (those with earlier settings end when their connections do), or its manager."""
        found = []
        for process in self._descendants():
            with contextlib.suppress(psutil.Error):
                if process.name() == kind or (process.cmdline() or [""])[0].startswith(kind):
                    found.append(process.pid)
        return sorted(found)

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        assert pid in {process.pid for process in self._descendants()}
        os.kill(pid, number)

    def hang(self, *pids: int) -> None:
        """Keep these replicas of `tests.faults.hanging_fleet` in their next step, and no others."""
        (self.folder / HANG).write_text(" ".join(map(str, pids)))

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds of every process of the fleet so far, by title and pid."""
        seconds = {}
        for process in self._descendants():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds[f"{' '.join(process.cmdline())[:80]} [{process.pid}]"] = times.user + times.system
        return seconds

    def _descendants(self) -> list[psutil.Process]:
        """Everything that carries this fleet's folder in its environment: Ray's processes leave the process tree."""
        mark = str(self.folder)
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RAY_TMPDIR") == mark:
                    found.append(process)
        return found

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        left = self._descendants()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        shutil.rmtree(self.folder, ignore_errors=True)


def merged(under: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in over.items():
        under[key] = merged(dict(under.get(key, {})), value) if isinstance(value, Mapping) else value
    return under
