"""How much of each rate limit is used up.

Revision 0007, after 0006. What the table is for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "quota_state",
        Column("id", Text, primary_key=True),
        Column("arrival", BigInteger, nullable=False),
    )
