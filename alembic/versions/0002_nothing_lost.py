"""Takeover between processes, idempotent requests, webhooks, retention.

Revision 0002, after 0001. What each table is for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Integer, LargeBinary, false, text
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("responses", Column("hidden", Boolean, nullable=False, server_default=false()))
    op.add_column("responses", Column("log_erased_at", BigInteger))
    op.add_column("responses", Column("num_bytes", BigInteger, nullable=False, server_default="0"))
    op.create_index(
        "responses_by_end",
        "responses",
        ["owner", "completed_at", "id", "num_bytes", "deleted_at", "hidden"],
        sqlite_where=text("completed_at IS NOT NULL AND deleted_at IS NULL AND hidden = 0"),
        postgresql_where=text("completed_at IS NOT NULL AND deleted_at IS NULL AND NOT hidden"),
    )

    op.add_column("conversation_items", Column("response_status", Text))
    op.execute(
        "UPDATE conversation_items SET response_status ="
        " (SELECT status FROM responses WHERE responses.id = conversation_items.response_id)"
    )

    op.drop_column("runs", "beat")
    op.add_column("runs", Column("strikes", Integer, nullable=False, server_default="0"))
    op.add_column("runs", Column("admitted_seq", BigInteger, nullable=False, server_default="0"))
    op.add_column("runs", Column("created_at", BigInteger, nullable=False, server_default="0"))
    op.add_column("runs", Column("watched", BigInteger, nullable=False, server_default="0"))
    op.create_index("runs_by_runner", "runs", ["runner", "state", "owner", "priority", "created_at"])

    op.create_table(
        "runners",
        Column("id", Text, primary_key=True),
        Column("beat", BigInteger, nullable=False),
    )

    op.create_table(
        "idempotency",
        Column("owner", Text, primary_key=True),
        Column("route", Text, primary_key=True),
        Column("key", Text, primary_key=True),
        Column("body_hash", LargeBinary, nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("response_id", Text),
        Column("runner", Text),
        Column("status", Integer),
        Column("headers", LargeBinary),
        Column("body", LargeBinary),
    )
    op.create_index("idempotency_by_time", "idempotency", ["created_at"])
    op.create_index("idempotency_by_response", "idempotency", ["response_id"])

    op.create_table(
        "webhooks",
        Column("id", Text, primary_key=True),
        Column("owner", Text, nullable=False),
        Column("url", Text, nullable=False),
        Column("secret", LargeBinary, nullable=False),
        Column("event_types", Text, nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("disabled_at", BigInteger),
    )
    op.create_index("webhooks_by_owner", "webhooks", ["owner"])

    op.create_table(
        "deliveries",
        Column("webhook_id", Text, primary_key=True),
        Column("event_id", Text, primary_key=True),
        Column("owner", Text, nullable=False),
        Column("response_id", Text, nullable=False),
        Column("body", LargeBinary, nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("due_at", BigInteger, nullable=False),
        Column("attempt", Integer, nullable=False),
    )
    op.create_index("deliveries_by_time", "deliveries", ["due_at"])
    op.create_index("deliveries_by_webhook", "deliveries", ["webhook_id", "due_at"])
    op.create_index("deliveries_by_response", "deliveries", ["response_id"])

    op.create_table(
        "commits",
        Column("writer", BigInteger, primary_key=True, autoincrement=False),
        Column("number", BigInteger, nullable=False),
        Column("at", BigInteger, nullable=False),
    )
