"""What was used, in sums: added to in the transaction that ends a run, and put together in hours later on.

A sum is of one minute, and each process has rows of its own, so that the transactions of several processes
that end runs of one owner at the same moment do not wait for each other.

What was used for persons whom clients name is counted in the same transaction once more, by the hour, in a
table of its own. So the sums of owners, which budgets read every second, do not grow with the number of
persons, and a person who is not told apart is missing from no sum.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    bindparam,
    delete,
    func,
    literal,
    literal_column,
    or_,
    select,
    tuple_,
    union_all,
)

from storage.drivers import insert_or_add, many
from storage.queries import events
from storage.records import (
    MAX_PERSONS,
    Account,
    Counts,
    Dimension,
    Spending,
    Spent,
    UsageFilter,
    UsageSum,
)
from storage.tables import HOURLY, person_usage, responses, runs, usage

MINUTE = 60 * 1_000_000
HOUR = 60 * MINUTE
SHARDS = 1 << 31
"""So many that two processes hardly ever share a row: one would wait for it while the other stands still."""

ROWS = 1000
"""Rows of persons that one step removes."""

MAX_KNOWN = 100_000
"""Persons who are remembered, of all owners and hours together; some 20 MB of memory."""

_COUNTS = tuple(field.name for field in fields(Counts))
_OF = ("kind", "model", "key_id", "tier", "batch")
_NAMES = ("owner", "start", *_OF, "shard", *_COUNTS)
_PERSON_NAMES = ("owner", "start", "person", *_OF, "shard", *_COUNTS)

_Of = tuple[str, str, str, str, bool]
"""Kind, model, key, tier and batch of a row."""
_Key = tuple[str, int, *_Of]
"""Owner and start of a row, and what it is of."""
_Person = tuple[str, int, str]
"""Owner, start and person of a row."""


class Persons:
    """Which persons of an owner are told apart in an hour: those whom the database has when this process
    counts the first of them, and then who comes first, up to `most`. What others use counts for their owner
    alone.

    Clients make identifiers up, so that without a bound they could fill the table. It is asked within
    transactions, and never by two at once; a person whose transaction comes to nothing keeps the place.
    """

    def __init__(self, most: int = MAX_PERSONS) -> None:
        self._most = most
        self._known: dict[tuple[str, int], set[str]] = {}  # by owner and hour
        self._num_known = 0

    def tells_apart(self, conn: Connection, owner: str, start: int, person: str) -> bool:
        """Whether a person's usage of the hour that begins at `start` is kept."""
        known = self._known.get((owner, start))
        if known is None:
            known = self._read(conn, owner, start)
        if person not in known and len(known) < self._most:
            known.add(person)
            self._num_known += 1
        return person in known

    def _read(self, conn: Connection, owner: str, start: int) -> set[str]:
        while self._num_known > MAX_KNOWN:
            self._num_known -= len(self._known.pop(next(iter(self._known))))
        known = set(conn.execute(_PERSONS, {"of": owner, "at": start}).scalars()) if self._most else set()
        self._known[owner, start] = known
        self._num_known += len(known)
        return known


_PERSONS = (
    select(person_usage.c.person)
    .distinct()
    .where(person_usage.c.owner == bindparam("of"), person_usage.c.start == bindparam("at"))
)


@dataclass(frozen=True, slots=True)
class Counting:
    """How a process counts. shard: of its rows."""

    shard: int
    persons: Persons


def shard_of(runner: str) -> int:
    """The shard that a process writes."""
    return zlib.crc32(runner.encode()) % SHARDS


def add(conn: Connection, spent: Sequence[Spent], counting: Counting) -> None:
    """Counts what was used, by one statement, and by a second one where persons are named."""
    sums: dict[_Key, Counts] = {}
    of_persons: dict[_Person, dict[_Of, Counts]] = {}
    for one in spent:
        owner, of = one.account.owner, _of(one.account)
        key = (owner, one.at - one.at % MINUTE, *of)
        sums[key] = sums.get(key, Counts()) + one.counts
        if one.account.person is not None:
            person = (owner, one.at - one.at % HOUR, one.account.person)
            used = of_persons.setdefault(person, {})
            used[of] = used.get(of, Counts()) + one.counts
    _add(conn, sums, counting.shard)
    told = [person for person in of_persons if counting.persons.tells_apart(conn, *person)]
    rows = [
        (*person, *of, counting.shard, *(getattr(counts, name) for name in _COUNTS))
        for person in sorted(told)
        for of, counts in sorted(of_persons[person].items())
    ]
    many(conn, insert_or_add(conn.dialect.name, person_usage, _COUNTS), _PERSON_NAMES, rows)


