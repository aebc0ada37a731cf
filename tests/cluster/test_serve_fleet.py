"""The gateway's way to replicas, over handles that do what Serve's may: lost answers, cancelled streams, dead peers."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from registry.errors import RegistryUnavailable
from registry.usage_ledger import UsageLedger
from replica.messages import GenerateRequest, SamplingParams, TokenChunk
from router.errors import ReplicaGone
from telemetry.traces import NoTraces

pytestmark = pytest.mark.filterwarnings("ignore")
"""Importing Serve warns."""


def request(name: str) -> GenerateRequest:
    return GenerateRequest(name, "tenant", None, (1,), SamplingParams(max_tokens=4))


class Handle:
    """A deployment handle whose methods are given as functions."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self._methods = methods

    def options(self, **_: Any) -> "Handle":
        return self

    def __getattr__(self, name: str) -> Any:
        return type("Method", (), {"remote": staticmethod(self._methods[name])})


class Response:
    """A call under way, as Serve's DeploymentResponse."""

    def __init__(self, work: Awaitable[Any]) -> None:
        self._task = asyncio.ensure_future(work)

    def __await__(self) -> Any:
        return self._task.__await__()

    def cancel(self) -> None:
        self._task.cancel()


async def empty_stream() -> AsyncIterator[tuple[TokenChunk, ...]]:
    yield ()


async def test_call_that_cannot_be_made_leaves_no_inbox() -> None:
    from cluster.serve_fleet import ServeFleet

    def refuse(**_: Any) -> Any:
        raise RuntimeError("the handle is shut down")

    fleet = ServeFleet(Handle(generate=refuse, tokens=lambda **_: empty_stream()), "gateway")
    with pytest.raises(RuntimeError):
        await anext(aiter(fleet.generate("replica", request("a"))))
    assert fleet._channels["replica"].is_idle


async def test_stream_that_serve_cancels_ends_its_requests() -> None:
    from cluster.serve_fleet import Channel

    async def cancelled(**_: Any) -> AsyncIterator[tuple[TokenChunk, ...]]:
        raise asyncio.CancelledError
        yield ()

    channel = Channel(Handle(tokens=cancelled), "gateway", "replica")
    inbox = channel.open(request("a"))
    with pytest.raises(ReplicaGone):
        await asyncio.wait_for(inbox.get(), 1)


async def test_probe_that_the_replica_gives_up_says_no() -> None:
    from cluster.serve_fleet import ServeFleet

    def given_up(**_: Any) -> Response:
        response = Response(asyncio.sleep(100))
        response.cancel()
        return response

    assert not await ServeFleet(Handle(makes_progress=given_up), "gateway").makes_progress("replica")


async def test_request_that_the_replica_gives_up_is_gone() -> None:
    from cluster.serve_fleet import ServeFleet

    def given_up(**_: Any) -> Response:
        response = Response(asyncio.sleep(100))
        asyncio.get_running_loop().call_later(0.01, response.cancel)
        return response

    async def silent(**_: Any) -> AsyncIterator[tuple[TokenChunk, ...]]:
        await asyncio.sleep(100)
        yield ()

    fleet = ServeFleet(Handle(generate=given_up, tokens=silent), "gateway")
    with pytest.raises(ReplicaGone):
        await asyncio.wait_for(anext(aiter(fleet.generate("replica", request("a")))), 60)
    fleet.follow(frozenset())


