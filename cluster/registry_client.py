"""The registry actor as gateways and replicas see it: our own errors, retries over a restart, blobs in pieces."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from cluster.serve_calls import MemberLost, call
from registry.errors import RegistryUnavailable
from registry.pulse import FleetPulse, GatewayPulse, ReplicaPulse
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

PIECE_BYTES = 1024 * 1024
ANSWER_S = 10.0
METRICS_S = 2.0
PUSH_S = 600.0
"""An upload of gigabytes is hashed and checked tensor by tensor before it is answered."""

RETRY_DELAYS_S = (0.2, 0.5, 1.0, 2.0)


class ServeRegistry:
    """`router.gateway.RegistryClient`, and what replicas need, over the registry's deployment handle.

    Every method raises RegistryUnavailable when the actor cannot be reached, else what the registry raised.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def _call(self, method: str, *args: Any, within_s: float = ANSWER_S, repeat: bool = True) -> Any:
        """One call, tried again while the actor restarts if it may be repeated after a lost answer."""
        for delay_s in (*(RETRY_DELAYS_S if repeat else ()), None):
            try:
                return await call(getattr(self._handle, method).remote(*args), within_s)
            except TimeoutError:
                raise RegistryUnavailable(f"the registry did not answer within {within_s:g} s") from None
            except MemberLost as error:
                if delay_s is None:
                    raise RegistryUnavailable(f"the registry cannot be reached: {error}") from error
                await asyncio.sleep(delay_s)
        raise AssertionError("unreachable")

    async def metrics(self) -> bytes:
        """The registry's Prometheus text, asked for once: a scrape does not wait for a restart."""
        text: bytes = await self._call("metrics", within_s=METRICS_S, repeat=False)
        return text

    async def gateways(self) -> tuple[str, ...]:
        """Ids of the gateways with a live lease, asked for once."""
        return cast(tuple[str, ...], await self._call("gateways", within_s=METRICS_S, repeat=False))

    # What replicas and gateways follow.

    async def publish_base(self, spec: BaseSpec) -> None:
        await self._call("publish_base", spec)

    async def changes(self, after_revision: int) -> CatalogDelta | None:
        return cast(CatalogDelta | None, await self._call("changes", after_revision))

    async def watch(self, after_revision: int, timeout_s: float) -> CatalogDelta | None:
        delta = await self._call("watch", after_revision, timeout_s, within_s=timeout_s + ANSWER_S)
        return cast(CatalogDelta | None, delta)

    async def follow_gateway(
        self, gateway_id: str, revision: int, timeout_s: float, used: tuple[str, ...] = ()
    ) -> CatalogDelta | None:
        arguments = (gateway_id, revision, timeout_s, used)
        delta = await self._call("follow_gateway", *arguments, within_s=timeout_s + ANSWER_S)
        return cast(CatalogDelta | None, delta)

    async def join_replica(
        self, replica_id: str, node_id: str, num_slots: int, base_digest: str, staged: tuple[str, ...]
    ) -> ReplicaRecord:
        record = await self._call("join_replica", replica_id, node_id, num_slots, base_digest, staged)
        return cast(ReplicaRecord, record)

    async def report_replica(self, report: ReplicaReport, pulse: ReplicaPulse | None = None) -> bool:
        return cast(bool, await self._call("report_replica", report, pulse))

    async def pulse_gateway(self, pulse: GatewayPulse) -> FleetPulse:
        return cast(FleetPulse, await self._call("pulse_gateway", pulse, repeat=False))

    async def leave_replica(self, replica_id: str) -> None:
        await self._call("leave_replica", replica_id)

    async def leave_gateway(self, gateway_id: str) -> None:
        await self._call("leave_gateway", gateway_id)

    async def share_limits(
        self, gateway_id: str, number: int, uses: Sequence[LimitUse], used_keys: Sequence[str]
    ) -> tuple[LimitShare, ...] | None:
        """Say what this gateway holds and wants of shared limits. Not repeated: the next one says more."""
        shares = await self._call("share_limits", gateway_id, number, tuple(uses), tuple(used_keys), repeat=False)
        return cast(tuple[LimitShare, ...] | None, shares)

    # Use.

    async def take_usage(self, batch: UsageBatch) -> int:
        """Hand over what was counted; a batch that arrives twice counts once, so it may be sent again."""
        return cast(int, await self._call("take_usage", batch))

    async def usage(
        self, *, from_s: int | None, to_s: int | None, tenant: str | None, group_by: Sequence[UsageGroup]
    ) -> UsageReport:
        return cast(UsageReport, await self._call("usage", from_s, to_s, tenant, tuple(group_by)))

    # Blobs.

    async def read_blob(self, sha256: str) -> bytes:
        """A whole blob. Raises AdapterNotFound when there is none."""
        size = cast(int, await self._call("blob_size", sha256))
        offsets = range(0, size, PIECE_BYTES)
        return b"".join([await self._call("read_blob", sha256, offset, PIECE_BYTES) for offset in offsets])

    async def fetch_blob(self, sha256: str, to: Path) -> None:
        """Write a blob to a file, a piece at a time."""
        size = cast(int, await self._call("blob_size", sha256))
        with to.open("wb") as file:
            for offset in range(0, size, PIECE_BYTES):
                piece = await self._call("read_blob", sha256, offset, PIECE_BYTES)
                await asyncio.to_thread(file.write, piece)

    async def store_blob(self, data: bytes) -> str:
        """Put a blob; returns its sha256."""
        upload_id = await self._call("begin_upload")
        try:
            for offset in range(0, len(data), PIECE_BYTES):
                await self._call("append_upload", upload_id, "blob", offset, data[offset : offset + PIECE_BYTES])
            return cast(str, await self._call("store_blob", upload_id, "blob"))
        finally:
            await self._call("drop_upload", upload_id)

    async def _send_file(self, upload_id: str, name: str, path: Path) -> None:
        offset = 0
        with path.open("rb") as file:
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                await self._call("append_upload", upload_id, name, offset, piece)
                offset += len(piece)

    # Tenants and keys. Making a key is not repeated: a lost answer would leave a key that nobody has seen.

    async def tenants(self) -> tuple[TenantRecord, ...]:
        return cast(tuple[TenantRecord, ...], await self._call("tenants"))

    async def tenant(self, name: str) -> TenantRecord:
        return cast(TenantRecord, await self._call("tenant", name))

    async def add_tenant(self, name: str, limits: TenantLimits, *, actor: str) -> TenantRecord:
        return cast(TenantRecord, await self._call("add_tenant", name, limits, actor, repeat=False))

    async def set_tenant(self, name: str, limits: TenantLimits, *, actor: str) -> TenantRecord:
        return cast(TenantRecord, await self._call("set_tenant", name, limits, actor))

    async def remove_tenant(self, name: str, *, actor: str) -> None:
        await self._call("remove_tenant", name, actor, repeat=False)

    async def keys(self, tenant: str | None) -> tuple[KeyRecord, ...]:
        return cast(tuple[KeyRecord, ...], await self._call("keys", tenant))

    async def new_key(
        self, tenant: str, scopes: Sequence[Scope], *, expires_at_s: float | None, note: str, actor: str
    ) -> NewKey:
        made = await self._call("new_key", tenant, tuple(scopes), expires_at_s, note, actor, repeat=False)
        return cast(NewKey, made)

    async def rotate_key(self, key_id: str, *, overlap_s: float, expires_at_s: float | None, actor: str) -> NewKey:
        return cast(NewKey, await self._call("rotate_key", key_id, overlap_s, expires_at_s, actor, repeat=False))

    async def revoke_key(self, key_id: str, *, actor: str) -> KeyRecord:
        return cast(KeyRecord, await self._call("revoke_key", key_id, actor))

    async def access_of(self, name: str) -> AdapterAccess | None:
        return cast(AdapterAccess | None, await self._call("access_of", name))

    async def set_callers(self, name: str, callers: Sequence[str], *, actor: str) -> AdapterAccess:
        return cast(AdapterAccess, await self._call("set_callers", name, tuple(callers), actor))

    # Control.

    async def pin(self, name: str, *, actor: str) -> AdapterRecord:
        return cast(AdapterRecord, await self._call("pin", name, actor))

    async def unpin(self, name: str, *, actor: str) -> AdapterRecord:
        return cast(AdapterRecord, await self._call("unpin", name, actor))

    async def set_preload(self, name: str, preload: Preload | None, *, actor: str) -> AdapterRecord:
        return cast(AdapterRecord, await self._call("set_preload", name, preload, actor))

    async def push(self, name: str, files: Mapping[str, Path], *, owner: str, activate: bool) -> PushResult:
        """Send an adapter's files and have them stored as a version."""
        upload_id = await self._call("begin_upload")
        try:
            for file_name, path in files.items():
                await self._send_file(upload_id, file_name, path)
            return cast(PushResult, await self._call("push", upload_id, name, owner, activate, within_s=PUSH_S))
        finally:
            await self._call("drop_upload", upload_id)

    async def push_source(self, name: str, source: AdapterSource, *, owner: str, activate: bool) -> PushResult:
        """Have an adapter fetched from where it lies and stored as a version."""
        return cast(PushResult, await self._call("push_source", name, source, owner, activate, within_s=PUSH_S))

    async def template(self) -> FleetTemplate:
        return cast(FleetTemplate, await self._call("template"))

    async def adapters(self) -> tuple[AdapterRecord, ...]:
        return cast(tuple[AdapterRecord, ...], await self._call("adapters"))

    async def adapter(self, name: str) -> AdapterRecord:
        return cast(AdapterRecord, await self._call("adapter", name))

    async def replicas(self) -> tuple[ReplicaRecord, ...]:
        return cast(tuple[ReplicaRecord, ...], await self._call("replicas"))

    async def manifest(self, digest: str) -> AdapterManifest:
        return cast(AdapterManifest, await self._call("manifest", digest))

    async def activate(
        self, name: str, alias: str, number: int, *, actor: str, expected_revision: int | None = None
    ) -> Activation:
        repeat = expected_revision is None
        activation = await self._call("activate", name, alias, number, actor, expected_revision, repeat=repeat)
        return cast(Activation, activation)

    async def rollback(self, name: str, alias: str, *, actor: str) -> Activation:
        return cast(Activation, await self._call("rollback", name, alias, actor, repeat=False))

    async def canary(
        self, name: str, number: int, weight: float, *, alias: str, actor: str, expected_revision: int | None = None
    ) -> Activation:
        repeat = expected_revision is None
        arguments = (name, number, weight, alias, actor, expected_revision)
        return cast(Activation, await self._call("canary", *arguments, repeat=repeat))

    async def promote(self, name: str, *, alias: str, actor: str, expected_revision: int | None = None) -> Activation:
        return cast(Activation, await self._call("promote", name, alias, actor, expected_revision, repeat=False))

    async def halt(self, name: str, *, alias: str, actor: str, expected_revision: int | None = None) -> AdapterRecord:
        return cast(AdapterRecord, await self._call("halt", name, alias, actor, expected_revision, repeat=False))

    async def remove_alias(
        self, name: str, alias: str, *, actor: str, expected_revision: int | None = None
    ) -> AdapterRecord:
        record = await self._call("remove_alias", name, alias, actor, expected_revision, repeat=False)
        return cast(AdapterRecord, record)

    async def retire(
        self, name: str, number: int | None, *, actor: str, deadline_s: float | None = None
    ) -> AdapterRecord:
        return cast(AdapterRecord, await self._call("retire", name, number, actor, deadline_s))

    async def quarantine(self, name: str, number: int, *, actor: str, reason: str) -> AdapterRecord:
        return cast(AdapterRecord, await self._call("quarantine", name, number, actor, reason))

    async def collect(self, *, actor: str, dry_run: bool) -> CollectReport:
        return cast(CollectReport, await self._call("collect", actor, dry_run, within_s=PUSH_S))

    async def version_states(self, name: str, number: int, unless: str | None, wait_s: float) -> VersionStates:
        states = await self._call("version_states", name, number, unless, wait_s, within_s=wait_s + ANSWER_S)
        return cast(VersionStates, states)

    async def audit(self, after: int, limit: int) -> AuditPage:
        return cast(AuditPage, await self._call("audit", after, limit))

    async def activation(self, activation_id: int) -> Activation:
        return cast(Activation, await self._call("activation", activation_id))

    async def wait_activation(self, activation_id: int, timeout_s: float) -> Activation:
        activation = await self._call("wait_activation", activation_id, timeout_s, within_s=timeout_s + ANSWER_S)
        return cast(Activation, activation)

    async def events(self, after: int, limit: int, wait_s: float = 0.0) -> tuple[Event, ...]:
        events = await self._call("events", after, limit, wait_s, within_s=wait_s + ANSWER_S)
        return cast(tuple[Event, ...], events)
