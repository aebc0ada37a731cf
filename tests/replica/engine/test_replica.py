"""The whole replica over a tiny real base: mixed adapters against PEFT, and every way a request can end."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from registry.adapter_format import read_adapter
from registry.config import RegistryConfig
from registry.types import AdapterManifest
from replica.adapters.node_store import FolderSource
from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from replica.errors import (
    AdapterTooLarge,
    AdapterUnavailable,
    AdapterWithdrawn,
    EngineDead,
    InvalidRequest,
    OutOfMemory,
    ReplicaDraining,
    UnknownAdapter,
)
from replica.messages import GenerateRequest, TokenChunk
from replica.model.base_model import BaseModel
from replica.replica import Replica
from tests.fakes import CollectingOutbox, PacedModel, base_spec
from tests.replica.engine.harness import make_request
from tests.tiny_models import LLAMA_TARGETS, load_peft, make_adapter, make_model

PROMPTS = [list(b"The quick brown fox"), list(b"x"), list(range(40, 75)), list(b"Once upon a time there was")]
NUM_TOKENS = 14


@dataclass(frozen=True)
class Adapters:
    """A tiny base, adapters of it, and the folder that serves their blobs by sha256."""

    base: Path
    model: BaseModel
    folders: Mapping[str, Path]
    blobs: Mapping[str, Path]
    manifests: Mapping[str, AdapterManifest]

    def digest(self, name: str | None) -> str | None:
        return None if name is None else self.manifests[name].digest


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    root = tmp_path_factory.mktemp("tiny")
    base = make_model(root / "base")
    folders = {
        "all": make_adapter(base, LLAMA_TARGETS, 8, folder=root / "all", seed=1),
        "qv": make_adapter(base, ["q_proj", "v_proj"], 4, folder=root / "qv", seed=2),
        "mlp": make_adapter(base, ["gate_proj", "down_proj"], 16, folder=root / "mlp", seed=3, layers=[1]),
    }
    model = BaseModel.load(ModelConfig(base=str(base), device="cpu", num_threads=1))
    manifests = {
        name: read_adapter({path.name: path for path in folder.iterdir()}, model.spec, RegistryConfig())
        for name, folder in folders.items()
    }
    blobs = {manifests[name].blob_sha256: folders[name] / "adapter_model.safetensors" for name in folders}
    return Adapters(base, model, folders, blobs, manifests)


def config_for(
    base: Path, node_store: Path, *, adapters: Mapping[str, Any] | None = None, **scheduler: Any
) -> ReplicaConfig:
    return ReplicaConfig(
        model=ModelConfig(base=str(base), device="cpu", num_threads=1),
        adapters=AdapterCacheConfig(
            **{"max_slots": 2, "arena_bytes": 8 << 20, "node_store": node_store, **(adapters or {})}
        ),
        scheduler=SchedulerConfig(**{"num_kv_blocks": 64, "block_size": 4, "max_batch_tokens": 32, **scheduler}),
    )


@pytest.fixture
def replica(adapters: Adapters, tmp_path: Path) -> Iterator[Replica]:
    made = load(adapters, config_for(adapters.base, tmp_path))
    yield made
    made.close()
    made.check_integrity()


@pytest.fixture
async def staged(replica: Replica, adapters: Adapters) -> AsyncIterator[Replica]:
    for manifest in adapters.manifests.values():
        await replica.stage(manifest)
    yield replica
    replica.check_integrity()


def load(adapters: Adapters, config: ReplicaConfig) -> Replica:
    """A loaded replica over the module's one model."""
    source = FolderSource(adapters.blobs.__getitem__)
    replica = Replica(config, source, model_loader=lambda config: adapters.model)
    assert replica.load().digest == adapters.model.spec.digest
    return replica


async def collect(replica: Replica, request: GenerateRequest) -> list[TokenChunk]:
    return [chunk async for chunks in replica.generate(request) for chunk in chunks]


