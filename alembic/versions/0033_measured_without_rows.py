"""What owners store is counted by indexes alone, and steps of upkeep find their rows by indexes.

What the indexes are for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import text

from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

OLD = {
    "responses_deleted": "responses",
    "responses_by_fork": "responses",
    "conversations_by_use": "conversations",
    "conversations_by_parent": "conversations",
    "conversation_items_by_item": "conversation_items",
    "conversation_items_deleted": "conversation_items",
    "runs_by_owner": "runs",
    "upload_parts_by_owner": "upload_parts",
    "container_files_by_owner": "container_files",
    "vector_store_files_of_owner": "vector_store_files",
    "batches_open": "batches",
    "prompt_versions_by_owner": "prompt_versions",
}

NEW = (
    ("responses", "deleted", ["owner", "num_bytes", "deleted_at"], "deleted_at IS NOT NULL"),
    (
        "responses",
        "unmeasured",
        ["owner", "completed_at", "id", "num_bytes", "deleted_at"],
        "num_bytes = 0 AND completed_at IS NOT NULL AND deleted_at IS NULL",
    ),
    ("responses", "by_fork", ["fork_of", "fork_direction", "fork_position"], "fork_of IS NOT NULL"),
    ("conversations", "by_use", ["used_at"], "deleted_at IS NULL"),
    ("conversations", "by_parent", ["parent_id", "parent_head", "id"], "parent_id IS NOT NULL"),
    ("conversation_items", "by_item", ["owner", "item_id", "conversation_id"], None),
    (
        "conversation_items",
        "deleted",
        ["conversation_id", "deleted_at", "position", "owner"],
        "deleted_at IS NOT NULL",
    ),
    ("runs", "by_owner", ["owner", "created_at"], None),
    (
        "vector_stores",
        "expiring",
        ["last_active_at", "expires_after"],
        "expires_after IS NOT NULL AND deleted_at IS NULL",
    ),
    ("vector_stores", "deleted", ["owner", "number"], "deleted_at IS NOT NULL"),
    ("batches", "open", ["owner", "created_at"], "ended_at IS NULL"),
    ("conversations", "by_size", ["owner", "num_bytes"], None),
    ("files", "by_size", ["owner", "num_bytes"], None),
    ("upload_parts", "by_size", ["owner", "num_bytes"], None),
    ("containers", "by_size", ["owner", "num_bytes"], None),
    ("container_files", "by_size", ["owner", "num_bytes"], None),
    ("vector_store_files", "by_size", ["owner", "num_bytes", "attribute_bytes"], None),
    ("vector_store_slices", "by_size", ["owner", "num_bytes"], None),
    ("batches", "by_size", ["owner", "num_bytes"], None),
    ("chat_completions", "by_size", ["owner", "num_bytes"], None),
    ("prompts", "by_size", ["owner", "num_bytes"], None),
    ("prompt_versions", "by_size", ["owner", "num_bytes"], None),
)


def upgrade() -> None:
    for index, table in OLD.items():
        op.drop_index(index, table)
    for table, name, columns, condition in NEW:
        where = None if condition is None else text(condition)
        op.create_index(f"{table}_{name}", table, columns, sqlite_where=where, postgresql_where=where)
