"""What runs are expected to take, and what the queue has served its owners.

Revision 0010, after 0009. What the columns and the table are for stands in `storage.tables`; this file never
changes again. Runs that were there before count a token each, as places did until now.
"""

from __future__ import annotations

from sqlalchemy import Column, Double, Integer, text
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("runs", Column("cost", Integer, nullable=False, server_default="1"))
    op.drop_index("runs_by_runner", "runs")
    op.create_index("runs_by_runner", "runs", ["runner", "state"])
    op.create_index(
        "runs_queued",
        "runs",
        ["priority", "owner", "created_at", "response_id", "cost", "state", "runner"],
        sqlite_where=text("runner IS NULL AND state = 'queued'"),
        postgresql_where=text("runner IS NULL AND state = 'queued'"),
    )
    op.create_table(
        "queue_shares",
        Column("priority", Integer, primary_key=True, autoincrement=False),
        Column("owner", Text, primary_key=True),
        Column("shard", Integer, primary_key=True, autoincrement=False),
        Column("served", Double, nullable=False),
        Column("start", Double, nullable=False),
        sqlite_with_rowid=False,
    )
