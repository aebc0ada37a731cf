"""Fakes of the gateway's two protocols: a fleet that follows a script, and a registry in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from registry.errors import AdapterNotFound, KeyNotFound, RegistryUnavailable, SourceNotFound, TenantNotFound
from registry.types import (
    Activation,
    ActivationState,
    AdapterAccess,
    AdapterManifest,
    AdapterRecord,
    AdapterSource,
    AuditPage,
    CollectReport,
    Event,
    FleetTemplate,
    KeyRecord,
    NewKey,
    Preload,
    PushResult,
    ReplicaRecord,
    Scope,
    TemplateRules,
    TenantLimits,
    TenantRecord,
    VersionRecord,
    VersionState,
    VersionStates,
)
from registry.usage_records import UsageGroup, UsageReport, UsageRow
from replica.messages import GenerateRequest, SlotView, TokenChunk
from router.errors import ReplicaGone

Message = Sequence[TokenChunk]
Script = Callable[[str, GenerateRequest], Sequence[Message | Exception]]


class FakeFleet:
    """`router.gateway.Fleet` from a script: what each replica answers, message by message, or the error it raises.

    After the script it waits for ever when `hang` is set. `closed` lists requests whose stream was closed early.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or (lambda replica_id, request: [])
        self.requests: list[tuple[str, GenerateRequest]] = []
        self.stopped: list[tuple[str, str, int]] = []
        self.closed: list[str] = []
        self.prefetched: list[tuple[str, str]] = []
        self.unreachable: set[str] = set()
        """Replicas that a prefetch finds gone."""
        self.hanging: set[str] = set()
        """Replicas that never answer a prefetch."""
        self.hang = False
        self.stuck: set[str] = set()
        """Replicas whose step loop does not run."""
        self.num_open = 0
        self.texts: dict[str, bytes] = {}
        self.slot_views: dict[str, Sequence[SlotView]] = {}

    async def generate(self, replica_id: str, request: GenerateRequest) -> AsyncIterator[Message]:
        self.requests.append((replica_id, request))
        self.num_open += 1
        finished = False
        try:
            for step in self.script(replica_id, request):
                await asyncio.sleep(0)
                if isinstance(step, Exception):
                    raise step
                yield step
            if self.hang:
                await asyncio.Event().wait()
            finished = True
        except Exception:
            finished = True
            raise
        finally:
            self.num_open -= 1
            if not finished:
                self.closed.append(request.request_id)

    async def makes_progress(self, replica_id: str) -> bool:
        await asyncio.sleep(0)
        return replica_id not in self.stuck

    async def stop_choice(self, replica_id: str, request_id: str, index: int) -> None:
        self.stopped.append((replica_id, request_id, index))

    async def metrics(self) -> Mapping[str, bytes]:
        return self.texts

    async def metrics_of(self, replica_id: str) -> bytes | None:
        return self.texts.get(replica_id)

    async def slots(self) -> Mapping[str, Sequence[SlotView]]:
        return self.slot_views

    async def prefetch(self, replica_id: str, digest: str) -> None:
        self.prefetched.append((replica_id, digest))
        if replica_id in self.hanging:
            await asyncio.Event().wait()
        if replica_id in self.unreachable:
            raise ReplicaGone(f"replica {replica_id} does not answer")


