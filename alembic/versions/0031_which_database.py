"""A database has an id that tells it from every other.

What the table is for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

import secrets

from sqlalchemy import Column, Integer, Text

from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    text = Text().with_variant(Text(collation="C"), "postgresql")
    identity = op.create_table(
        "identity",
        Column("one", Integer, primary_key=True, autoincrement=False),
        Column("id", text, nullable=False),
    )
    op.bulk_insert(identity, [{"one": 1, "id": secrets.token_hex(16)}])
