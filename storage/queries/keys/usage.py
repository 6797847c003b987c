"""What was used, in sums: added to in the transaction that ends a run, and put together in hours later on.

A sum is of one minute, and each process has rows of its own, so that the transactions of several processes
that end runs of one owner at the same moment do not wait for each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, literal_column, select

from storage.drivers import insert_or_add, many
from storage.queries import events
from storage.records import Counts, Dimension, Spending, Spent, UsageFilter, UsageSum
from storage.tables import HOURLY, responses, runs, usage

MINUTE = 60 * 1_000_000
HOUR = 60 * MINUTE
SHARDS = 1 << 31
"""So many that two processes hardly ever share a row: one would wait for it while the other stands still."""

_COUNTS = tuple(field.name for field in fields(Counts))
_NAMES = ("owner", "start", "kind", "model", "key_id", "tier", "batch", "shard", *_COUNTS)

_Key = tuple[str, int, str, str, str, str, bool]
"""Owner, start, kind, model, key, tier and batch of a row."""


def shard_of(runner: str) -> int:
    """The shard that a process writes."""
    return zlib.crc32(runner.encode()) % SHARDS


def add(conn: Connection, spent: Sequence[Spent], shard: int) -> None:
    """Counts what was used, by one statement."""
    sums: dict[_Key, Counts] = {}
    for one in spent:
        of = one.account
        start = one.at - one.at % MINUTE
        key = (of.owner, start, of.kind, of.model, of.key_id or "", of.tier, of.batch)
        sums[key] = sums.get(key, Counts()) + one.counts
    _add(conn, sums, shard)


def _add(conn: Connection, sums: dict[_Key, Counts], shard: int) -> None:
    # In one order, so that no two processes wait for each other.
    rows = [(*key, shard, *(getattr(sums[key], name) for name in _COUNTS)) for key in sorted(sums)]
    many(conn, insert_or_add(conn.dialect.name, usage, _COUNTS), _NAMES, rows)


def settle(conn: Connection, ids: Sequence[str], spending: Spending, shard: int) -> None:
    """Counts what those of these responses have used that are in flight, and are about to go."""
    query = (
        select(responses.c.id, responses.c.plan)
        .join_from(runs, responses, runs.c.response_id == responses.c.id)
        .where(runs.c.response_id.in_(ids), responses.c.plan != b"")
        .order_by(runs.c.response_id)
        .with_for_update(of=runs)  # what a run writes after this is lost
    )
    found = [spending(row.plan, events.counts(conn, row.id)) for row in conn.execute(query).all()]
    add(conn, [spent for spent in found if spent is not None], shard)


def sums(
    conn: Connection, wanted: UsageFilter, by: tuple[Dimension, ...], width: int
) -> tuple[UsageSum, ...]:
    """What was used, in buckets of `width` microseconds since the epoch, oldest first."""
    table = usage.c
    where: list[ColumnElement[bool]] = [
        table.kind == wanted.kind,
        table.start >= wanted.since,
        table.start < wanted.before,
    ]
    for column, values in (
        (table.owner, wanted.owners),
        (table.key_id, wanted.key_ids),
        (table.model, wanted.models),
    ):
        if values:
            where.append(column.in_(values))
    if wanted.batch is not None:
        where.append(table.batch == wanted.batch)
    # As text, because a parameter would not be the same expression in SELECT and GROUP BY.
    start = (table.start - table.start % literal_column(str(width))).label("bucket")
    columns = [table[name] for name in by]
    query = (
        select(start, *columns, *(func.sum(table[name]).label(name) for name in _COUNTS))
        .where(*where)
        .group_by(start, *columns)
        .order_by(start, *columns)
    )
    return tuple(
        UsageSum(
            int(row.bucket),
            {name: _shown(name, getattr(row, name)) for name in by},
            Counts(*(int(getattr(row, name)) for name in _COUNTS)),
        )
        for row in conn.execute(query).all()
    )


def _shown(name: Dimension, value: Any) -> str | bool | None:
    if name == "key_id":
        return value or None
    shown: str | bool = value
    return shown


def fold(conn: Connection, before: int) -> int:
    """Puts the minutes of one owner and one hour that ended before this time together; returns how many rows
    went, 0 when there are no more.

    They are taken out first: of two processes that do this at once, the second finds nothing.
    """
    minutes = usage.c.shard != literal_column(str(HOURLY))
    oldest = select(usage.c.start, usage.c.owner).where(minutes, usage.c.start < before - before % HOUR)
    first = conn.execute(oldest.order_by(usage.c.start, usage.c.owner).limit(1)).first()
    if first is None:
        return 0
    start = first.start - first.start % HOUR
    gone = (
        delete(usage)
        .where(minutes, usage.c.owner == first.owner, usage.c.start >= start, usage.c.start < start + HOUR)
        .returning(usage)
    )
    rows = conn.execute(gone).all()
    together: dict[_Key, Counts] = {}
    for row in rows:
        key = (row.owner, start, row.kind, row.model, row.key_id, row.tier, row.batch)
        counts = Counts(*(getattr(row, name) for name in _COUNTS))
        together[key] = together.get(key, Counts()) + counts
    _add(conn, together, HOURLY)
    return len(rows)
