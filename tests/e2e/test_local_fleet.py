"""The whole system in one process: overload of slots, and what a client leaves behind when it goes away."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from benchmarks.affinity import Mix, compare
from replica.config import AdapterCacheConfig, ModelConfig, ReplicaConfig, SchedulerConfig
from tests.local_fleet import LocalFleet, local_fleet, until
from tests.tiny_models import LLAMA_TARGETS, make_adapter, make_model

RANKS = (4, 8, 16, 32)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "tiny-llama")


def config(base: Path, *, max_slots: int = 8, **scheduler: int) -> ReplicaConfig:
    return ReplicaConfig(
        model=ModelConfig(base=str(base), device="cpu", num_threads=1),
        adapters=AdapterCacheConfig(max_slots=max_slots, arena_bytes=1 << 22),
        scheduler=SchedulerConfig(num_kv_blocks=512, max_num_seqs=32, **scheduler),
    )


async def push_many(fleet: LocalFleet, base: Path, folder: Path, count: int) -> list[str]:
    names = [f"tenant-{index:02}" for index in range(count)]
    for index, name in enumerate(names):
        targets = LLAMA_TARGETS if index % 3 == 0 else ("q_proj", "v_proj")
        rank = RANKS[index % len(RANKS)]
        await fleet.push(name, make_adapter(base, targets, rank, folder=folder / name, seed=index))
    return names


async def complete(client: httpx.AsyncClient, model: str, prompt: str, max_tokens: int = 12) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


async def test_12_adapters_on_4_slots_64_concurrent_requests_all_get_their_own_text(base: Path, tmp_path: Path) -> None:
    async with local_fleet(tmp_path, config(base, max_slots=4), num_replicas=1) as fleet, fleet.client() as client:
        names = await push_many(fleet, base, tmp_path, 12)
        alone = {name: await complete(client, name, "Once upon a time") for name in names}
        assert len(set(alone.values())) == len(names)
        jobs = [names[index % len(names)] for index in range(64)]
        random.Random(1).shuffle(jobs)
        async with asyncio.timeout(120):
            texts = await asyncio.gather(*(complete(client, name, "Once upon a time") for name in jobs))
        assert texts == [alone[name] for name in jobs]
        status = fleet.replicas["replica-0"].status()
        assert len(status.resident) <= 4
        assert status.num_running == status.num_waiting == status.num_loading == 0
        assert status.num_free_kv_blocks == status.num_kv_blocks
        fleet.check_integrity()


async def asgi_call(fleet: LocalFleet, body: bytes, is_gone: asyncio.Event, seen: Callable[[bytes], None]) -> None:
    """One HTTP request at ASGI level whose client leaves when `is_gone` is set."""
    sent = False

    async def receive() -> dict[str, object]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.body":
            seen(message.get("body", b""))  # type: ignore[arg-type]

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "scheme": "http",
        "server": ("fleet", 80),
        "client": ("test", 1),
    }
    await fleet.app(scope, receive, send)  # type: ignore[arg-type]


async def in_decode(fleet: LocalFleet, pieces: list[bytes]) -> None:
    await until(lambda: len(pieces) >= 3)


async def in_prefill(fleet: LocalFleet, pieces: list[bytes]) -> None:
    await until(lambda: fleet.replicas["replica-0"].status().num_running >= 1)


async def in_queue(fleet: LocalFleet, pieces: list[bytes]) -> None:
    await until(lambda: fleet.replicas["replica-0"].status().num_waiting >= 1)


@pytest.mark.parametrize("is_streamed", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("moment", [in_queue, in_prefill, in_decode])
async def test_client_that_leaves_gives_everything_back(
    base: Path, tmp_path: Path, moment: Callable[[LocalFleet, list[bytes]], Awaitable[None]], is_streamed: bool
) -> None:
    if moment is in_decode and not is_streamed:
        pytest.skip("a whole answer shows no decode from outside")
    settings = config(base, max_batch_tokens=16)
    settings = settings.model_copy(update={"scheduler": settings.scheduler.model_copy(update={"max_num_seqs": 1})})
    async with local_fleet(tmp_path, settings, num_replicas=1) as fleet:
        (name,) = await push_many(fleet, base, tmp_path, 1)
        replica = fleet.replicas["replica-0"]
        others: list[asyncio.Task[None]] = []
        stay, gone = asyncio.Event(), asyncio.Event()
        if moment is in_queue:
            others.append(asyncio.create_task(asgi_call(fleet, body(name, 150, True), stay, lambda piece: None)))
            await until(lambda: replica.status().num_running >= 1)
        pieces: list[bytes] = []
        call = asyncio.create_task(asgi_call(fleet, body(name, 150, is_streamed), gone, pieces.append))
        await moment(fleet, pieces)
        before = replica.status()
        gone.set()
        stay.set()
        took_s = await until(lambda: is_empty(fleet), 5.0)
        await asyncio.gather(call, *others)
        assert took_s < 0.5
        assert replica.status().num_steps - before.num_steps < 20, "the request must not have run to its end"
        fleet.check_integrity()


def is_empty(fleet: LocalFleet) -> bool:
    status = fleet.replicas["replica-0"].status()
    idle = status.num_running == status.num_waiting == status.num_loading == 0
    return idle and status.num_free_kv_blocks == status.num_kv_blocks and fleet.gateway.placement.num_leases == 0


def body(model: str, max_tokens: int, is_streamed: bool) -> bytes:
    flag = "true" if is_streamed else "false"
    prompt = "word " * 18
    return (
        f'{{"model": "{model}", "prompt": "{prompt}", "max_tokens": {max_tokens}, "temperature": 0,'
        f' "ignore_eos": true, "stream": {flag}}}'
    ).encode()


async def test_affinity_keeps_adapters_in_their_slots_and_load_under_its_bound(tmp_path: Path) -> None:
    ours, at_random = await compare(Mix(max_tokens=4), tmp_path)
    assert ours.worst_over_bound <= 0
    assert ours.hit_rate >= 0.74
    assert ours.hit_rate >= 1.2 * at_random.hit_rate
