"""Leases of replicas and gateways. A lease lives until `expire` removes it, in the same transaction as any decision
that its absence allows; so a renewal that comes late, but before that, has lost nothing.
"""

from collections.abc import Mapping, Sequence
from itertools import count

from sqlalchemy import delete, func, insert, select, update

from registry import records, tables
from registry.database import Transaction
from registry.errors import JoinRefused
from registry.types import AdapterRecord, ReplicaRecord, VersionState

r = tables.replicas.c
g = tables.gateways.c
LEAVING = "it is shutting down"


def join(
    tx: Transaction,
    *,
    replica_id: str,
    node_id: str,
    num_slots: int,
    base_digest: str,
    staged: Sequence[str],
    ttl_s: float,
) -> ReplicaRecord:
    """Admit a replica that holds the base and every version that an alias or a pending activation needs.

    Raises JoinRefused with the missing digests.
    """
    _check_base(tx, replica_id, base_digest)
    _check_staged(tx, replica_id, staged)
    known = tx.connection.execute(select(r.ring_id, r.joined_at_s).where(r.replica_id == replica_id)).one_or_none()
    record = ReplicaRecord(
        replica_id=replica_id,
        ring_id=_lowest_free_ring_id(tx) if known is None or known.ring_id < 0 else known.ring_id,
        node_id=node_id,
        num_slots=num_slots,
        revision=0,
        staged=tuple(staged),
    )
    leave_silently(tx, replica_id)
    tx.connection.execute(
        insert(tables.replicas).values(
            **record.model_dump(mode="json"),
            base_digest=base_digest,
            joined_at_s=tx.now_s if known is None else known.joined_at_s,
            renewed_at_s=tx.now_s,
            expires_at_s=tx.now_s + ttl_s,
        )
    )
    tx.record("replica_joined", actor=replica_id, node_id=node_id, ring_id=str(record.ring_id))
    return record


def renew(
    tx: Transaction,
    replica_id: str,
    *,
    revision: int,
    staged: Sequence[str],
    held: Sequence[str],
    resident: Sequence[str],
    failed: Mapping[str, str],
    running: Sequence[str],
    ttl_s: float,
) -> ReplicaRecord | None:
    """Extend the lease and note what the replica holds; None when the lease is gone. Takes no revision."""
    row = tx.connection.execute(select(tables.replicas).where(r.replica_id == replica_id)).one_or_none()
    if row is None:
        return None
    seen = {
        "revision": revision,
        "staged": tuple(staged),
        "held": tuple(held),
        "resident": tuple(resident),
        "failed": dict(failed),
        "running": tuple(running),
    }
    record = ReplicaRecord.model_validate({**records.replica(row).model_dump(), **seen})
    values = record.model_dump(mode="json", include=set(seen))
    tx.connection.execute(
        update(tables.replicas)
        .where(r.replica_id == replica_id)
        .values(**values, renewed_at_s=tx.now_s, expires_at_s=tx.now_s + ttl_s)
    )
    return record


def drain(tx: Transaction, replica: ReplicaRecord, why: str) -> None:
    """Send no new requests to a replica, and wait for it no more, until it can serve everything again."""
    tx.connection.execute(update(tables.replicas).where(r.replica_id == replica.replica_id).values(drained=why))
    tx.record("replica_drained", actor=replica.replica_id, why=why)


def mark_leaving(tx: Transaction, replica_id: str) -> None:
    """Send no new requests to a replica that is shutting down, and give its place on the ring to whoever comes next.

    It keeps its lease, so that what still runs on it counts. An unknown one, or one that is leaving, is left alone.
    """
    found = tx.connection.execute(select(r.drained).where(r.replica_id == replica_id)).one_or_none()
    if found is None or found.drained == LEAVING:
        return
    lowest = tx.connection.execute(select(func.min(r.ring_id))).scalar_one()
    values = {"ring_id": min(lowest, 0) - 1, "drained": LEAVING}
    tx.connection.execute(update(tables.replicas).where(r.replica_id == replica_id).values(values))
    tx.record("replica_leaving", actor=replica_id)


def restore_drained(tx: Transaction) -> None:
    """Let a drained replica take requests again when it can serve what is required and fails at none of it."""
    drained = [replica for replica in records.replicas(tx.connection) if replica.drained not in (None, LEAVING)]
    if not drained:
        return
    required = required_digests(records.adapters_after(tx.connection, 0))
    for replica in drained:
        if required <= set(replica.staged) and not required & replica.failed.keys():
            where = r.replica_id == replica.replica_id
            tx.connection.execute(update(tables.replicas).where(where).values(drained=None))
            tx.record("replica_restored", actor=replica.replica_id)


