"""What is kept for the repeats of requests counts among what owners store, and names what it tells of;
deleted responses without a measure are yet to be erased; lines of batches say what they used.

What the columns are for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, LargeBinary, text
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("idempotency", Column("about", Text))
    op.add_column("idempotency", Column("num_bytes", BigInteger, nullable=False, server_default="0"))
    # What these replies tell of was not written down; they go within a day.
    op.execute("UPDATE idempotency SET num_bytes = length(headers) + length(body) WHERE body IS NOT NULL")
    op.create_index("idempotency_by_size", "idempotency", ["owner", "num_bytes"])
    op.create_index(
        "idempotency_by_object",
        "idempotency",
        ["about"],
        sqlite_where=text("about IS NOT NULL"),
        postgresql_where=text("about IS NOT NULL"),
    )
    op.drop_index("responses_by_end", "responses")
    op.create_index(
        "responses_by_end",
        "responses",
        ["owner", "hidden", "completed_at", "id", "num_bytes", "deleted_at"],
        sqlite_where=text("completed_at IS NOT NULL AND deleted_at IS NULL"),
        postgresql_where=text("completed_at IS NOT NULL AND deleted_at IS NULL"),
    )
    # Until now a deletion was one transaction, so all of these are erased.
    op.execute("UPDATE responses SET num_bytes = 1 WHERE deleted_at IS NOT NULL AND num_bytes = 0")
    op.add_column("batch_lines", Column("used", LargeBinary))
