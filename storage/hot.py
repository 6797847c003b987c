"""Statements of the commit path: Core statements, compiled once, run with tuples.

Owns: the short way from a Core statement to the driver. Refuses to know: tables. Core's own executemany costs
2 us a row and its expanding IN 0.1 ms a call, as much as SQLite's own work; everything outside the commit
path uses Core as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import BindParameter, Connection, Executable, Insert, Row, Select, bindparam
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

    names: the parameters, in the order of a row's values; for an INSERT, the columns that it fills. Values
    reach the driver as they are, without SQLAlchemy's conversions.
    """
    if not rows:
        return 0
    inserts = isinstance(statement, Insert)
    sql, order = _compiled(statement, conn.dialect, names if inserts else None)
    if order != names:
        indexes = [names.index(name) for name in order]
        rows = [tuple([row[index] for index in indexes]) for row in rows]
    return conn.exec_driver_sql(sql, list(rows)).rowcount


Keys = Sequence[BindParameter[str]]


@lru_cache(maxsize=512)
def _for_keys(build: Callable[[Keys], Select[*tuple[Any, ...]]], count: int) -> Select[*tuple[Any, ...]]:
    return build([bindparam(f"key{index}", required=True) for index in range(count)])


def by_keys(
    conn: Connection, build: Callable[[Keys], Select[*tuple[Any, ...]]], keys: Sequence[str]
) -> Sequence[Row[*tuple[Any, ...]]]:
    """Runs the SELECT that `build` makes of key parameters; it is compiled once for each number of keys."""
    sql, order = _compiled(_for_keys(build, len(keys)), conn.dialect, None)
    assert len(order) == len(keys)  # a statement of keys only, in their order
    return conn.exec_driver_sql(sql, tuple(keys)).all()
