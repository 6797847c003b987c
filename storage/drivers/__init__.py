"""The databases: SQLite and PostgreSQL behind one interface, the writing thread and the reading threads."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from storage.drivers.bulk import Keys, by_keys, many, returned
from storage.drivers.connect import database
from storage.drivers.interface import Database, Writing, insert_unless_taken, unavailable
from storage.drivers.readers import Readers
from storage.drivers.writer import Writer

if TYPE_CHECKING:
    from storage.drivers.backup import back_up

__all__ = [
    "Database",
    "Keys",
    "Readers",
    "Writer",
    "Writing",
    "back_up",
    "by_keys",
    "database",
    "insert_unless_taken",
    "many",
    "returned",
    "unavailable",
]


def __getattr__(name: str) -> Any:
    if name == "back_up":  # with aiosqlite, which nothing else needs
        return import_module("storage.drivers.backup").back_up
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
