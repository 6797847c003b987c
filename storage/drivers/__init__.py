"""The databases: SQLite and PostgreSQL behind one interface, the writing thread and the reading threads."""

from __future__ import annotations

from storage.drivers.bulk import Keys, by_keys, many, returned
from storage.drivers.connect import database
from storage.drivers.interface import Database, Writing, insert_or_add, insert_unless_taken, unavailable
from storage.drivers.readers import Readers
from storage.drivers.writer import Writer

__all__ = [
    "Database",
    "Keys",
    "Readers",
    "Writer",
    "Writing",
    "by_keys",
    "database",
    "insert_or_add",
    "insert_unless_taken",
    "many",
    "returned",
    "unavailable",
]
