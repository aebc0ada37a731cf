"""Tenants with their limits, API keys as salted hashes, and the gateways' parts of limits: schema 5."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("limits", sa.JSON, nullable=False),
        sa.Column("created_at_s", sa.Float, nullable=False),
        sa.Column("removed_at_s", sa.Float),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "keys",
        sa.Column("key_id", sa.String(12), primary_key=True),
        sa.Column("tenant", sa.String(64), sa.ForeignKey("tenants.name"), nullable=False),
        sa.Column("salt", sa.String(32), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("created_at_s", sa.Float, nullable=False),
        sa.Column("expires_at_s", sa.Float),
        sa.Column("revoked_at_s", sa.Float),
        sa.Column("used_at_s", sa.Float),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_index("keys_by_tenant", "keys", ["tenant"])
    for column in ("held", "wanted"):
        op.add_column("gateways", sa.Column(column, sa.JSON, nullable=False, server_default="{}"))
    op.execute("UPDATE meta SET schema_version = 5")
