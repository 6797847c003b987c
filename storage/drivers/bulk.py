"""Fast statements for the commit path: compiled once and handed straight to the driver, for one row or many.

Core's own executemany and IN lists would cost a commit of 64 rows 0.3 ms, as much as all of SQLite's work.
Whatever is not on the commit path uses Core as it is.

SQLite has no wire between us and it, so there a statement for many rows is executed for each of them. On
PostgreSQL it becomes one statement over arrays, one for each column, which `unnest` turns into rows: a single
round trip, planned once, however many rows there are, and without a limit on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ARRAY,
    BindParameter,
    Connection,
    Executable,
    Insert,
    Select,
    Text,
    bindparam,
    column,
    func,
    select,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.sql import visitors
from sqlalchemy.sql.compiler import SQLCompiler

Rows = Sequence[tuple[Any, ...]]


def many(conn: Connection, statement: Executable, names: tuple[str, ...], rows: Rows) -> int:
    """Runs a statement once for each row; returns how many table rows it changed.

    names: the parameters, in the order of a row's values; for an INSERT, the columns that it fills. Where the
    statement's parameters are not compared with a column, they need an explicit type. No two rows may change
    the same table row.
    """
    if not rows:
        return 0
    cursor = conn.connection.cursor()
    try:
        if _takes_arrays(conn):
            sql, order = _compiled_for_arrays(statement, conn.dialect, names)
            cursor.execute(sql, _arrays(names, order, rows))
        else:
            cursor.executemany(*_bound(conn, statement, names, rows))
        return cursor.rowcount
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
    """Runs the SELECT that `build` makes of keys, its only parameters."""
    cursor = conn.connection.cursor()
    try:
        if _takes_arrays(conn):
            cursor.execute(_compiled(_for_any_keys(build), conn.dialect)[0], [list(keys)])
        else:
            cursor.execute(_compiled(_for_keys(build, len(keys)), conn.dialect)[0], keys)
        return cursor.fetchall()
    finally:
        cursor.close()


# ------------------------------------------------------------------------------------------------------------
# Parameters, a row at a time


@lru_cache(maxsize=512)
def _compiled(
    statement: Any, dialect: Dialect, columns: tuple[str, ...] | None = None
) -> tuple[str, tuple[str, ...]]:
    compiled: SQLCompiler = statement.compile(dialect=dialect, column_keys=columns)
    return compiled.string, tuple(compiled.positiontup or ())


def _bound(conn: Connection, statement: Executable, names: tuple[str, ...], rows: Rows) -> tuple[str, Rows]:
    """The statement's text, and the rows with their values in the order in which it takes them."""
    sql, order = _compiled(statement, conn.dialect, names if isinstance(statement, Insert) else None)
    if order != names:
        indexes = [names.index(name) for name in order]
        rows = [tuple([row[index] for index in indexes]) for row in rows]
    return sql, rows


@lru_cache(maxsize=512)
def _for_keys(build: Callable[[Keys], Select[*tuple[Any, ...]]], count: int) -> Select[*tuple[Any, ...]]:
    # Compiled once for each number of keys, in their order.
    return build([bindparam(f"key{index}", required=True) for index in range(count)])


# ------------------------------------------------------------------------------------------------------------
# Parameters as arrays


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

    def as_column(element: Any, **_: Any) -> Any:
        return given.c[element.key] if isinstance(element, BindParameter) else None

    return _compiled(visitors.replacement_traverse(statement, {}, as_column), dialect)


def _arrays(names: tuple[str, ...], order: tuple[str, ...], rows: Rows) -> list[list[Any]]:
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    return [list(columns[name]) for name in order]


@lru_cache(maxsize=512)
def _for_any_keys(build: Callable[[Keys], Select[*tuple[Any, ...]]]) -> Select[*tuple[Any, ...]]:
    return build(select(func.unnest(bindparam("keys", type_=ARRAY(Text), required=True))))
