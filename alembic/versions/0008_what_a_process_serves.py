"""What each of the processes that share a database serves.

Revision 0008, after 0007. What the column is for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import Column
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("runners", Column("serves", Text, nullable=False, server_default=""))
