"""A control plane made for vLLM against the whole system: load from a path, ask, replace in place, unload."""

import shutil
from pathlib import Path

from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from tests.local_fleet import local_fleet, until
from tests.tiny_models import make_adapter


async def test_adapter_is_loaded_replaced_and_unloaded_by_path(tiny_base: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    for seed in range(2):
        make_adapter(tiny_base, ("q_proj", "v_proj"), 4, folder=models / str(seed), seed=seed, std=0.5)
    shutil.make_archive(str(models / "packed"), "gztar", models / "1")
    config = ReplicaConfig(
        model=ModelConfig(base=str(tiny_base), device="cpu", num_threads=1),
        adapters=AdapterCacheConfig(max_slots=4, arena_bytes=1 << 22),
        scheduler=SchedulerConfig(num_kv_blocks=256),
    )
    async with local_fleet(tmp_path, config, source_roots=[models]) as fleet, fleet.client() as client:

        async def control(action: str, **body: object) -> tuple[int, str]:
            response = await client.post(f"/v1/{action}_lora_adapter", json={"lora_name": "sql", **body})
            return response.status_code, response.text

        async def text() -> str:
            body = {"model": "sql", "prompt": "select", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            return str(response.json()["choices"][0]["text"])

        assert await control("load", lora_path=str(models / "0")) == (
            200,
            "Success: LoRA adapter 'sql' added successfully.",
        )
        first = await text()
        assert (await control("load", lora_path=str(models / "1")))[0] == 400
        assert (await control("load", lora_path="/etc", load_inplace=True))[0] == 400
        assert (await control("load", lora_path=str(models / "2"), load_inplace=True))[0] == 404
        assert await text() == first
        assert (await control("load", lora_path=str(models / "packed.tar.gz"), load_inplace=True))[0] == 200
        assert await text() != first
        assert (await control("unload"))[0] == 200
        await until(lambda: "live" not in fleet.gateway.catalog.adapters[0].aliases)
        gone = await client.post("/v1/completions", json={"model": "sql", "prompt": "x"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        assert (await control("unload"))[0] == 404
        assert (await control("load", lora_path=str(models / "0")))[0] == 200
        await until(lambda: "live" in fleet.gateway.catalog.adapters[0].aliases)
        assert await text() == first
        fleet.check_integrity()
