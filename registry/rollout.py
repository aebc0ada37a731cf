"""Canaries of aliases, and the removal of aliases. Every function runs inside the caller's transaction.

A canary is an activation with a weight: it is staged everywhere before it takes its first request.
"""

from sqlalchemy import delete, select, update

from registry import activations, records, tables
from registry.database import Transaction
from registry.errors import AdapterNotFound, Conflict
from registry.types import ActivationState, AdapterRecord, Canary

a = tables.activations.c
al = tables.aliases.c


def start(
    tx: Transaction,
    name: str,
    alias: str,
    number: int,
    weight: float,
    *,
    actor: str,
    expected_revision: int | None = None,
) -> int:
    """Ask that version `number` take the share `weight` of the keys of `alias`; returns the activation's id.

    Raises AdapterNotFound, and Conflict when the version is what the alias points at, or out of service.
    """
    record = _with_alias(tx, name, alias)
    if record.aliases[alias] == number:
        raise Conflict(f"{name}@{alias} points at version {number} already; a canary is another version")
    return activations.request(tx, name, alias, number, actor=actor, expected_revision=expected_revision, weight=weight)


def promote(tx: Transaction, name: str, alias: str, *, actor: str, expected_revision: int | None = None) -> int:
    """Ask that the alias move to its canary. Raises AdapterNotFound, and Conflict without a canary."""
    number = _canary(_with_alias(tx, name, alias), alias).number
    return activations.request(tx, name, alias, number, actor=actor, expected_revision=expected_revision)


def halt(tx: Transaction, name: str, alias: str, *, actor: str, expected_revision: int | None = None) -> None:
    """Send every request to the version that the alias points at, now; a canary that is still staged is called off.

    Raises AdapterNotFound, and Conflict when there is no canary.
    """
    record = _with_alias(tx, name, alias)
    activations.check_revision(record, expected_revision)
    waiting = (a.name == name, a.alias == alias, a.state == ActivationState.PENDING, a.weight.is_not(None))
    number = tx.connection.execute(select(a.number).where(*waiting)).scalar_one_or_none()
    if number is None or alias in record.canaries:
        number = _canary(record, alias).number
    tx.connection.execute(update(tables.activations).where(*waiting).values(state=ActivationState.SUPERSEDED))
    _end(tx, name, alias, number, actor)


def drop_version(tx: Transaction, name: str, number: int, *, actor: str) -> None:
    """End every canary that is this version."""
    for alias, canary in records.adapter(tx.connection, name).canaries.items():
        if canary.number == number:
            _end(tx, name, alias, number, actor)


def remove_alias(tx: Transaction, name: str, alias: str, *, actor: str, expected_revision: int | None = None) -> None:
    """Remove an alias with its canary and whatever waits for it. Raises AdapterNotFound, Conflict."""
    record = _with_alias(tx, name, alias)
    activations.check_revision(record, expected_revision)
    activations.supersede(tx, name, alias)
    tx.connection.execute(delete(tables.aliases).where(al.name == name, al.alias == alias))
    tx.record("alias_removed", actor=actor, name=name, number=record.aliases[alias], alias=alias)


def _end(tx: Transaction, name: str, alias: str, number: int, actor: str) -> None:
    activations.set_canary(tx, name, alias, None, None)
    tx.record("canary_halted", actor=actor, name=name, number=number, alias=alias)


def _with_alias(tx: Transaction, name: str, alias: str) -> AdapterRecord:
    record = records.adapter(tx.connection, name)
    if alias not in record.aliases:
        raise AdapterNotFound(f"{name} has no alias {alias!r}")
    return record


def _canary(record: AdapterRecord, alias: str) -> Canary:
    canary = record.canaries.get(alias)
    if canary is None:
        raise Conflict(f"{record.name}@{alias} has no canary")
    return canary
