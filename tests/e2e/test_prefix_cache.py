"""Found KV blocks through the whole system: a name whose version changes gets none of the old one's, nor does a tenant
get another's."""

from pathlib import Path

import httpx
import pytest

from registry.types import Scope, TenantLimits
from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from tests.local_fleet import LocalFleet, local_fleet, until
from tests.tiny_fleet import TinyFleet
from tests.tiny_models import make_adapter

PROMPT = "You are a careful assistant of the house. Answer in one line. Who are you, and of what house? " * 2
NUM_BLOCKS = len(PROMPT) // 16
NUM_TOKENS = 8


def config(base: Path) -> ReplicaConfig:
    return ReplicaConfig(
        model=ModelConfig(base=str(base), device="cpu", num_threads=1),
        adapters=AdapterCacheConfig(max_slots=4, arena_bytes=1 << 22),
        scheduler=SchedulerConfig(num_kv_blocks=256, prefix_cache=True),
    )


async def ask(client: httpx.AsyncClient, model: str, key: str = "") -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


class Asker:
    """Asks, and says how many tokens were found on the way."""

    def __init__(self, fleet: LocalFleet, client: httpx.AsyncClient) -> None:
        self._client = client
        self._engine = fleet.replicas["replica-0"].engine
        self._num_found = 0

    async def __call__(self, model: str, key: str = "") -> tuple[str, int]:
        text = await ask(self._client, model, key)
        num_found = self._engine.counts.num_found_tokens
        self._num_found, news = num_found, num_found - self._num_found
        return text, news


@pytest.fixture(scope="module")
def versions(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("versions")
    return {
        name: make_adapter(tiny_base, ("q_proj", "v_proj"), 4, folder=folder / name, seed=seed, std=0.4)
        for seed, name in enumerate(("old", "new"))
    }


async def test_a_reload_under_the_same_name_finds_nothing_of_the_old_version(
    tiny_base: Path, versions: dict[str, Path], tmp_path: Path
) -> None:
    by_peft = TinyFleet(None, tiny_base, versions)  # type: ignore[arg-type]
    old, new = (by_peft.greedy_text(name, PROMPT, NUM_TOKENS)[0] for name in ("old", "new"))
    assert old != new
    async with local_fleet(tmp_path, config(tiny_base), num_replicas=1) as fleet, fleet.client() as client:
        asked = Asker(fleet, client)
        await fleet.push("style", versions["old"])
        assert await asked("style") == (old, 0)
        text, num_found = await asked("style")
        assert (text, num_found) == (old, NUM_BLOCKS * 16)
        await fleet.push("style", versions["new"])
        assert await asked("style") == (new, 0), "the alias moved: nothing of the old version"
        assert await asked("style") == (new, num_found)
        assert await asked("style@1") == (old, num_found), "a version finds its own blocks by whatever name"
        activation = await fleet.registry.rollback("style", "live", actor="default")
        await until(lambda: fleet.gateway.catalog.resolve("default", "style").number == 1)
        assert activation.number == 1
        assert await asked("style") == (old, num_found)
        await fleet.push("copy", versions["new"])
        assert await asked("copy") == (new, num_found), "the same content under another name is the same content"
        assert (await asked(next(iter(fleet.gateway.catalog.base_names))))[1] == 0
        fleet.check_integrity()


async def test_a_tenant_finds_nothing_of_another_one(
    tiny_base: Path, versions: dict[str, Path], tmp_path: Path
) -> None:
    async with local_fleet(tmp_path, config(tiny_base), num_replicas=1, with_keys=True) as fleet:
        keys = {}
        for tenant in ("a", "b"):
            await fleet.registry.add_tenant(tenant, TenantLimits(), actor="test")
            made = await fleet.registry.new_key(tenant, (Scope.INFER,), expires_at_s=None, note="", actor="test")
            keys[tenant] = made.secret
        await fleet.push("style", versions["old"])
        await fleet.registry.set_callers("style", ("*",), actor="default")
        async with fleet.client() as client:
            catalog = fleet.gateway.catalog
            await until(lambda: catalog.access is not None and len(catalog.access.keys) == 2)
            await until(lambda: any(catalog.adapters_for("b")))
            asked = Asker(fleet, client)
            text, _ = await asked("style", keys["a"])
            assert await asked("style", keys["b"]) == (text, 0)
            assert await asked("style", keys["a"]) == (text, NUM_BLOCKS * 16)
            assert await asked("style", keys["b"]) == (text, NUM_BLOCKS * 16)
