"""Responses and conversations are found by the pairs of their metadata.

What the table is for stands in `storage.tables`; this file never changes again.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import orjson
from sqlalchemy import BigInteger, Column, LargeBinary, column, table, text
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")

ROWS = 500
"""Objects whose metadata is in memory at once."""

SOME = b'"metadata":{"'
"""In the echo of every response that has metadata; what looks like it within a text has a backslash."""


PAIRS = table("metadata_pairs", *map(column, ("object_id", "digest", "owner", "created_at")))


def upgrade() -> None:
    op.create_table(
        "metadata_pairs",
        Column("object_id", Text, primary_key=True),
        Column("digest", LargeBinary, primary_key=True),
        Column("owner", Text, nullable=False),
        Column("created_at", BigInteger, nullable=False),
    )
    if op.get_bind().dialect.name == "sqlite":
        has_some = "instr(echo, :some) > 0"
    else:
        has_some = "position(:some IN echo) > 0"
    seen = f"store AND NOT hidden AND deleted_at IS NULL AND {has_some}"
    _label("response", "responses", "echo", seen, {"some": SOME})
    _label("conversation", "conversations", "metadata", "deleted_at IS NULL", {})
    # Last, for an index of rows that are there is made faster.
    op.create_index(
        "metadata_pairs_by_time", "metadata_pairs", ["owner", "digest", "created_at", "object_id"]
    )


def _label(kind: str, name: str, column: str, where: str, values: Mapping[str, bytes]) -> None:
    """Adds the pairs of all objects of a table. column: which has their metadata."""
    query = text(
        f"SELECT id, owner, created_at, {column} FROM {name} WHERE id > :last AND {where} ORDER BY id"
        f" LIMIT {ROWS}"
    )
    last = ""
    while found := op.get_bind().execute(query, {**values, "last": last}).all():
        rows = [
            {
                "object_id": id,
                "digest": blake2b(orjson.dumps([kind, *pair]), digest_size=16).digest(),
                "owner": owner,
                "created_at": created_at,
            }
            for id, owner, created_at, value in found
            for pair in _metadata(kind, value).items()
        ]
        if rows:
            op.get_bind().execute(PAIRS.insert(), rows)
        last = found[-1].id


def _metadata(kind: str, value: bytes) -> dict[str, str]:
    """The metadata of an object. An echo is the members of a JSON object."""
    its: dict[str, str] | None
    its = orjson.loads(b"{" + value + b"}").get("metadata") if kind == "response" else orjson.loads(value)
    return its or {}
