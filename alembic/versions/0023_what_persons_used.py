"""What was used by persons whom clients name, in sums by the hour.

What the table is for stands in `storage.tables`; this file never changes again. What persons used of earlier
versions is counted for their owners alone.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Integer
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    # A table of its own: processes of the version before go on writing `usage`, by its key as they know it.
    op.create_table(
        "person_usage",
        Column("owner", Text, primary_key=True),
        Column("start", BigInteger, primary_key=True, autoincrement=False),
        Column("person", Text, primary_key=True),
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
    op.create_index("person_usage_by_time", "person_usage", ["start"])
