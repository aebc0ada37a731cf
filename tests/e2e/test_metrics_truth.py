"""A scripted run on real replicas: every counter is the script's own count, and every gauge comes back to zero."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from registry.types import EVERYBODY, Scope, TenantLimits
from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from router.app import create_app
from router.auth import Principal
from router.schemas import CompletionBody
from tests.e2e.fleet_log import FleetLog, writing_down
from tests.local_fleet import LocalFleet, local_fleet, until
from tests.metrics_text import Samples, samples_of
from tests.tiny_models import make_adapter

TENANT_HEADER = "x-tenant"
ADAPTERS = ("a", "b", "c")
GAUGES_AT_REST = (
    *("lorafleet_gateway_in_flight", "lorafleet_tenant_in_flight", "lorafleet_gateway_replica_load"),
    *("lorafleet_replica_sequences", "lorafleet_adapter_waiting", "lorafleet_replica_staging"),
    *("lorafleet_tenant_waiting", "lorafleet_tenant_oldest_wait_seconds", "lorafleet_tenant_deficit_tokens"),
    *("lorafleet_registry_activations_open", "lorafleet_registry_oldest_open_seconds"),
    *("lorafleet_registry_replica_lag", "lorafleet_registry_gateway_lag"),
)


class TenantsByHeader:
    """Believes what a caller says it is."""

    async def authenticate(self, headers: Mapping[str, str]) -> Principal:
        return Principal(headers.get(TENANT_HEADER, "default"), frozenset(Scope))

    def take_used(self) -> tuple[str, ...]:
        return ()


@dataclass
class Script:
    """What was asked and answered, counted by the client. `Key` is (model, version)."""

    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    by_tenant: Counter[tuple[str, str]] = field(default_factory=Counter)
    prompt: Counter[str] = field(default_factory=Counter)
    output: Counter[str] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)
    prompts_at_tenant: Counter[str] = field(default_factory=Counter)
    outputs_at_tenant: Counter[str] = field(default_factory=Counter)

    def ended(self, tenant: str, key: tuple[str, str], outcome: str) -> None:
        self.calls[*key, outcome] += 1
        self.by_tenant[tenant, outcome] += 1

    def answered(self, tenant: str, key: tuple[str, str], usage: dict[str, int], n: int) -> None:
        self.ended(tenant, key, "ok")
        self.used(tenant, key, usage["prompt_tokens"], usage["completion_tokens"])
        self.choices["length"] += n

    def used(self, tenant: str, key: tuple[str, str], num_prompt: int, num_output: int) -> None:
        self.prompt["@".join(key)] += num_prompt
        self.output["@".join(key)] += num_output
        self.prompts_at_tenant[tenant] += num_prompt
        self.outputs_at_tenant[tenant] += num_output


@asynccontextmanager
async def a_fleet(tiny_base: Path, folder: Path) -> AsyncIterator[LocalFleet]:
    config = ReplicaConfig(
        model=ModelConfig(base=str(tiny_base), device="cpu", num_threads=1),
        adapters=AdapterCacheConfig(node_store=folder / "node", max_slots=1, arena_bytes=8 << 20),
        scheduler=SchedulerConfig(num_kv_blocks=256),
    )
    async with local_fleet(folder, config, num_replicas=2) as fleet:
        fleet.gateway.authenticator = TenantsByHeader()
        fleet.app = create_app(fleet.gateway)
        for seed, name in enumerate(ADAPTERS):
            await push(fleet, tiny_base, folder, name, seed)
        await until(lambda: len(fleet.gateway.catalog.adapters_for("nobody")) == len(ADAPTERS))
        yield fleet
        fleet.check_integrity()


async def push(fleet: LocalFleet, base: Path, folder: Path, name: str, seed: int) -> None:
    made = make_adapter(base, ("q_proj", "v_proj"), 8, folder=folder / f"{name}-{seed}", seed=seed)
    await fleet.push(name, made)
    await fleet.registry._change("set_callers", name, (EVERYBODY,), actor="test")


async def ask(client: httpx.AsyncClient, tenant: str, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": "Hello there", "temperature": 0, "ignore_eos": True, **fields}
    return await client.post("/v1/completions", json=body, headers={TENANT_HEADER: tenant})


def usage_of(response: httpx.Response) -> dict[str, int]:
    if not response.headers["content-type"].startswith("text/event-stream"):
        return dict(response.json()["usage"])
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return next(usage for event in events if (usage := json.loads(event).get("usage")))


async def ask_and_count(client: httpx.AsyncClient, script: Script, chance: random.Random) -> None:
    """One call by chance, and what its answer says it used."""
    tenant, name = chance.choice(("acme", "beta", "default")), chance.choice((*ADAPTERS, "tiny-llama"))
    n, is_stream = chance.randint(1, 2), chance.random() < 0.5
    fields: dict[str, Any] = {"max_tokens": chance.randint(1, 6), "n": n, "stream": is_stream}
    if is_stream:
        fields["stream_options"] = {"include_usage": True}
    response = await ask(client, tenant, name, **fields)
    assert response.status_code == 200, response.text
    key = ("base", "-") if name == "tiny-llama" else (name, "1")
    script.answered(tenant, key, usage_of(response), n)


async def run_script(fleet: LocalFleet, script: Script) -> None:
    """Good calls four at a time, calls of wrong models, calls over a limit, and one whose client goes away."""
    chance = random.Random(7)
    async with fleet.client() as client:
        for _ in range(10):
            await asyncio.gather(*(ask_and_count(client, script, chance) for _ in range(4)))
        for model in ("nobody", "a@9", "b@nowhere"):
            assert (await ask(client, "acme", model)).status_code == 404
        await fleet.registry.add_tenant("meagre", TenantLimits(requests_per_minute=2), actor="test")
        await until(lambda: "meagre" in getattr(fleet.gateway.catalog.access, "limits", {}))
        for _ in range(4):
            response = await ask(client, "meagre", "c", max_tokens=2)
            if response.status_code == 200:
                script.answered("meagre", ("c", "1"), usage_of(response), 1)
            else:
                script.ended("meagre", ("c", "1"), "tenant_limit_reached")
    await go_away(fleet, script)


async def go_away(fleet: LocalFleet, script: Script) -> None:
    """A client that leaves after its first message."""
    body = CompletionBody(model="b", prompt="Hello", stream=True, max_tokens=200)
    call = await fleet.gateway.completion_call("acme", body)
    generation = fleet.gateway.generation(call)
    deltas = generation.deltas()
    await anext(deltas)
    await deltas.aclose()
    script.ended("acme", ("b", "1"), "disconnect")
    script.choices["abort"] += 1
    script.used("acme", ("b", "1"), call.num_prompt_tokens, generation.num_tokens)


async def at_rest(fleet: LocalFleet) -> Samples:
    """The metrics once nothing runs, and the registry has heard of it."""
    await asyncio.gather(*(asyncio.to_thread(each.engine.wait_idle, 10.0) for each in fleet.replicas.values()))
    async with asyncio.timeout(20):
        while True:
            samples = samples_of(await fleet.gateway.exposition())
            if not any(value for (name, _), value in samples.items() if name in GAUGES_AT_REST):
                return samples
            await asyncio.sleep(0.1)


def added_up(samples: Samples, name: str, *labels: str) -> dict[Any, float]:
    """The samples of a name by these labels, over all instances; zeros left out."""
    found: Counter[Any] = Counter()
    for (each, pairs), value in samples.items():
        if each == name:
            by = dict(pairs)
            found[tuple(by[label] for label in labels) if len(labels) != 1 else by[labels[0]]] += value  # type: ignore[assignment]
    return {key: value for key, value in found.items() if value}


@pytest.fixture(scope="module")
def told(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Samples, Script, FleetLog]:
    async def run() -> tuple[Samples, Script, FleetLog]:
        script = Script()
        with writing_down() as log:
            async with a_fleet(tiny_base, tmp_path_factory.mktemp("truth")) as fleet:
                await run_script(fleet, script)
                return await at_rest(fleet), script, log

    return asyncio.run(run())


Told = tuple[Samples, Script, FleetLog]


def test_calls_and_tokens_are_the_clients(told: Told) -> None:
    samples, script, _ = told
    assert added_up(samples, "lorafleet_requests_total", "model", "version", "outcome") == script.calls
    assert added_up(samples, "lorafleet_tenant_requests_total", "tenant", "outcome") == script.by_tenant
    by_key = {"@".join(key): value for key, value in tokens(samples, "prompt").items()}
    assert by_key == script.prompt
    assert {"@".join(key): value for key, value in tokens(samples, "completion").items()} == script.output
    assert added_up(samples, "lorafleet_gateway_errors_total", "code") == {
        "model_not_found": 3,
        "tenant_limit_reached": 2,
    }
    assert added_up(samples, "lorafleet_gateway_limited_total", "tenant", "limit") == {
        ("meagre", "requests_per_minute"): 2
    }


def tokens(samples: Samples, kind: str) -> dict[Any, float]:
    return added_up(samples, f"lorafleet_gateway_{kind}_tokens_total", "model", "version")


def test_times_are_observed_once_a_call(told: Told) -> None:
    samples, script, _ = told
    ended: Counter[tuple[str, str]] = Counter()
    begun: Counter[tuple[str, str]] = Counter()
    for (model, version, outcome), count in script.calls.items():
        ended[model, version] += count
        begun[model, version] += count if outcome != "tenant_limit_reached" else 0
    by = ("model", "version")
    assert added_up(samples, "lorafleet_gateway_latency_seconds_count", *by) == ended
    assert added_up(samples, "lorafleet_gateway_first_token_seconds_count", *by) == begun
    assert added_up(samples, "lorafleet_replica_queue_wait_seconds_count", *by) == begun
    placed = added_up(samples, "lorafleet_gateway_placements_total", "kind")
    assert sum(placed.values()) == sum(begun.values())
    assert placed["base"] == begun["base", "-"]


def test_replicas_count_what_the_clients_got(told: Told) -> None:
    samples, script, _ = told
    assert added_up(samples, "lorafleet_replica_choices_total", "outcome") == script.choices
    assert added_up(samples, "lorafleet_replica_prompt_tokens_total") == {(): sum(script.prompt.values())}
    gone = added_up(samples, "lorafleet_replica_generation_tokens_total")[()] - sum(script.output.values())
    assert 0 <= gone <= 8, "tokens of the client that went away, which it did not wait for"
    service = added_up(samples, "lorafleet_tenant_service_tokens_total", "tenant")
    for tenant in ("beta", "default", "meagre"):
        assert service[tenant] == script.prompts_at_tenant[tenant] + script.outputs_at_tenant[tenant]
    assert service["acme"] == script.prompts_at_tenant["acme"] + script.outputs_at_tenant["acme"] + gone


def test_steps_are_those_that_were_launched(told: Told) -> None:
    samples, _, log = told
    assert added_up(samples, "lorafleet_replica_steps_total") == {(): len(log.launched)}
    for index, what in enumerate(("sequences", "tokens", "adapters")):
        total = sum(step[index] for step in log.launched)
        assert added_up(samples, f"lorafleet_replica_batch_{what}_sum") == {(): total}


def test_hits_loads_and_swaps_are_those_of_the_event_log(told: Told) -> None:
    samples, _, log = told
    hits, misses = (added_up(samples, f"lorafleet_adapter_{kind}_total", "tier") for kind in ("hits", "misses"))
    assert (hits["slot"], misses["slot"]) == (log.count("hit"), log.count("miss"))
    hit_rate = hits["slot"] / (hits["slot"] + misses["slot"])
    assert hit_rate == log.count("hit") / (log.count("hit") + log.count("miss"))
    assert added_up(samples, "lorafleet_adapter_evictions_total", "tier", "cause") == {
        ("slot", "room"): log.count("evict")
    }
    assert log.count("evict") > 5, "the run swaps too little to show anything"
    loads = added_up(samples, "lorafleet_adapter_loads_total", "source")
    assert loads == {"node": log.count("read"), "host": log.count("load") - log.count("read")}
    assert (hits["host"], hits["node"], misses["host"]) == (loads["host"], loads["node"], loads["node"])
    stages = added_up(samples, "lorafleet_adapter_load_seconds_count", "stage")
    once = dict.fromkeys(("wait", "copy", "publish", "total"), log.count("load"))
    assert stages == once | dict.fromkeys(("read", "convert"), log.count("read"))


def test_the_registry_counts_the_pushes(told: Told) -> None:
    samples, _, _ = told
    assert added_up(samples, "lorafleet_registry_activations_total", "outcome") == {"done": len(ADAPTERS)}
    assert added_up(samples, "lorafleet_registry_propagation_seconds_count") == {(): len(ADAPTERS)}
    assert added_up(samples, "lorafleet_registry_versions", "state") == {"active": len(ADAPTERS)}
    assert added_up(samples, "lorafleet_replica_staging_seconds_count", "outcome") == {"ok": 2 * len(ADAPTERS)}


def test_gauges_are_back_at_zero(told: Told) -> None:
    samples, _, _ = told
    assert {name for name, _ in samples} >= set(GAUGES_AT_REST)
    assert [key for key, value in samples.items() if key[0] in GAUGES_AT_REST and value] == []
    assert added_up(samples, "lorafleet_replica_kv_blocks", "state") == {"free": 2 * 256}
    assert added_up(samples, "lorafleet_adapter_slots", "state") == {"resident": 2}
