"""The tables as they were before steps were counted: schema 2."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _catalog()
    _aliases()
    _members()
    op.create_table(
        "events",
        sa.Column("revision", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("at_s", sa.Float, nullable=False),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("name", sa.String(64)),
        sa.Column("number", sa.Integer),
        sa.Column("digest", sa.String(64)),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
    )


def _catalog() -> None:
    meta = op.create_table(
        "meta",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("schema_version", sa.Integer, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.bulk_insert(meta, [{"id": 1, "schema_version": 2, "revision": 0}])
    op.create_table(
        "base",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "adapters",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("callers", sa.JSON, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
        sa.Column("created_at_s", sa.Float, nullable=False),
    )
    op.create_table(
        "manifests",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("manifest", sa.Text, nullable=False),
        sa.Column("blob_sha256", sa.String(64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("max_rank", sa.Integer, nullable=False),
        sa.Column("target_names", sa.JSON, nullable=False),
    )
    op.create_table(
        "versions",
        sa.Column("name", sa.String(64), sa.ForeignKey("adapters.name"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("digest", sa.String(64), sa.ForeignKey("manifests.digest"), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_at_s", sa.Float, nullable=False),
        sa.UniqueConstraint("name", "digest"),
    )


def _aliases() -> None:
    version = (["name", "number"], ["versions.name", "versions.number"])
    op.create_table(
        "aliases",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("alias", sa.String(32), primary_key=True),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(*version),
    )
    op.create_table(
        "alias_history",
        sa.Column("revision", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("alias", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
    )
    op.create_index("alias_history_by_alias", "alias_history", ["name", "alias"])
    op.create_table(
        "activations",
        sa.Column("activation_id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("alias", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False, index=True),
        sa.Column("requested_at_s", sa.Float, nullable=False),
        sa.Column("requested_revision", sa.BigInteger, nullable=False),
        sa.Column("flipped_revision", sa.BigInteger),
        sa.Column("staged_after_s", sa.Float),
        sa.Column("error", sa.Text),
        sa.ForeignKeyConstraint(*version),
    )


def _members() -> None:
    op.create_table(
        "replicas",
        sa.Column("replica_id", sa.String(128), primary_key=True),
        sa.Column("ring_id", sa.Integer, nullable=False, unique=True),
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("num_slots", sa.Integer, nullable=False),
        sa.Column("base_digest", sa.String(64), nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("staged", sa.JSON, nullable=False),
        sa.Column("held", sa.JSON, nullable=False),
        sa.Column("resident", sa.JSON, nullable=False),
        sa.Column("failed", sa.JSON, nullable=False),
        sa.Column("joined_at_s", sa.Float, nullable=False),
        sa.Column("renewed_at_s", sa.Float, nullable=False),
        sa.Column("expires_at_s", sa.Float, nullable=False),
    )
    op.create_table(
        "gateways",
        sa.Column("gateway_id", sa.String(128), primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("expires_at_s", sa.Float, nullable=False),
    )