async def text_of(replica: Replica, request: GenerateRequest, index: int = 0) -> list[int]:
    chunks = await collect(replica, request)
    assert [chunk.error for chunk in chunks if chunk.error] == []
    return [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]


def reference(adapters: Adapters, name: str | None, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    """What transformers and PEFT generate, greedily."""
    model = load_peft(adapters.base, adapters.folders[name or "all"])
    model = model if name else model.unload()  # type: ignore[operator]
    out = model.generate(  # type: ignore[operator]
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=num_tokens,
    )
    return list(out[0, len(prompt) :].tolist())


async def test_mixed_adapters_generate_what_peft_generates(staged: Replica, adapters: Adapters) -> None:
    names = [None, "all", "qv", "mlp"]
    cases = [(name, prompt) for prompt in PROMPTS for name in names]
    requests = [
        make_request(f"r{index}", prompt, NUM_TOKENS, adapter=adapters.digest(name))
        for index, (name, prompt) in enumerate(cases)
    ]
    texts = await asyncio.gather(*(text_of(staged, request) for request in requests))
    for (name, prompt), text in zip(cases, texts, strict=True):
        assert text == reference(adapters, name, prompt), name
    status = staged.status()
    assert status.num_adapter_loads >= 3
    assert (status.num_waiting, status.num_running, status.num_loading) == (0, 0, 0)


async def test_prompt_logprobs_equal_one_full_forward(staged: Replica, adapters: Adapters) -> None:
    prompt = list(range(100, 177))
    request = make_request("a", prompt, 1, adapter=adapters.digest("all"), prompt_logprobs=3)
    (chunk,) = await collect(staged, request)
    with torch.inference_mode():
        logits = load_peft(adapters.base, adapters.folders["all"])(torch.tensor([prompt])).logits[0]
    expected = logits.log_softmax(-1)
    assert chunk.prompt_logprobs is not None
    assert chunk.prompt_logprobs[0] is None
    for position, entry in enumerate(chunk.prompt_logprobs[1:]):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-3)
        assert entry.top[0][1] == pytest.approx(float(expected[position].max()), abs=1e-3)
    assert len(chunk.prompt_logprobs) == len(prompt)


async def test_choices_equal_requests_of_their_own(staged: Replica, adapters: Adapters) -> None:
    fields = {"adapter": adapters.digest("qv"), "temperature": 0.8}
    chunks = await collect(staged, make_request("many", PROMPTS[3], 10, n=3, seed=40, **fields))
    for index in range(3):
        single = await text_of(staged, make_request(f"one{index}", PROMPTS[3], 10, seed=40 + index, **fields))
        assert [token for chunk in chunks if chunk.index == index for token in chunk.token_ids] == single


async def test_an_echo_without_tokens_returns_the_prompt_only(staged: Replica) -> None:
    (chunk,) = await collect(staged, make_request("a", [5], 0, prompt_logprobs=1))
    assert (chunk.token_ids, chunk.prompt_logprobs, chunk.finish_reason) == ((), (None,), "length")


async def test_a_bad_request_is_refused_before_it_is_queued(replica: Replica) -> None:
    with pytest.raises(InvalidRequest, match="token id 264 is outside the vocabulary of 264"):
        await collect(replica, make_request("a", [264]))
    assert replica.status().num_waiting == 0


async def test_a_request_larger_than_the_cache_is_refused(adapters: Adapters, tmp_path: Path) -> None:
    replica = load(adapters, config_for(adapters.base, tmp_path, num_kv_blocks=5))
    try:
        assert replica.spec.context_length == 5 * 4
        with pytest.raises(InvalidRequest, match=r"needs 6 KV blocks of 4 tokens; the cache has 5"):
            await collect(replica, make_request("a", [1] * 11, 11))
        assert len(await text_of(replica, make_request("b", [1] * 11, 10, ignore_eos=True))) == 10
    finally:
        replica.close()


