"""Draining and collected versions, canaries, and the change log as a chain of hashes: schema 3."""

import sqlalchemy as sa
from alembic import op

from registry.audit import GENESIS, entry_hash
from registry.types import Event

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

BATCH = 1000


def upgrade() -> None:
    for column in ("closed_revision", "closed_at_s", "drain_until_s", "quiet_at_s", "used_at_s"):
        kind = sa.BigInteger() if column == "closed_revision" else sa.Float()
        op.add_column("versions", sa.Column(column, kind))
    op.create_index("versions_by_state", "versions", ["state"])
    op.add_column("aliases", sa.Column("previous_number", sa.Integer))
    op.add_column("aliases", sa.Column("canary_number", sa.Integer))
    op.add_column("aliases", sa.Column("canary_weight", sa.Float))
    op.add_column("activations", sa.Column("weight", sa.Float))
    op.add_column("replicas", sa.Column("running", sa.JSON, nullable=False, server_default="[]"))
    op.add_column("replicas", sa.Column("drained", sa.Text))
    op.add_column("events", sa.Column("hash", sa.String(64), nullable=False, server_default=""))
    op.add_column("meta", sa.Column("audit_hash", sa.String(64), nullable=False, server_default=GENESIS))
    _note_closed_versions()
    _chain_events()
    op.execute("UPDATE meta SET schema_version = 3")


def _note_closed_versions() -> None:
    """Versions that were out of service already may be collected as if they had been closed at this revision."""
    op.execute(
        "UPDATE versions SET closed_revision = (SELECT revision FROM meta), closed_at_s = created_at_s"
        " WHERE state <> 'active'"
    )


def _chain_events() -> None:
    connection, after, last = op.get_bind(), 0, GENESIS
    names = [name for name in (*Event.model_fields, "hash") if name != "detail"]
    events = sa.table("events", sa.column("detail", sa.JSON), *[sa.column(name) for name in names])
    columns = [events.c[name] for name in Event.model_fields]
    while True:
        query = sa.select(*columns).where(events.c.revision > after).order_by(events.c.revision).limit(BATCH)
        rows = connection.execute(query).all()
        if not rows:
            break
        for row in rows:
            event = Event.model_validate(dict(row._mapping))
            after, last = event.revision, entry_hash(last, event)
            connection.execute(sa.update(events).where(events.c.revision == after).values(hash=last))
    connection.execute(sa.text("UPDATE meta SET audit_hash = :hash"), {"hash": last})
