"""Transactions. Every change takes the next revision from one counter row, inside its own transaction.

Writers are serialised by that row (on SQLite by BEGIN IMMEDIATE), so revisions commit in order and two registries
on one database never disagree.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, create_engine, event, insert, select, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, OperationalError

from registry import schema
from registry.audit import entry_hash
from registry.errors import RegistryUnavailable
from registry.tables import adapters, events, meta
from registry.types import Event

logger = logging.getLogger(__name__)
CREATE_ATTEMPTS = 50


class Transaction:
    """One atomic change. `revision` is the counter's value so far; `record` takes the next one."""

    def __init__(self, connection: Connection, now_s: float, revision: int, audit_hash: str) -> None:
        self.connection = connection
        self.now_s = now_s
        self.revision = revision
        self._audit_hash = audit_hash
        self.entries: list[Event] = []
        """What was recorded so far."""

    def record(
        self,
        kind: str,
        *,
        actor: str,
        name: str | None = None,
        number: int | None = None,
        digest: str | None = None,
        **detail: str,
    ) -> int:
        """Append to the change log under a new revision and return it; a named adapter gets that revision too."""
        self.revision += 1
        entry = Event(
            revision=self.revision,
            at_s=self.now_s,
            kind=kind,
            name=name,
            number=number,
            digest=digest,
            actor=actor,
            detail=detail,
        )
        self._audit_hash = entry_hash(self._audit_hash, entry)
        self.entries.append(entry)
        self.connection.execute(update(meta).values(revision=self.revision, audit_hash=self._audit_hash))
        self.connection.execute(insert(events).values(**entry.model_dump(), hash=self._audit_hash))
        if name is not None:
            self.connection.execute(update(adapters).where(adapters.c.name == name).values(revision=self.revision))
        return self.revision


class Database:
    """Opens the database at `url`, creating its tables, and hands out transactions. Safe for many threads."""

    def __init__(self, url: str, *, busy_timeout_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._is_sqlite = make_url(url).get_backend_name() == "sqlite"
        self._engine = (
            _sqlite_engine(url, busy_timeout_s) if self._is_sqlite else create_engine(url, pool_pre_ping=True)
        )
        self._create_tables()

    def __repr__(self) -> str:
        return f"Database({self._engine.url.render_as_string(hide_password=True)!r}, {self._engine.pool.status()})"

    def close(self) -> None:
        self._engine.dispose()

    def now_s(self) -> float:
        """Seconds since the epoch, by the clock that all registries share."""
        return self._clock()

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """A serialised read-write transaction, committed unless the block raises.

        The lock on the counter row comes first. On PostgreSQL the queries after it see what is committed at their own
        time (READ COMMITTED), and nobody else commits while the lock is held: so the block sees one moment.
        """
        with self._connected() as connection, connection.begin():
            query = select(meta.c.revision, meta.c.audit_hash).with_for_update()
            row = connection.execute(query).one()
            tx = Transaction(connection, self._clock(), row.revision, row.audit_hash)
            yield tx
        for entry in tx.entries:
            _log(entry)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A snapshot: every query in the block sees the same moment."""
        with self._connected(begin="BEGIN") as connection:
            if not self._is_sqlite:
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection

    @contextmanager
    def _connected(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[Connection]:
        """A connection. A server that cannot be reached is RegistryUnavailable: the call may be repeated."""
        try:
            with self._engine.connect().execution_options(begin=begin) as connection:
                yield connection
        except DBAPIError as error:
            if self._is_sqlite or not (error.connection_invalidated or isinstance(error, OperationalError)):
                raise
            raise RegistryUnavailable(f"the database cannot be reached: {error.orig}") from error

    def _create_tables(self) -> None:
        """Bring the schema up to date; SQLite may be busy while another process does the same."""
        for attempt in range(CREATE_ATTEMPTS):
            try:
                self._upgrade()
                return
            except OperationalError:
                if attempt == CREATE_ATTEMPTS - 1:
                    raise
                time.sleep(0.1)

    def _upgrade(self) -> None:
        with self._connected(begin="BEGIN") as connection, connection.begin():
            if schema.is_current(connection):
                return
        with self._connected() as connection, connection.begin():
            schema.upgrade(connection)


def _log(entry: Event) -> None:
    """A change that was committed, as a line in the log."""
    digest = None if entry.digest is None else entry.digest[:12]
    fields = {"revision": entry.revision, "adapter": entry.name, "version": entry.number, "digest": digest}
    logger.info(entry.kind, extra={"fields": {**fields, "actor": entry.actor, **entry.detail}})


def _sqlite_engine(url: str, busy_timeout_s: float) -> Engine:
    """An engine whose transactions begin when we say so, and whose commits are on disk when they return."""
    connect_args = {"timeout": busy_timeout_s, "check_same_thread": False}
    engine = create_engine(url, pool_size=8, max_overflow=56, connect_args=connect_args)

    @event.listens_for(engine, "connect")
    def _prepare(connection: object, _record: object) -> None:
        connection.isolation_level = None  # type: ignore[attr-defined]
        cursor = connection.cursor()  # type: ignore[attr-defined]
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))

    return engine
