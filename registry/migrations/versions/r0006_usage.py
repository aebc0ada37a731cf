"""What requests used by hour, tenant and version, and the last batch that each source handed over: schema 6."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("hour_s", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("tenant", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("device_ns", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "usage_sources",
        sa.Column("source", sa.String(200), primary_key=True),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("seen_at_s", sa.Float, nullable=False),
    )
    op.execute("UPDATE meta SET schema_version = 6")
