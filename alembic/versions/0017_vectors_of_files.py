"""Files of vector stores: when one is tried again, which model its vectors are of, and which are to come.

Revision 0017. What the columns are for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Integer, LargeBinary, false, text
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("vector_store_files", Column("retry_at", BigInteger))
    op.add_column("vector_store_files", Column("embedding", Text))
    op.add_column("vector_store_files", Column("embedded", Integer, nullable=False, server_default="0"))
    op.add_column("vector_stores", Column("to_embed", Boolean, nullable=False, server_default=false()))
    op.create_index(
        "vector_stores_to_embed",
        "vector_stores",
        ["number"],
        sqlite_where=text("to_embed = 1"),
        postgresql_where=text("to_embed"),
    )
    op.add_column("vector_store_batches", Column("files", LargeBinary))
    op.add_column("vector_store_batches", Column("total", Integer, nullable=False, server_default="0"))
    op.add_column("vector_store_batches", Column("added", Integer, nullable=False, server_default="0"))
    op.create_index(
        "vector_store_batches_to_add",
        "vector_store_batches",
        ["store_id"],
        sqlite_where=text("files IS NOT NULL"),
        postgresql_where=text("files IS NOT NULL"),
    )
    # Until now all vectors of a store were of the model that it was made with.
    op.execute(
        "UPDATE vector_store_files SET embedded = next_position, embedding ="
        " (SELECT embedding FROM vector_stores WHERE number = store_number)"
        " WHERE store_number IN (SELECT number FROM vector_stores WHERE embedding IS NOT NULL)"
    )
