"""Sealed reasoning.

Revision 0003, after 0002. What the table is for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, LargeBinary, inspect

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if inspect(op.get_bind()).has_table("sealing_keys"):
        return  # for a short time 0002 made it
    op.create_table(
        "sealing_keys",
        Column("number", BigInteger, primary_key=True, autoincrement=False),
        Column("secret", LargeBinary, nullable=False),
        Column("created_at", BigInteger, nullable=False),
    )
