"""What requests used, stored by hour, tenant and version: batches taken once each, and sums over them.

Every batch is one transaction with the number of its source's last one, so that a batch which is sent again after a
lost answer, a restart or a kill counts once. Takes no revision: use is no change of the catalog.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, cast, delete, func, literal_column, select
from sqlalchemy.dialects import postgresql, sqlite

from registry import tables
from registry.config import RetentionConfig
from registry.database import Database, Transaction
from registry.usage_records import DAY_S, HOUR_S, UsageBatch, UsageGroup, UsageReport, UsageRow

MAX_ROWS = 10_000
SOURCE_KEPT_S = 7.0 * DAY_S
"""How long the number of a source's last batch is remembered after it was heard last."""

u = tables.usage.c
s = tables.usage_sources.c
COUNTS = ("requests", "prompt_tokens", "output_tokens", "device_ns")
COLUMNS: dict[UsageGroup, tuple[tuple[str, ColumnElement[Any]], ...]] = {
    UsageGroup.HOUR: (("start_s", u.hour_s),),
    UsageGroup.DAY: (("start_s", u.hour_s - u.hour_s % literal_column(str(DAY_S))),),
    UsageGroup.TENANT: (("tenant", u.tenant),),
    UsageGroup.ADAPTER: (("adapter", u.name),),
    UsageGroup.VERSION: (("adapter", u.name), ("version", u.number), ("digest", u.digest)),
}
"""What each group adds to a row."""


class Usage:
    """Every method is one transaction, safe to call from any thread."""

    def __init__(self, retention: RetentionConfig, database: Database) -> None:
        self._kept_s = retention.usage_s
        self._database = database

    def __repr__(self) -> str:
        return f"Usage({self._database!r})"

    def take(self, batch: UsageBatch) -> int:
        """Add a batch unless it is there already; returns the number of the source's last batch.

        What is past its retention goes in the same transaction.
        """
        with self._database.write() as tx:
            last = tx.connection.execute(select(s.sequence).where(s.source == batch.source)).scalar_one_or_none() or 0
            if batch.sequence > last:
                _add(tx.connection, batch)
                last = batch.sequence
            _note_source(tx, batch.source, last)
            tx.connection.execute(delete(tables.usage).where(u.hour_s < int(tx.now_s - self._kept_s)))
            return last

    def report(
        self,
        *,
        from_s: int | None,
        to_s: int | None,
        tenant: str | None = None,
        group_by: Sequence[UsageGroup] = (UsageGroup.TENANT, UsageGroup.VERSION),
        limit: int = MAX_ROWS,
    ) -> UsageReport:
        """Sums over the hours that begin in [from_s, to_s), of one tenant or all; at most `limit` rows."""
        first_s = 0 if from_s is None else from_s
        last_s = int(self._database.now_s()) + HOUR_S if to_s is None else to_s
        columns = dict(column for group in group_by for column in COLUMNS[group])
        where = [u.hour_s >= first_s, u.hour_s < last_s, *([] if tenant is None else [u.tenant == tenant])]
        sums = [cast(func.coalesce(func.sum(u[name]), 0), u[name].type).label(name) for name in COUNTS]
        query = select(*(column.label(name) for name, column in columns.items()), *sums).where(*where)
        query = query.group_by(*columns.values()).order_by(*columns.values()).limit(limit + 1)
        with self._database.read() as connection:
            rows = [_row(found) for found in connection.execute(query).mappings()]
        return UsageReport(
            from_s=first_s,
            to_s=last_s,
            group_by=tuple(group_by),
            rows=tuple(rows[:limit]),
            is_whole=len(rows) <= limit,
        )


def _add(connection: Connection, batch: UsageBatch) -> None:
    """Add to the rows that are there, and insert the others; the caller's transaction holds the lock."""
    rows = [_stored(entry.model_dump()) for entry in batch.entries]
    if rows:
        insert = _insert(connection, tables.usage)
        grown = {name: u[name] + insert.excluded[name] for name in COUNTS}
        keys = [column.name for column in tables.usage.primary_key.columns]
        connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=grown), rows)


def _note_source(tx: Transaction, source: str, sequence: int) -> None:
    insert = _insert(tx.connection, tables.usage_sources)
    values = {"sequence": sequence, "seen_at_s": tx.now_s}
    noted = insert.values(source=source, **values).on_conflict_do_update(index_elements=["source"], set_=values)
    tx.connection.execute(noted)
    tx.connection.execute(delete(tables.usage_sources).where(s.seen_at_s < tx.now_s - SOURCE_KEPT_S))


def _insert(connection: Connection, table: Any) -> Any:
    """An INSERT that can say ON CONFLICT; both databases have it, each in a class of its own."""
    return (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)


def _stored(entry: dict[str, Any]) -> dict[str, Any]:
    """A primary key holds no NULL: the base model is an empty name."""
    blank = {"name": "", "number": 0, "digest": ""}
    return {key: blank[key] if value is None else value for key, value in entry.items()}


def _row(found: Any) -> UsageRow:
    blank = {"adapter": "", "version": 0, "digest": ""}
    values: dict[str, Any] = {key: None if value == blank.get(key) else value for key, value in found.items()}
    return UsageRow(**values)
