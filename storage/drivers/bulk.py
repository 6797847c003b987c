"""Fast statements for the commit path: compiled once and handed straight to the driver, for one row or many.

Core's own executemany and IN lists would cost a commit of 64 rows 0.3 ms, as much as all of SQLite's work.
Whatever is not on the commit path uses Core as it is.

On PostgreSQL a statement for many rows becomes one over arrays, one for each column, which `unnest` turns
into rows: a single round trip, planned once, for any number of rows.

SQLite has no wire between us and it, but the interpreter's lock: its driver gives the lock up for each row
that is written or read, and waits for it again behind the event loop. So a statement there writes many rows
(an INSERT or UPDATE that has the values of each), and rows are read as one row of JSON. [measured] beside a
thread that computes, a commit of 64 rows takes 4 ms instead of 20, and half of the processor's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import orjson
from sqlalchemy import (
    ARRAY,
    BindParameter,
    Connection,
    Executable,
    FromClause,
    Insert,
    Select,
    Text,
    Update,
    bindparam,
    column,
    func,
    literal_column,
    select,
    text,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.sql import visitors
from sqlalchemy.sql.compiler import SQLCompiler

Rows = Sequence[tuple[Any, ...]]

MOST_ROWS = 64
"""Of one statement on SQLite."""


def many(conn: Connection, statement: Executable, names: tuple[str, ...], rows: Rows) -> int:
    """Runs a statement as if once for each row; returns how many table rows it changed.

    names: the parameters, in the order of a row's values; for an INSERT, which says nothing but its table,
    the columns that it fills. Where the statement's parameters are not compared with a column, they need an
    explicit type. No two rows may change the same table row.
    """
    if not rows:
        return 0
    cursor = conn.connection.cursor()
    try:
        if _takes_arrays(conn):
            sql, order = _compiled_for_arrays(statement, conn.dialect, names)
            cursor.execute(sql, _arrays(names, order, rows))
            return cursor.rowcount
        if type(statement) not in (Insert, Update):  # of a DELETE, or an INSERT that may add to a row
            cursor.executemany(*_bound(conn, statement, names, rows))
            return cursor.rowcount
        num = 0
        for part in _parts(rows):
            cursor.execute(_compiled_for_rows(statement, conn.dialect, names, len(part)), [*chain(*part)])
            num += cursor.rowcount
        return num
    finally:
        cursor.close()


def returned(conn: Connection, statement: Insert, names: tuple[str, ...], rows: Rows) -> list[Any]:
    """The same for an INSERT that returns values: a tuple for each row, in no particular order."""
    if not rows:
        return []
    cursor = conn.connection.cursor()
    try:
        if _takes_arrays(conn):
            sql, order = _compiled_for_arrays(statement, conn.dialect, names)
            cursor.execute(sql, _arrays(names, order, rows))
            return list(cursor.fetchall())
        found: list[Any] = []
        sql, rows = _bound(conn, statement, names, rows)
        for row in rows:
            cursor.execute(sql, row)
            found += cursor.fetchall()
        return found
    finally:
        cursor.close()


Keys = Sequence[BindParameter[str]] | Select[tuple[str]]
"""What a statement compares a column with by `in_`."""


def by_keys(
    conn: Connection, build: Callable[[Keys], Select[*tuple[Any, ...]]], keys: Sequence[str]
) -> Sequence[tuple[Any, ...]]:
    """Runs the SELECT that `build` makes of keys, its only parameters. What it returns are whole numbers,
    texts and None, in no particular order."""
    cursor = conn.connection.cursor()
    try:
        if _takes_arrays(conn):
            cursor.execute(_compiled(_for_any_keys(build), conn.dialect)[0], [list(keys)])
            return cursor.fetchall()
        cursor.execute(_compiled(_for_keys(build, len(keys)), conn.dialect)[0], keys)
        ((found,),) = cursor.fetchall()
        rows: list[tuple[Any, ...]] = orjson.loads(found)
        return rows
    finally:
        cursor.close()


# ------------------------------------------------------------------------------------------------------------
# Both


@lru_cache(maxsize=512)
def _compiled(
    statement: Any, dialect: Dialect, columns: tuple[str, ...] | None = None
) -> tuple[str, tuple[str, ...]]:
    compiled: SQLCompiler = statement.compile(dialect=dialect, column_keys=columns)
    return compiled.string, tuple(compiled.positiontup or ())


def _with_values_of(given: FromClause, statement: Any) -> Any:
    """A statement whose parameters are the columns of a table."""

    def as_column(element: Any, **_: Any) -> Any:
        return given.c[element.key] if isinstance(element, BindParameter) else None

    return visitors.replacement_traverse(statement, {}, as_column)


# ------------------------------------------------------------------------------------------------------------
# SQLite


def _bound(conn: Connection, statement: Executable, names: tuple[str, ...], rows: Rows) -> tuple[str, Rows]:
    """The statement's text, and the rows with their values in the order in which it takes them."""
    sql, order = _compiled(statement, conn.dialect, names if isinstance(statement, Insert) else None)
    if order != names:
        indexes = [names.index(name) for name in order]
        rows = [tuple([row[index] for index in indexes]) for row in rows]
    return sql, rows


