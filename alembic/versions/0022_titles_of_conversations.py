"""Titles and states of conversations, and when their items came.

What the columns are for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("conversations", Column("title", Text))
    op.add_column("conversations", Column("archived_at", BigInteger))
    op.add_column("conversation_items", Column("created_at", BigInteger))
