"""The registry actor: the plain Registry behind a Serve deployment of one replica, with its watches and its clockwork.

Correctness comes from the database, never from being alone: for a moment there may be two of these.
"""

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from cluster.registry_metrics import RegistryMetrics
from registry.activations import REGISTRY
from registry.config import RegistryConfig
from registry.errors import LimitExceeded, RegistryUnavailable
from registry.pulse import FleetPulse, GatewayPulse, ReplicaPulse
from registry.pulse_board import PulseBoard
from registry.service import Registry
from registry.types import (
    Activation,
    AdapterAccess,
    AdapterManifest,
    AdapterRecord,
    AdapterSource,
    AuditPage,
    BaseSpec,
    CatalogDelta,
    CollectReport,
    Event,
    FleetTemplate,
    KeyRecord,
    LimitShare,
    LimitUse,
    NewKey,
    Preload,
    PushResult,
    ReplicaRecord,
    ReplicaReport,
    Scope,
    TenantLimits,
    TenantRecord,
    VersionStates,
)
from registry.usage_records import UsageBatch, UsageGroup, UsageReport
from registry.watch import Watch
from telemetry.logs import set_up

logger = logging.getLogger("lorafleet.registry")
Result = TypeVar("Result")
ABANDONED_S = 6 * 3600.0


