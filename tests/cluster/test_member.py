"""A member over the plain registry: it stages, reports, tries again, and says why it is not let in."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.member import Member
from registry.types import Activation, ActivationState, AdapterManifest, BaseSpec
from tests.local_fleet import LocalRegistry, until
from tests.registry.uploads import make_base, open_registry, plain_upload

BASE = make_base()


class FakeStager:
    """Holds what it was given. A digest in `faults` fails that many times; `gate` holds every stage up."""

    def __init__(self) -> None:
        self.manifests: dict[str, AdapterManifest] = {}
        self.faults: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()

    async def stage(self, manifest: AdapterManifest) -> None:
        await self.gate.wait()
        if self.faults[manifest.digest]:
            self.faults[manifest.digest] -= 1
            raise OSError("disk full")
        self.manifests[manifest.digest] = manifest

    def forget(self, digest: str) -> None:
        self.manifests.pop(digest, None)

    def staged(self) -> tuple[str, ...]:
        return tuple(self.manifests)

    def resident(self) -> tuple[str, ...]:
        return ()


class Fleet:
    """A registry, and members that a test starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plain = open_registry(folder / "data")
        self.registry = LocalRegistry(self.plain)

    async def push(self, name: str, seed: int) -> Activation:
        """Push content number `seed` and ask for it to be live."""
        files = plain_upload(self.folder / f"upload-{seed}", BASE, seed)
        activation: Activation = (await self.registry.push(name, files, owner="o", activate=True)).activation
        return activation

    async def ended(self, activation: Activation) -> Activation:
        ended: Activation = await self.registry.wait_activation(activation.activation_id, 10.0)
        return ended

    @asynccontextmanager
    async def member(self, stager: FakeStager, *, base: BaseSpec = BASE, joins: bool = True) -> AsyncIterator[Member]:
        member = Member("r0", "node", 4, base, b"{}", stager, self.registry, watch_timeout_s=1.0)
        task = asyncio.create_task(member.run())
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
    async with fleet.member(stager):
        files = plain_upload(fleet.folder / "first", BASE, 0)
        digest = (await fleet.registry.push("alice", files, owner="o", activate=False)).version.digest
        await until(lambda: digest in stager.manifests)
        stager.forget(digest)
        stager.faults[digest] = 1
        failed = await fleet.ended(await fleet.registry.activate("alice", "live", 1, actor="a"))
        assert (failed.state, failed.error) == (ActivationState.FAILED, "replica r0 cannot stage it: disk full")
        stager.gate.clear()
        again = await fleet.registry.activate("alice", "live", 1, actor="a")
        await until(reported(fleet, (fleet.plain.changes(0) or pytest.fail("nothing there")).revision))
        assert fleet.plain.activation(again.activation_id).state is ActivationState.PENDING
        stager.gate.set()
        assert (await fleet.ended(again)).state is ActivationState.DONE
        assert fleet.plain.replicas()[0].failed == {}


def reported(fleet: Fleet, revision: int) -> Callable[[], bool]:
    return lambda: all(replica.revision >= revision for replica in fleet.plain.replicas())
