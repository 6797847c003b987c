"""Files of clients, uploads in parts, and blobs on PostgreSQL.

Revision 0011, after 0010. What the tables are for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Integer, LargeBinary
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "files",
        Column("id", Text, primary_key=True),
        Column("owner", Text, nullable=False),
        Column("filename", Text, nullable=False),
        Column("purpose", Text, nullable=False),
        Column("num_bytes", BigInteger, nullable=False),
        Column("digest", Text, nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("expires_at", BigInteger),
    )
    op.create_index("files_by_time", "files", ["owner", "created_at", "id"])
    op.create_index("files_by_digest", "files", ["digest"])
    op.create_index("files_by_expiry", "files", ["expires_at"])
    op.create_table(
        "uploads",
        Column("id", Text, primary_key=True),
        Column("owner", Text, nullable=False),
        Column("filename", Text, nullable=False),
        Column("purpose", Text, nullable=False),
        Column("mime_type", Text, nullable=False),
        Column("num_bytes", BigInteger, nullable=False),
        Column("status", Text, nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("expires_at", BigInteger, nullable=False),
        Column("file_lifetime", BigInteger),
        Column("file_id", Text),
    )
    op.create_index("uploads_by_owner", "uploads", ["owner"])
    op.create_index("uploads_by_expiry", "uploads", ["expires_at"])
    op.create_table(
        "upload_parts",
        Column("id", Text, primary_key=True),
        Column("upload_id", Text, nullable=False),
        Column("owner", Text, nullable=False),
        Column("num_bytes", BigInteger, nullable=False),
        Column("digest", Text, nullable=False),
        Column("created_at", BigInteger, nullable=False),
    )
    op.create_index("upload_parts_by_upload", "upload_parts", ["upload_id"])
    op.create_index("upload_parts_by_owner", "upload_parts", ["owner"])
    op.create_index("upload_parts_by_digest", "upload_parts", ["digest"])
    op.create_table(
        "blobs",
        Column("digest", Text, primary_key=True),
        Column("content", Text, nullable=False),
        Column("num_bytes", BigInteger, nullable=False),
        Column("touched_at", BigInteger, nullable=False),
    )
    op.create_index("blobs_by_content", "blobs", ["content"])
    op.create_table(
        "blob_parts",
        Column("content", Text, primary_key=True),
        Column("number", Integer, primary_key=True, autoincrement=False),
        Column("data", LargeBinary, nullable=False),
        Column("written_at", BigInteger, nullable=False),
    )
    if op.get_bind().dialect.name == "postgresql":
        # Files are compressed already, or compress badly: PostgreSQL need not try.
        op.execute("ALTER TABLE blob_parts ALTER COLUMN data SET STORAGE EXTERNAL")
