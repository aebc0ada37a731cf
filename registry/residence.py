"""What is kept at hand whoever asks: pinned adapters, and adapters that are brought to their homes by the clock."""

from sqlalchemy import func, select, update

from registry import records, tables
from registry.database import Transaction
from registry.errors import Conflict
from registry.types import Preload

a = tables.adapters.c


def pin(tx: Transaction, name: str, *, actor: str) -> None:
    """Keep the adapter's live version in a slot of every replica. Raises AdapterNotFound, and Conflict when no replica
    would have a slot left for the others."""
    if records.adapter(tx.connection, name).pinned:
        return
    _check_room(tx, name)
    tx.connection.execute(update(tables.adapters).where(a.name == name).values(pinned=True))
    tx.record("adapter_pinned", actor=actor, name=name)


def unpin(tx: Transaction, name: str, *, actor: str) -> None:
    """Let the adapter leave its slots when others need them. Raises AdapterNotFound."""
    if not records.adapter(tx.connection, name).pinned:
        return
    tx.connection.execute(update(tables.adapters).where(a.name == name).values(pinned=False))
    tx.record("adapter_unpinned", actor=actor, name=name)


def set_preload(tx: Transaction, name: str, preload: Preload | None, *, actor: str) -> None:
    """Say when the adapter is brought to its homes; None ends it. Raises AdapterNotFound."""
    if records.adapter(tx.connection, name).preload == preload:
        return
    value = None if preload is None else preload.model_dump(exclude_none=True)
    tx.connection.execute(update(tables.adapters).where(a.name == name).values(preload=value))
    when = "" if preload is None else preload.at or f"every {preload.every_s:g} s"
    tx.record("preload_changed", actor=actor, name=name, when=when)


def _check_room(tx: Transaction, name: str) -> None:
    """Each replica needs a slot that is not pinned, or requests for other adapters would wait for ever."""
    replicas = records.replicas(tx.connection)
    if not replicas:
        return
    smallest = min(replicas, key=lambda replica: replica.num_slots)
    num_pinned = tx.connection.execute(select(func.count()).select_from(tables.adapters).where(a.pinned)).scalar_one()
    if num_pinned + 1 > smallest.num_slots - 1:
        raise Conflict(
            f"{name} cannot be pinned: {num_pinned} adapters are, and replica {smallest.replica_id} has"
            f" {smallest.num_slots} slots, of which one must stay free for the others"
        )
