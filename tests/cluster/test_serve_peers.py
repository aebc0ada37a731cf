"""Asking the other gateways over a handle that does what Serve's may: answers, failures, silence."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cluster.serve_peers import ServePeers
from registry.errors import RegistryUnavailable
from router.errors import GatewaySilent


class Broadcast:
    """A handle to gateways that answer as `answers` says, by method; an error stands for a gateway that failed."""

    def __init__(self, **answers: list[Any] | Exception) -> None:
        self._answers = answers
        self.asked: list[tuple[str, dict[str, str]]] = []

    def broadcast(self, method: str, **arguments: str) -> "Broadcast":
        self.asked.append((method, arguments))
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert timeout_s < 10
        assert return_exceptions
        answers = self._answers[self.asked[-1][0]]
        if isinstance(answers, Exception):
            raise answers
        return answers


def on_record(*instances: str) -> Callable[[], Awaitable[tuple[str, ...]]]:
    """What the registry says; nothing when there are none."""

    async def recorded() -> tuple[str, ...]:
        if not instances:
            raise RegistryUnavailable("away")
        return instances

    return recorded


async def test_others_are_told_apart_from_the_one_that_asks() -> None:
    handle = Broadcast(instance=["g2", "g0", "g1"], metrics_for=[None, ("g1", b"one"), ("g2", b"two")])
    peers = ServePeers(handle, "g0", on_record("g0", "g1"))
    assert await peers.names() == ["g1", "g2"]
    assert await peers.metrics() == {"g1": b"one", "g2": b"two"}
    assert handle.asked[-1] == ("metrics_for", {"asker": "g0"})


async def test_one_that_fails_is_left_out_of_the_metrics_and_not_of_the_names() -> None:
    handle = Broadcast(instance=["g0", ValueError()], metrics_for=[None, RuntimeError("died"), ("g2", b"two")])
    peers = ServePeers(handle, "g0", on_record("g0", "g1", "g2"))
    assert await peers.names() == ["g1", "g2"]
    assert await peers.metrics() == {"g2": b"two"}
    with pytest.raises(GatewaySilent, match="g1 does not answer"):
        await ServePeers(Broadcast(metrics_for=[None, RuntimeError("died")]), "g0", on_record("g0", "g1")).metrics_of(
            "g1"
        )


async def test_one_alone_is_asked_for_by_name() -> None:
    handle = Broadcast(metrics_for=[None, None, ("g2", b"two")])
    assert await ServePeers(handle, "g0", on_record()).metrics_of("g2") == b"two"
    assert handle.asked == [("metrics_for", {"asker": "g0", "wanted": "g2"})]
    assert await ServePeers(Broadcast(metrics_for=[None, None]), "g0", on_record()).metrics_of("g9") is None


async def test_silent_gateways_are_those_on_record() -> None:
    silent = Broadcast(instance=TimeoutError(), metrics_for=RuntimeError("unavailable"))
    peers = ServePeers(silent, "g0", on_record("g0", "g1"))
    assert await peers.names() == ["g1"]
    assert await peers.metrics() == {}
    with pytest.raises(GatewaySilent, match="g1 does not answer"):
        await peers.metrics_of("g1")
    assert await peers.metrics_of("g9") is None


async def test_nobody_is_denied_while_neither_gateways_nor_registry_answer() -> None:
    silent = Broadcast(instance=TimeoutError(), metrics_for=RuntimeError("unavailable"))
    peers = ServePeers(silent, "g0", on_record())
    assert await peers.metrics() == {}
    with pytest.raises(GatewaySilent):
        await peers.names()
    with pytest.raises(GatewaySilent):
        await peers.metrics_of("g1")
    whole = ServePeers(Broadcast(instance=["g0", "g1"]), "g0", on_record())
    assert await whole.names() == ["g1"]
