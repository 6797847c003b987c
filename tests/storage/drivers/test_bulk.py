"""Statements for many rows on SQLite: they write and read as if each row had a statement of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Integer,
    LargeBinary,
    MetaData,
    Select,
    Table,
    Text,
    bindparam,
    create_engine,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import sqlite as upserting

from storage.drivers.bulk import MOST_ROWS, Keys, by_keys, many

META = MetaData()
THINGS = Table(
    "order",  # a word of SQL's own
    META,
    Column("id", Text, primary_key=True),
    Column("group", Integer, nullable=False),
    Column("body", LargeBinary),
    Column("live", Boolean),
)
NAMES = ("id", "group", "body", "live")
PUT = insert(THINGS)
MOVE = (
    update(THINGS)
    .where(THINGS.c.id == bindparam("which"))
    .values(group=bindparam("to", type_=Integer), body=bindparam("says", type_=LargeBinary))
)


@pytest.fixture
def statements() -> list[str]:
    return []


@pytest.fixture
def conn(statements: list[str]) -> Iterator[Connection]:
    with create_engine("sqlite://").connect() as opened:
        META.create_all(opened)
        opened.commit()
        raw: Any = opened.connection.driver_connection
        raw.set_trace_callback(statements.append)
        yield opened


def rows(count: int) -> list[tuple[Any, ...]]:
    return [(f"t{number:03}", number, bytes([number % 256]), bool(number % 2)) for number in range(count)]


@pytest.mark.parametrize("count", [0, 1, 2, 37, MOST_ROWS, MOST_ROWS + 1, 3 * MOST_ROWS + 5])
def test_rows_are_written_by_few_statements(conn: Connection, statements: list[str], count: int) -> None:
    assert many(conn, PUT, NAMES, rows(count)) == count
    inserts = [sql for sql in statements if sql.startswith("INSERT")]
    assert len(inserts) == count // MOST_ROWS + (count % MOST_ROWS).bit_count()
    assert conn.execute(select(THINGS).order_by(THINGS.c.id)).all() == rows(count)

    del statements[:]
    changes = [(f"t{number:03}", -number, None) for number in range(count)]
    assert many(conn, MOVE, ("which", "to", "says"), changes) == count
    assert len([sql for sql in statements if sql.startswith("UPDATE")]) == len(inserts)
    moved = [(id, -group, None, live) for id, group, _, live in rows(count)]
    assert conn.execute(select(THINGS).order_by(THINGS.c.id)).all() == moved


def test_rows_that_are_not_there_are_not_counted(conn: Connection) -> None:
    many(conn, PUT, NAMES, rows(2))
    changes = [("t000", 5, b"x"), ("none", 6, b"y"), ("t001", 7, b"z")]
    assert many(conn, MOVE, ("which", "to", "says"), changes) == 2


def test_a_row_that_is_refused_is_told_and_undone_with_its_transaction(conn: Connection) -> None:
    with conn.begin():
        many(conn, PUT, NAMES, rows(1))
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"), conn.begin():
        many(conn, PUT, NAMES, [("new", 1, b"", True), *rows(1)])
    with pytest.raises(sqlite3.IntegrityError, match="NOT NULL"), conn.begin():
        many(conn, MOVE, ("which", "to", "says"), [("t000", None, b"")])
    assert conn.execute(select(THINGS)).all() == rows(1)


def test_other_statements_take_rows_one_by_one(conn: Connection, statements: list[str]) -> None:
    many(conn, PUT, NAMES, rows(3))
    del statements[:]
    added = upserting.insert(THINGS)
    adds = added.on_conflict_do_update(
        index_elements=["id"], set_={"group": THINGS.c.group + added.excluded.group}
    )
    assert many(conn, adds, NAMES, [("t000", 10, None, None), ("t009", 10, None, None)]) == 2
    assert (
        many(conn, delete(THINGS).where(THINGS.c.id == bindparam("id")), ("id",), [("t001",), ("t002",)]) == 2
    )
    assert len(statements) == 4
    assert conn.execute(select(THINGS.c.id, THINGS.c.group)).all() == [("t000", 10), ("t009", 10)]


def test_rows_are_read_as_they_are(conn: Connection) -> None:
    odd = 'a"\n\u2028\x00é😀'
    many(conn, PUT, NAMES, [(odd, 2**63 - 1, b"", True), ("b", -(2**63), None, None), ("c", 0, b"", False)])

    def build(keys: Keys) -> Select[*tuple[Any, ...]]:
        return select(THINGS.c.id, THINGS.c.group, THINGS.c.live).where(THINGS.c.id.in_(keys))

    found = by_keys(conn, build, [odd, "b", "none"])
    assert sorted(map(tuple, found)) == sorted([(odd, 2**63 - 1, 1), ("b", -(2**63), None)])
    assert by_keys(conn, build, ["none"]) == []