async def test_an_unknown_adapter_is_refused_and_never_the_base(replica: Replica, adapters: Adapters) -> None:
    for digest in ("f" * 64, "../../etc/passwd", ""):
        with pytest.raises(UnknownAdapter):
            await collect(replica, make_request("a", [1], adapter=digest))


async def test_bytes_that_changed_cost_only_their_requests(staged: Replica, adapters: Adapters, tmp_path: Path) -> None:
    digest = adapters.digest("all")
    (tmp_path / "bytes" / f"{digest}.safetensors").write_bytes(b"junk")
    bad, good = await asyncio.gather(
        collect(staged, make_request("bad", [1], adapter=digest)),
        text_of(staged, make_request("good", PROMPTS[0], NUM_TOKENS, adapter=adapters.digest("qv"))),
    )
    assert [type(chunk.error) for chunk in bad] == [AdapterUnavailable]
    assert bad[0].finish_reason == "error"
    assert good == reference(adapters, "qv", PROMPTS[0])


async def test_an_adapter_that_cannot_fit_is_refused_when_staged(adapters: Adapters, tmp_path: Path) -> None:
    replica = load(adapters, config_for(adapters.base, tmp_path, adapters={"arena_bytes": 4096}))
    try:
        with pytest.raises(AdapterTooLarge):
            await replica.stage(adapters.manifests["all"])
        assert replica.staged() == ()
    finally:
        replica.close()


async def test_an_id_in_use_is_refused_and_leaves_its_owner_alone(staged: Replica) -> None:
    first = staged.generate(make_request("a", [1, 2], 30, ignore_eos=True))
    head = await anext(first)
    with pytest.raises(InvalidRequest, match="in use"):
        await collect(staged, make_request("a", [9]))
    rest = [chunk async for chunks in first for chunk in chunks]
    assert sum(len(chunk.token_ids) for chunk in (*head, *rest)) == 30


async def test_forgetting_an_adapter_ends_its_requests_and_no_others(staged: Replica, adapters: Adapters) -> None:
    digest = adapters.digest("all")
    assert digest is not None
    other = asyncio.create_task(text_of(staged, make_request("base", PROMPTS[0], NUM_TOKENS)))
    stream = staged.generate(make_request("a", PROMPTS[0], 200, adapter=digest, n=2, ignore_eos=True))
    await anext(stream)
    assert staged.running() == (digest,)
    staged.forget(digest)
    ends = [chunk for some in [some async for some in stream] for chunk in some if chunk.finish_reason is not None]
    assert sorted(chunk.index for chunk in ends) == [0, 1]
    assert {type(chunk.error) for chunk in ends} == {AdapterWithdrawn}
    assert await other == reference(adapters, None, PROMPTS[0])
    assert digest not in staged.staged()
    assert staged.running() == ()
    with pytest.raises(AdapterWithdrawn):
        await collect(staged, make_request("b", [1], adapter=digest))
    staged.check_integrity()


async def test_adapter_that_was_forgotten_is_served_again_when_it_is_staged_again(
    staged: Replica, adapters: Adapters
) -> None:
    digest = adapters.digest("all")
    assert digest is not None
    staged.forget(digest)
    await staged.stage(adapters.manifests["all"])
    assert await text_of(staged, make_request("a", PROMPTS[0], NUM_TOKENS, adapter=digest)) == reference(
        adapters, "all", PROMPTS[0]
    )


