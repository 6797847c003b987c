"""Takeover between processes, idempotent requests, webhooks, retention.

Revision 0002, after 0001. What each table is for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Integer, LargeBinary, Text, false

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("responses", Column("hidden", Boolean, nullable=False, server_default=false()))
    op.add_column("responses", Column("expires_at", BigInteger))
    op.add_column("responses", Column("log_erased_at", BigInteger))
    op.add_column("responses", Column("num_bytes", BigInteger, nullable=False, server_default="0"))
    op.create_index("responses_by_expiry", "responses", ["expires_at"])

    op.drop_column("runs", "beat")
    op.add_column("runs", Column("strikes", Integer, nullable=False, server_default="0"))
    op.add_column("runs", Column("admitted_seq", BigInteger, nullable=False, server_default="0"))
    op.create_index("runs_by_runner", "runs", ["runner"])

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
        Column("media_type", Text),
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
        Column("events", Text, nullable=False),
        Column("created_at", BigInteger, nullable=False),
    )
    op.create_index("webhooks_by_owner", "webhooks", ["owner"])

    op.create_table(
        "deliveries",
        Column("id", Text, primary_key=True),
        Column("webhook_id", Text, nullable=False),
        Column("owner", Text, nullable=False),
        Column("response_id", Text, nullable=False),
        Column("body", LargeBinary, nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("due_at", BigInteger, nullable=False),
        Column("attempt", Integer, nullable=False),
    )
    op.create_index("deliveries_by_time", "deliveries", ["due_at"])
    op.create_index("deliveries_by_webhook", "deliveries", ["webhook_id"])
    op.create_index("deliveries_by_response", "deliveries", ["response_id"])
