"""Replicas that say nothing, and replicas that Serve stops: what the gateway makes of either."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from cluster.running import RunningReplicas
from replica.messages import TokenChunk
from router.errors import ReplicaGone
from tests.cluster.test_serve_fleet import Handle, Response, request

pytestmark = pytest.mark.filterwarnings("ignore")
"""Importing Serve warns."""


async def forever(**_: Any) -> Any:
    await asyncio.Event().wait()


class Silent:
    """A replica that takes calls and answers none; `proof` is what it says when it is asked for progress."""

    def __init__(self, proof: Callable[[], Any]) -> None:
        self.num_asked = 0
        self.proof = proof
        self.chunks: asyncio.Queue[tuple[TokenChunk, ...]] = asyncio.Queue()
        self.handle = Handle(
            generate=lambda **_: Response(forever()),
            tokens=lambda **_: self.tokens(),
            makes_progress=lambda **_: Response(self.answer()),
            stop_choice=lambda **_: Response(forever()),
            warm=lambda **_: Response(forever()),
        )

    async def tokens(self) -> AsyncIterator[tuple[TokenChunk, ...]]:
        while True:
            yield await self.chunks.get()

    async def answer(self) -> Any:
        self.num_asked += 1
        said = self.proof()
        return await forever() if said is None else said


async def run(silent: Silent) -> list[TokenChunk]:
    from cluster.serve_fleet import ServeFleet

    fleet = ServeFleet(silent.handle, "gateway", silence_s=0.05, probe_timeout_s=0.05)
    try:
        return [chunk async for batch in fleet.generate("replica", request("a")) for chunk in batch]
    finally:
        for channel in fleet._channels.values():
            channel.shutdown()


@pytest.mark.parametrize("said", [None, False])
async def test_silent_replica_without_proof_of_progress_is_gone(said: bool | None) -> None:
    silent = Silent(lambda: said)
    with pytest.raises(ReplicaGone):
        await asyncio.wait_for(run(silent), 60)
    assert silent.num_asked == 1


async def test_busy_replica_that_proves_its_progress_is_waited_for() -> None:
    silent = Silent(lambda: True)
    running = asyncio.create_task(run(silent))
    while silent.num_asked < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    silent.chunks.put_nowait((TokenChunk("a", 0, (1,), finish_reason="stop"),))
    assert [chunk.token_ids for chunk in await asyncio.wait_for(running, 60)] == [(1,)]


async def test_replica_that_falls_silent_after_a_token_is_gone() -> None:
    silent = Silent(lambda: None)
    silent.chunks.put_nowait((TokenChunk("a", 0, (1,)),))
    with pytest.raises(ReplicaGone):
        await asyncio.wait_for(run(silent), 60)


async def test_calls_beside_a_request_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster import serve_fleet

    monkeypatch.setattr(serve_fleet, "STOP_TIMEOUT_S", 0.05)
    monkeypatch.setattr(serve_fleet, "PREFETCH_TIMEOUT_S", 0.05)
    fleet = serve_fleet.ServeFleet(Silent(lambda: None).handle, "gateway")
    async with asyncio.timeout(60):
        await fleet.stop_choice("replica", "a", 0)
        with pytest.raises(ReplicaGone):
            await fleet.prefetch("replica", "0" * 64)


def test_replicas_that_no_router_has_heard_of_are_starting() -> None:
    running = RunningReplicas()
    assert running.starting("Replica", ("a",)) == frozenset(), "nobody has said anything yet"
    running.tell("Replica", ("a",))
    assert running.starting("Replica", ("a", "b")) == {"b"}
    running.tell("Replica", ("a", "b"))
    running.tell("Replica", ("b",))
    assert running.starting("Replica", ("a", "b")) == frozenset(), "one that ran is gone, not starting"


def test_only_replicas_that_ran_once_can_be_gone() -> None:
    running = RunningReplicas()
    assert running.gone("Replica", ["a", "b"]) == frozenset(), "nothing was heard yet"
    running.tell("Replica", ["a", "b"])
    assert running.gone("Replica", ["a", "b", "joins-before-serve-says-so"]) == frozenset()
    running.tell("Replica", ["b"])
    assert running.gone("Replica", ["a", "b"]) == {"a"}
    assert running.gone("Replica", ["a", "b"]) == {"a"}, "as long as the catalog lists it"
    assert running.gone("Replica", ["b"]) == frozenset()
    running.tell("Other", [])
    assert running.gone("Replica", ["b"]) == frozenset()
    running.tell("Replica", [])
    assert running.gone("Replica", ["b"]) == {"b"}, "the last one too"
