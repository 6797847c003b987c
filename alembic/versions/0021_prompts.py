"""Prompt templates and their versions.

What the tables are for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Integer, LargeBinary
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "prompts",
        Column("id", Text, primary_key=True),
        Column("owner", Text, nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("name", Text),
        Column("metadata", LargeBinary, nullable=False),
        Column("default_version", Integer, nullable=False),
        Column("latest_version", Integer, nullable=False),
        Column("num_bytes", BigInteger, nullable=False),
    )
    op.create_index("prompts_by_time", "prompts", ["owner", "created_at", "id"])
    op.create_table(
        "prompt_versions",
        Column("prompt_id", Text, primary_key=True),
        Column("version", Integer, primary_key=True, autoincrement=False),
        Column("owner", Text, nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("body", LargeBinary, nullable=False),
        Column("num_bytes", BigInteger, nullable=False),
    )
    op.create_index("prompt_versions_by_owner", "prompt_versions", ["owner"])
