"""Storage: what survives a crash, in SQL: responses, items, conversations, runs, their events, and API keys;
and contents of files, as blobs.

The bytes of a body are stored and read back as they are; their meaning is the server's. This module is light:
values and errors are here at once, and SQLAlchemy is imported by `open_storage`.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.batches import (
    MAX_BATCH_ATTEMPTS,
    BatchCounts,
    BatchEnd,
    BatchEnded,
    BatchLine,
    BatchLost,
    NewBatch,
    OwnerShare,
    StoredBatch,
    TooManyBatches,
)
from storage.chat_completions import ChatCompletionKnown, NewChatCompletion, OwnerPurged, StoredChatCompletion
from storage.files import (
    Blob,
    BlobTooLarge,
    StoredFile,
    StoredPart,
    StoredUpload,
    SweptFiles,
    UploadEnded,
)
from storage.patience import PATIENCE_S, patience_s
from storage.private_files import make_private_folder
from storage.prompts import DefaultVersion, PromptChange, StoredPrompt, StoredPromptVersion
from storage.records import (
    COMMIT_SECONDS,
    CONVERSATION_BYTES,
    ECHO_MARK,
    LEAST_ROOM,
    MAX_PERSONS,
    PROGRESS_EVENTS,
    TERMINAL_STATUSES,
    UNSURE,
    Account,
    AuditEntry,
    AuditFilter,
    AuditState,
    BadText,
    ClosedItem,
    CommitStats,
    ContainerChange,
    ContainerFile,
    ContainerFull,
    ContainerRoom,
    ConversationArchived,
    ConversationChange,
    ConversationFull,
    ConversationHistory,
    ConversationLocked,
    ConversationMoved,
    Counts,
    Cursor,
    DatabaseState,
    DeletedConversation,
    DeletedResponse,
    Delivery,
    Dimension,
    Direction,
    DueDeliveries,
    EventsExpired,
    ExportedResponse,
    Finish,
    FleetView,
    FolderHeld,
    ForeignDatabase,
    FoundKey,
    HistoryItem,
    ItemConflict,
    Kept,
    KeyedRequest,
    KeyEnded,
    KnownRequest,
    Limits,
    LiveRun,
    NewFork,
    NewItem,
    NewKey,
    NewResponse,
    NewResponseFork,
    NotFound,
    Notice,
    NotWaiting,
    OfModels,
    Order,
    OutputConflict,
    OwnerArchived,
    Page,
    Park,
    PathTaken,
    PositionedItem,
    Purged,
    Record,
    RequestKnown,
    ResponseKnown,
    RunAppend,
    RunClaim,
    RunEnded,
    RunGlance,
    RunLost,
    SchemaTooNew,
    SealingKey,
    Spending,
    Spent,
    StorageError,
    StorageUnavailable,
    StoredAudit,
    StoredContainer,
    StoredConversation,
    StoredItem,
    StoredKey,
    StoredOwner,
    StoredResponse,
    StoredWebhook,
    Swept,
    ToolOutput,
    TooManyForks,
    TooManyQueued,
    UnknownCall,
    Usage,
    UsageFilter,
    UsageSum,
    WaitingInputs,
    each_row,
)
from storage.vector_stores import (
    MAX_CHUNKS,
    POSITION_BITS,
    Due,
    FileClaim,
    FileClaimLost,
    FileCounts,
    NewChunk,
    NewStoreFile,
    NewVectorStore,
    SearchedStore,
    StoredChunk,
    StoredFileBatch,
    StoredStoreFile,
    StoredVectorStore,
    VectorStoreFull,
    WordHits,
)

if TYPE_CHECKING:
    from storage.backup import back_up, blobs_beside, check_backup
    from storage.files import Blobs, Files
    from storage.importing import (
        ImportedConversation,
        ImportedResponse,
        Imports,
        OwnedByAnother,
        Place,
    )
    from storage.inspection import inspect_database, unfinished_plans
    from storage.storage import Storage
    from storage.tables import metadata

__all__ = [
    "COMMIT_SECONDS",
    "CONVERSATION_BYTES",
    "ECHO_MARK",
    "LEAST_ROOM",
    "MAX_BATCH_ATTEMPTS",
    "MAX_CHUNKS",
    "MAX_PERSONS",
    "PATIENCE_S",
    "POSITION_BITS",
    "PROGRESS_EVENTS",
    "TERMINAL_STATUSES",
    "UNSURE",
    "Account",
    "AuditEntry",
    "AuditFilter",
    "AuditState",
    "BadText",
    "BatchCounts",
    "BatchEnd",
    "BatchEnded",
    "BatchLine",
    "BatchLost",
    "Blob",
    "BlobTooLarge",
    "Blobs",
    "ChatCompletionKnown",
    "ClosedItem",
    "CommitStats",
    "ContainerChange",
    "ContainerFile",
    "ContainerFull",
    "ContainerRoom",
    "ConversationArchived",
    "ConversationChange",
    "ConversationFull",
    "ConversationHistory",
    "ConversationLocked",
    "ConversationMoved",
    "Counts",
    "Cursor",
    "DatabaseState",
    "DefaultVersion",
    "DeletedConversation",
    "DeletedResponse",
    "Delivery",
    "Dimension",
    "Direction",
    "Due",
    "DueDeliveries",
    "EventsExpired",
    "ExportedResponse",
    "FileClaim",
    "FileClaimLost",
    "FileCounts",
    "Files",
    "Finish",
    "FleetView",
    "FolderHeld",
    "ForeignDatabase",
    "FoundKey",
    "HistoryItem",
    "ImportedConversation",
    "ImportedResponse",
    "Imports",
    "ItemConflict",
    "Kept",
    "KeyEnded",
    "KeyedRequest",
    "KnownRequest",
    "Limits",
    "LiveRun",
    "NewBatch",
    "NewChatCompletion",
    "NewChunk",
    "NewFork",
    "NewItem",
    "NewKey",
    "NewResponse",
    "NewResponseFork",
    "NewStoreFile",
    "NewVectorStore",
    "NotFound",
    "NotWaiting",
    "Notice",
    "OfModels",
    "Order",
    "OutputConflict",
    "OwnedByAnother",
    "OwnerArchived",
    "OwnerPurged",
    "OwnerShare",
    "Page",
    "Park",
    "PathTaken",
    "Place",
    "PositionedItem",
    "PromptChange",
    "Purged",
    "Record",
    "RequestKnown",
    "ResponseKnown",
    "RunAppend",
    "RunClaim",
    "RunEnded",
    "RunGlance",
    "RunLost",
    "SchemaTooNew",
    "SealingKey",
    "SearchedStore",
    "Spending",
    "Spent",
    "Storage",
    "StorageError",
    "StorageUnavailable",
    "StoredAudit",
    "StoredBatch",
    "StoredChatCompletion",
    "StoredChunk",
    "StoredContainer",
    "StoredConversation",
    "StoredFile",
    "StoredFileBatch",
    "StoredItem",
    "StoredKey",
    "StoredOwner",
    "StoredPart",
    "StoredPrompt",
    "StoredPromptVersion",
    "StoredResponse",
    "StoredStoreFile",
    "StoredUpload",
    "StoredVectorStore",
    "StoredWebhook",
    "Swept",
    "SweptFiles",
    "TooManyBatches",
    "TooManyForks",
    "TooManyQueued",
    "ToolOutput",
    "UnknownCall",
    "UploadEnded",
    "Usage",
    "UsageFilter",
    "UsageSum",
    "VectorStoreFull",
    "WaitingInputs",
    "WordHits",
    "back_up",
    "blobs_beside",
    "check_backup",
    "check_url",
    "each_row",
    "inspect_database",
    "make_private_folder",
    "metadata",
    "open_storage",
    "patience_s",
    "unfinished_plans",
    "why_barred",
]


def check_url(url: str) -> None:
    """ValueError for a URL with which `open_storage` can do nothing, whatever stands there."""
    import_module("storage.drivers").database(url)


def why_barred(file: Path) -> str | None:
    """Why this user cannot read and write a file: the folder or file that is in the way, and whose it is.
    None where nothing is."""
    why: str | None = import_module("storage.drivers").why_barred([file])
    return why


async def open_storage(
    url: str, *, runner: str, lock: bool = True, synced: bool = False, max_persons: int = MAX_PERSONS
) -> Storage:
    """Opens the database at `url`; one that is not there is made, an older one is migrated.

    url: sqlite+aiosqlite:///PATH, whose folder is taken, or postgresql+asyncpg://USER:PASSWORD@HOST/NAME,
    which other processes may have open too. runner: the name under which this process owns runs. lock=False
    is for tests of two openers: without it, nobody knows that other owners are dead. synced: running text
    reaches the disk before it is shown, like everything else. max_persons: of how many persons of an owner it
    is told, in one hour, what each of them used. FolderHeld, SchemaTooNew, ForeignDatabase,
    StorageUnavailable; ValueError for a URL of another kind.
    """
    door = await asyncio.to_thread(import_module, "storage.storage")
    storage: Storage = await door.Storage.open(
        url, runner=runner, lock=lock, synced=synced, max_persons=max_persons
    )
    return storage


def __getattr__(name: str) -> Any:
    if name == "Storage":
        return import_module("storage.storage").Storage
    if name in ("Blobs", "Files"):
        return getattr(import_module("storage.files"), name)
    if name in ("ImportedConversation", "ImportedResponse", "Imports", "OwnedByAnother", "Place"):
        return getattr(import_module("storage.importing"), name)
    if name in ("back_up", "blobs_beside", "check_backup"):
        return getattr(import_module("storage.backup"), name)
    if name in ("inspect_database", "unfinished_plans"):
        return getattr(import_module("storage.inspection"), name)
    if name == "metadata":  # Alembic's
        return import_module("storage.tables").metadata
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
