"""The collector: retires versions beyond the retention rules, and removes the bytes of those nobody can use any more.

Decisions and deletions happen under the lock that writers share, one version or blob a transaction, so an upload of
the same content either keeps its bytes or stores them again.
"""

from collections.abc import Iterable, Iterator, Sequence

from sqlalchemy import Connection, Row, or_, select, update

from registry import draining, records, tables
from registry.blobs import BlobStore
from registry.config import RetentionConfig
from registry.database import Database, Transaction
from registry.types import (
    AdapterRecord,
    CollectAction,
    CollectItem,
    CollectReport,
    ReplicaRecord,
    VersionState,
)

USED_EVERY_S = 60.0
"""A version's last use is written down this often at most."""

v = tables.versions.c
m = tables.manifests.c
AnyRow = Row[tuple[object, ...]]


def note_used(tx: Transaction, digests: Sequence[str]) -> None:
    """Write down that requests were resolved to these versions. Takes no revision."""
    if digests:
        stale = or_(v.used_at_s.is_(None), v.used_at_s < tx.now_s - USED_EVERY_S)
        where = (v.digest.in_(set(digests)), stale)
        tx.connection.execute(update(tables.versions).where(*where).values(used_at_s=tx.now_s))


class Collector:
    """One run over one database and its blobs."""

    def __init__(
        self, database: Database, blobs: BlobStore, retention: RetentionConfig, retire_deadline_s: float
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._retention = retention
        self._retire_deadline_s = retire_deadline_s

    def run(self, *, actor: str, dry_run: bool) -> CollectReport:
        """What went, or with `dry_run` would go, and what is due and held."""
        items = []
        for planned in self._plan():
            done = planned if dry_run else self._carry_out(planned, actor)
            if done is not None:
                items.append(done)
        items.extend(self._sweep(dry_run))
        # What was collected is among what was swept; a dry run sweeps nothing and counts what would be collected.
        counted = {CollectAction.SWEEP, *([CollectAction.COLLECT] if dry_run else [])}
        freed_bytes = sum(item.num_bytes for item in items if item.action in counted)
        return CollectReport(dry_run=dry_run, items=tuple(items), freed_bytes=freed_bytes)

    def _plan(self) -> list[CollectItem]:
        with self._database.read() as connection:
            replicas, now_s = records.replicas(connection), self._database.now_s()
            every = records.adapters_after(connection, 0)
            return [item for adapter in every for item in self._due(connection, adapter, replicas, now_s)]

    def _due(
        self, connection: Connection, adapter: AdapterRecord, replicas: Sequence[ReplicaRecord], now_s: float
    ) -> Iterator[CollectItem]:
        """Everything of one adapter that is past its retention, the oldest first."""
        query = select(tables.versions, m.num_bytes).join(tables.manifests).where(v.name == adapter.name)
        rows = connection.execute(query.order_by(v.number)).all()
        newest = [row.number for row in rows if row.state == VersionState.ACTIVE]
        newest = newest[-self._retention.keep_versions :] if self._retention.keep_versions else newest
        for row in rows:
            why = self._why_due(row, row.number in newest, now_s)
            if why is not None:
                yield self._judge(row, why, _holders(adapter, row, replicas), now_s)

    def _why_due(self, row: AnyRow, is_kept: bool, now_s: float) -> str | None:
        """Why the rules let the version go; None when they do not, whatever holds it."""
        rules, used_at_s = self._retention, row.used_at_s or row.created_at_s
        if row.state not in (VersionState.ACTIVE, VersionState.RETIRED) or is_kept:
            return None
        if now_s - row.created_at_s < rules.min_age_s or now_s - used_at_s < rules.unused_s:
            return None
        beyond = "retired" if row.state == VersionState.RETIRED else f"beyond the newest {rules.keep_versions}"
        use = "never used" if row.used_at_s is None else f"last used {_age(now_s - row.used_at_s)} ago"
        return f"{beyond}, {_age(now_s - row.created_at_s)} old, {use}"

    def _judge(self, row: AnyRow, why: str, holders: Sequence[str], now_s: float) -> CollectItem:
        action = CollectAction.RETIRE
        if row.state == VersionState.RETIRED:
            action = CollectAction.COLLECT
            holders = [*holders, *self._in_grace(row, now_s)]
        if holders:
            action, why = CollectAction.KEEP, f"{why}; held by {', '.join(holders)}"
        about = {"name": row.name, "number": row.number, "digest": row.digest, "num_bytes": row.num_bytes}
        return CollectItem(action=action, why=why, **about)

    def _in_grace(self, row: AnyRow, now_s: float) -> Iterator[str]:
        if row.quiet_at_s is None:
            yield "a gateway or replica that has not seen its end"
        elif now_s - row.quiet_at_s < self._retention.grace_s:
            yield f"the grace period, for {_age(self._retention.grace_s - (now_s - row.quiet_at_s))} more"

    def _carry_out(self, planned: CollectItem, actor: str) -> CollectItem | None:
        """Decide once more, under the lock, and do it; None when it is no longer due."""
        assert planned.name is not None
        with self._database.write() as tx:
            replicas = records.replicas(tx.connection)
            adapter = records.adapter(tx.connection, planned.name)
            due = self._due(tx.connection, adapter, replicas, tx.now_s)
            item = next((item for item in due if item.number == planned.number), None)
            if item is not None and item.action is CollectAction.RETIRE:
                self._retire(tx, adapter, item, actor)
            elif item is not None and item.action is CollectAction.COLLECT:
                self._collect(tx, item, actor)
            return item

    def _retire(self, tx: Transaction, adapter: AdapterRecord, item: CollectItem, actor: str) -> None:
        version = adapter.version(item.number or 0)
        assert version is not None
        draining.begin(tx, adapter.name, version, actor=actor, deadline_s=self._retire_deadline_s)

    def _collect(self, tx: Transaction, item: CollectItem, actor: str) -> None:
        """The row says first that the bytes are gone: bytes without a row are swept, a row without bytes is damage."""
        where = (v.name == item.name, v.number == item.number)
        tx.connection.execute(update(tables.versions).where(*where).values(state=VersionState.COLLECTED))
        tx.record("version_collected", actor=actor, name=item.name, number=item.number, digest=item.digest)

    def _sweep(self, dry_run: bool) -> Iterator[CollectItem]:
        """Blobs that no row needs, once they are older than the grace period."""
        with self._database.read() as connection:
            needed = _needed_blobs(connection)
        oldest_s = self._database.now_s() - self._retention.grace_s
        for blob in self._blobs.list():
            if blob.sha256 in needed or blob.modified_at_s is None or blob.modified_at_s > oldest_s:
                continue
            if dry_run or self._remove(blob.sha256):
                yield CollectItem(
                    action=CollectAction.SWEEP,
                    why="no version needs this blob",
                    num_bytes=blob.num_bytes,
                    blob_sha256=blob.sha256,
                )

    def _remove(self, sha256: str) -> bool:
        with self._database.write() as tx:
            if sha256 in _needed_blobs(tx.connection, sha256):
                return False
            self._blobs.delete(sha256)
            return True


def _needed_blobs(connection: Connection, only: str | None = None) -> frozenset[str]:
    """The blobs that versions and the base's tokenizer need; with `only`, at most that one."""
    base = records.base_spec(connection)
    return records.needed_blobs(connection, only) | ({base.tokenizer_sha256} if base is not None else set())


def _holders(adapter: AdapterRecord, row: AnyRow, replicas: Iterable[ReplicaRecord]) -> list[str]:
    """What still needs the version, in words."""
    number = row.number
    holders = [f"alias {alias}" for alias, target in adapter.aliases.items() if target == number]
    holders += [f"the canary of {alias}" for alias, canary in adapter.canaries.items() if canary.number == number]
    if row.state == VersionState.ACTIVE:  # a rollback does not go to a version that was retired
        holders += [f"the way back of {alias}" for alias, target in adapter.previous.items() if target == number]
    if row.digest in adapter.pending:
        holders.append("a pending activation")
    holders += [f"requests on {replica.replica_id}" for replica in replicas if row.digest in replica.running]
    return holders


def _age(seconds: float) -> str:
    days, rest = divmod(max(0, int(seconds)), 24 * 3600)
    if days:
        return f"{days} d"
    hours, rest = divmod(rest, 3600)
    return f"{hours} h" if hours else f"{rest // 60} min" if rest >= 60 else f"{rest} s"
