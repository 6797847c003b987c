"""Batches take turns by owner, and rest after claims that came to nothing; their lines are counted.

What the columns are for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Integer, text

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batches", Column("attempts", Integer, nullable=False, server_default="0"))
    op.add_column("batches", Column("claimed_at", BigInteger))
    op.add_column("batches", Column("retry_at", BigInteger))
    # Until now those of batches that had not ended were counted whenever somebody looked.
    of_it = "SELECT count(*) FROM batch_lines l WHERE l.batch_id = batches.id"
    op.execute(
        text(
            f"UPDATE batches SET total = ({of_it}), completed = ({of_it} AND l.status = 'completed'),"
            f" failed = ({of_it} AND l.status = 'failed')"
            " WHERE ended_at IS NULL AND status != 'validating'"
        )
    )
