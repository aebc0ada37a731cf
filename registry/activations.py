"""Activations: durable wishes to point an alias at a version, carried out when every replica has staged it.

Every function runs inside the caller's transaction, so a decision and the membership it was based upon are one.
"""

from collections.abc import Sequence

from sqlalchemy import Row, insert, select, update

from registry import members, records, tables
from registry.database import Transaction
from registry.errors import AdapterNotFound, Conflict
from registry.types import ActivationState, AdapterRecord, ReplicaRecord, VersionRecord, VersionState

REGISTRY = "registry"
"""The actor of what the registry does by itself."""

a = tables.activations.c
al = tables.aliases.c


def request(
    tx: Transaction,
    name: str,
    alias: str,
    number: int,
    *,
    actor: str,
    expected_revision: int | None = None,
    weight: float | None = None,
) -> int:
    """Wish that `alias` pointed at version `number`; an older wish for the alias is superseded. Returns its id.

    With `weight`, that the version took that share of the alias's keys as its canary. Raises AdapterNotFound, and
    Conflict when the adapter has changed since `expected_revision` or the version is out of service.
    """
    record = records.adapter(tx.connection, name)
    check_revision(record, expected_revision)
    version = record.version(number)
    if version is None:
        raise AdapterNotFound(f"{name} has no version {number}")
    if version.state is not VersionState.ACTIVE:
        raise Conflict(f"{name}@{number} is {version.state}")
    supersede(tx, name, alias)
    activation_id = _insert(tx, name, alias, version, actor, weight)
    detail = {"alias": alias, "activation_id": str(activation_id)}
    if weight is not None:
        detail["weight"] = f"{weight:g}"
    revision = tx.record("activation_requested", actor=actor, name=name, number=number, digest=version.digest, **detail)
    _update(tx, activation_id, requested_revision=revision)
    return activation_id


def check_revision(record: AdapterRecord, expected: int | None) -> None:
    """Raises Conflict when the adapter has changed since revision `expected`; None does not ask."""
    if expected is not None and record.revision != expected:
        raise Conflict(f"{record.name} is at revision {record.revision}, not {expected}")


def supersede(tx: Transaction, name: str, alias: str) -> None:
    """End the wish that waits for this alias, if there is one."""
    older = (a.name == name, a.alias == alias, a.state == ActivationState.PENDING)
    tx.connection.execute(update(tables.activations).where(*older).values(state=ActivationState.SUPERSEDED))


def previous_target(tx: Transaction, name: str, alias: str) -> int:
    """The version that `alias` pointed at before, the latest that can still be served.

    Raises AdapterNotFound when there is no such alias, Conflict when nothing is left to go back to.
    """
    record = records.adapter(tx.connection, name)
    if alias not in record.aliases:
        raise AdapterNotFound(f"{name} has no alias {alias!r}")
    servable = {version.number for version in record.versions if version.state is VersionState.ACTIVE}
    h = tables.alias_history.c
    history = select(h.number).where(h.name == name, h.alias == alias).order_by(h.revision.desc())
    for number in tx.connection.execute(history).scalars():
        if number != record.aliases[alias] and number in servable:
            return int(number)
    raise Conflict(f"{name}@{alias} has no earlier version to go back to")


def advance(tx: Transaction, *, timeout_s: float, drains_failing: bool = False) -> None:
    """Flip what every replica has staged, fail what cannot be, finish what every gateway has seen.

    With `drains_failing` a replica that cannot stage what all others have staged is drained instead of waited for.
    """
    for row in _in_state(tx, ActivationState.PENDING):
        live: Sequence[ReplicaRecord] = records.ready_replicas(tx.connection)
        if drains_failing:
            live = _drain_failing(tx, row, live)
        error = _failure(row, live, tx.now_s - timeout_s, needs_all=not drains_failing)
        if error is not None:
            fail(tx, row, error)
        elif live and not records.late_replicas(row, live):
            _flip(tx, row)
    seen = (
        tx.connection.execute(select(tables.gateways.c.revision).order_by(tables.gateways.c.revision)).scalars().first()
    )
    for row in _in_state(tx, ActivationState.FLIPPED):
        if seen is None or seen >= row.flipped_revision:
            _update(tx, row.activation_id, state=ActivationState.DONE)


def fail_pending(tx: Transaction, name: str, number: int, error: str) -> None:
    """Fail every activation that waits for that version."""
    for row in _in_state(tx, ActivationState.PENDING):
        if (row.name, row.number) == (name, number):
            fail(tx, row, error)


