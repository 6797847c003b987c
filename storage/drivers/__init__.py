"""The databases: SQLite and PostgreSQL behind one interface, the writing thread and the reading threads."""

from __future__ import annotations

from storage.drivers.blob_folder import INCOMING, blob_folder, copied, sync
from storage.drivers.bulk import Keys, by_keys, many, returned
from storage.drivers.connect import database
from storage.drivers.file_access import why_barred
from storage.drivers.interface import (
    PART_BYTES,
    BlobStore,
    Database,
    OpenBlob,
    Run,
    Writing,
    earlier_clock,
    insert_or_add,
    insert_unless_taken,
    look,
    shared_clock,
    unavailable,
)
from storage.drivers.readers import Readers
from storage.drivers.writer import Writer

__all__ = [
    "INCOMING",
    "PART_BYTES",
    "BlobStore",
    "Database",
    "Keys",
    "OpenBlob",
    "Readers",
    "Run",
    "Writer",
    "Writing",
    "blob_folder",
    "by_keys",
    "copied",
    "database",
    "earlier_clock",
    "insert_or_add",
    "insert_unless_taken",
    "look",
    "many",
    "returned",
    "shared_clock",
    "sync",
    "unavailable",
    "why_barred",
]
