"""The gateway's loops, over a registry and replicas that hang: those that stop are noticed all the same."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.local_fleet import until

pytestmark = pytest.mark.filterwarnings("ignore")
"""Importing Serve warns."""


class Gateway:
    """Notes what it is told. `exchange` hangs while `hangs` is set."""

    def __init__(self) -> None:
        self.told: list[frozenset[str]] = []
        self.num_exchanges = 0
        self.hangs = True

    def stopping(self, replica_ids: frozenset[str], starting: frozenset[str]) -> bool:
        is_news = bool(replica_ids - (self.told[-1] if self.told else frozenset()))
        self.told.append(replica_ids)
        return is_news

    async def exchange(self, gateway_id: str, source: object) -> None:
        self.num_exchanges += 1
        if self.hangs:
            await asyncio.Event().wait()


def deployment(gateway: Gateway, pulse_s: float) -> Any:
    """What the loops use of a GatewayDeployment."""
    stopped: set[str] = set()
    return SimpleNamespace(
        stopped=stopped,
        _config=SimpleNamespace(router=SimpleNamespace(placement=SimpleNamespace(pulse_s=pulse_s))),
        _gateway=gateway,
        _gateway_id="g",
        _registry=None,
        _has_news=asyncio.Event(),
        _fleet=SimpleNamespace(gone=lambda: frozenset(stopped), starting=frozenset),
    )


def started(kind: Any, stand_in: Any) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(loop(stand_in)) for loop in (kind._pulse, kind._watch_running)]


async def test_stopping_replica_is_noticed_while_the_heartbeat_hangs() -> None:
    from cluster.gateway_deployment import GatewayDeployment

    gateway = Gateway()
    stand_in = deployment(gateway, pulse_s=0.01)
    loops = started(GatewayDeployment, stand_in)
    await until(lambda: gateway.num_exchanges == 1)
    stand_in.stopped.add("r0")
    await until(lambda: {"r0"} in gateway.told)
    for task in loops:
        task.cancel()


async def test_replica_that_stops_is_told_before_the_next_heartbeat() -> None:
    from cluster.gateway_deployment import GatewayDeployment

    gateway = Gateway()
    gateway.hangs = False
    stand_in = deployment(gateway, pulse_s=1000.0)
    loops = started(GatewayDeployment, stand_in)
    await until(lambda: len(gateway.told) > 2)
    assert gateway.num_exchanges == 0
    stand_in.stopped.add("r0")
    await until(lambda: gateway.num_exchanges == 1)
    for task in loops:
        task.cancel()
