"""Lists of responses by status, by model and by conversation are walked in their order.

What the indexes are for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import text

from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("responses_by_conversation", "responses")
    for name, columns, where in (
        ("conversation", ["conversation_id", "created_at", "id"], "conversation_id IS NOT NULL"),
        ("status", ["owner", "status", "created_at", "id", "model"], "deleted_at IS NULL"),
        ("model", ["owner", "model", "created_at", "id", "status"], "deleted_at IS NULL"),
    ):
        op.create_index(
            f"responses_by_{name}",
            "responses",
            columns,
            sqlite_where=text(where),
            postgresql_where=text(where),
        )
