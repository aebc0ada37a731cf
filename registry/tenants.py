"""Writes and reads tenants and their keys. Every function runs inside the caller's transaction."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, insert, or_, select, true, update

from registry import tables
from registry.database import Transaction
from registry.errors import Conflict, KeyNotFound, QuotaExceeded, TenantNotFound
from registry.keys import mint
from registry.types import (
    Access,
    KeyHash,
    KeyRecord,
    NewKey,
    Scope,
    TenantLimits,
    TenantRecord,
    VersionState,
)

t = tables.tenants.c
k = tables.keys.c
USED_EVERY_S = 60.0
"""A key's last use is written down this often at most."""

RETRY_QUOTA = "retire and collect what is not needed, or ask for a higher limit"


def add(tx: Transaction, name: str, limits: TenantLimits, *, actor: str) -> None:
    """Raises Conflict when there is such a tenant; one that was removed comes back, without its old keys."""
    row = tx.connection.execute(select(tables.tenants).where(t.name == name)).one_or_none()
    if row is not None and row.removed_at_s is None:
        raise Conflict(f"there is a tenant {name!r} already")
    revision = tx.record("tenant_added", actor=actor, tenant=name, limits=_told(limits))
    values: dict[str, Any] = {"limits": _stored(limits), "revision": revision, "removed_at_s": None}
    if row is None:
        tx.connection.execute(insert(tables.tenants).values(name=name, created_at_s=tx.now_s, **values))
    else:
        tx.connection.execute(update(tables.tenants).where(t.name == name).values(**values))


def set_limits(tx: Transaction, name: str, limits: TenantLimits, *, actor: str) -> None:
    """Replace a tenant's own limits. Raises TenantNotFound."""
    if _stored(_row(tx.connection, name).limits) == _stored(limits):
        return
    revision = tx.record("tenant_changed", actor=actor, tenant=name, limits=_told(limits))
    tx.connection.execute(
        update(tables.tenants).where(t.name == name).values(limits=_stored(limits), revision=revision)
    )


def remove(tx: Transaction, name: str, *, actor: str) -> None:
    """Revoke a tenant's keys and forget its limits.

    Raises TenantNotFound, and Conflict while it owns what is served.
    """
    _row(tx.connection, name)
    a, v = tables.adapters.c, tables.versions.c
    served = select(a.name).join(tables.versions, v.name == a.name).where(a.owner == name)
    served = served.where(v.state.in_((VersionState.ACTIVE, VersionState.DRAINING))).limit(1)
    owned = tx.connection.execute(served).scalar_one_or_none()
    if owned is not None:
        raise Conflict(f"the tenant {name!r} owns {owned!r}, which is in service; retire its adapters first")
    revision = tx.record("tenant_removed", actor=actor, tenant=name)
    live = (k.tenant == name, k.revoked_at_s.is_(None))
    tx.connection.execute(update(tables.keys).where(*live).values(revoked_at_s=tx.now_s, revision=revision))
    tx.connection.execute(
        update(tables.tenants).where(t.name == name).values(removed_at_s=tx.now_s, limits={}, revision=revision)
    )


def new_key(
    tx: Transaction, tenant: str, scopes: Sequence[Scope], *, expires_at_s: float | None, note: str, actor: str
) -> NewKey:
    """Raises TenantNotFound."""
    _row(tx.connection, tenant)
    minted = mint()
    allowed = tuple(scope for scope in Scope if scope in scopes)
    revision = tx.record(
        "key_made", actor=actor, tenant=tenant, key_id=minted.key_id, scopes=",".join(allowed), note=note
    )
    tx.connection.execute(
        insert(tables.keys).values(
            key_id=minted.key_id,
            tenant=tenant,
            salt=minted.salt,
            hash=minted.hash,
            scopes=list(allowed),
            note=note,
            created_at_s=tx.now_s,
            expires_at_s=expires_at_s,
            revision=revision,
        )
    )
    return NewKey(key=key(tx.connection, minted.key_id), secret=minted.text)


