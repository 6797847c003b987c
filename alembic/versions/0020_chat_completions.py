"""Chat completions that are stored, and the pairs of their metadata.

What the tables are for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, LargeBinary
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "chat_completions",
        Column("owner", Text, primary_key=True),
        Column("id", Text, primary_key=True),
        Column("created_at", BigInteger, nullable=False),
        Column("model", Text, nullable=False),
        Column("metadata", LargeBinary, nullable=False),
        Column("body", LargeBinary, nullable=False),
        Column("messages", LargeBinary, nullable=False),
        Column("num_bytes", BigInteger, nullable=False),
    )
    op.create_index("chat_completions_by_time", "chat_completions", ["owner", "created_at", "id"])
    op.create_index("chat_completions_by_age", "chat_completions", ["created_at"])
    op.create_table(
        "chat_completion_metadata",
        Column("owner", Text, primary_key=True),
        Column("completion_id", Text, primary_key=True),
        Column("key", LargeBinary, primary_key=True),
        Column("value", LargeBinary, nullable=False),
    )
