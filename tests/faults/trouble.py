"""Faults of a real fleet under traffic: what each does to it, how long it lasts, and what clients saw of it."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

import httpx

from tests.faults.churn import raise_faults, working
from tests.faults.clients import Client, End, Expected, Outcome, check, tally
from tests.fleet_process import PROXY, REPLICA, FleetProcess
from tests.tiny_fleet import ADAPTERS, TinyFleet

HEAL_S = 240.0
BEFORE_S, AFTER_S = 1.5, 1.5
"""Traffic on a whole fleet, before a fault and after it."""


@dataclass
class Scar:
    """What a fault left: replicas that were lost, when the proxy died, and how long until the fleet was whole."""

    lost: set[str] = field(default_factory=set)
    proxy_died_s: tuple[float, float] | None = None
    whole_s: float = 0.0


Fault = Callable[[FleetProcess], Scar]


def ids(fleet: FleetProcess) -> set[str]:
    return {replica["replica_id"] for replica in fleet.replicas()}


def kill_replica(fleet: FleetProcess) -> Scar:
    """Kill -9 a replica; over when another has joined in its place."""
    return _lose_replica(fleet, lambda pid: fleet.kill(pid))


def stop_replica(fleet: FleetProcess, stopped_s: float) -> Scar:
    """SIGSTOP a replica and let it go on later; over when there are as many as before."""

    def stop(pid: int) -> None:
        fleet.kill(pid, signal.SIGSTOP)
        try:
            sleep(stopped_s)
        finally:
            if pid in fleet.pids(REPLICA):
                fleet.kill(pid, signal.SIGCONT)

    return _lose_replica(fleet, stop, may_come_back=True)


def _lose_replica(fleet: FleetProcess, harm: Callable[[int], None], *, may_come_back: bool = False) -> Scar:
    before, began_s = ids(fleet), monotonic()
    harm(fleet.pids(REPLICA)[0])
    seen = set(before)

    def is_whole() -> bool:
        now = ids(fleet)
        seen.intersection_update(now)
        return len(now) == len(before) and (may_come_back or now != before)

    fleet.wait_until(is_whole, "replacement", HEAL_S)
    # One that was stopped left the fleet before it was let go on, whether or not it came back.
    return Scar(lost=before if may_come_back else before - seen, whole_s=monotonic() - began_s)


def hang_replica(fleet: FleetProcess) -> Scar:
    """Keep a replica in a step for good (`tests.faults.hanging_fleet`); over when another has joined in its place."""
    return _lose_replica(fleet, lambda pid: fleet.hang(pid))


def kill_proxy(fleet: FleetProcess, kind: str = PROXY) -> Scar:
    """Kill -9 HAProxy or its manager; over when there is another, and it answers."""
    old, killed, began_s = set(fleet.proxy_pids()), fleet.proxy_pids(kind), monotonic()
    for pid in killed:
        fleet.kill(pid)
    fleet.wait_until(lambda: not old & set(fleet.proxy_pids()), "end of the proxy", HEAL_S)
    gone_s = monotonic()

    def is_whole() -> bool:
        return bool(fleet.proxy_pids()) and httpx.get(f"{fleet.url}/health").status_code == 200

    fleet.wait_until(is_whole, "another proxy", HEAL_S)
    return Scar(proxy_died_s=(began_s, gone_s), whole_s=monotonic() - began_s)


def roll(fleet: FleetProcess, **changes: Any) -> Scar:
    """Another configuration of replicas and gateways; over when every replica is a new one."""
    before, began_s = ids(fleet), monotonic()
    fleet.deploy(fleet=changes)
    fleet.wait_until(lambda: len(now := ids(fleet)) == len(before) and not now & before, "new replicas", HEAL_S)
    fleet.wait_until(lambda: len(fleet.pids(REPLICA)) == len(before), "end of the old replicas", HEAL_S)
    return Scar(whole_s=monotonic() - began_s)


def scale(fleet: FleetProcess, num_replicas: int) -> Scar:
    """More replicas or fewer; over when so many have joined, and no other process is left."""
    began_s = monotonic()
    fleet.deploy(num_replicas=num_replicas)
    for count in (lambda: len(fleet.replicas()), lambda: len(fleet.pids(REPLICA))):
        fleet.wait_until(lambda count=count: count() == num_replicas, f"{num_replicas} replicas", HEAL_S)  # type: ignore[misc]
    return Scar(whole_s=monotonic() - began_s)


class Theatre:
    """A fleet with clients on it. `inflict` is one fault amid their traffic, judged when it is over."""

    def __init__(self, fleet: FleetProcess, clients: Sequence[Client]) -> None:
        self.fleet = fleet
        self._clients = clients

    def inflict(self, fault: Fault) -> dict[str, Any]:
        """What came of it. Raises AssertionError for anything that clients may not see."""
        starts = [len(client.outcomes) for client in self._clients]
        sleep(BEFORE_S)
        began_s = monotonic()
        scar = fault(self.fleet)
        sleep(AFTER_S)
        raise_faults(self._clients)
        outcomes = [
            outcome
            for client, start in zip(self._clients, starts, strict=True)
            for outcome in tuple(client.outcomes)[start:]
        ]
        check(outcomes, scar.lost, scar.proxy_died_s)
        return {
            "whole_s": round(scar.whole_s, 2),
            "longest_wait_s": round(max(outcome.waited_s for outcome in outcomes), 2),
            "last_harm_s": round(last_harm_s(outcomes, began_s), 2),
            **tally(outcomes),
        }


def last_harm_s(outcomes: Sequence[Outcome], began_s: float) -> float:
    """Seconds from the fault to the end of the last request that it took anything from; 0 when there was none."""
    return max([outcome.ended_s - began_s for outcome in outcomes if outcome.end is not End.RIGHT], default=0.0)


def expectations(tiny: TinyFleet, num_tokens: int) -> list[Expected]:
    """What every adapter and the base say, by PEFT."""
    texts = {name: tiny.greedy_text(name, "Hello", num_tokens)[0] for name in (*ADAPTERS, None)}
    assert len(set(texts.values())) == len(texts), "a wrong adapter would not show"
    base = next(each["id"] for each in _models(tiny.fleet) if each["id"] not in ADAPTERS)
    return [Expected(name or base, text, num_tokens) for name, text in texts.items()]


def _models(fleet: FleetProcess) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = httpx.get(f"{fleet.url}/v1/models").json()["data"]
    return data


@contextmanager
def theatre(tiny: TinyFleet, *, num_clients: int, num_tokens: int) -> Iterator[Theatre]:
    """A theatre on that fleet, whole before and after."""
    tiny.fleet.wait_ready()
    expected = expectations(tiny, num_tokens)
    clients = [Client(tiny.fleet.url, expected, seed) for seed in range(num_clients)]
    with working(clients):
        yield Theatre(tiny.fleet, clients)
    tiny.fleet.wait_ready()
