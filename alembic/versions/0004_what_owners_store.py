"""What an owner's conversations and deleted responses take, and when a conversation was last used.

Revision 0004, after 0003. What the columns are for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

import time

from sqlalchemy import BigInteger, Column, text

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("conversations", Column("num_bytes", BigInteger, nullable=False, server_default="0"))
    op.add_column("conversations", Column("used_at", BigInteger, nullable=False, server_default="0"))
    op.execute(
        "UPDATE conversations SET num_bytes = 256 + length(metadata) + coalesce("
        " (SELECT sum(128 + length(items.body)) FROM conversation_items"
        " JOIN items ON items.owner = conversation_items.owner AND items.id = conversation_items.item_id"
        " WHERE conversation_items.conversation_id = conversations.id), 0)"
    )
    # When they were last used was not written down: none may expire sooner than if that had been just now.
    op.execute(text("UPDATE conversations SET used_at = :now").bindparams(now=int(time.time() * 1e6)))
    op.create_index("conversations_by_use", "conversations", ["used_at"])
    op.create_index(
        "responses_deleted",
        "responses",
        ["owner", "num_bytes"],
        sqlite_where=text("deleted_at IS NOT NULL"),
        postgresql_where=text("deleted_at IS NOT NULL"),
    )
