"""What a client sees when replicas fail, are full, are gone or are late."""

import asyncio
from collections.abc import Sequence

import pytest

from registry.pulse import FleetPulse, GatewayPulse, HomePlan
from replica.errors import EngineDead, Overloaded, ReplicaDraining
from replica.messages import GenerateRequest, TokenChunk
from router.config import PlacementConfig, RequestLimits, RouterConfig
from router.deadline import TIMEOUT_HEADER
from router.errors import ReplicaGone
from tests.router.fakes import Message, Script
from tests.router.support import adapter_record, delta, digest, error_of, events, ids_of, running


def dies_first(error: Exception, *, times: int = 1, as_chunk: bool = False) -> Script:
    """The first `times` attempts say `lost ` and fail; later ones say `whole`. Each attempt has its own replica."""
    attempts: list[str] = []

    def script(replica_id: str, request: GenerateRequest) -> Sequence[Message | Exception]:
        assert replica_id not in attempts
        attempts.append(replica_id)
        lost = (TokenChunk(request.request_id, 0, ids_of("lost ")),)
        if len(attempts) > times:
            return [(TokenChunk(request.request_id, 0, ids_of("whole"), finish_reason="stop"),)]
        end = (TokenChunk(request.request_id, 0, (), finish_reason="error", error=error),)
        return [lost, end if as_chunk else error]

    return script


@pytest.mark.parametrize("error", [ReplicaGone("gone"), ReplicaDraining("draining"), EngineDead("dead")])
@pytest.mark.parametrize("as_chunk", [True, False])
async def test_whole_answer_begins_anew_elsewhere_after_its_first_token(error: Exception, as_chunk: bool) -> None:
    async with running(catalog=delta(num_replicas=3)) as stack:
        stack.fleet.script = dies_first(error, times=2, as_chunk=as_chunk)
        response = await stack.complete()
        assert response.json()["choices"][0]["text"] == "whole"
        assert response.json()["usage"]["completion_tokens"] == len(ids_of("whole"))
        assert len(stack.fleet.requests) == 3


async def test_chat_answer_with_echoed_choices_is_of_one_attempt_only() -> None:
    async with running() as stack:
        stack.fleet.script = dies_first(ReplicaGone("gone"))
        response = await stack.complete(echo=True)
        assert response.json()["choices"][0]["text"] == "hiwhole"


async def test_whole_answer_that_fails_everywhere_is_tried_as_often_as_configured() -> None:
    config = RouterConfig(placement=PlacementConfig(max_tries=2))
    async with running(config, delta(num_replicas=4)) as stack:
        stack.fleet.script = dies_first(ReplicaGone("gone"), times=4)
        response = await stack.complete()
        assert (response.status_code, error_of(response)["code"]) == (503, "replica_gone")
        assert len(stack.fleet.requests) == 2


async def test_stream_never_begins_anew_after_its_first_token() -> None:
    async with running() as stack:
        stack.fleet.script = dies_first(ReplicaGone("gone"))
        chunks = events(await stack.complete(stream=True))
        assert [chunk["choices"][0]["text"] for chunk in chunks if "choices" in chunk][-1] == "lost "
        assert chunks[-1]["error"]["code"] == "replica_gone"
        assert len(stack.fleet.requests) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_full_replica_is_a_429_even_when_another_is_gone(stream: bool) -> None:
    """503 is for a fleet without a replica that lives."""
    async with running() as stack:
        home = stack.gateway.placement.policy.home("legal")
        assert home is not None

        def script(replica_id: str, request: GenerateRequest) -> Sequence[Message | Exception]:
            return [Overloaded("full") if replica_id == home.replica_id else ReplicaGone("gone")]

        stack.fleet.script = script
        response = await stack.complete(stream=stream)
        assert (response.status_code, error_of(response)["code"]) == (429, "overloaded")
        assert response.headers["retry-after"] == "1"


async def test_no_replica_at_all_is_a_503_at_once() -> None:
    async with running(catalog=delta(num_replicas=0)) as stack:
        response = await stack.complete()
        assert (response.status_code, error_of(response)["code"]) == (503, "no_replica")
        assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize(("header", "limit_s"), [("0.05", 60.0), ("60", 0.05), (None, 0.05)])
