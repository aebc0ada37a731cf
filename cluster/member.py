"""A replica's life in the fleet: publish the base, stage what exists, join, then follow the catalog and acknowledge.

It pulls, so a late joiner, a restarted replica and a restarted registry all heal by the same path.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

from cluster.channel import wait_until_set
from cluster.staging import Stager, Staging
from registry.errors import Conflict, JoinRefused, RegistryError, RegistryUnavailable
from registry.pulse import ReplicaLoad, ReplicaPulse, Residency
from registry.types import AdapterManifest, BaseSpec, CatalogDelta, ReplicaRecord, ReplicaReport
from replica.errors import EngineDead
from replica.messages import ReplicaStatus
from telemetry import catalogue
from telemetry.exporter import Reading

logger = logging.getLogger("lorafleet.member")
RETRY_S = 0.5
REFUSED_RETRY_S = 5.0
REPORT_PERIOD_S = 1.0
TELL_PERIOD_S = 30.0
"""How often a replica that waits to join says why it waits."""


class MemberRegistry(Protocol):
    """What a member needs of the registry."""

    async def store_blob(self, data: bytes) -> str: ...

    async def publish_base(self, spec: BaseSpec) -> None: ...

    async def changes(self, after_revision: int) -> CatalogDelta | None: ...

    async def watch(self, after_revision: int, timeout_s: float) -> CatalogDelta | None: ...

    async def manifest(self, digest: str) -> AdapterManifest: ...

    async def join_replica(
        self, replica_id: str, node_id: str, num_slots: int, base_digest: str, staged: tuple[str, ...]
    ) -> ReplicaRecord: ...

    async def report_replica(self, report: ReplicaReport, pulse: ReplicaPulse | None = None) -> bool: ...

    async def leave_replica(self, replica_id: str) -> None: ...


class Member:
    """Keeps one replica joined. `run` never returns; cancel it to stop following.

    `refusal` says why the fleet does not take this replica's base, None while it does.
    """

    def __init__(
        self,
        replica_id: str,
        node_id: str,
        num_slots: int,
        base: BaseSpec,
        tokenizer: bytes,
        stager: Stager,
        registry: MemberRegistry,
        watch_timeout_s: float,
        node_store_bytes: int,
        pulse: Callable[[], ReplicaPulse] | None = None,
    ) -> None:
        self._replica_id = replica_id
        self._node_id = node_id
        self._num_slots = num_slots
        self._base = base
        self._tokenizer = tokenizer
        self._stager = stager
        self._registry = registry
        self._watch_timeout_s = watch_timeout_s
        self._pulse = pulse
        self._revision = 0
        self._told: str | None = None
        self._news = asyncio.Event()
        self._staging = Staging(stager, registry, node_store_bytes, self._news.set)
        self._settled = asyncio.Event()
        self.is_joined = False
        self.refusal: str | None = None

    def __repr__(self) -> str:
        return f"Member({self._replica_id}, revision={self._revision}, {self._staging!r})"

    async def run(self) -> None:
        """Join and follow for ever; whatever goes wrong is logged and tried again."""
        while True:
            try:
                await self._join()
                await self._follow()
            except RegistryUnavailable as error:
                if self._settled.is_set():
                    logger.warning("%s; serving on from what is staged", error.message)
                else:
                    self._tell(f"not joined yet: {error.message}")
            except (JoinRefused, EngineDead) as error:
                self._tell(f"not joined yet: {error.message}")
            except Exception:
                logger.exception("the member stumbled; it joins again")
            self.is_joined = False
            await asyncio.sleep(RETRY_S if self.refusal is None else REFUSED_RETRY_S)

    async def joined(self) -> None:
        """Return when the replica has joined for the first time, or cannot: its base was refused, or its engine died.

        Serve asks for its health from then on. While it waits, the log says why every TELL_PERIOD_S.
        """
        while not await wait_until_set(self._settled, TELL_PERIOD_S):
            logger.warning("%s (%r)", self._told or "not joined yet", self._staging)

    def _tell(self, trouble: str | None) -> None:
        """Log what keeps the replica out of the fleet, once and not again until it changes."""
        if trouble is not None and trouble != self._told:
            logger.warning(trouble)
        self._told = trouble

    def readings(self) -> Iterator[Reading]:
        """What the member adds to its replica's metrics."""
        yield Reading(catalogue.REPLICA_REVISION, self._revision)
        yield Reading(catalogue.STAGING, self._staging.num_under_way, ("under_way",))
        yield Reading(catalogue.STAGING, len(self._staging.failed), ("failed",))

    async def leave(self) -> None:
        """Give the lease back, so that gateways stop sending work at once."""
        try:
            await self._registry.leave_replica(self._replica_id)
        except RegistryError as error:
            logger.warning("could not leave: %s", error.message)

    async def _join(self) -> None:
        """Bring what there is to the node, then ask to be counted."""
        self._check_engine()
        await self._registry.store_blob(self._tokenizer)
        await self._publish_base()
        self._apply(await self._registry.changes(0))
        await self._staging.settle()
        self._check_engine()
        record = await self._registry.join_replica(
            self._replica_id, self._node_id, self._num_slots, self._base.digest, self._staging.staged()
        )
        self.is_joined = True
        self._settled.set()
        logger.info("joined as ring member %d", record.ring_id)

    def _check_engine(self) -> None:
        """Raises EngineDead, and waits to join no more, when the replica makes no progress."""
        if not self._stager.is_alive():
            self._settled.set()
            raise EngineDead("the step loop makes no progress")

    async def _publish_base(self) -> None:
        """Raises JoinRefused, and keeps its text as `refusal`, while the registry holds on to another base."""
        try:
            await self._registry.publish_base(self._base)
        except Conflict as error:
            catalog = await self._registry.changes(0)
            theirs = None if catalog is None else catalog.base
            self.refusal = refusal_of(self._base, theirs, error.message)
            self._settled.set()
            raise JoinRefused(self.refusal) from error
        self.refusal = None

    async def _follow(self) -> None:
        """Watch and report side by side until the lease is found to be gone."""
        watching = asyncio.create_task(self._watch_forever())
        try:
            while await self._report():
                await self._wait_for_news()
                self._staging.retry()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch_forever(self) -> None:
        while True:
            try:
                self._apply(await self._registry.watch(self._revision, self._watch_timeout_s))
            except Exception as error:
                logger.warning("watch: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _report(self) -> bool:
        """Renew the lease and acknowledge. False when the lease is gone; a silent registry is waited for.

        A replica that makes no progress lets its lease end: nobody shall wait for what it was given.
        """
        if not self._stager.is_alive():
            self._tell("the step loop makes no progress; the lease is not renewed")
            return True
        self._tell(None)
        report = ReplicaReport(
            replica_id=self._replica_id,
            revision=self._revision,
            staged=self._staging.staged(),
            held=tuple(self._stager.held()),
            resident=tuple(self._stager.resident()),
            failed=dict(self._staging.failed),
            running=tuple(self._stager.running()),
        )
        try:
            return await self._registry.report_replica(report, None if self._pulse is None else self._pulse())
        except RegistryUnavailable as error:
            logger.warning("%s; serving on from what is staged", error.message)
            return True

    async def _wait_for_news(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_PERIOD_S):
                await self._news.wait()
        self._news.clear()

    def _apply(self, delta: CatalogDelta | None) -> None:
        if delta is not None:
            self._revision = delta.revision
            self._staging.apply(delta)
            self._news.set()


def pulse_of(status: ReplicaStatus) -> ReplicaPulse:
    """What gateways want to know of a replica's state."""
    load = ReplicaLoad(
        num_waiting=status.num_waiting,
        num_running=status.num_running,
        num_loading=status.num_loading,
        num_free_kv_blocks=status.num_free_kv_blocks,
        num_kv_blocks=status.num_kv_blocks,
    )
    residency = Residency(resident=tuple(sorted(status.resident)), host_cached=tuple(sorted(status.host_cached)))
    return ReplicaPulse(load=load, residency=residency)


def refusal_of(ours: BaseSpec, theirs: BaseSpec | None, reason: str) -> str:
    """Which base the registry has, which the replica has, and what to do; `reason` is the registry's own word."""
    has = "another one" if theirs is None else f"{theirs.base_id} ({theirs.digest[:12]})"
    return (
        f"the registry has the base model {has}, this replica has {ours.base_id} ({ours.digest[:12]}): set"
        " `replica.model.base` and its dtype to the registry's base, or give this fleet a registry with a `data_dir` of"
        f" its own, or retire every adapter and stop the other replicas first ({reason})"
    )
