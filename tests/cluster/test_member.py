"""A member over the plain registry: it stages, reports, tries again, and says why it is not let in."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.member import Member
from registry.errors import Conflict, JoinRefused, RegistryError, RegistryUnavailable
from registry.types import Activation, ActivationState, AdapterManifest, BaseSpec
from tests.local_fleet import LocalRegistry, until
from tests.registry.uploads import Clock, make_base, open_registry, plain_upload

BASE = make_base()


class FakeStager:
    """Knows what it was given. `num_faults` stages fail first; `gate` holds every stage up."""

    def __init__(self) -> None:
        self.manifests: dict[str, AdapterManifest] = {}
        self.with_bytes: list[str] = []
        self.warmed: list[str] = []
        self.num_faults = 0
        self.alive = True
        self.in_use: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()

    async def stage(self, manifest: AdapterManifest) -> None:
        await self.gate.wait()
        if self.num_faults:
            self.num_faults -= 1
            raise OSError("disk full")
        self.manifests[manifest.digest] = manifest
        self.with_bytes.append(manifest.digest)

    async def remember(self, manifest: AdapterManifest) -> None:
        self.manifests[manifest.digest] = manifest

    def warm(self, digest: str) -> None:
        self.warmed.append(digest)

    def forget(self, digest: str) -> None:
        self.manifests.pop(digest, None)
        self.evict(digest)

    def evict(self, digest: str) -> None:
        """Lose the bytes and keep the manifest."""
        self.with_bytes = [each for each in self.with_bytes if each != digest]

    def staged(self) -> tuple[str, ...]:
        return tuple(self.manifests)

    def held(self) -> tuple[str, ...]:
        return tuple(self.with_bytes)

    def resident(self) -> tuple[str, ...]:
        return ()

    def running(self) -> tuple[str, ...]:
        return tuple(self.in_use)

    def is_alive(self) -> bool:
        return self.alive


class Fleet:
    """A registry, and members that a test starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
        self.plain = open_registry(folder / "data", self.clock)
        self.registry = LocalRegistry(self.plain)
        self.tasks: list[asyncio.Task[None]] = []

    async def push(self, name: str, seed: int) -> Activation:
        """Push content number `seed` and ask for it to be live; each push is younger than the one before."""
        self.clock.now_s += 0.001
        files = plain_upload(self.folder / f"upload-{seed}", BASE, seed)
        activation: Activation = (await self.registry.push(name, files, owner="o", activate=True)).activation
        return activation

    async def ended(self, activation: Activation) -> Activation:
        ended: Activation = await self.registry.wait_activation(activation.activation_id, 10.0)
        return ended

    @asynccontextmanager
    async def member(
        self, stager: FakeStager, *, base: BaseSpec = BASE, joins: bool = True, node_store_bytes: int = 1 << 20
    ) -> AsyncIterator[Member]:
        member = Member("r0", "node", 4, base, b"{}", stager, self.registry, 1.0, node_store_bytes)
        task = asyncio.create_task(member.run())
        self.tasks.append(task)
        try:
            if joins:
                await until(lambda: member.is_joined)
            yield member
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.plain.check_integrity()
    fleet.plain.close()


async def test_failed_staging_is_tried_again_by_a_new_activation(fleet: Fleet) -> None:
    stager = FakeStager()
    stager.num_faults = 1
    async with fleet.member(stager):
        failed = await fleet.ended(await fleet.push("alice", 0))
        assert (failed.state, failed.error) == (ActivationState.FAILED, "replica r0 cannot stage it: disk full")
        stager.gate.clear()
        again = await fleet.registry.activate("alice", "live", 1, actor="a")
        await until(reported(fleet, revision_of(fleet)))
        assert fleet.plain.activation(again.activation_id).state is ActivationState.PENDING
        stager.gate.set()
        assert (await fleet.ended(again)).state is ActivationState.DONE
        assert fleet.plain.replicas()[0].failed == {}