async def test_first_chunks_reach_a_gateway_whose_old_stream_still_drains() -> None:
    """Giving up a stream does not end its generator on the replica at once; it must not take the next one's chunks."""
    from cluster.channel import Outbox
    from cluster.serve_fleet import ServeFleet

    loop = asyncio.get_running_loop()
    boxes: dict[str, Outbox] = {}
    delay_s = 0.0
    producing = []

    def tokens(gateway_id: str, replica_id: str) -> AsyncIterator[tuple[TokenChunk, ...]]:
        queue: asyncio.Queue[tuple[TokenChunk, ...]] = asyncio.Queue()

        async def produce(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            async for batch in boxes.setdefault(gateway_id, Outbox(loop, 5.0, 0)).read():
                queue.put_nowait(batch)

        async def consume() -> AsyncIterator[tuple[TokenChunk, ...]]:
            while True:
                yield await queue.get()

        producing.append(asyncio.ensure_future(produce(delay_s)))
        return consume()

    def generate(request: GenerateRequest, gateway_id: str, replica_id: str) -> Response:
        async def run() -> None:
            outbox = boxes.setdefault(gateway_id, Outbox(loop, 5.0, 0))
            finished = outbox.open(request)
            outbox.put([TokenChunk(request.request_id, 0, (1,), finish_reason="stop")])
            await finished
            outbox.close(request.request_id)

        return Response(run())

    fleet = ServeFleet(Handle(tokens=tokens, generate=generate), "gateway")

    async def answer(name: str) -> list[TokenChunk]:
        return [chunk async for batch in fleet.generate("replica", request(name)) for chunk in batch]

    assert len(await asyncio.wait_for(answer("a"), 1)) == 1
    fleet.follow(frozenset())
    delay_s = 0.05
    assert len(await asyncio.wait_for(answer("b"), 1)) == 1
    for task in producing:
        task.cancel()
    fleet.follow(frozenset())


async def test_rollback_whose_answer_was_lost_is_not_done_twice(tmp_path: Path) -> None:
    from cluster.registry_client import ServeRegistry
    from cluster.serve_calls import MemberLost
    from tests.registry.test_service import Setup

    setup = Setup(tmp_path)
    first = setup.push(seed=1)
    setup.join("r", first)
    setup.registry.advance()
    second = setup.push(seed=2)
    setup.registry.renew_replica("r", revision=10**6, staged=(first, second), held=(first, second))
    setup.registry.advance()
    assert setup.live() == 2

    def rollback(name: str, alias: str, actor: str) -> Response:
        async def run() -> None:
            setup.registry.rollback(name, alias, actor=actor)
            setup.registry.advance()
            raise MemberLost("the actor died before it could answer")

        return Response(run())

    with suppress(RegistryUnavailable):
        await ServeRegistry(Handle(rollback=rollback)).rollback("alice", "live", actor="x")
    assert setup.live() == 1
    setup.registry.close()


async def test_replica_closes_while_a_load_waits_for_the_registry(tmp_path: Path) -> None:
    from cluster.replica_deployment import RegistrySource, ReplicaDeployment

    class Registry:
        async def fetch_blob(self, sha256: str, to: Path) -> None:
            await asyncio.sleep(0.2)
            await asyncio.to_thread(to.write_bytes, b"x")

    class Member:
        async def leave(self) -> None: ...

    threads, started = ThreadPoolExecutor(1), threading.Event()
    source = RegistrySource(Registry(), asyncio.get_running_loop())  # type: ignore[arg-type]

    def fetch() -> None:
        started.set()
        source.fetch("0" * 64, tmp_path / "blob")

    class Replica:
        def close(self) -> None:
            threads.shutdown(wait=True)

    deployment: Any = ReplicaDeployment.__new__(ReplicaDeployment)
    deployment._following, deployment._telling = (asyncio.create_task(asyncio.sleep(100)) for _ in range(2))
    deployment._member, deployment._replica, deployment._registry = Member(), Replica(), Registry()
    deployment._ledger, deployment._tracer = UsageLedger("replica"), NoTraces()
    threads.submit(fetch)
    started.wait()
    await asyncio.wait_for(ReplicaDeployment.__del__(deployment), 5)


def test_abandoned_uploads_are_removed_while_others_end(tmp_path: Path) -> None:
    from cluster.registry_actor import remove_abandoned

    is_over = threading.Event()

    def churn(name: str) -> None:
        while not is_over.is_set():
            (tmp_path / name).mkdir()
            (tmp_path / name).rmdir()

    threads = [threading.Thread(target=churn, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2000):
            remove_abandoned(tmp_path)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
