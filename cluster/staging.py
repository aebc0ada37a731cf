"""Which versions of the catalog a replica has on its node, and the work of bringing them there. Knows no leases."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from registry.types import LIVE_ALIAS, AdapterManifest, AdapterRecord, CatalogDelta, VersionRecord, VersionState

logger = logging.getLogger("lorafleet.member")
MAX_PARALLEL_STAGES = 4
FIRST_RETRY_S, LAST_RETRY_S = 5.0, 300.0


class Stager(Protocol):
    """What following the catalog needs of a replica."""

    async def stage(self, manifest: AdapterManifest) -> None:
        """Bring the bytes onto the node, checked against their digest."""

    async def remember(self, manifest: AdapterManifest) -> None:
        """Keep the manifest; the bytes come when they are first used."""

    def warm(self, digest: str) -> None:
        """Bring it from the node to where it is served from, if there is room to spare. Never blocks or raises."""

    async def keep(self, digests: Sequence[str]) -> None:
        """Keep these in their slots, and no others; returns when they are there or will not come."""

    def forget(self, digest: str) -> None: ...

    def staged(self) -> Sequence[str]:
        """What can be served here: the manifest is on the node, the bytes too or on demand."""

    def held(self) -> Sequence[str]:
        """What has its bytes on the node at this moment."""

    def resident(self) -> Sequence[str]: ...

    def running(self) -> Sequence[str]:
        """What requests wait for or run on at this moment."""

    def is_alive(self) -> bool:
        """Whether it makes progress."""


class ManifestSource(Protocol):
    """Where manifests come from: the registry."""

    async def manifest(self, digest: str) -> AdapterManifest: ...


class Staging:
    """Follows the catalog: every manifest comes to the node, and bytes as far as `node_store_bytes` goes.

    `changed` is called when there is something new to report.
    """

    def __init__(
        self,
        stager: Stager,
        manifests: ManifestSource,
        node_store_bytes: int,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stager = stager
        self._manifests = manifests
        self._node_store_bytes = node_store_bytes
        self._changed = changed
        self._adapters: dict[str, AdapterRecord] = {}
        self._tasks: dict[tuple[str, bool], asyncio.Task[None]] = {}
        """(digest, whether its bytes are wanted) -> the work on it."""
        self._brought: set[str] = set()
        """Of the digests that activations wait for, those whose bytes were here since they began to wait."""
        self._gate = asyncio.Semaphore(MAX_PARALLEL_STAGES)
        self._kept: frozenset[str] = frozenset()
        self._pinned: tuple[str, ...] = ()
        self._pinning: asyncio.Task[None] | None = None
        self._pin_due_s = math.inf
        """When what is pinned is to be said again: something is not in its slot, or another version has come."""
        self._num_short = 0
        """How often in a row something pinned was not in its slot afterwards."""
        self._clock = clock
        self._num_failures: dict[str, tuple[int, float]] = {}
        """Digest -> how often in a row it failed, and when it is due again."""
        self.failed: dict[str, str] = {}
        """Digest -> why it could not be staged."""

    def __repr__(self) -> str:
        return f"Staging({len(self._adapters)} adapters, {len(self._tasks)} under way, {len(self.failed)} failed)"

    @property
    def num_under_way(self) -> int:
        """Versions being brought to the node."""
        return len(self._tasks)

    def apply(self, delta: CatalogDelta) -> None:
        """Take a change of the catalog: begin to bring what is new, drop what nothing serves any more.

        With a full delta, bytes that left the node are brought again and what failed is tried again.
        """
        if delta.full:
            self._adapters.clear()
            self.failed.clear()
            self._num_failures.clear()
        else:
            self._warm_ways_back(delta.adapters)
        self._adapters.update({adapter.name: adapter for adapter in delta.adapters})
        self._withdraw()
        self._begin(in_service(self._adapters.values()), delta.full)
        self._pin()

    def _pin(self) -> None:
        """Have the replica keep what is pinned; one that was told of none before needs no word."""
        pinned = pinned_digests(self._adapters.values())
        if pinned or self._pinned:
            self._pinned, self._pin_due_s = pinned, math.inf
            self._pinning = asyncio.create_task(self._keep(self._pinning))

    async def _keep(self, before: asyncio.Task[None] | None) -> None:
        """After the word before it; of several that wait, the last one alone says what is pinned by then."""
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        if self._pinning is asyncio.current_task():
            try:
                await self._stager.keep(self._pinned)
            except Exception:
                logger.exception("what is pinned could not be kept")
            self._note_short()

    def _note_short(self) -> None:
        """Have what is pinned said again later while some of it is in no slot."""
        if set(self._pinned) <= set(self._stager.resident()):
            self._num_short = 0
        else:
            self._num_short += 1
            self._pin_due_s = min(self._pin_due_s, self._clock() + pause_s(self._num_short))

    def _warm_ways_back(self, changed: Iterable[AdapterRecord]) -> None:
        """Where an alias has just moved, a rollback shall find the version before it as warm as it was."""
        for adapter in changed:
            known = self._adapters.get(adapter.name)
            before = set() if known is None else ways_back(known)
            for digest in ways_back(adapter) - before:
                self._stager.warm(digest)

    def _withdraw(self) -> None:
        """Forget what may not even be finished any more. A neighbour on this node may have removed the files first,
        so what requests run on and what was here before counts too.
        """
        kept = may_run(self._adapters.values())
        for digest in ({*self._stager.staged(), *self._stager.running()} | self._kept) - kept:
            self._stager.forget(digest)
        self._kept = kept
        for digest in self.failed.keys() - kept:
            del self.failed[digest]

    def retry(self) -> None:
        """Try again what failed, each version and the pins after twice the time they were left alone before.

        Pins are said again after each new version too: room for the largest adapter stays beside them.
        """
        now_s = self._clock()
        due = {digest for digest, (_, due_s) in self._num_failures.items() if due_s <= now_s}
        for digest in due & self.failed.keys():
            del self.failed[digest]
            self._start(digest, has_bytes=True)
        if self._pin_due_s <= now_s and (self._pinning is None or self._pinning.done()):
            self._pin()

    def staged(self) -> tuple[str, ...]:
        """What this replica answers for: it can serve it, and is not about to bring the bytes or failing to."""
        bringing = {digest for digest, has_bytes in self._tasks if has_bytes}
        return tuple(digest for digest in self._stager.staged() if digest not in bringing | self.failed.keys())

    async def settle(self) -> None:
        """Wait until nothing is under way, and what is pinned is in its slots."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))
        if self._pinned:
            self._pin()
        if self._pinning is not None:
            await asyncio.gather(self._pinning, return_exceptions=True)

    def _begin(self, versions: dict[str, VersionRecord], full: bool) -> None:
        """Start what is missing, the most wanted first."""
        known, held = set(self._stager.staged()), set(self._stager.held())
        pending = pending_digests(self._adapters.values()) & versions.keys()
        self._brought = (self._brought | held) & pending
        for digest in pending:
            self.failed.pop(digest, None)  # the next report is at this revision: it must tell of the new attempt only
        bytes_here = (held if full else known) - pending | self._brought
        chosen = choose_bytes(self._adapters.values(), self._node_store_bytes)
        for digest in chosen:
            if digest not in bytes_here:
                self._start(digest, has_bytes=True)
        for digest in versions.keys() - known - set(chosen):
            self._start(digest, has_bytes=False)

    def _start(self, digest: str, has_bytes: bool) -> None:
        if (digest, has_bytes) not in self._tasks and digest not in self.failed:
            self._tasks[digest, has_bytes] = asyncio.create_task(self._bring(digest, has_bytes))

    async def _bring(self, digest: str, has_bytes: bool) -> None:
        try:
            async with self._gate:
                manifest = await self._manifests.manifest(digest)
                await (self._stager.stage(manifest) if has_bytes else self._stager.remember(manifest))
            self._num_failures.pop(digest, None)
            if has_bytes:
                self._brought.add(digest)
            if self._pinned:
                self._pin_due_s = self._clock()
        except Exception as error:
            logger.warning("cannot stage %s: %s", digest[:12], error)
            self._fail(digest, str(error))
        finally:
            del self._tasks[digest, has_bytes]
            self._changed()

    def _fail(self, digest: str, why: str) -> None:
        self.failed[digest] = why
        count = self._num_failures.get(digest, (0, 0.0))[0] + 1
        self._num_failures[digest] = (count, self._clock() + pause_s(count))


