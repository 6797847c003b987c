"""Lists of archived conversations are walked in their order.

What the index is for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import text

from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    where = text("archived_at IS NOT NULL AND deleted_at IS NULL")
    op.create_index(
        "conversations_archived",
        "conversations",
        ["owner", "created_at", "id"],
        sqlite_where=where,
        postgresql_where=where,
    )