def rotate(tx: Transaction, key_id: str, *, overlap_s: float, expires_at_s: float | None, actor: str) -> NewKey:
    """A new key in place of an old one, which goes on for `overlap_s` seconds. Raises KeyNotFound, Conflict.

    What expires has no successor for ever: whoever wants one makes a new key.
    """
    old = key(tx.connection, key_id)
    if old.revoked_at_s is not None:
        raise Conflict(f"the key {key_id} was revoked; make a new one")
    if old.expires_at_s is not None and expires_at_s is None:
        raise Conflict(f"the key {key_id} expires, and so must its successor: say when (expires_in_s)")
    made = new_key(tx, old.tenant, old.scopes, expires_at_s=expires_at_s, note=old.note, actor=actor)
    ends_at_s = tx.now_s + overlap_s
    ends_at_s = ends_at_s if old.expires_at_s is None else min(ends_at_s, old.expires_at_s)
    revision = tx.record("key_rotated", actor=actor, tenant=old.tenant, key_id=key_id, successor=made.key.key_id)
    tx.connection.execute(
        update(tables.keys).where(k.key_id == key_id).values(expires_at_s=ends_at_s, revision=revision)
    )
    return made


def revoke(tx: Transaction, key_id: str, *, actor: str) -> None:
    """Refuse a key from now on; does nothing when that is so already. Raises KeyNotFound."""
    found = key(tx.connection, key_id)
    if found.revoked_at_s is None:
        revision = tx.record("key_revoked", actor=actor, tenant=found.tenant, key_id=key_id)
        values = {"revoked_at_s": tx.now_s, "revision": revision}
        tx.connection.execute(update(tables.keys).where(k.key_id == key_id).values(values))


def note_used(tx: Transaction, key_ids: Sequence[str]) -> None:
    """Write down that these keys were used. Takes no revision."""
    if key_ids:
        stale = or_(k.used_at_s.is_(None), k.used_at_s < tx.now_s - USED_EVERY_S)
        tx.connection.execute(update(tables.keys).where(k.key_id.in_(set(key_ids)), stale).values(used_at_s=tx.now_s))


def key(connection: Connection, key_id: str) -> KeyRecord:
    """Raises KeyNotFound."""
    row = connection.execute(select(*_KEY_COLUMNS).where(k.key_id == key_id)).one_or_none()
    if row is None:
        raise KeyNotFound(f"there is no key {key_id[:40]!r}")
    return _key(row)


def keys(connection: Connection, tenant: str | None) -> tuple[KeyRecord, ...]:
    """Every key there ever was, or those of one tenant, the oldest first."""
    where = true() if tenant is None else k.tenant == tenant
    rows = connection.execute(select(*_KEY_COLUMNS).where(where).order_by(k.created_at_s, k.key_id))
    return tuple(_key(row) for row in rows)


def tenant(connection: Connection, name: str, defaults: TenantLimits) -> TenantRecord:
    """Raises TenantNotFound."""
    return _tenant(connection, _row(connection, name), defaults)


def tenants(connection: Connection, defaults: TenantLimits) -> tuple[TenantRecord, ...]:
    """Every tenant that was not removed, by name."""
    rows = connection.execute(select(tables.tenants).where(t.removed_at_s.is_(None)).order_by(t.name)).all()
    return tuple(_tenant(connection, row, defaults) for row in rows)


def own_limits(connection: Connection, names: set[str]) -> dict[str, TenantLimits]:
    """Tenant -> what its row says, of those that have one."""
    rows = connection.execute(select(t.name, t.limits).where(t.name.in_(names), t.removed_at_s.is_(None)))
    return {name: TenantLimits.model_validate(limits) for name, limits in rows}


