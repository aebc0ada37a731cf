"""Tenants, keys, access lists and shared limits as the registry offers them. Knows nothing of HTTP and of Ray."""

from collections.abc import Sequence

from sqlalchemy import select

from registry import sharing, tables, tenants, versions
from registry.config import RegistryConfig
from registry.database import Database
from registry.errors import AdapterNotFound, InvalidAdapter
from registry.types import (
    EVERYBODY,
    AdapterAccess,
    Fault,
    KeyRecord,
    LimitShare,
    LimitUse,
    NewKey,
    Scope,
    TenantLimits,
    TenantRecord,
    is_adapter_name,
)


class Tenants:
    """Every method is one transaction, safe to call from any thread."""

    def __init__(self, config: RegistryConfig, database: Database) -> None:
        self._database = database
        self._defaults = config.tenant_defaults

    def __repr__(self) -> str:
        return f"Tenants({self._database!r})"

    def add(self, name: str, limits: TenantLimits, *, actor: str) -> TenantRecord:
        """Raises Conflict when there is such a tenant, InvalidAdapter for a bad name."""
        check_tenant_name(name)
        with self._database.write() as tx:
            tenants.add(tx, name, limits, actor=actor)
            return tenants.tenant(tx.connection, name, self._defaults)

    def set_limits(self, name: str, limits: TenantLimits, *, actor: str) -> TenantRecord:
        """Replace a tenant's own limits. Raises TenantNotFound."""
        with self._database.write() as tx:
            tenants.set_limits(tx, name, limits, actor=actor)
            return tenants.tenant(tx.connection, name, self._defaults)

    def remove(self, name: str, *, actor: str) -> None:
        """Revoke its keys and forget it. Raises TenantNotFound, and Conflict while it owns what is served."""
        with self._database.write() as tx:
            tenants.remove(tx, name, actor=actor)

    def every(self) -> tuple[TenantRecord, ...]:
        with self._database.read() as connection:
            return tenants.tenants(connection, self._defaults)

    def one(self, name: str) -> TenantRecord:
        """Raises TenantNotFound."""
        with self._database.read() as connection:
            return tenants.tenant(connection, name, self._defaults)

    def new_key(
        self, tenant: str, scopes: Sequence[Scope], *, expires_at_s: float | None, note: str, actor: str
    ) -> NewKey:
        """A key whose secret is in the answer and nowhere else. Raises TenantNotFound."""
        with self._database.write() as tx:
            return tenants.new_key(tx, tenant, scopes, expires_at_s=expires_at_s, note=note, actor=actor)

    def rotate_key(self, key_id: str, *, overlap_s: float, expires_at_s: float | None, actor: str) -> NewKey:
        """A successor; the old key goes on for `overlap_s` seconds. Raises KeyNotFound, Conflict."""
        with self._database.write() as tx:
            return tenants.rotate(tx, key_id, overlap_s=overlap_s, expires_at_s=expires_at_s, actor=actor)

    def revoke_key(self, key_id: str, *, actor: str) -> KeyRecord:
        """Raises KeyNotFound."""
        with self._database.write() as tx:
            tenants.revoke(tx, key_id, actor=actor)
            return tenants.key(tx.connection, key_id)

    def keys(self, tenant: str | None = None) -> tuple[KeyRecord, ...]:
        """Every key, or a tenant's, revoked and expired ones too."""
        with self._database.read() as connection:
            return tenants.keys(connection, tenant)

    def first_key(self, tenant: str, *, note: str) -> NewKey:
        """An admin's key for whoever has the database in hand; the tenant is made if there is none."""
        check_tenant_name(tenant)
        with self._database.write() as tx:
            if tenant not in tenants.own_limits(tx.connection, {tenant}):
                tenants.add(tx, tenant, TenantLimits(), actor="console")
            return tenants.new_key(tx, tenant, tuple(Scope), expires_at_s=None, note=note, actor="console")

    def access_of(self, name: str) -> AdapterAccess | None:
        """Whose an adapter is: one row by its key, so that it takes as long for a name that nobody has."""
        a = tables.adapters.c
        with self._database.read() as connection:
            row = connection.execute(select(a.owner, a.callers).where(a.name == name)).one_or_none()
        return None if row is None else AdapterAccess(owner=row.owner, callers=tuple(row.callers))

    def set_callers(self, name: str, callers: Sequence[str], *, actor: str) -> AdapterAccess:
        """Say which tenants, besides the owner, may call `name`; `*` is everybody. Raises AdapterNotFound."""
        for caller in callers:
            if caller != EVERYBODY:
                check_tenant_name(caller)
        with self._database.write() as tx:
            versions.set_callers(tx, name, tuple(dict.fromkeys(callers)), actor=actor)
        found = self.access_of(name)
        if found is None:
            raise AdapterNotFound(f"there is no adapter {name[:80]!r}")
        return found

    def share_limits(
        self, gateway_id: str, number: int, uses: Sequence[LimitUse], used_keys: Sequence[str] = ()
    ) -> tuple[LimitShare, ...] | None:
        """Take a gateway's word on what it holds and wants of shared limits, and give it its parts; None when its
        lease is gone. `number` grows from 1 with its messages: of one that was overtaken by a later one only
        `used_keys` counts, the keys that it has seen since it last said so."""
        with self._database.write() as tx:
            tenants.note_used(tx, used_keys)
            return sharing.share(tx, gateway_id, number, uses, self._defaults)


def check_tenant_name(name: str) -> None:
    """Raises InvalidAdapter unless `name` may name a tenant: the grammar is that of adapters."""
    if not is_adapter_name(name):
        message = f"{name[:80]!r} is no tenant's name: 1 to 64 of A-Z a-z 0-9 . _ -, alphanumeric at both ends, no .."
        raise InvalidAdapter((Fault(code="name", message=message, field="tenant"),))
