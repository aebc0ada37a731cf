"""Whose an adapter is: what a caller may not call does not exist for it, and only owners and admins change things."""

from typing import Protocol

from registry.errors import AdapterNotFound
from registry.types import AdapterAccess, AdapterRecord
from router.auth import Principal
from router.errors import PermissionDenied


class AccessSource(Protocol):
    async def access_of(self, name: str) -> AdapterAccess | None: ...


async def see(registry: AccessSource, caller: Principal, name: str) -> AdapterAccess:
    """Whose the adapter is. Raises AdapterNotFound, in the same words and after the same work, whether there is none
    or this caller may not know of it."""
    access = await registry.access_of(name)
    if access is None or not may_see(access, caller):
        raise AdapterNotFound(f"there is no adapter {name[:80]!r}")
    return access


async def own(registry: AccessSource, caller: Principal, name: str) -> AdapterAccess:
    """As `see`, for whoever wants to change it. Raises PermissionDenied for those that may only call it."""
    access = await see(registry, caller, name)
    if not may_change(access, caller):
        raise PermissionDenied(f"the adapter {name!r} belongs to another tenant, which alone may change it")
    return access


def may_see(access: AdapterAccess, caller: Principal) -> bool:
    return caller.is_admin or access.may_call(caller.tenant)


def may_change(access: AdapterAccess, caller: Principal) -> bool:
    return caller.is_admin or access.owner == caller.tenant


def shown_to(record: AdapterRecord, caller: Principal) -> AdapterRecord:
    """The record without the names of other tenants that may call it, unless it is the caller's own."""
    if caller.is_admin or record.owner == caller.tenant:
        return record
    mine = tuple(name for name in record.callers if name in (caller.tenant, "*"))
    return record.model_copy(update={"callers": mine})


def access_of(record: AdapterRecord) -> AdapterAccess:
    return AdapterAccess(owner=record.owner, callers=record.callers)
