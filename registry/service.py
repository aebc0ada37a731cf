"""The registry: immutable adapter versions, aliases that move when the fleet is ready, members and the change log.

Many registries may share one database; correctness comes from its transactions. Knows nothing of HTTP and of Ray.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sqlalchemy import Connection, select
from sqlalchemy.engine import make_url

from registry import (
    activations,
    archives,
    backup,
    collect,
    draining,
    figures,
    integrity,
    members,
    records,
    residence,
    rollout,
    sources,
    states,
    tables,
    tenants,
    versions,
)
from registry.adapter_files import weights_path
from registry.adapter_format import read_adapter
from registry.backup import Snapshot
from registry.blobs import BlobStore
from registry.config import RegistryConfig
from registry.database import Database
from registry.errors import AdapterNotFound, Conflict, InvalidAdapter, NotReady
from registry.figures import RegistryFigures
from registry.template import fleet_template
from registry.tenant_service import Tenants
from registry.tokenizer_files import StoredBaseTokens
from registry.types import (
    LIVE_ALIAS,
    Activation,
    AdapterManifest,
    AdapterRecord,
    AdapterSource,
    AuditPage,
    BaseSpec,
    CatalogDelta,
    CollectReport,
    Event,
    Fault,
    FleetTemplate,
    Preload,
    PushResult,
    ReplicaRecord,
    VersionStates,
    is_adapter_name,
    is_alias_name,
)
from registry.usage import Usage

MAX_EVENTS = 1000


class Registry:
    """Every method is one transaction, safe to call from any thread; what it returned has reached the disk."""

    def __init__(
        self, config: RegistryConfig, database: Database, blobs: BlobStore, clock: Callable[[], float]
    ) -> None:
        self.config = config
        self.blobs = blobs
        self.tenants = Tenants(config, database)
        self.usage = Usage(config.retention, database)
        self._database = database
        self._base_tokens = StoredBaseTokens(blobs)
        self._may_expire_at_s = clock() + config.lease_ttl_s

    @classmethod
    def open(cls, config: RegistryConfig, clock: Callable[[], float] = time.time) -> "Registry":
        """Open the store, creating what is missing. `clock` gives seconds since the epoch, shared by all registries."""
        url = make_url(config.database)
        if url.get_backend_name() == "sqlite" and url.database:
            Path(url.database).absolute().parent.mkdir(parents=True, exist_ok=True)
        database = Database(config.database, busy_timeout_s=config.busy_timeout_s, clock=clock)
        return cls(config, database, BlobStore(config.blobs), clock)

    def close(self) -> None:
        self._database.close()

    def __repr__(self) -> str:
        return f"Registry({self._database!r}, {self.blobs!r})"

    def publish_base(self, spec: BaseSpec, *, actor: str) -> int:
        """Make `spec` the base that uploads are checked against; returns the revision at which it last changed.

        Raises Conflict when another base is in use.
        """
        with self._database.write() as tx:
            return versions.publish_base(tx, spec, actor=actor)

    def base(self) -> BaseSpec | None:
        with self._database.read() as connection:
            return records.base_spec(connection)

    def template(self) -> FleetTemplate:
        """What adapters of this fleet should look like."""
        return fleet_template(self.config.template, self.config.max_rank, self.base())

    def push(self, name: str, files: Mapping[str, Path], *, owner: str, activate: bool = True) -> PushResult:
        """Store an upload (relative name -> file) as a version of `name`; known content keeps its number. The upload
        may be one archive.

        With `activate`, the alias `live` is asked to move to it. Raises InvalidAdapter, LimitExceeded, NotReady
        (no base yet), and Conflict when the name is another owner's or the content is quarantined.
        """
        _check_name(name)
        base = self._base_for_push(name, owner)
        with archives.opened(files, self.config) as found:
            return self._push_files(name, found, base, owner=owner, activate=activate)

    def push_source(self, name: str, source: AdapterSource, *, owner: str, activate: bool = True) -> PushResult:
        """As `push`, with the files at `source`. Raises SourceRefused, SourceNotFound, SourceUnavailable as well."""
        _check_name(name)
        self._base_for_push(name, owner)
        with sources.fetched(source, self.config) as files:
            return self.push(name, files, owner=owner, activate=activate)

    def _push_files(
        self, name: str, files: Mapping[str, Path], base: BaseSpec, *, owner: str, activate: bool
    ) -> PushResult:
        manifest = read_adapter(files, base, self.config, self._base_tokens)
        keep_manifest = self._store_blob(manifest, files)
        with self._database.write() as tx:
            keep_manifest = self._still_stored(tx.connection, manifest, files, keep_manifest)
            current = records.base_spec(tx.connection)
            if current is None or current.digest != base.digest:
                raise Conflict("the base model was replaced during the upload; upload again")
            number, created = versions.add_version(
                tx, name, manifest, owner=owner, keep_manifest=keep_manifest, callers=self.config.first_callers
            )
            if created:
                tenants.check_quota(tx, owner, self.config.tenant_defaults)
            activation_id = activations.request(tx, name, LIVE_ALIAS, number, actor=owner) if activate else None
            version = records.adapter(tx.connection, name).version(number)
            assert version is not None
            activation = None if activation_id is None else records.activation(tx.connection, activation_id)
        return PushResult(
            name=name, version=version, created=created, warnings=manifest.warnings, activation=activation
        )

    def _base_for_push(self, name: str, owner: str) -> BaseSpec:
        """Refuse early, before the upload is read, what the transaction would refuse."""
        with self._database.read() as connection:
            base = records.base_spec(connection)
            where = tables.adapters.c.name == name
            found = connection.execute(select(tables.adapters.c.owner).where(where)).scalar_one_or_none()
        if base is None:
            raise NotReady("no base model has been published yet; wait for a replica")
        if name == base.base_id:
            raise Conflict(f"{name!r} is the base model's name")
        versions.check_owner(found, name, owner)
        return base

    def _store_blob(self, manifest: AdapterManifest, files: Mapping[str, Path]) -> bool:
        """Put the weights on disk unless the same content is there; returns whether it was."""
        with self._database.read() as connection:
            known = records.manifest(connection, manifest.digest)
        if known is not None and self.blobs.exists(known.blob_sha256):
            return True
        if self.blobs.put_file(weights_path(files, self.config)) != manifest.blob_sha256:
            raise InvalidAdapter((Fault(code="changed", message="the upload changed while it was being read"),))
        return False

    def _still_stored(
        self, connection: Connection, manifest: AdapterManifest, files: Mapping[str, Path], kept: bool
    ) -> bool:
        """Store the weights again if the collector removed them meanwhile: it works under the same lock."""
        known = records.manifest(connection, manifest.digest) if kept else None
        if self.blobs.exists(manifest.blob_sha256 if known is None else known.blob_sha256):
            return kept
        self.blobs.put_file(weights_path(files, self.config))
        return False

    def adapters(self) -> tuple[AdapterRecord, ...]:
        with self._database.read() as connection:
            return records.adapters_after(connection, 0)

    def adapter(self, name: str) -> AdapterRecord:
        """Raises AdapterNotFound."""
        with self._database.read() as connection:
            return records.adapter(connection, name)

    def manifest(self, digest: str) -> AdapterManifest:
        """Raises AdapterNotFound."""
        with self._database.read() as connection:
            found = records.manifest(connection, digest)
        if found is None:
            raise AdapterNotFound(f"there is no version with digest {digest[:80]!r}")
        return found

    def activate(
        self, name: str, alias: str, number: int, *, actor: str, expected_revision: int | None = None
    ) -> Activation:
        """Ask that `alias` move to version `number`; `advance` moves it. With `expected_revision`, only if the
        adapter is still at that revision. Raises AdapterNotFound, Conflict, and InvalidAdapter for a bad alias.
        """
        if not is_alias_name(alias):
            message = f"{alias[:80]!r} is no alias: 1 to 32 of a-z 0-9 _ -, first a letter, last no _ or -"
            raise InvalidAdapter((Fault(code="alias_name", message=message, field="alias"),))
        with self._database.write() as tx:
            activation_id = activations.request(
                tx, name, alias, number, actor=actor, expected_revision=expected_revision
            )
            return records.activation(tx.connection, activation_id)

    def rollback(self, name: str, alias: str, *, actor: str) -> Activation:
        """Ask that `alias` go back to where it pointed before. Raises AdapterNotFound, Conflict."""
        with self._database.write() as tx:
            number = activations.previous_target(tx, name, alias)
            activation_id = activations.request(tx, name, alias, number, actor=actor)
            return records.activation(tx.connection, activation_id)

    def activation(self, activation_id: int) -> Activation:
        """Raises AdapterNotFound."""
        with self._database.read() as connection:
            return records.activation(connection, activation_id)

    def canary(
        self,
        name: str,
        number: int,
        weight: float,
        *,
        alias: str = LIVE_ALIAS,
        actor: str,
        expected_revision: int | None = None,
    ) -> Activation:
        """Ask that version `number` take the share `weight` (above 0, at most 1) of the keys of `alias`.

        Raises AdapterNotFound, Conflict, and InvalidAdapter for a bad weight.
        """
        if not 0 < weight <= 1:
            message = f"weight is {weight}; allowed: above 0, at most 1"
            raise InvalidAdapter((Fault(code="weight", message=message, field="weight"),))
        with self._database.write() as tx:
            activation_id = rollout.start(
                tx, name, alias, number, weight, actor=actor, expected_revision=expected_revision
            )
            return records.activation(tx.connection, activation_id)

    def promote(
        self, name: str, *, alias: str = LIVE_ALIAS, actor: str, expected_revision: int | None = None
    ) -> Activation:
        """Ask that `alias` move to its canary. Raises AdapterNotFound, Conflict."""
        with self._database.write() as tx:
            activation_id = rollout.promote(tx, name, alias, actor=actor, expected_revision=expected_revision)
            return records.activation(tx.connection, activation_id)

    def halt(
        self, name: str, *, alias: str = LIVE_ALIAS, actor: str, expected_revision: int | None = None
    ) -> AdapterRecord:
        """End the canary of `alias` now. Raises AdapterNotFound, Conflict."""
        with self._database.write() as tx:
            rollout.halt(tx, name, alias, actor=actor, expected_revision=expected_revision)
            return records.adapter(tx.connection, name)

    def remove_alias(self, name: str, alias: str, *, actor: str, expected_revision: int | None = None) -> AdapterRecord:
        """Raises AdapterNotFound, Conflict."""
        with self._database.write() as tx:
            rollout.remove_alias(tx, name, alias, actor=actor, expected_revision=expected_revision)
            return records.adapter(tx.connection, name)

    def retire(self, name: str, number: int | None, *, actor: str, deadline_s: float | None = None) -> AdapterRecord:
        """Take a version out of service, or with None the whole adapter and its aliases.

        New requests are refused from now on; those that run are aborted after `deadline_s` seconds, by default
        `retire_deadline_s`. Raises AdapterNotFound, and Conflict while an alias points at the version.
        """
        within_s = self.config.retire_deadline_s if deadline_s is None else deadline_s
        with self._database.write() as tx:
            if number is None:
                versions.retire_adapter(tx, name, actor=actor, deadline_s=within_s)
            else:
                versions.retire_version(tx, name, number, actor=actor, deadline_s=within_s)
            return records.adapter(tx.connection, name)

    def quarantine(self, name: str, number: int, *, actor: str, reason: str) -> AdapterRecord:
        """Stop serving a version's content at once, under every name and whatever points at it.

        Raises AdapterNotFound.
        """
        with self._database.write() as tx:
            versions.quarantine(tx, name, number, actor=actor, reason=reason)
            return records.adapter(tx.connection, name)

    def set_callers(self, name: str, callers: Sequence[str], *, actor: str) -> AdapterRecord:
        """Say which tenants, besides the owner, may call `name`; `*` is everybody. Raises AdapterNotFound."""
        with self._database.write() as tx:
            versions.set_callers(tx, name, tuple(callers), actor=actor)
            return records.adapter(tx.connection, name)

    def pin(self, name: str, *, actor: str) -> AdapterRecord:
        """Keep the live version in a slot of every replica. Raises AdapterNotFound, and Conflict when slots run out."""
        with self._database.write() as tx:
            residence.pin(tx, name, actor=actor)
            return records.adapter(tx.connection, name)

    def unpin(self, name: str, *, actor: str) -> AdapterRecord:
        """Raises AdapterNotFound."""
        with self._database.write() as tx:
            residence.unpin(tx, name, actor=actor)
            return records.adapter(tx.connection, name)

    def set_preload(self, name: str, preload: Preload | None, *, actor: str) -> AdapterRecord:
        """Say when `name` is brought to its homes ahead of requests; None ends it. Raises AdapterNotFound."""
        with self._database.write() as tx:
            residence.set_preload(tx, name, preload, actor=actor)
            return records.adapter(tx.connection, name)

    def join_replica(
        self, *, replica_id: str, node_id: str, num_slots: int, base_digest: str, staged: Sequence[str]
    ) -> ReplicaRecord:
        """Give the replica a lease. Raises JoinRefused, whose `missing` lists what it must stage first."""
        with self._database.write() as tx:
            return members.join(
                tx,
                replica_id=replica_id,
                node_id=node_id,
                num_slots=num_slots,
                base_digest=base_digest,
                staged=staged,
                ttl_s=self.config.lease_ttl_s,
            )

    def renew_replica(
        self,
        replica_id: str,
        *,
        revision: int,
        staged: Sequence[str],
        held: Sequence[str] = (),
        resident: Sequence[str] = (),
        failed: Mapping[str, str] | None = None,
        running: Sequence[str] = (),
    ) -> ReplicaRecord | None:
        """Extend the lease and report what the replica holds; None when the lease is gone and it must join again."""
        with self._database.write() as tx:
            return members.renew(
                tx,
                replica_id,
                revision=revision,
                staged=staged,
                held=held,
                resident=resident,
                failed=failed or {},
                running=running,
                ttl_s=self.config.lease_ttl_s,
            )

    def mark_leaving(self, replica_ids: Sequence[str]) -> None:
        """Take replicas that are shutting down out of the catalog; they keep their leases and end what they have."""
        with self._database.write() as tx:
            for replica_id in replica_ids:
                members.mark_leaving(tx, replica_id)

    def leave_replica(self, replica_id: str) -> None:
        with self._database.write() as tx:
            members.leave(tx, replica_id)

    def renew_gateway(self, gateway_id: str, revision: int, used: Sequence[str] = ()) -> None:
        """Extend the gateway's lease, or begin it; `revision` is of the catalog that it serves by.

        `used` are the digests that it resolved requests to since it last said so.
        """
        with self._database.write() as tx:
            members.renew_gateway(tx, gateway_id, revision, ttl_s=self.config.lease_ttl_s)
            collect.note_used(tx, used)

    def leave_gateway(self, gateway_id: str) -> None:
        with self._database.write() as tx:
            members.leave_gateway(tx, gateway_id)

    def advance(self) -> bool:
        """Expire leases and carry activations on; returns whether the catalog changed.

        Call it every second, and when a member reports. Leases expire only once this registry has been open for
        `lease_ttl_s`: while it was down nobody could renew, and a member that lives shall keep its place.
        """
        with self._database.write() as tx:
            before = tx.revision
            if tx.now_s >= self._may_expire_at_s:
                members.expire(tx)
            members.restore_drained(tx)
            drains_failing = self.config.on_staging_failure == "drain"
            activations.advance(tx, timeout_s=self.config.activation_timeout_s, drains_failing=drains_failing)
            draining.settle(tx)
            return tx.revision != before

    def changes(self, after_revision: int, *, with_access: bool = False) -> CatalogDelta | None:
        """What changed after that revision, None if nothing; everything when it is 0, negative or in the future.

        Hashes of keys and limits of tenants are for gateways alone: they come `with_access`.
        """
        with self._database.read() as connection:
            revision = records.revision(connection)
            if revision == after_revision:
                return None
            full = not 0 < after_revision < revision
            after = 0 if full else after_revision
            defaults = self.config.tenant_defaults
            return CatalogDelta(
                revision=revision,
                full=full,
                adapters=records.adapters_after(connection, after),
                replicas=records.ready_replicas(connection),
                base=records.base_spec(connection),
                access=tenants.access_after(connection, after, defaults) if with_access else None,
            )

    def replicas(self) -> tuple[ReplicaRecord, ...]:
        """Every replica with a lease and what it last reported, which the catalog does not follow report by report."""
        with self._database.read() as connection:
            return records.replicas(connection)

    def figures(self, bounds_s: Sequence[float]) -> RegistryFigures:
        """How far members are behind, and how activations fare; `bounds_s` are those of the propagation times."""
        with self._database.read() as connection:
            return figures.read(connection, bounds_s, self._database.now_s())

    def events(self, after: int, limit: int = 100) -> tuple[Event, ...]:
        """At most `limit` (up to 1000) entries of the change log after revision `after`, oldest first."""
        with self._database.read() as connection:
            return records.events(connection, after, max(0, min(limit, MAX_EVENTS)))

    def audit(self, after: int, limit: int = 100) -> AuditPage:
        """The change log after revision `after` with its chain of hashes, at most `limit` (up to 1000) entries."""
        with self._database.read() as connection:
            return records.audit_page(connection, after, max(0, min(limit, MAX_EVENTS)))

    def version_states(self, name: str, number: int) -> VersionStates:
        """What every replica has of a version. Raises AdapterNotFound."""
        with self._database.read() as connection:
            return states.of_version(connection, name, number)

    def collect(self, *, actor: str, dry_run: bool = False) -> CollectReport:
        """Remove what the retention rules allow and nothing holds, one version or blob a transaction.

        With `dry_run` change nothing and say what would go. May run in several registries at once.
        """
        rules, retire_deadline_s = self.config.retention, self.config.retire_deadline_s
        collector = collect.Collector(self._database, self.blobs, rules, retire_deadline_s)
        return collector.run(actor=actor, dry_run=dry_run)

    def backup(self, url: str) -> tuple[str, Snapshot]:
        """Copy rows and bytes to a folder or fsspec URL while the registry runs on; returns the snapshot's name and
        contents. Raises BackupFailed, AuditBroken.
        """
        return backup.backup(self._database, self.blobs, backup.BackupStore(url))

    def restore(self, url: str, name: str | None = None) -> Snapshot:
        """Fill this registry, which must be empty, from a backup's newest (or named) snapshot. Raises BackupFailed."""
        return backup.restore(self._database, self.blobs, backup.BackupStore(url), name)

    def check_integrity(self) -> None:
        """Raise RegistryError naming every invariant of the stored data that does not hold."""
        with self._database.read() as connection:
            integrity.check(connection, self.blobs)


def _check_name(name: str) -> None:
    if not is_adapter_name(name):
        message = f"{name[:80]!r} is no adapter name: 1 to 64 of A-Z a-z 0-9 . _ -, alphanumeric at both ends, no .."
        raise InvalidAdapter((Fault(code="name", message=message, field="name"),))
