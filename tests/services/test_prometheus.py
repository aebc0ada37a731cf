"""A real Prometheus over a fleet of real replicas: every panel has data, every alert comes with its cause and goes."""

import asyncio
import itertools
import math
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import pytest_asyncio

from cluster.member import Member
from registry.errors import RegistryUnavailable
from registry.types import EVERYBODY, TenantLimits
from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from replica.errors import AdapterUnavailable
from replica.replica import Replica
from replica.step import StepRunner
from router.app import create_app
from router.errors import ReplicaGone
from tests.e2e.test_metrics_truth import TENANT_HEADER, TenantsByHeader
from tests.local_fleet import LocalFleet, LocalRegistry, LocalReplicas, local_fleet
from tests.services.prometheus import DEPLOY, RULES, Prometheus, on_a_socket, program, prometheus
from tests.telemetry.test_deploy import panels, rules
from tests.tiny_models import make_adapter

pytestmark = [
    pytest.mark.services,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]
NAMES = tuple(f"adapter-{number}" for number in range(6))
PATIENCE_S = 40.0
VARIABLES = {"$instance": ".*", "$model": ".*", "$tenant": ".*", "$__rate_interval": "5s", "[1h]": "[30s]"}


@dataclass
class Traffic:
    """Calls that go on until the end, one after another; `models` says of what, and may be changed at any time."""

    client: httpx.AsyncClient
    others: Sequence[httpx.AsyncClient] = ()
    """Of further gateways: calls go to all in turn."""
    models: Sequence[str] = NAMES
    outcomes: list[int] = field(default_factory=list)

    async def run(self, lane: int) -> None:
        for number in itertools.count(lane):
            model = self.models[number % len(self.models)]
            tenant = ("acme", "beta", "meagre")[number % 3]
            client = (self.client, *self.others)[number % (1 + len(self.others))]
            self.outcomes.append(await ask(client, model, tenant, max_tokens=4))
            await asyncio.sleep(0.02)


