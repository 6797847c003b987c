"""The values of vector stores that cross storage's door."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from storage.records import StorageError

FileStatus = Literal["in_progress", "completed", "failed", "cancelled"]
"""How far the reading of a file has come."""


POSITION_BITS = 15
"""The last bits of a chunk's id are its position in its file; those before them are the file's key."""

MAX_CHUNKS = 1 << POSITION_BITS
"""Chunks of one file."""


@dataclass(frozen=True, slots=True)
class FileCounts:
    """How many files there are of each status."""

    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.in_progress + self.completed + self.failed + self.cancelled


@dataclass(frozen=True, slots=True)
class NewVectorStore:
    """A store that is to be made. Times are microseconds; metadata is a JSON object. expires_after: how long
    after its last use it expires. embedding, dimensions: the model that its vectors are to be of.
    last_active_at: its last use, where that is not its beginning."""

    id: str
    owner: str
    created_at: int
    name: str
    description: str | None
    metadata: bytes
    expires_after: int | None = None
    embedding: str | None = None
    dimensions: int | None = None
    last_active_at: int | None = None


@dataclass(frozen=True, slots=True)
class StoredVectorStore:
    """A store as it is. number: what the ids of its chunks begin with. num_bytes: of its chunks.
    num_embedded: files that can be searched by vectors of its model, too."""

    number: int
    id: str
    owner: str
    created_at: int
    name: str
    description: str | None
    metadata: bytes
    expires_after: int | None
    last_active_at: int
    embedding: str | None
    dimensions: int | None
    num_bytes: int
    num_embedded: int
    counts: FileCounts

    @property
    def expires_at(self) -> int | None:
        """When it expires unless it is used before; None for never."""
        return None if self.expires_after is None else self.last_active_at + self.expires_after


@dataclass(frozen=True, slots=True)
class NewStoreFile:
    """A file that is to be put into a store. attributes: a JSON object, or None. chunk_tokens, chunk_overlap:
    how it is to be cut, in tokens."""

    file_id: str
    filename: str
    chunk_tokens: int
    chunk_overlap: int
    attributes: bytes | None = None


@dataclass(frozen=True, slots=True)
class StoredStoreFile:
    """A file of a store. error: code and message of what went wrong. num_bytes: of its chunks so far."""

    store_id: str
    file_id: str
    filename: str
    batch_id: str | None
    created_at: int
    status: FileStatus
    error: tuple[str, str] | None
    attributes: bytes | None
    chunk_tokens: int
    chunk_overlap: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredFileBatch:
    """Files that were put into a store together."""

    id: str
    store_id: str
    created_at: int
    cancelled_at: int | None
    counts: FileCounts


@dataclass(frozen=True, slots=True)
class FileClaim:
    """The claim of a process to a file of a store: to read it (`in_progress`), or, once it is read, to give
    its chunks vectors of the model that the store has now (`completed`).

    next_position: the first chunk that is still to be stored, of the chunks with this digest; None where none
    is stored yet. embedding, dimensions: the store's model. embedded: how many chunks, from the first on,
    have vectors of it. attempt: how often it was claimed, and the work neither got anywhere nor ended by
    somebody's will.
    """

    store_number: int
    number: int
    owner: str
    store_id: str
    file_id: str
    filename: str
    status: FileStatus
    chunk_tokens: int
    chunk_overlap: int
    embedding: str | None
    dimensions: int | None
    fence: int
    attempt: int
    next_position: int
    digest: bytes | None
    embedded: int

    @property
    def key(self) -> tuple[int, int]:
        """What tells files of all stores apart."""
        return self.store_number, self.number


@dataclass(frozen=True, slots=True)
class NewChunk:
    """A piece of a file. page: where it begins, counted from 1, None where the file has none. embedding:
    float32 values, little-endian. breaks: where in the text other pages begin, in characters, each with its
    number."""

    position: int
    page: int | None
    text: str
    tokens: int
    embedding: bytes | None = None
    breaks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A piece of a file as a search finds it. breaks: as of a new one; none are known of what was stored
    before they were."""

    id: int
    file_id: str
    filename: str
    attributes: bytes | None
    position: int
    page: int | None
    text: str
    breaks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SearchedStore:
    """A store that is about to be searched. hidden: the keys of its files that no search finds now. shown:
    those of the files that this one does find, where it finds some by their attributes."""

    number: int
    id: str
    expires_at: int | None
    embedding: str | None
    dimensions: int | None
    hidden: frozenset[int]
    shown: frozenset[int]


@dataclass(frozen=True, slots=True)
class WordHits:
    """The chunks that share most words with a query. hits: ids and scores, the highest first. fit: how much
    of the query one of the best has, from 0 to 1: each of its words counts by how rare it is in the store."""

    hits: Sequence[tuple[int, float]]
    fit: float


@dataclass(frozen=True, slots=True)
class Due:
    """What there is to be done about stores: to_read: files that nobody reads; to_embed: stores with files
    that lack vectors of this process's model; to_expire: stores that have expired and still have files;
    to_erase: what nobody sees any more; to_add: files of batches that are not in their stores yet."""

    to_read: bool
    to_embed: bool
    to_expire: bool
    to_erase: bool
    to_add: bool


class FileClaimLost(StorageError):
    """The file was deleted, cancelled or claimed by another process: nothing was written."""

    def __init__(self, file_id: str) -> None:
        super().__init__(file_id)
        self.file_id = file_id


class VectorStoreFull(StorageError):
    """The store has taken as many files as it ever can."""

    def __init__(self, id: str, limit: int) -> None:
        super().__init__(id, limit)
        self.id, self.limit = id, limit
