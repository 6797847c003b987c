"""Who still needs a blob that no row names yet; the private halves of tool outputs that are to be taken up.

Revision 0016, after 0015. What the columns are for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, LargeBinary

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("run_inputs", Column("private", LargeBinary))
    for name in ("holds", "puts"):
        op.add_column("blobs", Column(name, BigInteger, nullable=False, server_default="0"))
