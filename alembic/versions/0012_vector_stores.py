"""Vector stores: their files, the batches that these came in, their chunks, and the index of the words.

Revision 0012, after 0011. What the columns are for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Integer, LargeBinary, false, text
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")
Counted = BigInteger().with_variant(Integer, "sqlite")


def upgrade() -> None:
    _stores()
    _files()
    op.create_table(
        "vector_store_batches",
        Column("id", Text, primary_key=True),
        Column("owner", Text, nullable=False),
        Column("store_id", Text, nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("cancelled_at", BigInteger),
    )
    op.create_index("vector_store_batches_by_store", "vector_store_batches", ["store_id"])
    op.create_index("vector_store_batches_of_owner", "vector_store_batches", ["owner"])
    op.create_table(
        "vector_chunks",
        Column("id", Counted, primary_key=True, autoincrement=False),
        Column("owner", Text, nullable=False),
        Column("page", Integer),
        Column("text", Text, nullable=False),
        Column("tokens", Integer, nullable=False),
        Column("embedding", LargeBinary),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute("CREATE TABLE vector_words (id bigint PRIMARY KEY, words tsvector NOT NULL)")
        op.execute("CREATE INDEX vector_words_by_word ON vector_words USING gin (words)")
    else:
        op.execute(
            "CREATE VIRTUAL TABLE vector_words USING fts5"
            "(words, content='', tokenize='porter unicode61 remove_diacritics 2')"
        )


def _stores() -> None:
    op.create_table(
        "vector_stores",
        Column("number", Counted, primary_key=True),
        Column("id", Text, nullable=False),
        Column("owner", Text, nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("name", Text, nullable=False),
        Column("description", Text),
        Column("metadata", LargeBinary, nullable=False),
        Column("expires_after", BigInteger),
        Column("last_active_at", BigInteger, nullable=False),
        Column("next_file", Integer, nullable=False),
        Column("embedding", Text),
        Column("dimensions", Integer),
        Column("deleted_at", BigInteger),
    )
    op.create_index("vector_stores_by_id", "vector_stores", ["id"], unique=True)
    op.create_index("vector_stores_by_time", "vector_stores", ["owner", "created_at", "id"])


def _files() -> None:
    op.create_table(
        "vector_store_files",
        Column("store_number", BigInteger, primary_key=True, autoincrement=False),
        Column("number", Integer, primary_key=True, autoincrement=False),
        Column("owner", Text, nullable=False),
        Column("store_id", Text, nullable=False),
        Column("file_id", Text, nullable=False),
        Column("filename", Text, nullable=False),
        Column("batch_id", Text),
        Column("created_at", BigInteger, nullable=False),
        Column("status", Text, nullable=False),
        Column("error_code", Text),
        Column("error_message", Text),
        Column("attributes", LargeBinary),
        Column("chunk_tokens", Integer, nullable=False),
        Column("chunk_overlap", Integer, nullable=False),
        Column("num_bytes", BigInteger, nullable=False, server_default="0"),
        Column("runner", Text),
        Column("fence", BigInteger, nullable=False, server_default="0"),
        Column("attempt", Integer, nullable=False, server_default="0"),
        Column("next_position", Integer, nullable=False, server_default="0"),
        Column("digest", LargeBinary),
        Column("erasing", Boolean, nullable=False, server_default=false()),
        Column("deleted_at", BigInteger),
    )
    live, to_read = text("deleted_at IS NULL"), text("status = 'in_progress' AND deleted_at IS NULL")
    op.create_index(
        "vector_store_files_by_file",
        "vector_store_files",
        ["store_id", "file_id"],
        unique=True,
        sqlite_where=live,
        postgresql_where=live,
    )
    op.create_index("vector_store_files_of_owner", "vector_store_files", ["owner"])
    op.create_index("vector_store_files_of_file", "vector_store_files", ["file_id"])
    op.create_index("vector_store_files_by_batch", "vector_store_files", ["batch_id"])
    op.create_index(
        "vector_store_files_to_read",
        "vector_store_files",
        ["owner", "created_at", "runner"],
        sqlite_where=to_read,
        postgresql_where=to_read,
    )
    op.create_index(
        "vector_store_files_to_erase",
        "vector_store_files",
        ["store_number"],
        sqlite_where=text("erasing = 1"),
        postgresql_where=text("erasing"),
    )