async def ask(client: httpx.AsyncClient, model: str, tenant: str, max_tokens: int) -> int:
    body = {"model": model, "prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True}
    return (await client.post("/v1/completions", json=body, headers={TENANT_HEADER: tenant})).status_code


@dataclass
class Scene:
    """A fleet under traffic and who watches it."""

    fleet: LocalFleet
    traffic: Traffic
    prometheus: Prometheus
    base: Path
    folder: Path
    address: str
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(100))

    async def push(self, name: str) -> None:
        """Push another version, without waiting for the alias to move."""
        seed = next(self.seeds)
        made = make_adapter(self.base, ("q_proj", "v_proj"), 8, folder=self.folder / f"{name}-{seed}", seed=seed)
        files = {path.name: path for path in made.iterdir()}
        await self.fleet.registry.push(name, files, owner="default", activate=True)

    async def until(self, what: str, question: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask for the firing alerts until they are as wanted."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not question(firing := await self.prometheus.firing()):
            assert time.monotonic() < deadline_s, f"{what}; firing are {sorted(firing)}"
            await asyncio.sleep(0.3)
        return firing


@asynccontextmanager
async def a_scene(base: Path, folder: Path) -> AsyncIterator[Scene]:
    config = ReplicaConfig(
        model=ModelConfig(base=str(base), device="cpu", num_threads=1),
        adapters=AdapterCacheConfig(node_store=folder / "node", max_slots=1),
        scheduler=SchedulerConfig(num_kv_blocks=256, max_num_seqs=2, policy="fcfs"),
    )
    async with local_fleet(folder, config, num_replicas=2, num_gateways=2) as fleet:
        for gateway in fleet.gateways:
            gateway.authenticator = TenantsByHeader()
        for seed, name in enumerate(NAMES):
            await fleet.push(name, make_adapter(base, ("q_proj", "v_proj"), 8, folder=folder / name, seed=seed))
            await fleet.registry._change("set_callers", name, (EVERYBODY,), actor="test")
        await fleet.registry.add_tenant("meagre", TenantLimits(requests_per_minute=3), actor="test")
        app = create_app(fleet.gateway)
        whole = {"job_name": "lorafleet", "honor_labels": True}
        async with on_a_socket(app) as address, httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as client:
            configs = [{**whole, "static_configs": [{"targets": [address]}]}]
            async with prometheus(folder, configs) as server:
                traffic = Traffic(client, [fleet.client(gateway) for gateway in fleet.gateways[1:]])
                running = [asyncio.create_task(traffic.run(lane)) for lane in range(3)]
                try:
                    yield Scene(fleet, traffic, server, base, folder, address)
                finally:
                    for task in running:
                        task.cancel()
                    await asyncio.gather(*running, return_exceptions=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    program("prometheus")
    async with a_scene(tiny_base, tmp_path_factory.mktemp("prometheus")) as scene:
        yield scene


def test_promtool_accepts_rules_and_configuration_and_every_alert_fires_and_clears() -> None:
    promtool, folder = program("promtool"), DEPLOY / "prometheus"
    for words in (["check", "rules", RULES], ["check", "config", folder / "prometheus.yaml"]):
        subprocess.run([promtool, *words], check=True, capture_output=True)
    done = subprocess.run([promtool, "test", "rules", folder / "rules_test.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


async def test_every_panel_of_the_dashboard_has_data(scene: Scene) -> None:
    await asyncio.gather(*(ask(scene.traffic.client, model, "acme", 2) for model in ("nobody", "tiny-llama")))
    assert await empty_panels(scene, PATIENCE_S) == []


async def empty_panels(scene: Scene, patience_s: float) -> list[str]:
    """The queries that have no number even after a while."""
    missing = {(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]}
    deadline_s = time.monotonic() + patience_s
    while missing and time.monotonic() < deadline_s:
        for title, expr in tuple(missing):
            if any(not math.isnan(value) for _, value in await scene.prometheus.query(filled_in(expr))):
                missing.discard((title, expr))
        await asyncio.gather(ask(scene.traffic.client, "nobody", "acme", 2), scene.push("often"))
        await asyncio.sleep(0.3)
    return sorted(title for title, _ in missing)


def filled_in(expr: str) -> str:
    """The query as Grafana would send it with everything selected."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


async def test_members_can_be_targets_of_their_own(scene: Scene) -> None:
    folder = scene.folder / "members"
    folder.mkdir()
    url = f"http://{scene.address}/metrics/targets"
    async with prometheus(folder, [{"job_name": "members", "http_sd_configs": [{"url": url}]}]) as server:
        deadline_s = time.monotonic() + PATIENCE_S
        wanted = {"gateway", "gateway-1", "registry", "replica-0", "replica-1"}
        while {labels["instance"] for labels, value in await server.query("up == 1")} != wanted:
            assert time.monotonic() < deadline_s, await server.targets()
            await asyncio.sleep(0.3)
        steps = await server.query("lorafleet_replica_steps_total")
        assert {labels["instance"] for labels, _ in steps} == {"replica-0", "replica-1"}


async def test_one_target_has_the_calls_of_all_gateways(scene: Scene) -> None:
    calls = await scene.prometheus.query("sum by (instance) (lorafleet_requests_total)")
    assert {labels["instance"] for labels, value in calls if value} == {"gateway", "gateway-1"}


@contextmanager
def one_adapter_only(scene: Scene) -> Iterator[None]:
    scene.traffic.models = NAMES[:1]
    try:
        yield
    finally:
        scene.traffic.models = NAMES


@contextmanager
def unreachable_replicas(scene: Scene) -> Iterator[None]:
    def generate(self: LocalReplicas, replica_id: str, request: Any) -> Any:
        raise ReplicaGone(f"replica {replica_id} was lost")

    with patch.object(LocalReplicas, "generate", generate):
        yield


@contextmanager
def slow_steps_and_long_requests(scene: Scene) -> Iterator[None]:
    """First come, first served: long requests of one tenant fill all rows, and what comes later waits."""
    launch = StepRunner.launch

    def slow(self: StepRunner, *args: Any) -> Any:
        time.sleep(0.05)
        return launch(self, *args)

    with patch.object(StepRunner, "launch", slow):
        hogs = [asyncio.create_task(ask(scene.traffic.client, "tiny-llama", "acme", 200)) for _ in range(8)]
        try:
            yield
        finally:
            for hog in hogs:
                hog.cancel()


@contextmanager
def a_replica_that_does_not_follow(scene: Scene) -> Iterator[None]:
    apply, watch = Member._apply, LocalRegistry.watch

    def deaf(self: Member, delta: Any) -> None:
        if self._replica_id != "replica-1":
            apply(self, delta)

    async def unhurried(self: LocalRegistry, *args: Any) -> Any:
        await asyncio.sleep(0.1)
        return await watch(self, *args)

    deafened = patch.object(Member, "_apply", deaf)
    with deafened, patch.object(LocalRegistry, "watch", unhurried), pushed(scene, "late"):
        yield


@contextmanager
def pushed(scene: Scene, name: str) -> Iterator[None]:
    """A new version is pushed meanwhile, once the watches that were under way have ended."""

    async def later() -> None:
        await asyncio.sleep(1.5)
        await scene.push(name)

    pushing = asyncio.create_task(later())
    yield
    pushing.result()


@contextmanager
def a_replica_that_cannot_stage(scene: Scene) -> Iterator[None]:
    async def refuse(self: Replica, manifest: Any) -> None:
        raise AdapterUnavailable("the disk is full")

    with patch.object(Replica, "stage", refuse), pushed(scene, "unwelcome"):
        yield


@contextmanager
def a_silent_replica(scene: Scene) -> Iterator[None]:
    async def metrics(self: LocalReplicas) -> dict[str, bytes]:
        return {"replica-0": self._replicas["replica-0"].metrics()}

    with patch.object(LocalReplicas, "metrics", metrics):
        yield


@contextmanager
def a_silent_registry(scene: Scene) -> Iterator[None]:
    async def metrics(self: LocalRegistry) -> bytes:
        raise RegistryUnavailable("the registry cannot be reached")

    with patch.object(LocalRegistry, "metrics", metrics):
        yield


Cause = Callable[[Scene], Any]
CAUSES: list[tuple[str, Cause, dict[str, str]]] = [
    ("LorafleetAdapterDominates", one_adapter_only, {"model": NAMES[0]}),
    ("LorafleetErrorBudgetBurn", unreachable_replicas, {}),
    ("LorafleetTenantStarving", slow_steps_and_long_requests, {}),
    ("LorafleetPropagationStuck", a_replica_that_does_not_follow, {}),
    ("LorafleetReplicaBehind", a_replica_that_does_not_follow, {"replica": "replica-1"}),
    ("LorafleetStagingFails", a_replica_that_cannot_stage, {}),
    ("LorafleetReplicaSilent", a_silent_replica, {}),
    ("LorafleetRegistrySilent", a_silent_registry, {}),
]


@pytest.mark.parametrize(("alert", "cause", "labels"), CAUSES, ids=[alert for alert, _, _ in CAUSES])
async def test_alert_comes_with_its_cause_and_goes_with_it(
    scene: Scene, alert: str, cause: Cause, labels: dict[str, str]
) -> None:
    await scene.until(f"{alert} is there before its cause", lambda firing: alert not in firing)
    with ExitStack() as causes:
        causes.enter_context(cause(scene))
        firing = await scene.until(f"{alert} does not come", lambda firing: alert in firing)
        assert labels.items() <= dict(firing[alert]).items()
    await scene.until(f"{alert} does not go", lambda firing: alert not in firing)


async def test_thrashing_is_told_while_more_adapters_are_in_use_than_slots_hold(scene: Scene) -> None:
    await scene.until("thrashing is not told", lambda firing: "LorafleetThrashing" in firing)
    with one_adapter_only(scene):
        await scene.until("thrashing is told still", lambda firing: "LorafleetThrashing" not in firing)


def test_every_alert_has_its_cause_here() -> None:
    assert {rule["alert"] for rule in rules() if "alert" in rule} == {
        "LorafleetThrashing",
        *(alert for alert, _, _ in CAUSES),
    }
