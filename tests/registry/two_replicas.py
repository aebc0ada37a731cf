"""A registry with two replicas and a gateway that say what a test wants them to say."""

from pathlib import Path
from typing import Any

from registry.catalog import Catalog
from registry.types import VersionState
from tests.registry.uploads import Clock, make_base, open_registry, plain_upload

BASE = make_base()


class TwoReplicas:
    """A registry with `alice@1` and `alice@2`, of which the first is live on r0 and r1; one gateway follows."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.clock = Clock()
        self.registry = open_registry(folder / "data", self.clock, **settings)
        self.registry.publish_base(BASE, actor="replica")
        self.catalog = Catalog([])
        self.digests: list[str] = []
        for replica in ("r0", "r1"):
            self.registry.join_replica(replica_id=replica, node_id="n", num_slots=4, base_digest=BASE.digest, staged=[])
        for seed in (1, 2):
            self.push(seed, activate=seed == 1)
        self.settle()

    def push(self, seed: int, *, name: str = "alice", activate: bool = False) -> int:
        files = plain_upload(self.folder / f"u{seed}", BASE, seed)
        version = self.registry.push(name, files, owner="o", activate=activate).version
        self.digests.append(version.digest)
        return version.number

    def report(self, replica: str, running: tuple[str, ...] = (), **failed: str) -> None:
        staged = [digest for digest in self.digests if digest not in failed]
        self.registry.renew_replica(
            replica, revision=self.revision(), staged=staged, held=staged, failed=failed, running=running
        )

    def follow(self) -> None:
        """The gateway takes over the catalog and says so."""
        delta = self.registry.changes(self.catalog.revision)
        if delta is not None:
            self.catalog.apply(delta)
        self.registry.renew_gateway("g", self.catalog.revision)

    def settle(self) -> None:
        """Everybody reports until nothing moves any more."""
        for _ in range(4):
            for replica in ("r0", "r1"):
                self.report(replica)
            self.registry.advance()
            self.follow()
            self.registry.advance()

    def revision(self) -> int:
        delta = self.registry.changes(0)
        return 0 if delta is None else delta.revision

    def state(self, number: int, name: str = "alice") -> VersionState:
        version = self.registry.adapter(name).version(number)
        assert version is not None
        return version.state

    def kinds(self) -> list[str]:
        return [event.kind for event in self.registry.events(0, 1000)]
