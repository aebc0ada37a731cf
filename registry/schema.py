"""Brings a database to the schema that this program reads, step by step, in one transaction under a lock.

A database that is already there costs one query and does not load Alembic.
"""

from pathlib import Path

from sqlalchemy import Connection, inspect, select, text

from registry.errors import SchemaMismatch
from registry.tables import meta

HEAD = "0008"
FIRST = "0002"
"""The schema of databases from before steps were counted; `meta.schema_version` says 2 there."""

LOCK_KEY = 0x6C6F7261
SCRIPTS = Path(__file__).parent / "migrations"


def is_current(connection: Connection) -> bool:
    """Whether nothing is to be done. Raises SchemaMismatch for a schema that this program does not know."""
    found = stamped(connection)
    if found is not None and found != HEAD:
        _check_known(found)
    return found == HEAD


def stamped(connection: Connection) -> str | None:
    """The step that the database is at; None for an empty one, and for one from before steps were counted."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()


def upgrade(connection: Connection) -> None:
    """Carry out the missing steps in the caller's transaction, which holds off other writers.

    Raises SchemaMismatch, and changes nothing, for a database that this program cannot read.
    """
    from alembic import command
    from alembic.config import Config

    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
    if is_current(connection):
        return
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    config.attributes["connection"] = connection
    if stamped(connection) is None and inspect(connection).has_table(meta.name):
        _check_uncounted(connection)
        command.stamp(config, FIRST)
    command.upgrade(config, HEAD)


def _check_known(found: str) -> None:
    known = sorted(path.name[1:5] for path in (SCRIPTS / "versions").glob("r*.py"))
    if found not in known:
        raise SchemaMismatch(
            f"the database has schema {found}; this program knows {known[0]} to {HEAD}: run the release that wrote it,"
            " or a newer one"
        )


def _check_uncounted(connection: Connection) -> None:
    found = connection.execute(select(meta.c.schema_version)).scalar_one_or_none()
    if found != int(FIRST):
        raise SchemaMismatch(f"the database has schema {found}; this program reads {int(FIRST)} to {int(HEAD)}")