class FakeRegistry:
    """`router.gateway.RegistryClient` in memory: versions by name; an activation ends when it is waited for."""

    def __init__(self, blobs: Mapping[str, bytes] | None = None) -> None:
        self.blobs = dict(blobs or {})
        self.records: dict[str, AdapterRecord] = {}
        self.contents: dict[tuple[str, bytes], VersionRecord] = {}
        self.activations: list[Activation] = []
        self.calls: list[tuple[Any, ...]] = []
        self.pushed: list[dict[str, bytes]] = []
        self.known_tenants: dict[str, TenantRecord] = {}
        self.known_keys: dict[str, KeyRecord] = {}
        self.push_error: Exception | None = None
        self.sources: dict[str, Mapping[str, Path]] = {}
        self.reported: Sequence[ReplicaRecord] | None = None
        """What replicas last told the registry; None as in an outage."""
        self.end_state = ActivationState.DONE
        self.usage_rows: list[UsageRow] = []
        self.usage_is_whole = True

    async def push(self, name: str, files: Mapping[str, Path], *, owner: str, activate: bool) -> PushResult:
        if self.push_error is not None:
            raise self.push_error
        self.pushed.append({file: path.read_bytes() for file, path in files.items()})
        content = b"\0".join(self.pushed[-1][file] for file in sorted(files))
        known = self.contents.get((name, content))
        version = known or self._new_version(name, content, owner)
        activation = await self.activate(name, "live", version.number, actor=owner) if activate else None
        return PushResult(name=name, version=version, created=known is None, activation=activation)

    async def push_source(self, name: str, source: AdapterSource, *, owner: str, activate: bool) -> PushResult:
        """Content is by URL in `sources`."""
        self.calls.append(("push_source", name, source.url, source.revision, owner, activate))
        if source.url not in self.sources:
            raise SourceNotFound(f"{source.url} does not exist")
        return await self.push(name, self.sources[source.url], owner=owner, activate=activate)

    async def template(self) -> FleetTemplate:
        return FleetTemplate(rules=TemplateRules(ranks=(8,)), max_rank=64, targets=("q_proj",), base=None)

    def _new_version(self, name: str, content: bytes, owner: str) -> VersionRecord:
        record = self.records.get(name) or AdapterRecord(name=name, owner=owner, revision=1, created_at_s=1.0)
        version = VersionRecord(
            number=len(record.versions) + 1,
            digest=f"{len(self.contents) + 5000:064x}",
            state=VersionState.ACTIVE,
            created_at_s=1.0,
            num_bytes=len(content),
            max_rank=8,
            target_names=("q_proj",),
        )
        self.contents[name, content] = version
        self.records[name] = record.model_copy(update={"versions": (*record.versions, version)})
        return version

    def make_live(self, name: str, number: int) -> None:
        """What `advance` does when every replica has a version."""
        record = self.records[name]
        changes = {"aliases": {**record.aliases, "live": number}, "revision": record.revision + 1}
        self.records[name] = record.model_copy(update=changes)

    async def adapters(self) -> Sequence[AdapterRecord]:
        return tuple(self.records.values())

    async def adapter(self, name: str) -> AdapterRecord:
        if name not in self.records:
            raise AdapterNotFound(f"there is no adapter {name!r}")
        return self.records[name]

    async def replicas(self) -> Sequence[ReplicaRecord]:
        if self.reported is None:
            raise RegistryUnavailable("the registry cannot be reached")
        return self.reported

    async def manifest(self, digest: str) -> AdapterManifest:
        return AdapterManifest(
            digest=digest, base_digest="0" * 64, base_verified=True, modules=(), blob_sha256="1" * 64, blob_bytes=1
        )

    async def activate(
        self, name: str, alias: str, number: int, *, actor: str, expected_revision: int | None = None
    ) -> Activation:
        self.calls.append(("activate", name, alias, number, actor, expected_revision))
        version = (await self.adapter(name)).version(number)
        if version is None:
            raise AdapterNotFound(f"adapter {name!r} has no version {number}")
        activation = Activation(
            activation_id=len(self.activations) + 1,
            name=name,
            alias=alias,
            number=number,
            digest=version.digest,
            state=ActivationState.PENDING,
            requested_at_s=1.0,
            waiting_for=("r0",),
        )
        self.activations.append(activation)
        return activation

    async def rollback(self, name: str, alias: str, *, actor: str) -> Activation:
        self.calls.append(("rollback", name, alias, actor))
        return await self.activate(name, alias, 1, actor=actor)

    async def canary(
        self, name: str, number: int, weight: float, *, alias: str, actor: str, expected_revision: int | None = None
    ) -> Activation:
        self.calls.append(("canary", name, number, weight, alias, actor, expected_revision))
        return await self.activate(name, alias, number, actor=actor)

    async def promote(self, name: str, *, alias: str, actor: str, expected_revision: int | None = None) -> Activation:
        self.calls.append(("promote", name, alias, actor, expected_revision))
        return await self.activate(name, alias, 1, actor=actor)

    async def halt(self, name: str, *, alias: str, actor: str, expected_revision: int | None = None) -> AdapterRecord:
        self.calls.append(("halt", name, alias, actor, expected_revision))
        return await self.adapter(name)

    async def remove_alias(
        self, name: str, alias: str, *, actor: str, expected_revision: int | None = None
    ) -> AdapterRecord:
        self.calls.append(("remove_alias", name, alias, actor, expected_revision))
        return await self.adapter(name)

    async def retire(
        self, name: str, number: int | None, *, actor: str, deadline_s: float | None = None
    ) -> AdapterRecord:
        self.calls.append(("retire", name, number, actor, deadline_s))
        return await self.adapter(name)

    async def quarantine(self, name: str, number: int, *, actor: str, reason: str) -> AdapterRecord:
        self.calls.append(("quarantine", name, number, actor, reason))
        return await self.adapter(name)

    async def collect(self, *, actor: str, dry_run: bool) -> CollectReport:
        self.calls.append(("collect", actor, dry_run))
        return CollectReport(dry_run=dry_run, items=(), freed_bytes=0)

    async def version_states(self, name: str, number: int, unless: str | None, wait_s: float) -> VersionStates:
        self.calls.append(("version_states", name, number, unless, wait_s))
        version = (await self.adapter(name)).version(number)
        if version is None:
            raise AdapterNotFound(f"adapter {name!r} has no version {number}")
        return VersionStates(version=version, replicas=(), etag="e")

    async def usage(
        self, *, from_s: int | None, to_s: int | None, tenant: str | None, group_by: Sequence[UsageGroup]
    ) -> UsageReport:
        self.calls.append(("usage", from_s, to_s, tenant, tuple(group_by)))
        return UsageReport(
            from_s=from_s or 0,
            to_s=to_s or 0,
            group_by=tuple(group_by),
            rows=tuple(self.usage_rows),
            is_whole=self.usage_is_whole,
        )

    async def audit(self, after: int, limit: int) -> AuditPage:
        self.calls.append(("audit", after, limit))
        return AuditPage(entries=(), head_revision=0, head_hash="0" * 64)

    async def activation(self, activation_id: int) -> Activation:
        if not 1 <= activation_id <= len(self.activations):
            raise AdapterNotFound(f"no activation {activation_id}")
        return self.activations[activation_id - 1]

    async def wait_activation(self, activation_id: int, timeout_s: float) -> Activation:
        self.calls.append(("wait_activation", activation_id, timeout_s))
        ended = (await self.activation(activation_id)).model_copy(
            update={"state": self.end_state, "waiting_for": (), "staged_after_s": 0.25}
        )
        self.activations[activation_id - 1] = ended
        return ended

    async def access_of(self, name: str) -> AdapterAccess | None:
        record = self.records.get(name)
        return None if record is None else AdapterAccess(owner=record.owner, callers=record.callers)

    async def pin(self, name: str, *, actor: str) -> AdapterRecord:
        return await self._update("pin", name, actor, pinned=True)

    async def unpin(self, name: str, *, actor: str) -> AdapterRecord:
        return await self._update("unpin", name, actor, pinned=False)

    async def set_preload(self, name: str, preload: Preload | None, *, actor: str) -> AdapterRecord:
        return await self._update("set_preload", name, actor, preload=preload)

    async def _update(self, method: str, name: str, actor: str, **changes: Any) -> AdapterRecord:
        self.calls.append((method, name, actor, *changes.values()))
        self.records[name] = (await self.adapter(name)).model_copy(update=changes)
        return self.records[name]

    async def set_callers(self, name: str, callers: Sequence[str], *, actor: str) -> AdapterAccess:
        self.calls.append(("set_callers", name, tuple(callers), actor))
        self.records[name] = (await self.adapter(name)).model_copy(update={"callers": tuple(callers)})
        return AdapterAccess(owner=self.records[name].owner, callers=tuple(callers))

    async def tenants(self) -> Sequence[TenantRecord]:
        return tuple(self.known_tenants.values())

    async def tenant(self, name: str) -> TenantRecord:
        if name not in self.known_tenants:
            raise TenantNotFound(f"there is no tenant {name!r}")
        return self.known_tenants[name]

    async def add_tenant(self, name: str, limits: TenantLimits, *, actor: str) -> TenantRecord:
        self.calls.append(("add_tenant", name, limits, actor))
        self.known_tenants[name] = TenantRecord(name=name, created_at_s=1.0, limits=limits, effective=limits)
        return self.known_tenants[name]

    async def set_tenant(self, name: str, limits: TenantLimits, *, actor: str) -> TenantRecord:
        await self.tenant(name)
        return await self.add_tenant(name, limits, actor=actor)

    async def remove_tenant(self, name: str, *, actor: str) -> None:
        await self.tenant(name)
        del self.known_tenants[name]

    async def keys(self, tenant: str | None) -> Sequence[KeyRecord]:
        return tuple(key for key in self.known_keys.values() if tenant in (None, key.tenant))

    async def new_key(
        self, tenant: str, scopes: Sequence[Scope], *, expires_at_s: float | None, note: str, actor: str
    ) -> NewKey:
        await self.tenant(tenant)
        key_id = f"{len(self.known_keys):012x}"
        self.known_keys[key_id] = KeyRecord(
            key_id=key_id, tenant=tenant, scopes=tuple(scopes), created_at_s=1.0, expires_at_s=expires_at_s, note=note
        )
        return NewKey(key=self.known_keys[key_id], secret=f"lf_{key_id}_secret")

    async def rotate_key(self, key_id: str, *, overlap_s: float, expires_at_s: float | None, actor: str) -> NewKey:
        if key_id not in self.known_keys:
            raise KeyNotFound(f"there is no key {key_id!r}")
        old = self.known_keys[key_id]
        return await self.new_key(old.tenant, old.scopes, expires_at_s=expires_at_s, note=old.note, actor=actor)

    async def revoke_key(self, key_id: str, *, actor: str) -> KeyRecord:
        if key_id not in self.known_keys:
            raise KeyNotFound(f"there is no key {key_id!r}")
        self.known_keys[key_id] = self.known_keys[key_id].model_copy(update={"revoked_at_s": 2.0})
        return self.known_keys[key_id]

    async def events(self, after: int, limit: int, wait_s: float = 0.0) -> Sequence[Event]:
        every = [Event(revision=i + 1, at_s=float(i), kind="push", actor="default") for i in range(10)]
        return tuple(event for event in every if event.revision > after)[:limit]

    async def metrics(self) -> bytes:
        if self.reported is None:
            raise RegistryUnavailable("the registry cannot be reached")
        return b"lorafleet_registry_revision 7\n"

    async def read_blob(self, sha256: str) -> bytes:
        return self.blobs[sha256]


def one_choice(request_id: str, pieces: Sequence[tuple[int, ...]], reason: Any = "length") -> list[Message]:
    """A script of one choice: a message for each piece, the last with a finish reason."""
    last = len(pieces) - 1
    return [
        (TokenChunk(request_id, 0, piece, finish_reason=reason if i == last else None),)
        for i, piece in enumerate(pieces)
    ]