def _parts(rows: Rows) -> Iterator[Rows]:
    """As many rows as one statement has, and what is left in powers of two: each number is a statement of its
    own, and a connection remembers some hundred."""
    at = 0
    while (left := len(rows) - at) > 0:
        count = min(MOST_ROWS, 1 << (left.bit_length() - 1))
        yield rows[at : at + count]
        at += count


@lru_cache(maxsize=512)
def _compiled_for_rows(
    statement: Insert | Update, dialect: Dialect, names: tuple[str, ...], count: int
) -> str:
    """A statement of one row as one of so many, whose values follow each other in the order of `names`."""
    rows = ", ".join([f"({', '.join('?' * len(names))})"] * count)
    # What fails undoes its transaction: nothing of it has to be kept for undoing this statement alone, which
    # would take three times as long.
    if isinstance(statement, Insert):
        quote = dialect.identifier_preparer.quote
        into = f"{quote(statement.table.name)} ({', '.join(map(quote, names))})"
        return f"INSERT OR FAIL INTO {into} VALUES {rows}"
    columns: list[Any] = [
        literal_column(f"column{number}").label(name) for number, name in enumerate(names, 1)
    ]
    given = select(*columns).select_from(text(f"(VALUES {rows})")).subquery("given")
    return _compiled(_with_values_of(given, statement.prefix_with("OR FAIL")), dialect)[0]


@lru_cache(maxsize=512)
def _for_keys(build: Callable[[Keys], Select[*tuple[Any, ...]]], count: int) -> Select[*tuple[Any, ...]]:
    # Compiled once for each number of keys, in their order.
    found = build([bindparam(f"key{index}", required=True) for index in range(count)]).subquery()
    return select(func.json_group_array(func.json_array(*found.c)))


# ------------------------------------------------------------------------------------------------------------
# PostgreSQL: parameters as arrays


def _takes_arrays(conn: Connection) -> bool:
    return conn.dialect.name == "postgresql"


@lru_cache(maxsize=512)
def _compiled_for_arrays(
    statement: Any, dialect: Dialect, names: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """A statement of one row as a statement of many: each parameter becomes a column of `given`."""
    if isinstance(statement, Insert):
        types = {name: statement.table.c[name].type for name in names}
    else:
        parameters = [
            parameter for parameter in visitors.iterate(statement) if isinstance(parameter, BindParameter)
        ]
        types = {parameter.key: parameter.type for parameter in parameters}
    arrays = [bindparam(name, type_=ARRAY(types[name])) for name in names]
    columns = [column(name, types[name]) for name in names]
    given = func.unnest(*arrays).table_valued(*columns).render_derived(name="given")
    if isinstance(statement, Insert):
        return _compiled(statement.from_select(names, select(*(given.c[name] for name in names))), dialect)
    return _compiled(_with_values_of(given, statement), dialect)


def _arrays(names: tuple[str, ...], order: tuple[str, ...], rows: Rows) -> list[list[Any]]:
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    return [list(columns[name]) for name in order]


@lru_cache(maxsize=512)
def _for_any_keys(build: Callable[[Keys], Select[*tuple[Any, ...]]]) -> Select[*tuple[Any, ...]]:
    return build(select(func.unnest(bindparam("keys", type_=ARRAY(Text), required=True))))
