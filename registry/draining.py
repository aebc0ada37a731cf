"""How a version leaves service: it drains until its deadline, then it is retired; at last nobody can still use it.

Every function runs inside the caller's transaction. Members act upon what the catalog says, so one clock decides.
"""

from collections.abc import Sequence

from sqlalchemy import Row, select, update

from registry import activations, records, tables
from registry.database import Transaction
from registry.types import ReplicaRecord, VersionRecord, VersionState

LINGER_S = 2.0
"""A request that was resolved just before its gateway heard of the end may take so long to reach a replica."""

v = tables.versions.c
g = tables.gateways.c
AnyRow = Row[tuple[object, ...]]


def begin(tx: Transaction, name: str, version: VersionRecord, *, actor: str, deadline_s: float) -> None:
    """Refuse new requests, and let those that run go on for `deadline_s` seconds; again with another deadline, that
    one counts. Without a replica, or without time, the version is retired at once. Others are left alone.
    """
    if version.state not in (VersionState.ACTIVE, VersionState.DRAINING):
        return
    until_s = tx.now_s + deadline_s
    number, digest = version.number, version.digest
    if version.state is VersionState.ACTIVE:
        close(tx, name, number, VersionState.DRAINING)
    if deadline_s > 0 and records.replicas(tx.connection):
        within = f"{deadline_s:g}"
        tx.record("version_draining", actor=actor, name=name, number=number, digest=digest, deadline_s=within)
        _update(tx, name, number, drain_until_s=until_s)
    else:
        _retire(tx, name, number, digest, actor)


def close(tx: Transaction, name: str, number: int, state: VersionState) -> None:
    """Take a version out of service; an activation that waits for it fails. The caller records the event next.

    A transaction is seen whole or not at all: whoever knows its first revision knows that the version is closed.
    """
    values = {"state": state, "closed_revision": tx.revision + 1, "closed_at_s": tx.now_s, "quiet_at_s": None}
    _update(tx, name, number, **values)
    activations.fail_pending(tx, name, number, f"{name}@{number} was taken out of service ({state})")


def reopen(tx: Transaction, name: str, number: int) -> None:
    """Put a version back into service."""
    cleared = dict.fromkeys(("closed_revision", "closed_at_s", "drain_until_s", "quiet_at_s"))
    _update(tx, name, number, state=VersionState.ACTIVE, **cleared)


def settle(tx: Transaction) -> None:
    """Retire what has drained or reached its deadline, and note since when nobody can use what is closed."""
    closed = (VersionState.DRAINING, VersionState.RETIRED, VersionState.QUARANTINED)
    query = select(tables.versions).where(v.state.in_(closed), v.quiet_at_s.is_(None)).order_by(v.name, v.number)
    rows = tx.connection.execute(query).all()
    if not rows:
        return
    replicas = records.replicas(tx.connection)
    seen = tx.connection.execute(select(g.revision).order_by(g.revision).limit(1)).scalar_one_or_none()
    for row in rows:
        is_quiet = _is_quiet(row, replicas, seen)
        if row.state != VersionState.DRAINING:
            if is_quiet:
                _update(tx, row.name, row.number, quiet_at_s=tx.now_s)
        elif tx.now_s >= row.drain_until_s or (is_quiet and tx.now_s >= row.closed_at_s + LINGER_S):
            _retire(tx, row.name, row.number, row.digest, activations.REGISTRY)


def _is_quiet(row: AnyRow, replicas: Sequence[ReplicaRecord], seen: int | None) -> bool:
    """Whether every gateway serves by a catalog without the version, and no replica runs anything on it."""
    if seen is not None and seen < row.closed_revision:
        return False
    return all(replica.revision >= row.closed_revision and row.digest not in replica.running for replica in replicas)


def _retire(tx: Transaction, name: str, number: int, digest: str, actor: str) -> None:
    revision = tx.record("version_retired", actor=actor, name=name, number=number, digest=digest)
    values = {"state": VersionState.RETIRED, "closed_revision": revision, "drain_until_s": None}
    _update(tx, name, number, **values)


def _update(tx: Transaction, name: str, number: int, **values: object) -> None:
    tx.connection.execute(update(tables.versions).where(v.name == name, v.number == number).values(**values))