async def test_joiner_holds_what_its_budget_can_and_serves_the_rest_on_demand(fleet: Fleet) -> None:
    first = FakeStager()
    async with fleet.member(first):
        pushed = [await fleet.ended(await fleet.push(f"tenant-{seed}", seed)) for seed in range(5)]
    await fleet.registry.leave_replica("r0")
    size = fleet.plain.manifest(pushed[0].digest).blob_bytes
    joiner = FakeStager()
    async with fleet.member(joiner, node_store_bytes=2 * size + size // 2):
        await until(reported(fleet, revision_of(fleet)))
        (record,) = fleet.plain.replicas()
        newest = [activation.digest for activation in pushed[-2:]]
        assert sorted(record.held) == sorted(newest)
        assert set(record.staged) == {activation.digest for activation in pushed}


async def test_bytes_on_demand_are_brought_before_an_alias_moves(fleet: Fleet) -> None:
    stager = FakeStager()
    async with fleet.member(stager):
        digest = (await fleet.ended(await fleet.push("alice", 0))).digest
        stager.evict(digest)
        await until(lambda: fleet.plain.replicas()[0].held == ())
        assert fleet.plain.replicas()[0].staged == (digest,)
        stager.gate.clear()
        canary = await fleet.registry.activate("alice", "canary", 1, actor="a")
        await until(reported(fleet, revision_of(fleet)))
        assert fleet.plain.activation(canary.activation_id).waiting_for == ("r0",)
        stager.gate.set()
        assert (await fleet.ended(canary)).state is ActivationState.DONE
        assert stager.held() == (digest,)


async def test_version_before_the_live_one_is_warmed_once_when_the_alias_moves(fleet: Fleet) -> None:
    stager = FakeStager()
    async with fleet.member(stager):
        first, second = [await fleet.ended(await fleet.push("alice", seed)) for seed in (0, 1)]
        await until(lambda: stager.warmed == [first.digest])
        await asyncio.to_thread(fleet.plain.set_callers, "alice", ["*"], actor="a")
        await fleet.ended(await fleet.registry.rollback("alice", "live", actor="a"))
        await until(lambda: stager.warmed == [first.digest, second.digest])
    await fleet.registry.leave_replica("r0")
    joiner = FakeStager()
    async with fleet.member(joiner):
        assert joiner.warmed == []


async def test_replica_that_makes_no_progress_loses_its_lease_until_it_does(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.member.REPORT_PERIOD_S", 0.02)
    monkeypatch.setattr("cluster.member.RETRY_S", 0.02)
    stager = FakeStager()
    async with fleet.member(stager):
        stager.alive = False
        await asyncio.sleep(0.3)
        fleet.clock.now_s += fleet.plain.config.lease_ttl_s + 1
        await asyncio.sleep(0.3)
        await asyncio.to_thread(fleet.plain.advance)
        await asyncio.sleep(0.3)
        assert fleet.plain.replicas() == ()
        stager.alive = True
        await until(lambda: len(fleet.plain.replicas()) == 1)


async def test_replica_that_makes_no_progress_does_not_join(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.member.RETRY_S", 0.02)
    stager = FakeStager()
    stager.alive = False
    async with fleet.member(stager, joins=False) as member:
        await asyncio.wait_for(member.joined(), 10)  # and its health is asked for
        await asyncio.sleep(0.3)
        assert fleet.plain.replicas() == ()
        stager.alive = True
        await until(lambda: len(fleet.plain.replicas()) == 1)


async def test_dead_step_loop_is_told_while_the_registry_hangs(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(data: bytes) -> str:
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(fleet.registry, "store_blob", hang)
    stager = FakeStager()
    stager.alive = False
    async with fleet.member(stager, joins=False) as member:
        await asyncio.wait_for(member.joined(), 10)


@pytest.mark.parametrize(
    "trouble", [RegistryUnavailable("the registry cannot be reached"), JoinRefused("a@1 is not staged here")]
)
async def test_replica_that_waits_to_join_says_why_from_time_to_time(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: RegistryError
) -> None:
    async def refuse(*_: object) -> None:
        raise trouble

    monkeypatch.setattr("cluster.member.TELL_PERIOD_S", 0.1)
    monkeypatch.setattr("cluster.member.RETRY_S", 0.01)
    monkeypatch.setattr(fleet.registry, "join_replica", refuse)
    async with fleet.member(FakeStager(), joins=False) as member:
        joining = asyncio.create_task(member.joined())
        said = f"not joined yet: {trouble.message}"
        await until(lambda: [each.message for each in caplog.records].count(said) == 1)
        began_s = time.monotonic()
        await until(lambda: len([each for each in caplog.records if each.message.startswith(said)]) >= 4)
        assert time.monotonic() - began_s > 0.15, "once a period, and not with each try"
        assert not joining.done()
        monkeypatch.undo()
        await asyncio.wait_for(joining, 30)


async def test_replica_with_another_base_says_so_once_and_joins_when_it_may(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cluster.member.REFUSED_RETRY_S", 0.05)
    async with fleet.member(FakeStager()):
        await fleet.ended(await fleet.push("alice", 0))
    await fleet.registry.leave_replica("r0")
    other = make_base("acme/other", weights="other")
    async with fleet.member(FakeStager(), base=other, joins=False) as member:
        await until(lambda: member.refusal is not None)
        assert member.refusal is not None
        for part in (f"acme/tiny ({BASE.digest[:12]})", f"acme/other ({other.digest[:12]})", "retire every adapter"):
            assert part in member.refusal
        await asyncio.sleep(0.5)
        assert [record.message for record in caplog.records if "acme/other" in record.message] == [
            f"not joined yet: {member.refusal}"
        ]
        await fleet.registry.retire("alice", None, actor="a")
        await until(lambda: member.is_joined)
        assert member.refusal is None


async def test_refused_replica_asks_less_often(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def refuse(spec: BaseSpec) -> None:
        asked.append(spec.digest)
        raise Conflict("replicas are serving another base")

    monkeypatch.setattr(fleet.registry, "publish_base", refuse)
    async with fleet.member(FakeStager(), joins=False) as member:
        await until(lambda: member.refusal is not None)
        await asyncio.sleep(1.2)
        assert len(asked) == 1


async def test_member_that_is_cancelled_while_it_has_news_stops(fleet: Fleet) -> None:
    for ticks in range(6):
        async with fleet.member(FakeStager()) as member:
            task = fleet.tasks[-1]
            await asyncio.sleep(0.05)
            member._news.set()
            for _ in range(ticks):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 5.0)


def revision_of(fleet: Fleet) -> int:
    """Of the newest change."""
    return (fleet.plain.changes(0) or pytest.fail("nothing there")).revision


def reported(fleet: Fleet, revision: int) -> Callable[[], bool]:
    """Whether every replica has reported since that revision."""
    return lambda: all(replica.revision >= revision for replica in fleet.plain.replicas())
