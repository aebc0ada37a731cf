"""Which bytes a node should hold when it cannot hold all, and pins that are said again until they are kept."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from cluster.staging import FIRST_RETRY_S, LAST_RETRY_S, Staging, choose_bytes, pause_s
from registry.types import AdapterManifest, AdapterRecord, CatalogDelta, VersionRecord, VersionState
from tests.registry.uploads import Clock, sha


def version(number: int, *, num_bytes: int = 10, state: VersionState = VersionState.ACTIVE) -> VersionRecord:
    return VersionRecord(
        number=number,
        digest=sha(str(number)),
        state=state,
        created_at_s=float(number),
        num_bytes=num_bytes,
        max_rank=1,
        target_names=(),
    )


def adapter(*versions: VersionRecord, live: int | None = None, pending: tuple[int, ...] = ()) -> AdapterRecord:
    aliases = {} if live is None else {"live": live}
    waiting = tuple(sha(str(number)) for number in pending)
    return AdapterRecord(
        name="a", owner="o", revision=1, created_at_s=0, aliases=aliases, versions=versions, pending=waiting
    )


ADAPTERS = (
    adapter(version(1), version(4), version(9, state=VersionState.RETIRED), live=1),
    adapter(version(2), version(3, num_bytes=30), live=2),
    adapter(version(5), version(6)),
)


@pytest.mark.parametrize(
    ("max_bytes", "numbers"),
    [(5, []), (19, [2]), (29, [2, 1]), (45, [2, 1, 6, 5]), (1000, [2, 1, 6, 5, 4, 3])],
)
def test_alias_targets_come_first_and_the_newest_first(max_bytes: int, numbers: list[int]) -> None:
    assert choose_bytes(ADAPTERS, max_bytes) == [sha(str(number)) for number in numbers]


def test_what_an_activation_waits_for_is_always_chosen() -> None:
    waiting = adapter(version(7, num_bytes=40), version(8), pending=(7,))
    assert choose_bytes((*ADAPTERS, waiting), 45) == [sha("7")]
    assert choose_bytes((*ADAPTERS, waiting), 55) == [sha("7"), sha("2")]


def test_content_of_two_names_is_counted_once() -> None:
    assert choose_bytes((adapter(version(1), live=1), adapter(version(1))), 15) == [sha("1")]


class Stager:
    """A replica that stages at once. What is to be kept gets into a slot unless it is in `broken`."""

    def __init__(self) -> None:
        self.there: list[str] = []
        self.in_slots: set[str] = set()
        self.broken: set[str] = set()
        self.keeps: list[tuple[str, ...]] = []

    async def stage(self, manifest: AdapterManifest) -> None:
        self.there.append(cast(str, manifest))

    remember = stage

    async def keep(self, digests: Sequence[str]) -> None:
        self.keeps.append(tuple(digests))
        self.in_slots = set(digests) - self.broken

    def warm(self, digest: str) -> None: ...

    def forget(self, digest: str) -> None: ...

    def staged(self) -> tuple[str, ...]:
        return tuple(self.there)

    held = staged

    def resident(self) -> tuple[str, ...]:
        return tuple(self.in_slots)

    def running(self) -> tuple[str, ...]:
        return ()

    def is_alive(self) -> bool:
        return True


class Manifests:
    """A version's manifest is its digest here."""

    async def manifest(self, digest: str) -> Any:
        return digest


def changed(*adapters: AdapterRecord) -> CatalogDelta:
    return CatalogDelta(revision=1, full=False, adapters=adapters, replicas=(), base=None)


PINNED = adapter(version(1), live=1).model_copy(update={"name": "pinned", "pinned": True})


async def settled(staging: Staging) -> None:
    """Let everything run that was begun."""
    for _ in range(50):
        await asyncio.sleep(0)
    assert staging.num_under_way == 0


async def test_pin_that_is_in_no_slot_is_said_again_after_a_pause_that_grows() -> None:
    clock, stager = Clock(), Stager()
    stager.broken = {sha("1")}
    staging = Staging(stager, Manifests(), 1 << 20, lambda: None, clock)
    staging.apply(changed(PINNED))
    await staging.settle()
    staging.retry()
    await settled(staging)
    stager.keeps.clear()
    for wait_s, num_said in ((2.5, 0), (10.0, 1), (5.0, 1), (20.0, 2)):
        clock.now_s += wait_s
        staging.retry()
        await settled(staging)
        assert len(stager.keeps) == num_said
    stager.broken = set()
    clock.now_s += LAST_RETRY_S
    staging.retry()
    await settled(staging)
    assert stager.in_slots == {sha("1")}
    stager.keeps.clear()
    clock.now_s += 10 * LAST_RETRY_S
    staging.retry()
    await settled(staging)
    assert stager.keeps == []


async def test_pins_are_said_again_when_another_version_has_come() -> None:
    stager = Stager()
    staging = Staging(stager, Manifests(), 1 << 20, lambda: None, Clock())
    staging.apply(changed(PINNED))
    await settled(staging)
    staging.retry()
    await settled(staging)
    staging.apply(changed(adapter(version(2), live=2)))
    await settled(staging)
    assert sha("2") in stager.there
    stager.keeps.clear()
    for _ in range(3):
        staging.retry()
        await settled(staging)
    assert stager.keeps == [(sha("1"),)]


async def test_nothing_is_said_while_nothing_is_pinned() -> None:
    stager = Stager()
    staging = Staging(stager, Manifests(), 1 << 20, lambda: None, Clock())
    staging.apply(changed(adapter(version(2), live=2)))
    await settled(staging)
    staging.retry()
    await settled(staging)
    assert stager.keeps == []


@pytest.mark.parametrize(("num_failures", "expected_s"), [(1, FIRST_RETRY_S), (2, 10.0), (7, 300.0), (5000, 300.0)])
def test_pause_doubles_up_to_its_bound_however_often_it_failed(num_failures: int, expected_s: float) -> None:
    assert pause_s(num_failures) == expected_s
