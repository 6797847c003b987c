"""The pairs of metadata by which responses and conversations are found: SQL never looks into JSON here.

A pair is a row, of its object's owner and time, so that a list of what has a pair walks nothing else. What no
list shows, since it is hidden or deleted, has no rows. A row has a digest in place of key and value, which
may be longer than what an index takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    bindparam,
    delete,
    exists,
    func,
    insert,
    select,
)

from storage.tables import metadata_pairs

Kind = Literal["response", "conversation"]

CREATED, ID = metadata_pairs.c.created_at, metadata_pairs.c.object_id
"""The order of a list of what has some pairs."""


def add(
    conn: Connection, owner: str, kind: Kind, id: str, created_at: int, metadata: Mapping[str, str]
) -> None:
    """Has an object found by its metadata."""
    if metadata:
        place = {"object_id": id, "owner": owner, "created_at": created_at}
        conn.execute(insert(metadata_pairs), [{**place, "digest": one} for one in _digests(kind, metadata)])


def forget(conn: Connection, ids: Sequence[str]) -> None:
    """Has objects not found any more."""
    conn.execute(delete(metadata_pairs).where(ID.in_(ids)))


def having(
    query: Select[*tuple[Any, ...]], table: Table, kind: Kind, metadata: Mapping[str, str]
) -> Select[*tuple[Any, ...]]:
    """Only those objects that have all of these pairs. table: that of the objects, which is walked."""
    return _also(query, table.c.id, _digests(kind, metadata))


def walking(
    conn: Connection,
    query: Select[*tuple[Any, ...]],
    table: Table,
    owner: str,
    kind: Kind,
    metadata: Mapping[str, str],
) -> Select[*tuple[Any, ...]]:
    """The same by a walk through the rows of the rarest of the pairs, of which there is one at least, in the
    order of `CREATED` and `ID`."""
    first, *others = _digests(kind, metadata)
    if others:
        first, *others = sorted(
            (first, *others),
            key=lambda one: conn.execute(_SOME, {"owner": owner, "digest": one}).scalar_one(),
        )
    query = query.join_from(metadata_pairs, table, table.c.id == ID)
    query = query.where(metadata_pairs.c.owner == owner, metadata_pairs.c.digest == first)
    query = _also(query, ID, others)
    # SQLite, which has no statistics, might walk all objects of the owner and look for the pair of each.
    return query.with_hint(metadata_pairs, "INDEXED BY metadata_pairs_by_time", "sqlite").with_hint(
        table, f"INDEXED BY sqlite_autoindex_{table.name}_1", "sqlite"
    )


MANY = 100
"""Rows of a pair that are counted to find the rarest one."""

_OF_PAIR = (metadata_pairs.c.owner == bindparam("owner"), metadata_pairs.c.digest == bindparam("digest"))
_SOME = select(func.count()).select_from(select(ID).where(*_OF_PAIR).limit(MANY).subquery())


def _also(
    query: Select[*tuple[Any, ...]], id: ColumnElement[str], digests: Iterable[bytes]
) -> Select[*tuple[Any, ...]]:
    for digest in digests:
        pair = metadata_pairs.alias()
        query = query.where(exists().where(pair.c.object_id == id, pair.c.digest == digest))
    return query


def _digests(kind: Kind, metadata: Mapping[str, str]) -> list[bytes]:
    return [blake2b(orjson.dumps([kind, *pair]), digest_size=16).digest() for pair in metadata.items()]