def leave(tx: Transaction, replica_id: str) -> None:
    if leave_silently(tx, replica_id):
        tx.record("replica_left", actor=replica_id)


def leave_silently(tx: Transaction, replica_id: str) -> bool:
    return tx.connection.execute(delete(tables.replicas).where(r.replica_id == replica_id)).rowcount > 0


def renew_gateway(tx: Transaction, gateway_id: str, revision: int, *, ttl_s: float) -> None:
    """Note the catalog revision a gateway serves by; a new gateway needs no other introduction."""
    values = {"revision": revision, "expires_at_s": tx.now_s + ttl_s}
    renewed = tx.connection.execute(update(tables.gateways).where(g.gateway_id == gateway_id).values(values))
    if renewed.rowcount == 0:
        tx.connection.execute(insert(tables.gateways).values(gateway_id=gateway_id, **values))


def leave_gateway(tx: Transaction, gateway_id: str) -> None:
    tx.connection.execute(delete(tables.gateways).where(g.gateway_id == gateway_id))


def expire(tx: Transaction) -> None:
    """Remove every lease that was not renewed in time, and give the places on the ring to their replacements."""
    tx.connection.execute(delete(tables.gateways).where(g.expires_at_s < tx.now_s))
    late = tx.connection.execute(
        select(r.replica_id, r.ring_id, r.renewed_at_s).where(r.expires_at_s < tx.now_s).order_by(r.ring_id)
    ).all()
    for row in late:
        leave_silently(tx, row.replica_id)
        tx.record("replica_expired", actor=row.replica_id)
    for row in late:
        if row.ring_id < 0:
            continue
        _hand_over(tx, row.ring_id, row.renewed_at_s)


def _hand_over(tx: Transaction, ring_id: int, renewed_at_s: float) -> None:
    """Give the place of a replica that was last heard of at `renewed_at_s` to one that joined since, if there is one.

    That one joined before the dead one's lease had ended and so took a place further up: with it, homes would stay
    shifted. Of several the highest moves, so that the places in use are those of a ring that nobody ever left.
    """
    younger = select(r.replica_id, r.ring_id).where(r.joined_at_s > renewed_at_s, r.ring_id > ring_id)
    heir = tx.connection.execute(younger.order_by(r.ring_id.desc()).limit(1)).one_or_none()
    if heir is None:
        return
    tx.connection.execute(update(tables.replicas).where(r.replica_id == heir.replica_id).values(ring_id=ring_id))
    tx.record("replica_renumbered", actor=heir.replica_id, before=str(heir.ring_id), ring_id=str(ring_id))


def required_digests(adapters: Sequence[AdapterRecord]) -> frozenset[str]:
    """What a replica must be able to serve: targets of aliases, canaries and pending activations that may be served."""
    required: set[str] = set()
    for adapter in adapters:
        wanted = {*adapter.aliases.values(), *(canary.number for canary in adapter.canaries.values())}
        for version in adapter.versions:
            needed = version.number in wanted or version.digest in adapter.pending
            if needed and version.state is VersionState.ACTIVE:
                required.add(version.digest)
    return frozenset(required)


def _check_base(tx: Transaction, replica_id: str, base_digest: str) -> None:
    base = records.base_spec(tx.connection)
    if base is None:
        raise JoinRefused(f"replica {replica_id} must publish its base model before it joins")
    if base.digest != base_digest:
        raise JoinRefused(
            f"replica {replica_id} holds the base {base_digest[:12]}; the fleet serves {base.digest[:12]}"
        )


def _check_staged(tx: Transaction, replica_id: str, staged: Sequence[str]) -> None:
    missing = tuple(sorted(required_digests(records.adapters_after(tx.connection, 0)) - set(staged)))
    if missing:
        listed = ", ".join(digest[:12] for digest in missing[:5])
        message = f"replica {replica_id} has yet to stage {len(missing)} versions ({listed})"
        raise JoinRefused(message, missing)


def _lowest_free_ring_id(tx: Transaction) -> int:
    taken = set(tx.connection.execute(select(r.ring_id)).scalars())
    return next(ring_id for ring_id in count() if ring_id not in taken)
