"""What the server keeps of an item besides what clients are shown.

Revision 0009, after 0008. What the column is for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import Column, LargeBinary

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("items", Column("private", LargeBinary))