def _of(account: Account) -> _Of:
    return account.kind, account.model, account.key_id or "", account.tier, account.batch


def _add(conn: Connection, sums: Mapping[_Key, Counts], shard: int) -> None:
    # In one order, so that no two processes wait for each other.
    rows = [(*key, shard, *(getattr(sums[key], name) for name in _COUNTS)) for key in sorted(sums)]
    many(conn, insert_or_add(conn.dialect.name, usage, _COUNTS), _NAMES, rows)


def settle(conn: Connection, ids: Sequence[str], spending: Spending, counting: Counting) -> None:
    """Counts what those of these responses have used that are in flight, and are about to go."""
    query = (
        select(responses.c.id, responses.c.plan)
        .join_from(runs, responses, runs.c.response_id == responses.c.id)
        .where(runs.c.response_id.in_(ids), responses.c.plan != b"")
        .order_by(runs.c.response_id)
        .with_for_update(of=runs)  # what a run writes after this is lost
    )
    found = [spending(row.plan, events.counts(conn, row.id)) for row in conn.execute(query).all()]
    add(conn, [spent for spent in found if spent is not None], counting)


def sums(
    conn: Connection, wanted: UsageFilter, by: tuple[Dimension, ...], width: int, limit: int | None
) -> tuple[UsageSum, ...]:
    """What was used, in buckets of `width` microseconds since the epoch, oldest first: all sums, or the first
    `limit` ones."""
    if wanted.persons:
        rows = _rows(person_usage, wanted).subquery()
    elif "person" in by:
        # What is of no person is what theirs leave of the whole; by one statement, so that the parts fit.
        whole, told_apart = _rows(usage, wanted), _rows(person_usage, wanted)
        rows = union_all(whole, told_apart, _rows(person_usage, wanted, taken_off=True)).subquery()
    else:
        rows = _rows(usage, wanted).subquery()
    # As text, because a parameter would not be the same expression in SELECT and GROUP BY.
    start = (rows.c.start - rows.c.start % literal_column(str(width))).label("bucket")
    columns = [rows.c[name] for name in by]
    counted = [func.sum(rows.c[name]).label(name) for name in _COUNTS]
    query = (
        select(start, *columns, *counted)
        .group_by(start, *columns)
        .having(or_(*(total != 0 for total in counted)))
        .order_by(start, *columns)
        .limit(limit)
    )
    return tuple(
        UsageSum(
            int(row.bucket),
            {name: _shown(name, getattr(row, name)) for name in by},
            Counts(*(int(getattr(row, name)) for name in _COUNTS)),
        )
        for row in conn.execute(query).all()
    )


def _rows(table: Table, wanted: UsageFilter, *, taken_off: bool = False) -> Select[*tuple[Any, ...]]:
    """The rows of a table that are asked for. taken_off: those of persons, below zero and of nobody."""
    of = table.c
    where: list[ColumnElement[bool]] = [
        of.kind == wanted.kind,
        of.start >= wanted.since,
        of.start < wanted.before,
    ]
    for name, values in (
        ("owner", wanted.owners),
        ("key_id", wanted.key_ids),
        ("model", wanted.models),
        ("person", wanted.persons),
    ):
        if values:
            where.append(of[name].in_(values))
    if wanted.batch is not None:
        where.append(of.batch == wanted.batch)
    person = literal("").label("person") if taken_off or "person" not in of else of.person
    counts = [(-of[name]).label(name) if taken_off else of[name] for name in _COUNTS]
    return select(of.start, of.owner, of.key_id, of.model, of.tier, of.batch, person, *counts).where(*where)


def _shown(name: Dimension, value: Any) -> str | bool | None:
    if name in ("key_id", "person"):
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


def forget(conn: Connection, before: int) -> int:
    """Removes some of what persons used in hours that began before this time; returns how many rows went."""
    key = tuple(person_usage.primary_key.columns)
    some = select(*key).where(person_usage.c.start < before).limit(ROWS)
    return conn.execute(delete(person_usage).where(tuple_(*key).in_(some))).rowcount
