"""Statements of the commit path: Core statements, compiled once, handed straight to the driver's cursor.

Owns: the short way from a Core statement to the driver, and nothing else; values travel as they are. Refuses
to know: tables. Core's own executemany and IN lists would cost a commit of 64 rows 0.3 ms, as much as
SQLite's whole work; whatever is not on the commit path uses Core as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import BindParameter, Connection, Executable, Insert, Select, bindparam
from sqlalchemy.engine import Dialect
from sqlalchemy.sql.compiler import SQLCompiler


@lru_cache(maxsize=512)
def _compiled(
    statement: Any, dialect: Dialect, columns: tuple[str, ...] | None
) -> tuple[str, tuple[str, ...]]:
    compiled: SQLCompiler = statement.compile(dialect=dialect, column_keys=columns)
    return compiled.string, tuple(compiled.positiontup or ())


def many(
    conn: Connection, statement: Executable, names: tuple[str, ...], rows: Sequence[tuple[Any, ...]]
) -> int:
    """Runs a statement once for each row; returns how many table rows it changed.

    names: the parameters, in the order of a row's values; for an INSERT, the columns that it fills.
    """
    if not rows:
        return 0
    sql, rows = _bound(conn, statement, names, rows)
    cursor = conn.connection.cursor()
    try:
        cursor.executemany(sql, rows)
        return cursor.rowcount
    finally:
        cursor.close()


def returned(
    conn: Connection, statement: Executable, names: tuple[str, ...], rows: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """The same for an INSERT that returns one value: those values, in order."""
    sql, rows = _bound(conn, statement, names, rows)
    cursor = conn.connection.cursor()
    try:
        values: list[tuple[Any]] = []
        for row in rows:
            cursor.execute(sql, row)
            values += cursor.fetchall()
        return [value for (value,) in values]
    finally:
        cursor.close()


def _bound(
    conn: Connection, statement: Executable, names: tuple[str, ...], rows: Sequence[tuple[Any, ...]]
) -> tuple[str, Sequence[tuple[Any, ...]]]:
    """The statement's text, and the rows with their values in the order in which it takes them."""
    sql, order = _compiled(statement, conn.dialect, names if isinstance(statement, Insert) else None)
    if order != names:
        indexes = [names.index(name) for name in order]
        rows = [tuple([row[index] for index in indexes]) for row in rows]
    return sql, rows


Keys = Sequence[BindParameter[str]]


@lru_cache(maxsize=512)
def _for_keys(build: Callable[[Keys], Select[*tuple[Any, ...]]], count: int) -> Select[*tuple[Any, ...]]:
    return build([bindparam(f"key{index}", required=True) for index in range(count)])


def by_keys(
    conn: Connection, build: Callable[[Keys], Select[*tuple[Any, ...]]], keys: Sequence[str]
) -> Sequence[tuple[Any, ...]]:
    """Runs the SELECT that `build` makes of key parameters; it is compiled once for each number of keys."""
    sql, order = _compiled(_for_keys(build, len(keys)), conn.dialect, None)
    assert len(order) == len(keys)  # a statement of keys only, in their order
    cursor = conn.connection.cursor()
    try:
        cursor.execute(sql, keys)
        return cursor.fetchall()
    finally:
        cursor.close()
