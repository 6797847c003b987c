"""Storage: what survives a crash.

Owns: responses, items, conversations, runs, the log of events and API keys, in SQL. Refuses to know: HTTP,
models, what any stored byte means. It imports nothing of ours.

This door is light: the values and errors are here at once, SQLAlchemy comes with `open_storage`.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .records import (
    ECHO_MARK,
    ClosedItem,
    CommitStats,
    ConversationLocked,
    ConversationMoved,
    Direction,
    Finish,
    FolderHeld,
    HistoryItem,
    ItemConflict,
    NewItem,
    NewResponse,
    NotFound,
    NotWaiting,
    Order,
    OutputConflict,
    Page,
    Park,
    Record,
    RunAppend,
    RunClaim,
    RunLost,
    SchemaTooNew,
    StorageError,
    StorageUnavailable,
    StoredConversation,
    StoredItem,
    StoredKey,
    StoredResponse,
    ToolOutput,
    UnknownCall,
    WaitingInputs,
)

if TYPE_CHECKING:
    from .door import Storage
    from .tables import metadata

__all__ = [
    "ECHO_MARK",
    "ClosedItem",
    "CommitStats",
    "ConversationLocked",
    "ConversationMoved",
    "Direction",
    "Finish",
    "FolderHeld",
    "HistoryItem",
    "ItemConflict",
    "NewItem",
    "NewResponse",
    "NotFound",
    "NotWaiting",
    "Order",
    "OutputConflict",
    "Page",
    "Park",
    "Record",
    "RunAppend",
    "RunClaim",
    "RunLost",
    "SchemaTooNew",
    "Storage",
    "StorageError",
    "StorageUnavailable",
    "StoredConversation",
    "StoredItem",
    "StoredKey",
    "StoredResponse",
    "ToolOutput",
    "UnknownCall",
    "WaitingInputs",
    "metadata",
    "open_storage",
]


async def open_storage(url: str, *, runner: str, lock: bool = True) -> Storage:
    """Opens the database at `url` (sqlite+aiosqlite:///PATH), makes or migrates it, and takes its folder.

    runner: the name under which this process owns runs. lock=False is for tests of two openers: without it,
    nobody knows that other owners are dead. FolderHeld, SchemaTooNew, StorageUnavailable; ValueError for a
    URL of another kind.
    """
    door = await asyncio.to_thread(import_module, ".door", __name__)
    storage: Storage = await door.Storage.open(url, runner=runner, lock=lock)
    return storage


def __getattr__(name: str) -> Any:
    if name == "Storage":
        return import_module(".door", __name__).Storage
    if name == "metadata":  # Alembic's
        return import_module(".tables", __name__).metadata
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
