"""No number of a vector store is given twice; files of batches wait in slices, and attributes of files count
among what owners store.

What the columns are for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

import orjson
from sqlalchemy import BigInteger, Column, Integer, LargeBinary, column, select, table
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")

SLICE = 100


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        _count_on()
    _cut_into_slices()
    size = Column("attribute_bytes", BigInteger, nullable=False, server_default="0")
    op.add_column("vector_store_files", size)
    op.execute(
        "UPDATE vector_store_files SET attribute_bytes = length(attributes) WHERE attributes IS NOT NULL"
    )


def _count_on() -> None:
    """Has SQLite count on from every number that a store, a file or a chunk ever had and still has."""
    with op.batch_alter_table(
        "vector_stores", recreate="always", table_kwargs={"sqlite_autoincrement": True}
    ):
        pass
    op.execute("DELETE FROM sqlite_sequence WHERE name = 'vector_stores'")
    op.execute(
        "INSERT INTO sqlite_sequence (name, seq) SELECT 'vector_stores', coalesce(max(number), 0) FROM"
        " (SELECT max(number) AS number FROM vector_stores"
        " UNION SELECT max(store_number) FROM vector_store_files"
        " UNION SELECT max(id) >> 37 FROM vector_chunks)"
    )


def _cut_into_slices() -> None:
    op.create_table(
        "vector_store_slices",
        Column("batch_id", Text, primary_key=True),
        Column("number", Integer, primary_key=True, autoincrement=False),
        Column("owner", Text, nullable=False),
        Column("num_files", Integer, nullable=False),
        Column("num_bytes", BigInteger, nullable=False),
        Column("files", LargeBinary, nullable=False),
    )
    slices = table(
        "vector_store_slices",
        *map(column, ("batch_id", "number", "owner", "num_files", "num_bytes", "files")),
    )
    batches = table("vector_store_batches", *map(column, ("id", "owner", "added", "files")))
    waiting = select(batches).where(batches.c.files.is_not(None))
    for batch in op.get_bind().execute(waiting).all():
        files = orjson.loads(batch.files)
        for start in range(batch.added, len(files), SLICE):
            some = files[start : start + SLICE]
            told = orjson.dumps(
                [
                    [
                        file["chunk_tokens"],
                        file["chunk_overlap"],
                        file["attributes"],
                        [[file["file_id"], file["filename"]]],
                    ]
                    for file in some
                ]
            )
            op.get_bind().execute(
                slices.insert().values(
                    batch_id=batch.id,
                    number=start,
                    owner=batch.owner,
                    num_files=len(some),
                    num_bytes=len(told),
                    files=told,
                )
            )
    op.drop_index("vector_store_batches_to_add", "vector_store_batches")
    op.drop_column("vector_store_batches", "files")
