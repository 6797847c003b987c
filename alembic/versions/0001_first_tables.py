"""The first tables.

Revision 0001, after none. What each table is for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Integer, LargeBinary
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "responses",
        Column("id", Text, primary_key=True),
        Column("owner", Text, nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("completed_at", BigInteger),
        Column("status", Text, nullable=False),
        Column("model", Text, nullable=False),
        Column("background", Boolean, nullable=False),
        Column("store", Boolean, nullable=False),
        Column("head", LargeBinary, nullable=False),
        Column("echo", LargeBinary, nullable=False),
        Column("plan", LargeBinary, nullable=False),
        Column("previous_response_id", Text),
        Column("conversation_id", Text),
        Column("conversation_head", BigInteger),
        Column("deleted_at", BigInteger),
    )
    op.create_index("responses_by_time", "responses", ["owner", "created_at", "id"])
    op.create_index("responses_by_parent", "responses", ["previous_response_id"])
    op.create_index("responses_by_conversation", "responses", ["conversation_id"])

    op.create_table(
        "items",
        Column("owner", Text, primary_key=True),
        Column("id", Text, primary_key=True),
        Column("kind", Text, nullable=False),
        Column("call_id", Text),
        Column("name", Text),
        Column("body", LargeBinary, nullable=False),
    )

    op.create_table(
        "response_items",
        Column("response_id", Text, primary_key=True),
        Column("direction", Text, primary_key=True),
        Column("position", Integer, primary_key=True),
        Column("owner", Text, nullable=False),
        Column("item_id", Text, nullable=False),
    )
    op.create_index("response_items_by_item", "response_items", ["owner", "item_id"])

    op.create_table(
        "conversations",
        Column("id", Text, primary_key=True),
        Column("owner", Text, nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("metadata", LargeBinary, nullable=False),
        Column("head", BigInteger, nullable=False),
        Column("active_response_id", Text),
        Column("deleted_at", BigInteger),
    )
    op.create_index("conversations_by_time", "conversations", ["owner", "created_at", "id"])

    op.create_table(
        "conversation_items",
        Column("conversation_id", Text, primary_key=True),
        Column("position", BigInteger, primary_key=True),
        Column("owner", Text, nullable=False),
        Column("item_id", Text, nullable=False),
        Column("direction", Text, nullable=False),
        Column("response_id", Text),
        Column("deleted_at", BigInteger),
    )
    op.create_index("conversation_items_by_item", "conversation_items", ["owner", "item_id"])

    op.create_table(
        "segments",
        Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
        Column("response_id", Text, nullable=False),
        Column("first_seq", BigInteger, nullable=False),
    )
    op.create_index("segments_by_response", "segments", ["response_id", "first_seq"], unique=True)

    op.create_table(
        "records",
        Column("segment", BigInteger, primary_key=True, autoincrement=False),
        Column("first_seq", BigInteger, primary_key=True, autoincrement=False),
        Column("num_events", Integer, nullable=False),
        Column("generation", Integer, nullable=False),
        Column("first_token", Integer, nullable=False),
        Column("token_ids", LargeBinary, nullable=False),
        Column("logprobs", LargeBinary),
        Column("facts", LargeBinary),
        Column("events", LargeBinary, nullable=False),
    )

    op.create_table(
        "runs",
        Column("response_id", Text, primary_key=True),
        Column("owner", Text, nullable=False),
        Column("runner", Text),
        Column("fence", BigInteger, nullable=False),
        Column("beat", BigInteger, nullable=False),
        Column("state", Text, nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("next_seq", BigInteger, nullable=False),
        Column("segment", BigInteger),
        Column("segment_end", BigInteger, nullable=False),
        Column("deadline", BigInteger),
        Column("cancel_requested", Boolean, nullable=False),
        Column("priority", Integer, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("runs_by_state", "runs", ["state", "deadline"])
    op.create_index("runs_by_owner", "runs", ["owner"])

    op.create_table(
        "run_inputs",
        Column("response_id", Text, primary_key=True),
        Column("call_id", Text, primary_key=True),
        Column("item_id", Text, nullable=False),
        Column("kind", Text, nullable=False),
        Column("body", LargeBinary, nullable=False),
        Column("body_hash", LargeBinary, nullable=False),
        Column("created_at", BigInteger, nullable=False),
    )

    op.create_table(
        "api_keys",
        Column("id", Text, primary_key=True),
        Column("owner", Text, nullable=False),
        Column("name", Text, nullable=False),
        Column("hash", LargeBinary, nullable=False),
        Column("hint", Text, nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("revoked_at", BigInteger),
    )
    op.create_index("api_keys_by_hash", "api_keys", ["hash"], unique=True)


def downgrade() -> None:
    for table in (
        "api_keys",
        "run_inputs",
        "runs",
        "records",
        "segments",
        "conversation_items",
        "conversations",
        "response_items",
        "items",
        "responses",
    ):
        op.drop_table(table)
