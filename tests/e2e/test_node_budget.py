"""More adapters than a node may keep on its disk: replicas join all the same, and every adapter answers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from replica.messages import GenerateRequest, SamplingParams
from replica.replica import Replica
from tests.local_fleet import local_fleet, until
from tests.tiny_models import load_peft, make_adapter, make_model

PROMPT = "Once upon a time"
NUM_TOKENS = 8
NAMES = tuple(f"tenant-{index}" for index in range(5))


def greedy(base: Path, adapter: Path, prompt: list[int]) -> list[int]:
    """What PEFT generates."""
    output = load_peft(base, adapter).generate(  # type: ignore[operator]
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        eos_token_id=None,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


async def tokens_of(replica: Replica, digest: str, prompt: list[int]) -> list[int]:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    request = GenerateRequest(f"r-{digest[:8]}", "default", digest, tuple(prompt), sampling)
    chunks = [chunk async for some in replica.generate(request) for chunk in some]
    assert [chunk.error for chunk in chunks if chunk.error] == []
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.timeout(120)
async def test_late_joiner_with_room_for_two_of_five_adapters_serves_them_all(tmp_path: Path) -> None:
    base = make_model(tmp_path / "tiny-llama")
    folders = {
        name: make_adapter(base, ("q_proj", "v_proj"), 8, folder=tmp_path / name, seed=index)
        for index, name in enumerate(NAMES)
    }
    size = max((folder / "adapter_model.safetensors").stat().st_size for folder in folders.values())
    config = ReplicaConfig(
        model=ModelConfig(base=str(base), device="cpu", num_threads=1),
        adapters=AdapterCacheConfig(max_slots=2, arena_bytes=1 << 20, node_store_bytes=2 * size + size // 2),
        scheduler=SchedulerConfig(num_kv_blocks=64),
    )
    prompt = AutoTokenizer.from_pretrained(base)(PROMPT).input_ids
    async with local_fleet(tmp_path, config, num_replicas=1) as fleet, fleet.client() as client:
        for name, folder in folders.items():
            await fleet.push(name, folder)
        late = await fleet.add_replica()
        assert len(late.staged()) == 5
        digests = {record.name: record.versions[0].digest for record in await fleet.registry.adapters()}
        assert set(late.held()) == {digests[name] for name in NAMES[-2:]}
        await until(lambda: all(replica.held for replica in fleet.registry.registry.replicas()))
        shown = (await client.get("/v1/replicas")).json()["data"]
        assert [(len(replica["staged"]), len(replica["held"])) for replica in shown] == [(5, 2), (5, 2)]
        for name in NAMES:
            expected = greedy(base, folders[name], prompt)
            assert await tokens_of(late, digests[name], prompt) == expected, name
            answer = await client.post("/v1/completions", json=body(name))
            assert answer.json()["choices"][0]["text"] == AutoTokenizer.from_pretrained(base).decode(expected), name
        assert len(late.held()) == 2
        fleet.check_integrity()


def body(model: str) -> dict[str, object]:
    return {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
