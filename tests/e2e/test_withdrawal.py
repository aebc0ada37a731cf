"""Versions that leave service under load: drains with a deadline, quarantine, and a canary, with real replicas."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from registry.errors import ModelNotFound
from registry.types import VersionState
from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from tests.local_fleet import LocalFleet, local_fleet, until
from tests.tiny_models import CONTEXT_LENGTH, make_adapter

TOKENS = CONTEXT_LENGTH // 2


@pytest.fixture
async def fleet(tiny_base: Path, tmp_path: Path) -> AsyncIterator[LocalFleet]:
    config = ReplicaConfig(
        model=ModelConfig(base=str(tiny_base), device="cpu", num_threads=1),
        adapters=AdapterCacheConfig(node_store=tmp_path / "node", max_slots=4, arena_bytes=8 << 20),
        scheduler=SchedulerConfig(num_kv_blocks=512),
    )
    async with local_fleet(tmp_path, config, num_replicas=2) as fleet:
        await fleet.push("legal", make_adapter(tiny_base, ("q_proj", "v_proj"), 8, folder=tmp_path / "one", seed=1))
        await fleet.push("legal", make_adapter(tiny_base, ("q_proj", "v_proj"), 8, folder=tmp_path / "two", seed=2))
        yield fleet
        fleet.check_integrity()


async def complete(client: httpx.AsyncClient, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": "Hello", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **fields}
    return await client.post("/v1/completions", json=body)


async def running(fleet: LocalFleet, model: str, count: int) -> tuple[httpx.AsyncClient, list["asyncio.Task[Any]"]]:
    """Requests of `model` that compute on the replicas."""
    client = fleet.client()
    digest = fleet.gateway.catalog.resolve("default", model).digest
    tasks = [asyncio.create_task(complete(client, model, n=4)) for _ in range(count)]
    await until(lambda: any(digest in replica.running() for replica in fleet.replicas.values()))
    return client, tasks


async def test_version_before_the_live_one_is_warm_on_every_replica(fleet: LocalFleet) -> None:
    before = fleet.gateway.catalog.resolve("default", "legal@1").digest
    await until(lambda: all(before in replica.status().host_cached for replica in fleet.replicas.values()))


def state(fleet: LocalFleet, number: int) -> VersionState:
    version = fleet.registry.registry.adapter("legal").version(number)
    assert version is not None
    return version.state


async def test_retired_version_ends_what_runs_and_then_it_is_retired(fleet: LocalFleet) -> None:
    client, tasks = await running(fleet, "legal@1", 4)
    answer = await client.delete("/v1/adapters/legal/versions/1?deadline_s=60")
    assert answer.json()["versions"][0]["state"] == "draining"
    await until(lambda: state_in_catalog(fleet, 1) is not VersionState.ACTIVE)
    assert (await complete(client, "legal@1")).status_code == 404
    assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 4
    started_s = time.monotonic()
    while state(fleet, 1) is VersionState.DRAINING:
        assert time.monotonic() - started_s < 20
        await asyncio.to_thread(fleet.registry.registry.advance)
        await asyncio.sleep(0.1)
    assert state(fleet, 1) is VersionState.RETIRED


async def test_quarantine_aborts_what_runs_with_a_clear_error(fleet: LocalFleet) -> None:
    client, tasks = await running(fleet, "legal@1", 4)
    answer = await client.post("/v1/adapters/legal/versions/1/quarantine", json={"reason": "leaks"})
    assert answer.status_code == 200
    ended = await asyncio.gather(*tasks)
    codes = {(each.status_code, each.json().get("error", {}).get("code")) for each in ended}
    assert codes <= {(410, "adapter_withdrawn"), (404, "model_not_found"), (200, None)}
    assert (410, "adapter_withdrawn") in codes
    await until(lambda: state_in_catalog(fleet, 1) is VersionState.QUARANTINED)
    with pytest.raises(ModelNotFound):
        fleet.gateway.catalog.resolve("default", "legal@1")
    assert (await complete(client, "legal", max_tokens=4)).status_code == 200


async def test_canary_serves_its_keys_and_nobody_else(fleet: LocalFleet) -> None:
    client = fleet.client()
    prints = {}
    for number in (1, 2):
        prints[number] = (await complete(client, f"legal@{number}", max_tokens=1)).json()["system_fingerprint"]
    answer = await client.post("/v1/adapters/legal/canary", json={"version": 1, "weight": 0.5})
    assert answer.json()["state"] in ("done", "flipped"), answer.text
    await until(lambda: bool(fleet.gateway.catalog.adapters[0].canaries))
    for number in range(12):
        expected = prints[fleet.gateway.catalog.resolve("default", "legal", f"u{number}").number or 0]
        by_user = await complete(client, "legal", max_tokens=1, user=f"u{number}")
        body = {"model": "legal", "prompt": "Hello", "max_tokens": 1, "user": "somebody else"}
        by_header = await client.post("/v1/completions", json=body, headers={"x-lorafleet-sticky": f"u{number}"})
        assert {by_user.json()["system_fingerprint"], by_header.json()["system_fingerprint"]} == {expected}
    seen = await client.get("/v1/adapters/legal/versions/1/replicas")
    assert {each["state"] for each in seen.json()["replicas"]} <= {"held", "resident"}


def state_in_catalog(fleet: LocalFleet, number: int) -> VersionState:
    version = fleet.gateway.catalog.adapters[0].version(number)
    assert version is not None
    return version.state
