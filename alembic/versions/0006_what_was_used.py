"""What was used, in sums by owner, key, model and minute.

Revision 0006, after 0005. What the table is for stands in `storage.tables`; this file never changes again.
What responses of earlier versions used is not counted.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Integer, text
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "usage",
        Column("owner", Text, primary_key=True),
        Column("start", BigInteger, primary_key=True, autoincrement=False),
        Column("kind", Text, primary_key=True),
        Column("model", Text, primary_key=True),
        Column("key_id", Text, primary_key=True),
        Column("tier", Text, primary_key=True),
        Column("batch", Boolean, primary_key=True),
        Column("shard", Integer, primary_key=True, autoincrement=False),
        Column("requests", BigInteger, nullable=False),
        Column("input_tokens", BigInteger, nullable=False),
        Column("cached_tokens", BigInteger, nullable=False),
        Column("output_tokens", BigInteger, nullable=False),
        Column("reasoning_tokens", BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("usage_by_time", "usage", ["start"])
    op.create_index(
        "usage_of_minutes",
        "usage",
        ["start", "owner"],
        sqlite_where=text("shard <> -1"),
        postgresql_where=text("shard <> -1"),
    )
