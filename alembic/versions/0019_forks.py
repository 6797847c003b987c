"""Forks of conversations and responses, which share the items of what they were forked from.

What the columns are for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Integer, text
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("responses", Column("fork_of", Text))
    op.add_column("responses", Column("fork_direction", Text))
    op.add_column("responses", Column("fork_position", Integer))
    op.add_column("conversations", Column("parent_id", Text))
    op.add_column("conversations", Column("parent_head", BigInteger))
    op.add_column("conversations", Column("parent_item", Text))
    op.add_column("conversations", Column("epoch", BigInteger, nullable=False, server_default="0"))
    _index("responses_by_fork", "responses", ["fork_of"], "fork_of IS NOT NULL")
    _index("conversations_by_parent", "conversations", ["parent_id"], "parent_id IS NOT NULL")
    _index(
        "conversation_items_deleted",
        "conversation_items",
        ["conversation_id", "deleted_at"],
        "deleted_at IS NOT NULL",
    )


def _index(name: str, table: str, columns: list[str], where: str) -> None:
    op.create_index(name, table, columns, sqlite_where=text(where), postgresql_where=text(where))