def pause_s(num_failures: int) -> float:
    """How long to leave alone what failed so often in a row: doubled each time, up to LAST_RETRY_S."""
    return min(FIRST_RETRY_S * 2.0 ** min(num_failures - 1, 30), LAST_RETRY_S)


def may_run(adapters: Iterable[AdapterRecord]) -> frozenset[str]:
    """The digests on which requests may run: those in service, and those that drain."""
    states = (VersionState.ACTIVE, VersionState.DRAINING)
    return frozenset(version.digest for each in adapters for version in each.versions if version.state in states)


def in_service(adapters: Iterable[AdapterRecord]) -> dict[str, VersionRecord]:
    """Every version that may be served, by digest."""
    return {
        version.digest: version
        for adapter in adapters
        for version in adapter.versions
        if version.state is VersionState.ACTIVE
    }


def pinned_digests(adapters: Iterable[AdapterRecord]) -> tuple[str, ...]:
    """What `live` points at in every pinned adapter, in the order of their names."""
    found = []
    for adapter in sorted(adapters, key=lambda adapter: adapter.name):
        version = adapter.version(adapter.aliases.get(LIVE_ALIAS, 0)) if adapter.pinned else None
        if version is not None and version.state is VersionState.ACTIVE:
            found.append(version.digest)
    return tuple(dict.fromkeys(found))


def pending_digests(adapters: Iterable[AdapterRecord]) -> set[str]:
    """What activations wait for."""
    return {digest for adapter in adapters for digest in adapter.pending}


def choose_bytes(adapters: Iterable[AdapterRecord], max_bytes: int) -> list[str]:
    """The digests whose bytes a node of `max_bytes` should hold, the most wanted first.

    What activations wait for is always among them; then come what aliases need (their targets, their canaries, and
    what they pointed at before), then the rest, the newest first.
    """
    adapters = tuple(adapters)
    pending = pending_digests(adapters)
    targets = {version.digest for each in adapters for version in each.versions if version.number in wanted(each)}
    versions = sorted(
        in_service(adapters).values(),
        key=lambda version: (version.digest not in pending, version.digest not in targets, -version.created_at_s),
    )
    chosen, free_bytes = [], max_bytes
    for version in versions:
        if version.digest in pending or version.num_bytes <= free_bytes:
            chosen.append(version.digest)
            free_bytes -= version.num_bytes
    return chosen


def wanted(adapter: AdapterRecord) -> set[int]:
    """The versions that requests by alias may come to need at once."""
    canaries = (canary.number for canary in adapter.canaries.values())
    return {*adapter.aliases.values(), *adapter.previous.values(), *canaries}


def ways_back(adapter: AdapterRecord) -> set[str]:
    """The digests that a rollback of some alias would go to."""
    numbers = adapter.previous.values()
    return {
        version.digest
        for version in adapter.versions
        if version.number in numbers and version.state is VersionState.ACTIVE
    }
