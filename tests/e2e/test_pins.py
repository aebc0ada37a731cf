"""Pinned adapters on real replicas: there before a replica takes requests, and never out of their slots."""

import asyncio
from pathlib import Path

from registry.types import Preload
from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from tests.local_fleet import LocalFleet, local_fleet, until
from tests.tiny_models import make_adapter

NAMES = ("a", "b", "c", "d")


def live(fleet: LocalFleet, name: str) -> str:
    digest = fleet.gateway.catalog.resolve("default", name).digest
    assert digest is not None
    return digest


def is_everywhere(fleet: LocalFleet, name: str) -> bool:
    return all(live(fleet, name) in replica.resident() for replica in fleet.replicas.values())


def config(base: Path, folder: Path, max_slots: int) -> ReplicaConfig:
    return ReplicaConfig(
        model=ModelConfig(base=str(base), device="cpu", num_threads=1),
        adapters=AdapterCacheConfig(node_store=folder / "node", max_slots=max_slots, arena_bytes=8 << 20),
        scheduler=SchedulerConfig(num_kv_blocks=64),
    )


async def test_pinned_adapter_stays_in_a_slot_of_every_replica(tiny_base: Path, tmp_path: Path) -> None:
    async with local_fleet(tmp_path, config(tiny_base, tmp_path, max_slots=2), num_replicas=2) as fleet:
        for seed, name in enumerate(NAMES):
            await fleet.push(name, make_adapter(tiny_base, ("q_proj",), 4, folder=tmp_path / name, seed=seed))
        client = fleet.client()

        async def ask(name: str) -> int:
            body = {"model": name, "prompt": "Hello", "max_tokens": 2, "temperature": 0}
            return (await client.post("/v1/completions", json=body)).status_code

        assert (await client.put("/v1/adapters/a/pin")).status_code == 200
        assert (await client.put("/v1/adapters/b/pin")).status_code == 409, "a slot stays for the others"
        await until(lambda: is_everywhere(fleet, "a"))
        for _ in range(3):
            assert set(await asyncio.gather(*(ask(name) for name in NAMES))) == {200}
            assert is_everywhere(fleet, "a")

        await fleet.add_replica()
        assert is_everywhere(fleet, "a"), "it was there before the replica took requests"

        before = live(fleet, "a")
        await fleet.push("a", make_adapter(tiny_base, ("q_proj",), 4, folder=tmp_path / "a2", seed=9))
        assert live(fleet, "a") != before
        await until(lambda: is_everywhere(fleet, "a"))
        assert (await client.delete("/v1/adapters/a/pin")).status_code == 200
        assert {await ask(name) for name in NAMES} == {200}
        fleet.check_integrity()


async def test_preloaded_adapter_is_in_host_memory_of_its_home(tiny_base: Path, tmp_path: Path) -> None:
    async with local_fleet(tmp_path, config(tiny_base, tmp_path, max_slots=8), num_replicas=2) as fleet:
        await fleet.push("a", make_adapter(tiny_base, ("q_proj",), 4, folder=tmp_path / "a", seed=1))
        await fleet.registry.set_preload("a", Preload(every_s=3600), actor="test")
        await until(lambda: fleet.gateway.catalog.adapters[0].preload is not None)
        await fleet.gateway.preload()
        home = fleet.gateway.placement.policy.home("a")
        assert home is not None
        await until(lambda: live(fleet, "a") in fleet.replicas[home.replica_id].status().host_cached)