def access_after(connection: Connection, after: int, defaults: TenantLimits) -> Access | None:
    """Who may come in, or None when nothing about that has changed after this revision."""
    last = select(func.max(t.revision)).union_all(select(func.max(k.revision)))
    newest = max((revision for (revision,) in connection.execute(last) if revision is not None), default=0)
    if after > 0 and newest <= after:
        return None
    has_keys = connection.execute(select(k.key_id).limit(1)).first() is not None
    live = connection.execute(select(tables.keys).where(k.revoked_at_s.is_(None)))
    rows = connection.execute(select(t.name, t.limits).where(t.removed_at_s.is_(None)))
    return Access(
        has_keys=has_keys,
        keys=tuple(KeyHash.model_validate({name: row._mapping[name] for name in KeyHash.model_fields}) for row in live),
        limits={name: TenantLimits.model_validate(limits).over(defaults) for name, limits in rows},
        defaults=defaults,
    )


def check_quota(tx: Transaction, owner: str, defaults: TenantLimits) -> None:
    """Raises QuotaExceeded when the owner has more than it may, as things stand in this transaction."""
    where = (t.name == owner, t.removed_at_s.is_(None))
    own = tx.connection.execute(select(t.limits).where(*where)).scalar_one_or_none()
    limits = TenantLimits.model_validate(own or {}).over(defaults)
    if limits.max_adapters is None and limits.max_stored_bytes is None:
        return
    num_adapters, num_bytes = stored(tx.connection, owner)
    if limits.max_adapters is not None and num_adapters > limits.max_adapters:
        raise QuotaExceeded(f"this tenant may have {limits.max_adapters} adapters; {RETRY_QUOTA}", "max_adapters")
    if limits.max_stored_bytes is not None and num_bytes > limits.max_stored_bytes:
        message = f"with this upload the tenant would store {num_bytes} bytes; allowed: {limits.max_stored_bytes}"
        raise QuotaExceeded(f"{message}; {RETRY_QUOTA}", "max_stored_bytes")


def stored(connection: Connection, owner: str) -> tuple[int, int]:
    """How many adapters an owner has, and the bytes of their contents, of what was not collected."""
    a, v, m = tables.adapters.c, tables.versions.c, tables.manifests.c
    kept = select(v.name, v.digest).join(tables.adapters, a.name == v.name)
    kept = kept.where(a.owner == owner, v.state != VersionState.COLLECTED)
    names = connection.execute(select(func.count(kept.subquery().c.name.distinct()))).scalar_one()
    digests = select(kept.subquery().c.digest)
    size = connection.execute(select(func.coalesce(func.sum(m.num_bytes), 0)).where(m.digest.in_(digests)))
    return int(names), int(size.scalar_one())


_KEY_COLUMNS: tuple[ColumnElement[Any], ...] = tuple(k[name] for name in KeyRecord.model_fields)


def _key(row: Row[Any]) -> KeyRecord:
    return KeyRecord.model_validate(dict(row._mapping))


def _row(connection: Connection, name: str) -> Row[Any]:
    where = (t.name == name, t.removed_at_s.is_(None))
    row = connection.execute(select(tables.tenants).where(*where)).one_or_none()
    if row is None:
        raise TenantNotFound(f"there is no tenant {name[:80]!r}")
    return row


def _tenant(connection: Connection, row: Row[Any], defaults: TenantLimits) -> TenantRecord:
    limits = TenantLimits.model_validate(row.limits)
    num_adapters, num_bytes = stored(connection, row.name)
    return TenantRecord(
        name=row.name,
        created_at_s=row.created_at_s,
        limits=limits,
        effective=limits.over(defaults),
        num_adapters=num_adapters,
        stored_bytes=num_bytes,
    )


def _stored(limits: TenantLimits | dict[str, Any]) -> dict[str, Any]:
    return TenantLimits.model_validate(limits).model_dump(exclude_none=True)


def _told(limits: TenantLimits) -> str:
    return ", ".join(f"{name}={value}" for name, value in _stored(limits).items())
