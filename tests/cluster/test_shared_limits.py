"""Several gateways over one registry: what they admit together is the tenant's limit."""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from registry.errors import RegistryUnavailable
from registry.service import Registry
from registry.types import LimitShare, LimitUse, TenantLimits
from router.errors import TenantLimitReached
from router.tenant_limits import TenantGate
from tests.registry.uploads import Clock, open_registry
from tests.router.support import Stack

LIMITS = TenantLimits(max_concurrent=10, requests_per_minute=240, tokens_per_minute=6000)


class Gate:
    """One gateway's door, its open calls, and what it admitted by time."""

    def __init__(self, name: str, registry: Registry, clock: Clock) -> None:
        self.name = name
        self._registry = registry
        self._clock = clock
        self._access = registry.changes(0, with_access=True).access  # type: ignore[union-attr]
        self.door = TenantGate(lambda: self._access, shared=True, clock=clock)
        self.calls: list[ExitStack] = []
        self.admitted_at_s: list[float] = []
        self._num_shares = 0
        registry.renew_gateway(name, 1)

    def share(self, *, is_lost: bool = False) -> None:
        self._num_shares += 1
        shares = self._registry.tenants.share_limits(self.name, self._num_shares, self.door.uses()) or ()
        if not is_lost:
            self.door.take(shares)

    def begin(self) -> None:
        call = ExitStack()
        try:
            charge = call.enter_context(self.door.admit("acme", 1, 20))
        except TenantLimitReached:
            return
        call.callback(charge.settle, 20)
        self.calls.append(call)
        self.admitted_at_s.append(self._clock())

    def end(self, number: int) -> None:
        for call in self.calls[:number]:
            call.close()
        del self.calls[:number]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(tmp_path: Path, clock: Clock) -> Iterator[Registry]:
    registry = open_registry(tmp_path, clock)
    registry.tenants.add("acme", LIMITS, actor="a")
    yield registry
    registry.close()


def most_in_a_minute(times: list[float]) -> int:
    times = sorted(times)
    return max(sum(at_s <= other < at_s + 60 for other in times) for at_s in times)


def test_two_backlogged_gateways_admit_the_limit_and_no_more(registry: Registry, clock: Clock) -> None:
    gates = [Gate(name, registry, clock) for name in "ab"]
    most = 0
    for step in range(150):
        for gate in gates:
            for _ in range(8):
                gate.begin()
            if step % 2:
                gate.share()
        assert sum(len(gate.calls) for gate in gates) <= 10
        most = max(most, sum(len(gate.calls) for gate in gates))
        clock.now_s += 1
        for gate in gates:
            gate.end(5)
    times = [at_s for gate in gates for at_s in gate.admitted_at_s]
    assert most == 10
    assert 0.95 * 240 <= most_in_a_minute(times) <= 240
    share = len(gates[0].admitted_at_s) / len(times)
    assert 0.4 < share < 0.6


def test_load_that_wanders_and_answers_that_are_lost_never_exceed_it(registry: Registry, clock: Clock) -> None:
    rng = random.Random(7)
    gates = [Gate(name, registry, clock) for name in "abc"]
    for step in range(240):
        busy = gates[(step // 40) % 3]
        for gate in gates:
            for _ in range(6 if gate is busy else rng.randrange(2)):
                gate.begin()
            gate.share(is_lost=rng.random() < 0.2)
        assert sum(len(gate.calls) for gate in gates) <= 10
        clock.now_s += 0.5
        for gate in gates:
            gate.end(rng.randrange(5))
    assert most_in_a_minute([at_s for gate in gates for at_s in gate.admitted_at_s]) <= 240


def test_dead_gateway_gives_its_part_to_the_others_when_its_lease_ends(registry: Registry, clock: Clock) -> None:
    alive, dead = (Gate(name, registry, clock) for name in "ab")
    for _ in range(6):
        for gate in (alive, dead):
            gate.end(10)
            for _ in range(10):
                gate.begin()
            gate.share()
    assert (len(alive.calls), len(dead.calls)) == (5, 5)
    for _ in range(4):
        clock.now_s += 4
        registry.renew_gateway("a", 1)
        registry.advance()
        alive.share()
        for _ in range(10):
            alive.begin()
    alive.share()
    for _ in range(10):
        alive.begin()
    assert len(alive.calls) == 10


async def test_keys_seen_are_told_again_when_the_registry_did_not_hear_and_messages_are_numbered() -> None:
    gateway = Stack().gateway
    heard: list[tuple[int, tuple[str, ...]]] = []
    seen = iter([("first",), ("second",), (), ()])
    gateway.authenticator = SimpleNamespace(take_used=lambda: next(seen))  # type: ignore[assignment]

    class Deaf:
        async def share_limits(
            self, gateway_id: str, number: int, uses: Sequence[LimitUse], used_keys: Sequence[str]
        ) -> Sequence[LimitShare] | None:
            heard.append((number, tuple(sorted(used_keys))))
            if number == 1:
                raise RegistryUnavailable("try later")
            return ()

    with pytest.raises(RegistryUnavailable):
        await gateway.share_limits("g", Deaf())
    for _ in range(2):
        await gateway.share_limits("g", Deaf())
    assert heard == [(1, ("first",)), (2, ("first", "second"))], "the third time there is no news"
