"""A real Prometheus on loopback, and an application served on a socket by the test's own loop."""

import asyncio
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import yaml

from tests.fleet_process import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yaml"
START_S = 30.0

WINDOWS = {"5m": "5s", "30m": "6s", "1h": "8s", "6h": "10s", "15s": "1s"}
"""What minutes and hours are in a test."""

THRESHOLDS = {"> 120": "> 2", "> 60": "> 2", "> 30": "> 2", "rate5m > 1 ": "rate5m > 0.2 "}


def program(name: str) -> str:
    """Its path; skips the test where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here (Debian: apt install prometheus)")
    return found


def hastened(rules: str) -> str:
    """The rules with seconds for minutes, so that a test can wait for them."""
    for long, short in THRESHOLDS.items():
        assert long in rules, long
        rules = rules.replace(long, short)
    rules = re.sub(r"\[(\w+)\]", lambda found: f"[{WINDOWS[found[1]]}]", rules)
    rules = re.sub(r"interval: (\w+)", lambda found: f"interval: {WINDOWS[found[1]]}", rules)
    return re.sub(r"for: \w+", "for: 1s", rules)


class Prometheus:
    """Asks the running server."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def query(self, expr: str) -> list[tuple[Mapping[str, str], float]]:
        """Labels and value of every series now. Raises AssertionError with Prometheus' own word."""
        answer = (await self._client.get("/api/v1/query", params={"query": expr})).json()
        assert answer["status"] == "success", f"{expr}: {answer}"
        return [(each["metric"], float(each["value"][1])) for each in answer["data"]["result"]]

    async def firing(self) -> dict[str, Mapping[str, str]]:
        """Alerts that fire, by name, with their labels."""
        alerts = (await self._client.get("/api/v1/alerts")).json()["data"]["alerts"]
        return {each["labels"]["alertname"]: each["labels"] for each in alerts if each["state"] == "firing"}

    async def targets(self) -> list[dict[str, Any]]:
        return list((await self._client.get("/api/v1/targets")).json()["data"]["activeTargets"])

    async def is_ready(self) -> bool:
        try:
            return (await self._client.get("/-/ready")).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def server_process(
    folder: Path, scrape_configs: list[dict[str, Any]]
) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """The process and its port."""
    path, port = program("prometheus"), free_port()
    (folder / "rules.yaml").write_text(hastened(RULES.read_text()))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": scrape_configs,
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    arguments = [f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        command = [path, *arguments, f"--web.listen-address=127.0.0.1:{port}"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            yield server, port
        finally:
            server.terminate()
            server.wait(20)


@asynccontextmanager
async def prometheus(folder: Path, scrape_configs: list[dict[str, Any]]) -> AsyncIterator[Prometheus]:
    """A Prometheus that scrapes every second, with our rules hastened."""
    with server_process(folder, scrape_configs) as (server, port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            asking = Prometheus(client)
            async with asyncio.timeout(START_S):
                while not await asking.is_ready():
                    assert server.poll() is None, (folder / "log").read_text()
                    await asyncio.sleep(0.1)
            yield asking


@asynccontextmanager
async def on_a_socket(app: Any) -> AsyncIterator[str]:
    """Serve an application on this very loop; yields host and port."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", lifespan="off"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
