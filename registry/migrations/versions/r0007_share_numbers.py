"""The number of the last message on limits that was heard of each gateway: schema 7."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("gateways", sa.Column("share_number", sa.BigInteger, nullable=False, server_default="0"))
    op.execute("UPDATE meta SET schema_version = 7")
