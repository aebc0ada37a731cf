"""At how many replicas a tenant has requests, and that requests say so."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from replica.messages import GenerateRequest, SamplingParams, TokenChunk
from router.config import PlacementConfig
from router.dispatch import Dispatch
from router.placement import Placement
from router.spread import TenantSpread
from tests.router.support import replica_record


def test_a_tenant_at_two_replicas_is_counted_at_two_until_its_requests_end() -> None:
    spread = TenantSpread()
    with spread.at("acme", "r0") as first, spread.at("acme", "r0") as second:
        assert (first, second) == (1, 1)
        with spread.at("acme", "r1") as third, spread.at("other", "r1") as others:
            assert (third, others) == (2, 1)
        with spread.at("acme", "r0") as later:
            assert later == 1
    assert not len(spread)


def test_counts_are_given_back_when_a_request_fails() -> None:
    spread = TenantSpread()
    with pytest.raises(RuntimeError), spread.at("acme", "r0"):
        raise RuntimeError("the replica died")
    assert not len(spread)


class RecordingFleet:
    """Keeps each request open until told, and remembers what it was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        self.end = asyncio.Event()

    async def generate(self, replica_id: str, request: GenerateRequest) -> AsyncIterator[Sequence[TokenChunk]]:
        self.sent.append((replica_id, request.spread))
        await self.end.wait()
        yield (TokenChunk(request.request_id, 0, (1,), finish_reason="stop"),)

    async def stop_choice(self, replica_id: str, request_id: str, index: int) -> None:
        raise AssertionError("nobody stops a choice here")


async def test_requests_tell_at_how_many_replicas_their_tenant_is() -> None:
    placement, fleet = Placement(PlacementConfig()), RecordingFleet()
    placement.update([], [replica_record(0), replica_record(1)])

    async def serve(name: str) -> None:
        request = GenerateRequest(name, "acme", None, (1,), SamplingParams(max_tokens=4))
        async for _ in Dispatch(placement, fleet, request, None, 2).chunks():
            pass

    async with asyncio.TaskGroup() as tasks:
        for name in ("a", "b", "c"):
            tasks.create_task(serve(name))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        fleet.end.set()

    assert len({replica for replica, _ in fleet.sent}) == 2
    assert [spread for _, spread in fleet.sent] == [1, 2, 2]
    assert not len(placement.spread)


async def test_a_client_that_vanishes_is_counted_no_more() -> None:
    placement, fleet = Placement(PlacementConfig()), RecordingFleet()
    placement.update([], [replica_record(0)])
    request = GenerateRequest("a", "acme", None, (1,), SamplingParams(max_tokens=4))
    chunks = Dispatch(placement, fleet, request, None, 2).chunks()
    waiting = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (len(placement.spread), placement.num_leases) == (1, 1)

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert (len(placement.spread), placement.num_leases) == (0, 0)


async def test_a_stream_closed_half_way_is_counted_no_more() -> None:
    placement, fleet = Placement(PlacementConfig()), RecordingFleet()
    placement.update([], [replica_record(0)])
    fleet.end.set()
    request = GenerateRequest("a", "acme", None, (1,), SamplingParams(max_tokens=4))
    chunks = Dispatch(placement, fleet, request, None, 2).chunks()
    await anext(chunks)
    assert (len(placement.spread), placement.num_leases) == (1, 1)

    await chunks.aclose()  # type: ignore[attr-defined]

    assert (len(placement.spread), placement.num_leases) == (0, 0)
