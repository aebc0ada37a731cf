"""Whether an upload said for which base it was trained, where lists of versions can show it: schema 4."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("manifests", sa.Column("base_verified", sa.Boolean, nullable=False, server_default=sa.false()))
    manifests = sa.table("manifests", sa.column("manifest", sa.Text), sa.column("base_verified", sa.Boolean))
    says = manifests.c.manifest.like('%"base_verified":true%')
    op.execute(sa.update(manifests).where(says).values(base_verified=True))
    op.execute("UPDATE meta SET schema_version = 4")