async def test_deadline_is_the_shorter_of_header_and_setting(header: str | None, limit_s: float) -> None:
    async with running(RouterConfig(requests=RequestLimits(request_timeout_s=limit_s))) as stack:
        stack.fleet.hang = True
        headers = {} if header is None else {TIMEOUT_HEADER: header}
        body = {"model": "legal", "prompt": "hi"}
        response = await stack.http.post("/v1/completions", json=body, headers=headers)
        assert (response.status_code, error_of(response)["code"]) == (504, "request_timeout")


@pytest.mark.parametrize("header", ["0", "-1", "nan", "soon", ""])
async def test_deadline_that_is_no_time_is_refused_before_anything_runs(header: str) -> None:
    async with running() as stack:
        body = {"model": "legal", "prompt": "hi"}
        response = await stack.http.post("/v1/completions", json=body, headers={TIMEOUT_HEADER: header})
        assert (response.status_code, error_of(response)["param"]) == (400, TIMEOUT_HEADER)
        assert stack.fleet.requests == []


async def test_base_goes_to_the_least_loaded_of_all_gateways() -> None:
    async with running(catalog=delta(num_replicas=3)) as stack:
        pulse = FleetPulse(
            board_id="b", seen=1, plan=None, in_flight={"r0": 3, "r1": 1, "r2": 2}, loads={}, residency={}
        )
        stack.gateway.placement.hear(pulse)
        stack.fleet.script = dies_first(ReplicaGone("gone"), times=0)
        await stack.complete(model="tiny-base")
        assert [replica_id for replica_id, _ in stack.fleet.requests] == ["r1"]


async def test_heartbeat_warms_the_live_version_at_the_homes_it_gained() -> None:
    class Source:
        async def pulse_gateway(self, pulse: GatewayPulse) -> FleetPulse:
            plan = HomePlan(epoch=1, active=("legal",), num_homes={"legal": 3})
            return FleetPulse(board_id="b", seen=1, plan=plan, in_flight={}, loads={}, residency={})

    async with running(catalog=delta(num_replicas=3)) as stack:
        home = stack.gateway.placement.policy.home("legal")
        assert home is not None
        for _ in range(2):
            await stack.gateway.exchange("g", Source())
        others = {"r0", "r1", "r2"} - {home.replica_id}
        for _ in range(5):
            await asyncio.sleep(0)
        assert sorted(stack.fleet.prefetched) == sorted((replica_id, digest(1001)) for replica_id in others)


async def test_heartbeat_waits_for_no_replica_and_no_replica_for_another() -> None:
    class Source:
        async def pulse_gateway(self, pulse: GatewayPulse) -> FleetPulse:
            plan = HomePlan(epoch=1, active=("a", "b"), num_homes={"a": 4, "b": 4})
            return FleetPulse(board_id="b", seen=1, plan=plan, in_flight={}, loads={}, residency={})

    adapters = [adapter_record("a"), adapter_record("b", live=2, num_versions=2)]
    async with running(catalog=delta(adapters, num_replicas=4)) as stack:
        policy = stack.gateway.placement.policy
        firsts = {name: {home.replica_id for home in policy.homes(name)} for name in ("a", "b")}
        hung, *_ = {"r0", "r1", "r2", "r3"} - firsts["a"] - firsts["b"]
        stack.fleet.hanging = {hung}
        async with asyncio.timeout(10):
            await stack.gateway.exchange("g", Source())
        gained = [
            (home.replica_id, digest(number))
            for name, number in (("a", 1001), ("b", 1002))
            for home in policy.homes(name)
            if home.replica_id not in firsts[name]
        ]
        assert hung in {replica_id for replica_id, _ in gained}
        for _ in range(5):
            await asyncio.sleep(0)
        began = stack.fleet.prefetched
        assert {pair for pair in began if pair[0] != hung} == {pair for pair in gained if pair[0] != hung}
        assert [replica_id for replica_id, _ in began].count(hung) == 1