class RegistryActor:
    """Serves members (replicas, gateways) and the control API. All methods may be repeated after a lost answer."""

    def __init__(self, config: RegistryConfig, tick_s: float = 0.25) -> None:
        set_up(config.logs, role="registry", member="registry")
        self._config = config
        self._registry = Registry.open(config)
        self._watch = Watch(self._registry)
        self._board = PulseBoard(config.demand)
        self._metrics = RegistryMetrics(self._registry.figures)
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="registry")
        self._spool = config.data_dir.expanduser() / "uploads"
        self._spool.mkdir(parents=True, exist_ok=True)
        self._uploads: dict[str, Path] = {}
        self._tick_s = tick_s
        self._clockwork: asyncio.Task[None] | None = None
        self._collected_at_s = time.monotonic()

    async def _run(self, function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """Run a blocking registry call on a thread, and the clockwork from the first call on."""
        if self._clockwork is None:
            self._clockwork = asyncio.get_running_loop().create_task(self._tick_forever())
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))

    async def _change(self, function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """Run a call that may change the catalog, then let activations advance and wake the watchers."""
        result = await self._run(function, *args, **kwargs)
        await self._advance()
        return result

    async def _advance(self) -> None:
        await self._run(self._registry.advance)
        self._watch.notify()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            try:
                if await self._run(self._registry.advance):
                    self._watch.notify()
                await self._collect_when_due()
            except Exception:
                logger.exception("the registry's clockwork stumbled; it tries again")

    async def _collect_when_due(self) -> None:
        interval_s = self._config.retention.interval_s
        if interval_s is None or time.monotonic() < self._collected_at_s + interval_s:
            return
        self._collected_at_s = time.monotonic()
        await self._change(self._registry.collect, actor=REGISTRY)

    def check_health(self) -> None:
        """Serve replaces the actor when its clockwork has stopped."""
        if self._clockwork is not None and self._clockwork.done():
            raise RuntimeError("the registry's clockwork has stopped")

    # Members.

    async def publish_base(self, spec: BaseSpec) -> int:
        return await self._change(self._registry.publish_base, spec, actor="replica")

    async def changes(self, after_revision: int) -> CatalogDelta | None:
        return await self._run(self._registry.changes, after_revision)

    async def join_replica(
        self, replica_id: str, node_id: str, num_slots: int, base_digest: str, staged: tuple[str, ...]
    ) -> ReplicaRecord:
        return await self._change(
            self._registry.join_replica,
            replica_id=replica_id,
            node_id=node_id,
            num_slots=num_slots,
            base_digest=base_digest,
            staged=staged,
        )

    async def report_replica(self, report: ReplicaReport, pulse: ReplicaPulse | None = None) -> bool:
        """Renew a replica's lease and take its acknowledgements. False: the lease is gone, join again."""
        if pulse is not None:
            self._board.hear_replica(report.replica_id, pulse)
        record = await self._change(
            self._registry.renew_replica,
            report.replica_id,
            revision=report.revision,
            staged=report.staged,
            held=report.held,
            resident=report.resident,
            failed=report.failed,
            running=report.running,
        )
        return record is not None

    async def pulse_gateway(self, pulse: GatewayPulse) -> FleetPulse:
        """Take a gateway's loads and demand, and answer with the fleet's; take stopping replicas out of the catalog."""
        if pulse.gone:
            await self._change(self._registry.mark_leaving, pulse.gone)
        return self._board.exchange(pulse)

    async def leave_replica(self, replica_id: str) -> None:
        self._board.forget_replica(replica_id)
        await self._change(self._registry.leave_replica, replica_id)

    async def gateways(self) -> tuple[str, ...]:
        """Ids of the gateways with a live lease."""
        return tuple((await self._run(self._registry.figures, ())).gateway_lags)

    async def leave_gateway(self, gateway_id: str) -> None:
        self._board.forget_gateway(gateway_id)
        await self._change(self._registry.leave_gateway, gateway_id)

    async def watch(self, after_revision: int, timeout_s: float) -> CatalogDelta | None:
        return await self._watch.wait(after_revision, timeout_s)

    async def follow_gateway(
        self, gateway_id: str, revision: int, timeout_s: float, used: tuple[str, ...] = ()
    ) -> CatalogDelta | None:
        """Renew a gateway's lease, acknowledge `revision`, note what it `used`, and wait for news."""
        await self._change(self._registry.renew_gateway, gateway_id, revision, used)
        return await self._watch.wait(revision, timeout_s, with_access=True)

    # Blobs, in pieces: a call through a Serve handle carries 4 MB at most.

    async def read_blob(self, sha256: str, offset: int, length: int) -> bytes:
        return await self._run(self._registry.blobs.read, sha256, offset, length)

    async def blob_size(self, sha256: str) -> int:
        return await self._run(self._registry.blobs.size, sha256)

    async def begin_upload(self) -> str:
        await self._run(remove_abandoned, self._spool)
        folder = Path(await self._run(tempfile.mkdtemp, dir=self._spool))
        self._uploads[folder.name] = folder
        return folder.name

    async def append_upload(self, upload_id: str, name: str, offset: int, data: bytes) -> None:
        """Write a piece of one file of an upload. Raises RegistryUnavailable when the actor restarted in between."""
        folder = self._upload(upload_id)
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise LimitExceeded(f"file name {name!r} leaves the upload")
        await self._run(write_piece, path, offset, data)

    async def drop_upload(self, upload_id: str) -> None:
        folder = self._uploads.pop(upload_id, None)
        if folder is not None:
            await self._run(shutil.rmtree, folder, ignore_errors=True)

    async def store_blob(self, upload_id: str, name: str) -> str:
        return await self._run(self._registry.blobs.put_file, self._upload(upload_id) / name)

    def _upload(self, upload_id: str) -> Path:
        folder = self._uploads.get(upload_id)
        if folder is None:
            raise RegistryUnavailable(f"upload {upload_id} was lost when the registry restarted; send it again")
        return folder

    # Control.

    async def push(self, upload_id: str, name: str, owner: str, activate: bool) -> PushResult:
        folder = self._upload(upload_id)
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        return await self._change(self._registry.push, name, files, owner=owner, activate=activate)

    async def push_source(self, name: str, source: AdapterSource, owner: str, activate: bool) -> PushResult:
        return await self._change(self._registry.push_source, name, source, owner=owner, activate=activate)

    async def template(self) -> FleetTemplate:
        return await self._run(self._registry.template)

    async def adapters(self) -> tuple[AdapterRecord, ...]:
        return await self._run(self._registry.adapters)

    async def adapter(self, name: str) -> AdapterRecord:
        return await self._run(self._registry.adapter, name)

    async def replicas(self) -> tuple[ReplicaRecord, ...]:
        return await self._run(self._registry.replicas)

    async def manifest(self, digest: str) -> AdapterManifest:
        return await self._run(self._registry.manifest, digest)

    async def activate(
        self, name: str, alias: str, number: int, actor: str, expected_revision: int | None
    ) -> Activation:
        return await self._change(
            self._registry.activate, name, alias, number, actor=actor, expected_revision=expected_revision
        )

    async def rollback(self, name: str, alias: str, actor: str) -> Activation:
        return await self._change(self._registry.rollback, name, alias, actor=actor)

    async def canary(
        self, name: str, number: int, weight: float, alias: str, actor: str, expected_revision: int | None
    ) -> Activation:
        return await self._change(
            self._registry.canary, name, number, weight, alias=alias, actor=actor, expected_revision=expected_revision
        )

    async def promote(self, name: str, alias: str, actor: str, expected_revision: int | None) -> Activation:
        return await self._change(
            self._registry.promote, name, alias=alias, actor=actor, expected_revision=expected_revision
        )

    async def halt(self, name: str, alias: str, actor: str, expected_revision: int | None) -> AdapterRecord:
        return await self._change(
            self._registry.halt, name, alias=alias, actor=actor, expected_revision=expected_revision
        )

    async def remove_alias(self, name: str, alias: str, actor: str, expected_revision: int | None) -> AdapterRecord:
        return await self._change(
            self._registry.remove_alias, name, alias, actor=actor, expected_revision=expected_revision
        )

    async def retire(self, name: str, number: int | None, actor: str, deadline_s: float | None) -> AdapterRecord:
        return await self._change(self._registry.retire, name, number, actor=actor, deadline_s=deadline_s)

    async def quarantine(self, name: str, number: int, actor: str, reason: str) -> AdapterRecord:
        return await self._change(self._registry.quarantine, name, number, actor=actor, reason=reason)

    async def collect(self, actor: str, dry_run: bool) -> CollectReport:
        return await self._change(self._registry.collect, actor=actor, dry_run=dry_run)

    async def version_states(self, name: str, number: int, unless: str | None, wait_s: float) -> VersionStates:
        return await self._watch.wait_states(name, number, unless, wait_s)

    # Tenants, keys, and who may call what.

    async def tenants(self) -> tuple[TenantRecord, ...]:
        return await self._run(self._registry.tenants.every)

    async def tenant(self, name: str) -> TenantRecord:
        return await self._run(self._registry.tenants.one, name)

    async def add_tenant(self, name: str, limits: TenantLimits, actor: str) -> TenantRecord:
        return await self._change(self._registry.tenants.add, name, limits, actor=actor)

    async def set_tenant(self, name: str, limits: TenantLimits, actor: str) -> TenantRecord:
        return await self._change(self._registry.tenants.set_limits, name, limits, actor=actor)

    async def remove_tenant(self, name: str, actor: str) -> None:
        await self._change(self._registry.tenants.remove, name, actor=actor)

    async def keys(self, tenant: str | None) -> tuple[KeyRecord, ...]:
        return await self._run(self._registry.tenants.keys, tenant)

    async def new_key(
        self, tenant: str, scopes: tuple[Scope, ...], expires_at_s: float | None, note: str, actor: str
    ) -> NewKey:
        return await self._change(
            self._registry.tenants.new_key, tenant, scopes, expires_at_s=expires_at_s, note=note, actor=actor
        )

    async def rotate_key(self, key_id: str, overlap_s: float, expires_at_s: float | None, actor: str) -> NewKey:
        return await self._change(
            self._registry.tenants.rotate_key, key_id, overlap_s=overlap_s, expires_at_s=expires_at_s, actor=actor
        )

    async def revoke_key(self, key_id: str, actor: str) -> KeyRecord:
        return await self._change(self._registry.tenants.revoke_key, key_id, actor=actor)

    async def access_of(self, name: str) -> AdapterAccess | None:
        return await self._run(self._registry.tenants.access_of, name)

    async def set_callers(self, name: str, callers: tuple[str, ...], actor: str) -> AdapterAccess:
        return await self._change(self._registry.tenants.set_callers, name, callers, actor=actor)

    async def pin(self, name: str, actor: str) -> AdapterRecord:
        return await self._change(self._registry.pin, name, actor=actor)

    async def unpin(self, name: str, actor: str) -> AdapterRecord:
        return await self._change(self._registry.unpin, name, actor=actor)

    async def set_preload(self, name: str, preload: Preload | None, actor: str) -> AdapterRecord:
        return await self._change(self._registry.set_preload, name, preload, actor=actor)

    async def share_limits(
        self, gateway_id: str, number: int, uses: tuple[LimitUse, ...], used_keys: tuple[str, ...]
    ) -> tuple[LimitShare, ...] | None:
        """Take a gateway's word on limits that several share, and give it its parts; None: its lease is gone."""
        return await self._run(self._registry.tenants.share_limits, gateway_id, number, uses, used_keys)

    async def take_usage(self, batch: UsageBatch) -> int:
        """Add what a member counted, once; returns the number of the last batch that it has handed over."""
        return await self._run(self._registry.usage.take, batch)

    async def usage(
        self, from_s: int | None, to_s: int | None, tenant: str | None, group_by: tuple[UsageGroup, ...]
    ) -> UsageReport:
        return await self._run(self._registry.usage.report, from_s=from_s, to_s=to_s, tenant=tenant, group_by=group_by)

    async def audit(self, after: int, limit: int) -> AuditPage:
        return await self._run(self._registry.audit, after, limit)

    async def activation(self, activation_id: int) -> Activation:
        return await self._run(self._registry.activation, activation_id)

    async def wait_activation(self, activation_id: int, timeout_s: float) -> Activation:
        return await self._watch.wait_activation(activation_id, timeout_s)

    async def events(self, after: int, limit: int, wait_s: float = 0.0) -> tuple[Event, ...]:
        return await self._watch.wait_events(after, limit, wait_s)

    async def metrics(self) -> bytes:
        """Prometheus text of the registry alone."""
        return await self._run(self._metrics.render)

    async def check_integrity(self) -> None:
        await self._run(self._registry.check_integrity)


def write_piece(path: Path, offset: int, data: bytes) -> None:
    """Write `data` at `offset`; writing the same piece twice changes nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(offset)
        file.write(data)


def remove_abandoned(spool: Path) -> None:
    """Delete uploads that no actor can still be receiving; what a killed actor left behind is found here."""
    for folder in spool.iterdir():
        with suppress(FileNotFoundError):  # an upload that ends meanwhile
            if time.time() - folder.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)
