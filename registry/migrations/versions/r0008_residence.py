"""Which adapters stay in a slot, and when one is brought to its homes ahead of its requests: schema 8."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapters", sa.Column("pinned", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("adapters", sa.Column("preload", sa.JSON(none_as_null=True)))
    op.execute("UPDATE meta SET schema_version = 8")
