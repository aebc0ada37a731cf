"""Pins and preloads over HTTP, and which adapters a gateway brings to their homes when."""

from collections import Counter

import pytest

from registry.catalog import Catalog
from registry.types import AdapterRecord, Preload
from registry.usage_records import DAY_S
from router.config import RouterConfig
from router.gateway import Gateway
from router.preload import PreloadClock
from tests.router.fakes import FakeFleet, FakeRegistry
from tests.router.support import (
    BASE_NAME,
    BYTES,
    TOKENIZER_SHA,
    Stack,
    adapter_record,
    delta,
    error_of,
    running,
)

MIDNIGHT_S = 20_000.0 * DAY_S
HALF_PAST_SEVEN_S = MIDNIGHT_S + 7.5 * 3600


class Clock:
    """Seconds since the epoch, as a test says."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def gateway_of(clock: Clock) -> tuple[Gateway, FakeFleet]:
    fleet = FakeFleet()
    registry = FakeRegistry({TOKENIZER_SHA: BYTES.to_str().encode()})
    return Gateway(RouterConfig(), Catalog((BASE_NAME,)), fleet, registry, wall_clock=clock), fleet


def scheduled(name: str, **preload: float | str) -> AdapterRecord:
    return adapter_record(name).model_copy(update={"preload": Preload.model_validate(preload)})


def test_interval_is_due_at_once_and_then_each_time_it_has_passed() -> None:
    clock, adapters = PreloadClock(), (scheduled("a", every_s=60), adapter_record("never"))
    assert clock.due(adapters, MIDNIGHT_S + 30) == ["a"]
    assert clock.due(adapters, MIDNIGHT_S + 59) == []
    assert clock.due(adapters, MIDNIGHT_S + 60) == ["a"]
    assert clock.due(adapters, MIDNIGHT_S + 1000) == ["a"], "turns that were slept through are one"
    assert clock.due(adapters, MIDNIGHT_S + 1001) == []


def test_time_of_day_is_due_once_a_day_and_not_because_a_gateway_starts() -> None:
    clock, adapters = PreloadClock(), (scheduled("a", at="07:30"),)
    assert clock.due(adapters, HALF_PAST_SEVEN_S - 1) == []
    assert clock.due(adapters, HALF_PAST_SEVEN_S) == ["a"]
    assert clock.due(adapters, HALF_PAST_SEVEN_S + 3600) == []
    assert clock.due(adapters, HALF_PAST_SEVEN_S + DAY_S) == ["a"]
    assert PreloadClock().due(adapters, HALF_PAST_SEVEN_S + 10) == []


def test_another_schedule_begins_anew() -> None:
    clock = PreloadClock()
    clock.due((scheduled("a", every_s=3600),), MIDNIGHT_S)
    assert clock.due((scheduled("a", every_s=60),), MIDNIGHT_S + 1) == ["a"]
    assert clock.due((scheduled("a", at="00:00"),), MIDNIGHT_S + 2) == []
    assert clock.due((adapter_record("a"),), MIDNIGHT_S + 3) == []
    assert clock.due((scheduled("a", every_s=60),), MIDNIGHT_S + 4) == ["a"]


async def test_gateway_brings_the_live_version_to_its_homes() -> None:
    stack = Stack()
    await stack.gateway.apply(delta())
    (legal,) = stack.gateway.catalog.adapters
    await stack.gateway.preload()
    assert stack.fleet.prefetched == []
    hourly = legal.model_copy(update={"preload": Preload(every_s=3600)})
    await stack.gateway.apply(delta(revision=2, adapters=(hourly,)))
    await stack.gateway.preload()
    await stack.gateway.preload()
    home, version = stack.gateway.placement.policy.home("legal"), legal.version(legal.aliases["live"])
    assert home is not None
    assert version is not None
    assert stack.fleet.prefetched == [(home.replica_id, version.digest)]


async def test_a_turn_waits_while_there_is_no_replica() -> None:
    stack = Stack()
    hourly = adapter_record("legal").model_copy(update={"preload": Preload(every_s=3600)})
    await stack.gateway.apply(delta(adapters=(hourly,), num_replicas=0))
    await stack.gateway.preload()
    await stack.gateway.apply(delta(revision=2, adapters=(hourly,)))
    await stack.gateway.preload()
    assert len(stack.fleet.prefetched) == 1


async def test_time_of_day_waits_for_the_first_replica() -> None:
    clock = Clock(HALF_PAST_SEVEN_S - 60)
    gateway, fleet = gateway_of(clock)
    daily = scheduled("legal", at="07:30")
    await gateway.apply(delta(adapters=(daily,), num_replicas=0))
    await gateway.preload()
    clock.now_s += 120
    await gateway.preload()
    await gateway.apply(delta(revision=2, adapters=(daily,)))
    await gateway.preload()
    await gateway.preload()
    assert len(fleet.prefetched) == 1


async def test_what_did_not_come_is_brought_by_the_next_call() -> None:
    gateway, fleet = gateway_of(Clock(HALF_PAST_SEVEN_S - 1))
    await gateway.apply(delta(adapters=(scheduled("legal", every_s=3600),), num_replicas=1))
    fleet.unreachable = {"r0"}
    await gateway.preload()
    await gateway.preload()
    assert len(fleet.prefetched) == 2
    fleet.unreachable = set()
    await gateway.preload()
    await gateway.preload()
    assert len(fleet.prefetched) == 3


async def test_replica_that_fails_once_is_left_alone_for_that_round() -> None:
    gateway, fleet = gateway_of(Clock(MIDNIGHT_S))
    adapters = tuple(scheduled(name, every_s=3600) for name in "abcde")
    await gateway.apply(delta(adapters=adapters, num_replicas=2))
    homes = gateway.placement.policy.homes
    num_there = Counter(home.replica_id for name in "abcde" for home in homes(name))
    assert set(num_there) == {"r0", "r1"}
    fleet.unreachable = {"r0"}
    await gateway.preload()
    asked = Counter(replica_id for replica_id, _ in fleet.prefetched)
    assert asked == {"r0": 1, "r1": num_there["r1"]}


def test_what_is_owed_ends_with_its_schedule() -> None:
    clock = PreloadClock()
    clock.due((scheduled("a", every_s=3600), scheduled("b", every_s=3600)), MIDNIGHT_S)
    clock.owe(["a", "b"])
    assert clock.due((scheduled("a", every_s=3600), adapter_record("b")), MIDNIGHT_S + 1) == ["a"]
    assert clock.due((scheduled("a", every_s=3600), scheduled("b", at="00:00")), MIDNIGHT_S + 2) == []


async def test_pin_and_preload_over_http() -> None:
    async with running() as stack:
        stack.registry.records["legal"] = adapter_record("legal")
        assert (await stack.http.put("/v1/adapters/legal/pin")).json()["pinned"] is True
        assert (await stack.http.delete("/v1/adapters/legal/pin")).json()["pinned"] is False
        answer = await stack.http.put("/v1/adapters/legal/preload", json={"at": "07:30"})
        assert answer.json()["preload"] == {"every_s": None, "at": "07:30"}
        assert (await stack.http.delete("/v1/adapters/legal/preload")).json()["preload"] is None
        assert (await stack.http.put("/v1/adapters/nobody/pin")).status_code == 404


@pytest.mark.parametrize(
    "body", [{}, {"every_s": 60, "at": "07:30"}, {"every_s": 0}, {"at": "25:00"}, {"cron": "* * * * *"}]
)
async def test_schedule_that_is_none_is_refused(body: dict[str, object]) -> None:
    async with running() as stack:
        answer = await stack.http.put("/v1/adapters/legal/preload", json=body)
        assert answer.status_code == 400
        assert error_of(answer)["type"] == "invalid_request_error"
        assert stack.registry.calls == []
