"""Chunks of files say where in their text other pages begin.

Revision 0026. What the column is for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import Column, LargeBinary

from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("vector_chunks", Column("breaks", LargeBinary))
