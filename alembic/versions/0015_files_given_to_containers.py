"""Which uploaded files a container was given, so that each is copied into it once.

Revision 0015, after 0014. What the column is for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import Column
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("containers", Column("given", Text, nullable=False, server_default=""))
