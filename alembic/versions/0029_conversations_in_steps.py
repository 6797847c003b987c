"""Deleted conversations are found, so that a sweep goes on with what is left of them.

What the index is for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import text

from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        "conversations_deleted",
        "conversations",
        ["id"],
        sqlite_where=text("deleted_at IS NOT NULL"),
        postgresql_where=text("deleted_at IS NOT NULL"),
    )
