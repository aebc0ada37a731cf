"""Turns rows into the records that others see. Reads only, inside the caller's transaction."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Table, select, true

from registry import tables
from registry.audit import GENESIS
from registry.errors import AdapterNotFound
from registry.types import (
    LEAST_PRELOAD_S,
    Activation,
    ActivationState,
    AdapterManifest,
    AdapterRecord,
    AuditEntry,
    AuditPage,
    BaseSpec,
    Canary,
    Event,
    Preload,
    ReplicaRecord,
    VersionRecord,
    VersionState,
)

AnyRow = Row[tuple[object, ...]]


def revision(connection: Connection) -> int:
    return int(connection.execute(select(tables.meta.c.revision)).scalar_one())


def base_spec(connection: Connection) -> BaseSpec | None:
    text = connection.execute(select(tables.base.c.spec)).scalar_one_or_none()
    return None if text is None else BaseSpec.model_validate_json(text)


def manifest(connection: Connection, digest: str) -> AdapterManifest | None:
    where = tables.manifests.c.digest == digest
    text = connection.execute(select(tables.manifests.c.manifest).where(where)).scalar_one_or_none()
    return None if text is None else AdapterManifest.model_validate_json(text)


def adapters_after(connection: Connection, after: int) -> tuple[AdapterRecord, ...]:
    """Whole records of the adapters that changed after that revision, by name."""
    return _adapters(connection, tables.adapters.c.revision > after if after > 0 else true())


def adapter(connection: Connection, name: str) -> AdapterRecord:
    """Raises AdapterNotFound."""
    found = _adapters(connection, tables.adapters.c.name == name)
    if not found:
        raise AdapterNotFound(f"there is no adapter {name[:80]!r}")
    return found[0]


def active_version(connection: Connection, name: str, number: int) -> VersionRecord | None:
    version = adapter(connection, name).version(number)
    return version if version and version.state is VersionState.ACTIVE else None


def replicas(connection: Connection) -> tuple[ReplicaRecord, ...]:
    """Every replica with a lease, the drained ones too."""
    rows = connection.execute(select(tables.replicas).order_by(tables.replicas.c.ring_id))
    return tuple(replica(row) for row in rows)


def ready_replicas(connection: Connection) -> tuple[ReplicaRecord, ...]:
    """Those that take requests, and that activations wait for."""
    return tuple(replica for replica in replicas(connection) if replica.is_ready)


def replica(row: Row[tuple[object, ...]]) -> ReplicaRecord:
    columns = dict(row._mapping)
    return ReplicaRecord.model_validate({name: columns[name] for name in ReplicaRecord.model_fields})


def activation(connection: Connection, activation_id: int) -> Activation:
    """Raises AdapterNotFound."""
    where = tables.activations.c.activation_id == activation_id
    row = connection.execute(select(tables.activations).where(where)).one_or_none()
    if row is None:
        raise AdapterNotFound(f"there is no activation {activation_id}")
    columns = {name: value for name, value in row._mapping.items() if name in Activation.model_fields}
    return Activation.model_validate({**columns, "waiting_for": _waiting_for(connection, row)})


def needed_blobs(connection: Connection, only: str | None = None) -> frozenset[str]:
    """The blobs that versions need; with `only`, at most that one."""
    m, v = tables.manifests.c, tables.versions.c
    held = select(v.digest).where(v.state != VersionState.COLLECTED)
    query = select(m.blob_sha256).where(m.digest.in_(held))
    return frozenset(connection.execute(query if only is None else query.where(m.blob_sha256 == only)).scalars())


def events(connection: Connection, after: int, limit: int) -> tuple[Event, ...]:
    where = tables.events.c.revision > after
    columns = [tables.events.c[name] for name in Event.model_fields]
    rows = connection.execute(select(*columns).where(where).order_by(tables.events.c.revision).limit(limit))
    return tuple(Event.model_validate(dict(row._mapping)) for row in rows)


def audit_page(connection: Connection, after: int, limit: int) -> AuditPage:
    """At most `limit` entries after revision `after`, each with the hash of the entry before it."""
    e, m = tables.events.c, tables.meta.c
    rows = connection.execute(select(tables.events).where(e.revision > after).order_by(e.revision).limit(limit)).all()
    before = select(e.hash).where(e.revision <= after).order_by(e.revision.desc()).limit(1)
    previous = connection.execute(before).scalar_one_or_none() or GENESIS
    entries = []
    for row in rows:
        entries.append(AuditEntry.model_construct(**row._mapping, previous_hash=previous))
        previous = row.hash
    head = connection.execute(select(m.revision, m.audit_hash)).one()
    return AuditPage.model_construct(entries=tuple(entries), head_revision=head.revision, head_hash=head.audit_hash)


def late_replicas(activation: AnyRow, live: Sequence[ReplicaRecord]) -> tuple[str, ...]:
    """The replicas that have yet to stage what a pending activation wants.

    `staged` alone may mean bytes on demand. It vouches for bytes that were on the node when the replica had seen the
    request; before that, only what it holds counts.
    """
    columns = activation._mapping
    return tuple(
        replica.replica_id
        for replica in live
        if columns["digest"] not in replica.staged
        or (columns["digest"] not in replica.held and replica.revision < columns["requested_revision"])
    )


def _waiting_for(connection: Connection, row: AnyRow) -> tuple[str, ...]:
    columns = row._mapping
    if columns["state"] == ActivationState.PENDING:
        return late_replicas(row, ready_replicas(connection))
    if columns["state"] == ActivationState.FLIPPED:
        late = tables.gateways.c.revision < columns["flipped_revision"]
        return tuple(connection.execute(select(tables.gateways.c.gateway_id).where(late)).scalars())
    return ()


def _adapters(connection: Connection, where: ColumnElement[bool]) -> tuple[AdapterRecord, ...]:
    rows = connection.execute(select(tables.adapters).where(where).order_by(tables.adapters.c.name)).all()
    versions = _versions(connection, where)
    al = tables.aliases.c
    targets = [al.alias, al.number, al.previous_number, al.canary_number, al.canary_weight]
    aliases = _grouped(connection, where, tables.aliases, targets)
    waiting = where & (tables.activations.c.state == ActivationState.PENDING)
    pending = _grouped(connection, waiting, tables.activations, [tables.activations.c.digest])
    return tuple(
        AdapterRecord.model_construct(
            name=row.name,
            owner=row.owner,
            callers=tuple(row.callers),
            revision=row.revision,
            created_at_s=row.created_at_s,
            pinned=row.pinned,
            preload=None if row.preload is None else _preload(row.preload),
            aliases={alias: number for alias, number, *_ in aliases[row.name]},
            previous={alias: number for alias, _, number, *_ in aliases[row.name] if number is not None},
            canaries={
                alias: Canary(number=number, weight=weight)
                for alias, _, _, number, weight in aliases[row.name]
                if number is not None
            },
            versions=tuple(versions[row.name]),
            pending=tuple(sorted({digest for (digest,) in pending[row.name]})),
        )
        for row in rows
    )


def _preload(stored: dict[str, Any]) -> Preload:
    """Shorter intervals than there may be now are in older databases."""
    if "every_s" in stored:
        stored = {"every_s": max(stored["every_s"], LEAST_PRELOAD_S)}
    return Preload.model_validate(stored)


def _versions(connection: Connection, where: ColumnElement[bool]) -> dict[str, list[VersionRecord]]:
    v, m = tables.versions.c, tables.manifests.c
    query = (
        select(v.name, v.number, v.digest, v.state, v.created_at_s, v.drain_until_s)
        .add_columns(m.num_bytes, m.max_rank, m.target_names, m.base_verified)
        .select_from(tables.versions.join(tables.manifests).join(tables.adapters))
        .where(where)
        .order_by(v.name, v.number)
    )
    found: dict[str, list[VersionRecord]] = defaultdict(list)
    for row in connection.execute(query):
        found[row.name].append(
            VersionRecord.model_construct(  # rows were checked when they were written; a catalog has thousands
                number=row.number,
                digest=row.digest,
                state=VersionState(row.state),
                created_at_s=row.created_at_s,
                num_bytes=row.num_bytes,
                max_rank=row.max_rank,
                target_names=tuple(row.target_names),
                base_verified=row.base_verified,
                drain_until_s=row.drain_until_s if row.state == VersionState.DRAINING else None,
            )
        )
    return found


def _grouped(
    connection: Connection, where: ColumnElement[bool], table: Table, columns: Sequence[ColumnElement[Any]]
) -> dict[str, list[Any]]:
    """The columns of every row of `table` that belongs to a chosen adapter, by the adapter's name."""
    joined = table.join(tables.adapters, table.c.name == tables.adapters.c.name)
    found: dict[str, list[Any]] = defaultdict(list)
    query = select(table.c.name, *columns).select_from(joined).where(where).order_by(table.c.name, *columns)
    for name, *values in connection.execute(query):
        found[name].append(tuple(values))
    return found
