"""The vectors of chunks as `pgvector` has them, on a PostgreSQL that offers this extension, 0.7 or later: the
database compares a query with each of them, and no process loads them.

They are unit vectors of 16 bits a number, which are compared in half the time of 32 and give cosines that are
right to the third digit.

The table `vector_nearest` is made by the first process that has a model for vectors. It stands beside the
column of `vector_chunks`, which all databases have: whoever writes there writes here too, once there is this
table. What had been written before is taken over in small steps; when all of it is, the table's comment says
so, and only then is it searched.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from math import hypot
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from storage.vector_stores.chunk_ids import FILE_BITS, by_store, of_store
from storage.vector_stores.records import POSITION_BITS

TAKEN = 200
"""Vectors that one transaction takes over."""

_COMPLETE = "all vectors are here"
_MAKING = 0x616E_7469_7665_6374
"""Of the advisory lock of whoever makes the table."""


def make(conn: Connection) -> bool:
    """Makes the table, if the database offers the extension and lets us have it; False where it does not."""
    if conn.dialect.name != "postgresql":
        return False
    conn.execute(text(f"SELECT pg_advisory_xact_lock({_MAKING})"))
    kind = _kind(conn)
    if kind is None:
        offered = "SELECT 1 FROM pg_available_extensions WHERE name = 'vector'"
        if conn.execute(text(offered)).first() is None:
            return False
        nested = conn.begin_nested()
        try:
            conn.execute(text("CREATE EXTENSION IF NOT EXISTS vector"))
        except DBAPIError:  # this user may not
            nested.rollback()
            return False
        nested.commit()
    if conn.execute(text("SELECT to_regtype('halfvec')")).scalar() is None:
        return False
    if kind != "halfvec":
        # Whoever has written chunks and not seen the table has ended before it is there.
        conn.execute(text("LOCK TABLE vector_chunks IN SHARE MODE"))
        # That of an earlier release is filled anew, in small steps: to convert a large one in place takes
        # longer than a statement may.
        conn.execute(text("DROP TABLE IF EXISTS vector_nearest"))
        conn.execute(text("CREATE TABLE vector_nearest (id bigint PRIMARY KEY, embedding halfvec NOT NULL)"))
    return True


def _kind(conn: Connection) -> str | None:
    """The type of the table's vectors; None where there is no table."""
    column = "attrelid = to_regclass('vector_nearest') AND attname = 'embedding'"
    told = conn.execute(text(f"SELECT format_type(atttypid, NULL) FROM pg_attribute WHERE {column}"))
    kind: str | None = told.scalar()
    return kind


def is_complete(conn: Connection) -> bool:
    """Whether the table can be searched."""
    if conn.dialect.name != "postgresql" or _kind(conn) != "halfvec":
        return False
    told = conn.execute(text("SELECT obj_description(to_regclass('vector_nearest'), 'pg_class')"))
    return told.scalar() == _COMPLETE


def take_over(conn: Connection, after: int) -> int | None:
    """Takes over some vectors that were written before the table was there, of chunks behind an id: the last
    id, or None when there are no more."""
    if _kind(conn) is None or is_complete(conn):
        return None
    rows = conn.execute(
        text(
            "SELECT id, embedding FROM vector_chunks WHERE id > :after AND embedding IS NOT NULL"
            f" ORDER BY id LIMIT {TAKEN} FOR UPDATE"
        ),
        {"after": after},
    ).all()
    if not rows:
        conn.execute(text(f"COMMENT ON TABLE vector_nearest IS '{_COMPLETE}'"))
        return None
    values = [{"id": row.id, "value": _literal(row.embedding)} for row in rows]
    conn.execute(text(f"{_INSERT} ON CONFLICT (id) DO NOTHING"), values)
    return int(rows[-1].id)


_INSERT = "INSERT INTO vector_nearest (id, embedding) VALUES (:id, CAST(CAST(:value AS text) AS vector))"


def put(conn: Connection, vectors: Sequence[tuple[int, bytes]]) -> None:
    """Takes vectors in, or others for the same chunks: ids and float32 values. Called behind the write to
    `vector_chunks`."""
    if vectors and conn.dialect.name == "postgresql" and _kind(conn) is not None:
        replace = "ON CONFLICT (id) DO UPDATE SET embedding = excluded.embedding"
        values = [{"id": id, "value": _literal(value)} for id, value in vectors]
        conn.execute(text(f"{_INSERT} {replace}"), values)


def remove(conn: Connection, first: int, last: int) -> None:
    """Takes the vectors of a range of chunks out."""
    if conn.dialect.name == "postgresql" and _kind(conn) is not None:
        within = {"first": first, "last": last}
        conn.execute(text("DELETE FROM vector_nearest WHERE id BETWEEN :first AND :last"), within)


def _literal(value: bytes) -> str:
    """A vector as pgvector reads it, of the length 1."""
    numbers = array("f", value)
    length = hypot(*numbers) or 1.0
    return str([number / length for number in numbers])


_IN_USE = "f.status = 'completed' AND f.deleted_at IS NULL"
_KNOWN = f"{_IN_USE} AND f.embedding = :model AND f.embedded = f.next_position"
_UNKNOWN_FILE = text(
    "SELECT 1 FROM vector_store_files f"
    f" WHERE f.store_number = :store AND f.next_position > 0 AND ({_KNOWN}) IS NOT TRUE LIMIT 1"
)
# Keys of files, once for all chunks: a join of both tables may compare each chunk with each file.
_KNOWN_FILES = (
    f"SELECT (CAST(f.store_number AS bigint) << {FILE_BITS}) | f.number"
    f" FROM vector_store_files f WHERE f.store_number = :store AND {_KNOWN}"
)


def search(
    conn: Connection,
    model: str,
    stores: Sequence[int],
    query: bytes,
    files: Collection[int],
    only: bool,
    most: int,
) -> list[tuple[int, float]]:
    """The chunks of stores that are nearest to a query: ids and cosines, the highest first. model: of the
    vectors. files: keys of files: those that are looked at where `only`, and otherwise those that are not."""
    found: list[tuple[int, float]] = []
    for store, of_this in by_store(stores, files, only=only):
        first, last = of_store(store)
        values: dict[str, Any] = {"query": _literal(query), "most": most}
        of_model = {"store": store, "model": model}
        within = ""
        if conn.execute(_UNKNOWN_FILE, of_model).first() is not None:
            within = f" AND n.id >> {POSITION_BITS} IN ({_KNOWN_FILES})"
            values |= of_model
        if of_this:
            chosen = "= ANY" if only else "<> ALL"
            within += f" AND (n.id >> {POSITION_BITS}) {chosen} (CAST(:files AS bigint[]))"
            values["files"] = sorted(of_this)
        # PostgreSQL keeps a plan for whatever the parameters are. So the range is none, by which it plans how
        # many processes search; and the query is read once, which it would else read anew for each vector.
        statement = (
            "SELECT n.id, n.embedding <=> (SELECT CAST(CAST(:query AS text) AS halfvec)) AS far"
            f" FROM vector_nearest n WHERE n.id BETWEEN {first} AND {last}{within}"
            " ORDER BY far, n.id LIMIT :most"
        )
        rows = conn.execute(text(statement), values).all()
        # A vector of zeros is at no distance that could be told.
        found += [(id, 1.0 - far if far == far else 0.0) for id, far in rows]
    return sorted(found, key=lambda hit: (-hit[1], hit[0]))[:most]
