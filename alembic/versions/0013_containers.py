"""Containers of code and their files.

Revision 0013, after 0011. What the tables are for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, LargeBinary
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "containers",
        Column("id", Text, primary_key=True),
        Column("owner", Text, nullable=False),
        Column("name", Text, nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("last_active_at", BigInteger, nullable=False),
        Column("lifetime", BigInteger, nullable=False),
        Column("memory_limit", Text, nullable=False),
        Column("version", BigInteger, nullable=False),
        Column("cells", BigInteger, nullable=False),
        Column("state", LargeBinary),
        Column("num_bytes", BigInteger, nullable=False),
    )
    op.create_index("containers_by_time", "containers", ["owner", "created_at", "id"])
    op.create_index("containers_by_use", "containers", ["last_active_at"])
    op.create_table(
        "container_files",
        Column("id", Text, primary_key=True),
        Column("container_id", Text, nullable=False),
        Column("owner", Text, nullable=False),
        Column("path", Text, nullable=False),
        Column("num_bytes", BigInteger, nullable=False),
        Column("digest", Text, nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("source", Text, nullable=False),
    )
    op.create_index("container_files_by_container", "container_files", ["container_id", "path"], unique=True)
    op.create_index("container_files_by_owner", "container_files", ["owner"])
    op.create_index("container_files_by_digest", "container_files", ["digest"])