async def test_an_adapter_gets_a_slot_although_others_are_in_constant_use(adapters: Adapters, tmp_path: Path) -> None:
    replica = load(adapters, config_for(adapters.base, tmp_path, adapters={"max_slots": 2, "drain_after_s": 0.1}))
    for manifest in adapters.manifests.values():
        await replica.stage(manifest)
    busy = True

    async def refill(name: str, worker: int) -> None:
        turn = 0
        while busy:
            turn += 1
            await text_of(replica, make_request(f"{name}{worker}-{turn}", [7], 20, adapter=adapters.digest(name)))

    workers = [asyncio.create_task(refill(name, worker)) for name in ("all", "qv") for worker in range(3)]
    try:
        await asyncio.sleep(0.3)
        async with asyncio.timeout(20):
            await text_of(replica, make_request("late", PROMPTS[0], 5, adapter=adapters.digest("mlp")))
    finally:
        busy = False
        await asyncio.gather(*workers)
        replica.check_integrity()
        replica.close()


async def test_a_request_that_is_refused_has_nothing_read_for_it(
    staged: Replica, adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(staged._cache, "prefetch", read.append)
    outbox, digest = CollectingOutbox(), adapters.digest("qv")
    staged.submit(make_request("served", PROMPTS[0], 1, adapter=digest), outbox)
    await staged.drain(20.0)
    with pytest.raises(ReplicaDraining):
        staged.submit(make_request("refused", PROMPTS[0], 1, adapter=digest), outbox)
    assert read == [digest]


async def test_a_drain_waits_then_aborts_the_rest(staged: Replica) -> None:
    task = asyncio.create_task(collect(staged, make_request("a", [1], 12, ignore_eos=True)))
    await asyncio.sleep(0)
    await staged.drain(20.0)
    assert sum(len(chunk.token_ids) for chunk in await task) == 12
    with pytest.raises(ReplicaDraining):
        await collect(staged, make_request("b", [1]))


def paced(tmp_path: Path, **pace: float) -> Replica:
    config = config_for(tmp_path, tmp_path / "node", max_num_seqs=16, num_kv_blocks=256)
    replica = Replica(
        config, FolderSource(lambda sha256: tmp_path), model_loader=PacedModel.loader(base_spec(), **pace), stall_s=0.3
    )
    replica.load()
    return replica


async def test_closing_a_stream_gives_everything_back(tmp_path: Path) -> None:
    replica = paced(tmp_path, step_s=0.02)
    stream = replica.generate(make_request("a", [1, 2], 200, n=3))
    await anext(stream)
    await stream.aclose()
    assert await asyncio.to_thread(replica.engine.wait_idle, 1.0)
    replica.check_integrity()
    assert replica.status().num_free_kv_blocks == 256
    replica.close()


async def test_a_cancelled_task_gives_everything_back(tmp_path: Path) -> None:
    replica = paced(tmp_path, step_s=0.02)
    task = asyncio.create_task(collect(replica, make_request("a", [1, 2], 200)))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(replica.engine.wait_idle, 1.0)
    replica.close()


async def test_a_drain_that_takes_too_long_aborts(tmp_path: Path) -> None:
    replica = paced(tmp_path, step_s=0.02)
    task = asyncio.create_task(collect(replica, make_request("a", [1], 200)))
    await asyncio.sleep(0.1)
    await replica.drain(0.1)
    assert (await task)[-1].finish_reason == "abort"
    replica.close()


async def test_closing_the_replica_ends_its_streams(tmp_path: Path) -> None:
    replica = paced(tmp_path, step_s=0.01)
    task = asyncio.create_task(collect(replica, make_request("a", [1], 200)))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(replica.close)
    last = (await task)[-1]
    assert isinstance(last.error, EngineDead)
    with pytest.raises(EngineDead):
        await collect(replica, make_request("b", [1]))
    assert not replica.is_alive()
    replica.close()


async def test_a_replica_that_stalls_is_not_alive_until_it_moves(tmp_path: Path) -> None:
    replica = paced(tmp_path, step_s=1.0)
    await asyncio.sleep(0.4)
    assert replica.is_alive()
    task = asyncio.create_task(collect(replica, make_request("a", [1], 1)))
    await asyncio.sleep(0.1)
    assert replica.is_alive()
    await asyncio.sleep(0.5)
    assert not replica.is_alive()
    await task
    assert replica.is_alive()
    replica.close()


async def test_a_paced_model_sets_the_pace(tmp_path: Path) -> None:
    replica = paced(tmp_path, step_s=0.01)
    started_s = time.monotonic()
    texts = await asyncio.gather(*(text_of(replica, make_request(f"r{index}", [1], 20)) for index in range(16)))
    assert time.monotonic() - started_s >= 20 * 0.01
    assert texts == [[0] * 20] * 16
    assert replica.status().num_steps <= 22
    replica.close()


def test_nothing_works_before_load(tmp_path: Path) -> None:
    replica = Replica(config_for(tmp_path, tmp_path), FolderSource(lambda sha256: tmp_path))
    assert not replica.is_alive()
    with pytest.raises(EngineDead, match="not loaded"):
        replica.submit(make_request("a", [1]), CollectingOutbox())
    replica.close()


def test_a_cache_too_small_for_one_block_is_refused_at_load(tmp_path: Path) -> None:
    config = config_for(tmp_path, tmp_path, num_kv_blocks=None, kv_bytes=3)
    replica = Replica(config, FolderSource(lambda sha256: tmp_path), model_loader=PacedModel.loader(base_spec()))
    with pytest.raises(OutOfMemory, match="kv_bytes is 3; one KV block takes 4"):
        replica.load()


async def test_metrics_tell_what_happened(staged: Replica, adapters: Adapters) -> None:
    digest = adapters.digest("qv")
    assert digest is not None
    await text_of(staged, make_request("a", [1, 2, 3], 5, adapter=digest, ignore_eos=True))
    await text_of(staged, make_request("b", [1, 2], 4, n=2, ignore_eos=True))
    await asyncio.to_thread(staged.engine.wait_idle, 5.0)
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(staged.metrics().decode())
        for sample in family.samples
    }
    assert all(name.startswith("lorafleet_") for name, _ in samples)
    expected = {
        ("lorafleet_replica_choices_total", (("outcome", "length"),)): 3,
        ("lorafleet_replica_prompt_tokens_total", ()): 5,
        ("lorafleet_replica_generation_tokens_total", ()): 13,
        ("lorafleet_replica_queue_wait_seconds_count", (("model", "base"), ("version", "-"))): 1,
        ("lorafleet_replica_queue_wait_seconds_count", (("model", digest[:12]), ("version", "-"))): 1,
        ("lorafleet_tenant_service_tokens_total", (("tenant", "t"),)): 18,
        ("lorafleet_tenant_queue_wait_seconds_count", (("tenant", "t"),)): 2,
        ("lorafleet_tenant_waiting", (("tenant", "t"),)): 0,
        ("lorafleet_tenant_oldest_wait_seconds", (("tenant", "t"),)): 0,
        ("lorafleet_tenant_deficit_tokens", (("tenant", "t"),)): 0,
        ("lorafleet_replica_kv_blocks", (("state", "used"),)): 0,
        ("lorafleet_replica_kv_blocks", (("state", "free"),)): 64,
        ("lorafleet_adapter_slots", (("state", "resident"),)): 1,
        ("lorafleet_adapter_slots", (("state", "free"),)): 1,
        ("lorafleet_adapter_misses_total", (("tier", "slot"),)): 1,
        ("lorafleet_adapter_resident", (("adapter", digest[:12]), ("tier", "slot"))): 1,
        ("lorafleet_adapter_load_seconds_count", (("source", "node"), ("stage", "copy"))): 1,
        ("lorafleet_adapter_load_seconds_count", (("source", "node"), ("stage", "convert"))): 1,
        ("lorafleet_adapter_loads_total", (("source", "node"),)): 1,
    }
    assert {key: samples[key] for key in expected} == expected
    assert samples["lorafleet_replica_step_seconds_count", ()] == staged.status().num_steps
    assert samples["lorafleet_replica_batch_adapters_sum", ()] >= 5