def fail(tx: Transaction, row: Row[tuple[object, ...]], error: str) -> None:
    _update(tx, row.activation_id, state=ActivationState.FAILED, error=error)
    detail = {"alias": row.alias, "activation_id": str(row.activation_id), "error": error}
    tx.record("activation_failed", actor=REGISTRY, name=row.name, number=row.number, digest=row.digest, **detail)


def _failure(
    row: Row[tuple[object, ...]], live: Sequence[ReplicaRecord], oldest_s: float, *, needs_all: bool
) -> str | None:
    """Why the activation cannot succeed any more; None while it can. With `needs_all` one replica's failure is enough.

    A failure counts only from replicas that have seen this request: an older one says nothing of the new attempt.
    """
    failing = [replica for replica in live if _has_failed(row, replica)]
    if failing and (needs_all or len(failing) == len(live)):
        return f"replica {failing[0].replica_id} cannot stage it: {failing[0].failed[row.digest]}"
    late = records.late_replicas(row, live)
    if row.requested_at_s < oldest_s and (late or not live):
        return f"timed out waiting for {', '.join(late) or 'a replica'}"
    return None


def _has_failed(row: Row[tuple[object, ...]], replica: ReplicaRecord) -> bool:
    return row.digest in replica.failed and replica.revision >= row.requested_revision


def _drain_failing(
    tx: Transaction, row: Row[tuple[object, ...]], live: Sequence[ReplicaRecord]
) -> Sequence[ReplicaRecord]:
    """The replicas that go on without those that fail, once all others have shown that the version is sound."""
    failing = [replica for replica in live if _has_failed(row, replica)]
    others = [replica for replica in live if not _has_failed(row, replica)]
    if not failing or not others or records.late_replicas(row, others):
        return live
    for replica in failing:
        members.drain(tx, replica, f"it cannot stage {row.name}@{row.number}: {replica.failed[row.digest]}")
    return others


def _flip(tx: Transaction, row: Row[tuple[object, ...]]) -> None:
    """Move the alias or set its canary, by compare-and-set on the activation's state."""
    won = tx.connection.execute(
        update(tables.activations)
        .where(a.activation_id == row.activation_id, a.state == ActivationState.PENDING)
        .values(state=ActivationState.FLIPPED)
    )
    if won.rowcount != 1:
        return
    about = {"name": row.name, "number": row.number, "digest": row.digest, "alias": row.alias}
    if row.weight is None:
        revision = tx.record("alias_moved", actor=row.actor, **about)
        _point(tx, row.name, row.alias, row.number, revision)
    else:
        revision = tx.record("canary_set", actor=row.actor, weight=f"{row.weight:g}", **about)
        set_canary(tx, row.name, row.alias, row.number, row.weight)
    _update(tx, row.activation_id, flipped_revision=revision, staged_after_s=tx.now_s - row.requested_at_s)


def _point(tx: Transaction, name: str, alias: str, number: int, revision: int) -> None:
    """Point the alias at another version, which ends its canary."""
    where = (al.name == name, al.alias == alias)
    before = tx.connection.execute(select(al.number, al.previous_number).where(*where)).one_or_none()
    values = {"name": name, "alias": alias, "number": number, "revision": revision}
    if before is None:
        tx.connection.execute(insert(tables.aliases).values(values))
    else:
        previous = before.previous_number if before.number == number else before.number
        more = {"previous_number": previous, "canary_number": None, "canary_weight": None}
        tx.connection.execute(update(tables.aliases).where(*where).values(**values, **more))
    tx.connection.execute(insert(tables.alias_history).values(values))


def set_canary(tx: Transaction, name: str, alias: str, number: int | None, weight: float | None) -> None:
    """Write the alias's canary; None and None end it. The caller records the event."""
    where = (al.name == name, al.alias == alias)
    tx.connection.execute(update(tables.aliases).where(*where).values(canary_number=number, canary_weight=weight))


def _insert(tx: Transaction, name: str, alias: str, version: VersionRecord, actor: str, weight: float | None) -> int:
    result = tx.connection.execute(
        insert(tables.activations).values(
            name=name,
            alias=alias,
            number=version.number,
            digest=version.digest,
            actor=actor,
            state=ActivationState.PENDING,
            requested_at_s=tx.now_s,
            requested_revision=tx.revision,
            weight=weight,
        )
    )
    (activation_id,) = result.inserted_primary_key or (0,)
    return int(activation_id)


def _in_state(tx: Transaction, state: ActivationState) -> Sequence[Row[tuple[object, ...]]]:
    query = select(tables.activations).where(a.state == state).order_by(a.activation_id)
    return tx.connection.execute(query).all()


def _update(tx: Transaction, activation_id: int, **values: object) -> None:
    tx.connection.execute(update(tables.activations).where(a.activation_id == activation_id).values(**values))
