"""The registry: immutable adapter versions, aliases that move when the fleet is ready, members and the change log.

Many registries may share one database; correctness comes from its transactions. Knows nothing of HTTP and of Ray.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.engine import make_url

from registry import activations, integrity, members, records, tables, versions
from registry.adapter_files import weights_path
from registry.adapter_format import read_adapter
from registry.blobs import BlobStore
from registry.config import RegistryConfig
from registry.database import Database
from registry.errors import AdapterNotFound, Conflict, InvalidAdapter, NotReady
from registry.types import (
    LIVE_ALIAS,
    Activation,
    AdapterManifest,
    AdapterRecord,
    BaseSpec,
    CatalogDelta,
    Event,
    Fault,
    PushResult,
    ReplicaRecord,
    is_adapter_name,
    is_alias_name,
)

MAX_EVENTS = 1000


class Registry:
    """Every method is one transaction, safe to call from any thread; what it returned has reached the disk."""

    def __init__(
        self, config: RegistryConfig, database: Database, blobs: BlobStore, clock: Callable[[], float]
    ) -> None:
        self.config = config
        self.blobs = blobs
        self._database = database
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

    def push(self, name: str, files: Mapping[str, Path], *, owner: str, activate: bool = True) -> PushResult:
        """Store an upload (relative name -> file) as a version of `name`; known content keeps its number.

        With `activate`, the alias `live` is asked to move to it. Raises InvalidAdapter, LimitExceeded, NotReady
        (no base yet), and Conflict when the name is another owner's or the content is quarantined.
        """
        _check_name(name)
        base = self._base_for_push(name, owner)
        manifest = read_adapter(files, base, self.config)
        keep_manifest = self._store_blob(manifest, files)
        with self._database.write() as tx:
            current = records.base_spec(tx.connection)
            if current is None or current.digest != base.digest:
                raise Conflict("the base model was replaced during the upload; upload again")
            number, created = versions.add_version(tx, name, manifest, owner=owner, keep_manifest=keep_manifest)
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

    def retire(self, name: str, number: int | None, *, actor: str) -> AdapterRecord:
        """Take a version out of service, or with None the whole adapter and its aliases.

        Raises AdapterNotFound, and Conflict while an alias points at the version.
        """
        with self._database.write() as tx:
            if number is None:
                versions.retire_adapter(tx, name, actor=actor)
            else:
                versions.retire_version(tx, name, number, actor=actor)
            return records.adapter(tx.connection, name)

    def quarantine(self, name: str, number: int, *, actor: str, reason: str) -> AdapterRecord:
        """Stop serving a version at once, whatever points at it. Raises AdapterNotFound."""
        with self._database.write() as tx:
            versions.quarantine(tx, name, number, actor=actor, reason=reason)
            return records.adapter(tx.connection, name)

    def set_callers(self, name: str, callers: Sequence[str], *, actor: str) -> AdapterRecord:
        """Say which tenants, besides the owner, may call `name`; `*` is everybody. Raises AdapterNotFound."""
        with self._database.write() as tx:
            versions.set_callers(tx, name, tuple(callers), actor=actor)
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
                ttl_s=self.config.lease_ttl_s,
            )

    def leave_replica(self, replica_id: str) -> None:
        with self._database.write() as tx:
            members.leave(tx, replica_id)

    def renew_gateway(self, gateway_id: str, revision: int) -> None:
        """Extend the gateway's lease, or begin it; `revision` is of the catalog that it serves by."""
        with self._database.write() as tx:
            members.renew_gateway(tx, gateway_id, revision, ttl_s=self.config.lease_ttl_s)

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
            activations.advance(tx, timeout_s=self.config.activation_timeout_s)
            return tx.revision != before

    def changes(self, after_revision: int) -> CatalogDelta | None:
        """What changed after that revision, None if nothing; everything when it is 0, negative or in the future."""
        with self._database.read() as connection:
            revision = records.revision(connection)
            if revision == after_revision:
                return None
            full = not 0 < after_revision < revision
            return CatalogDelta(
                revision=revision,
                full=full,
                adapters=records.adapters_after(connection, 0 if full else after_revision),
                replicas=records.replicas(connection),
                base=records.base_spec(connection),
            )

    def replicas(self) -> tuple[ReplicaRecord, ...]:
        """Every replica with a lease and what it last reported, which the catalog does not follow report by report."""
        with self._database.read() as connection:
            return records.replicas(connection)

    def events(self, after: int, limit: int = 100) -> tuple[Event, ...]:
        """At most `limit` (up to 1000) entries of the change log after revision `after`, oldest first."""
        with self._database.read() as connection:
            return records.events(connection, after, max(0, min(limit, MAX_EVENTS)))

    def check_integrity(self) -> None:
        """Raise RegistryError naming every invariant of the stored data that does not hold."""
        with self._database.read() as connection:
            integrity.check(connection, self.blobs)


def _check_name(name: str) -> None:
    if not is_adapter_name(name):
        message = f"{name[:80]!r} is no adapter name: 1 to 64 of A-Z a-z 0-9 . _ -, alphanumeric at both ends, no .."
        raise InvalidAdapter((Fault(code="name", message=message, field="name"),))
