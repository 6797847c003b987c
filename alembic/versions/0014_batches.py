"""Batches and their lines.

Revision 0014, after 0011. What the tables are for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Integer, LargeBinary, text
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "batches",
        Column("id", Text, primary_key=True),
        Column("owner", Text, nullable=False),
        Column("key_id", Text),
        Column("endpoint", Text, nullable=False),
        Column("input_file_id", Text, nullable=False),
        Column("digest", Text),
        Column("metadata", LargeBinary, nullable=False),
        Column("status", Text, nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("expires_at", BigInteger, nullable=False),
        Column("in_progress_at", BigInteger),
        Column("cancelling_at", BigInteger),
        Column("finalizing_at", BigInteger),
        Column("ended_at", BigInteger),
        Column("output_lifetime", BigInteger),
        Column("errors", LargeBinary),
        Column("output_file_id", Text),
        Column("error_file_id", Text),
        Column("model", Text),
        Column("usage", LargeBinary),
        Column("total", Integer, nullable=False),
        Column("completed", Integer, nullable=False),
        Column("failed", Integer, nullable=False),
        Column("num_bytes", BigInteger, nullable=False),
        Column("runner", Text),
        Column("fence", BigInteger, nullable=False),
    )
    op.create_index("batches_by_owner", "batches", ["owner", "created_at", "id"])
    op.create_index("batches_by_digest", "batches", ["digest"])
    op.create_index(
        "batches_open",
        "batches",
        ["created_at"],
        sqlite_where=text("ended_at IS NULL"),
        postgresql_where=text("ended_at IS NULL"),
    )
    op.create_table(
        "batch_lines",
        Column("batch_id", Text, primary_key=True),
        Column("position", Integer, primary_key=True, autoincrement=False),
        Column("custom_id", Text, nullable=False),
        Column("start", BigInteger, nullable=False),
        Column("stop", BigInteger, nullable=False),
        Column("status", Text, nullable=False),
        Column("result", LargeBinary),
        Column("ended_at", BigInteger),
    )
    op.create_index("batch_lines_by_status", "batch_lines", ["batch_id", "status", "position"])
    op.create_index("batch_lines_by_end", "batch_lines", ["batch_id", "status", "ended_at", "position"])
