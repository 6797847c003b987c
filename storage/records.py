"""The values that cross storage's door: what is written, what is read, and storage's errors.

Owns: frozen shapes only. Refuses to know: SQL, HTTP, what a response means. Bodies, heads, echoes and events
are the exact UTF-8 JSON bytes of the wire; storage never parses them. Times are integer microseconds since
the epoch, given by the caller, so that one clock serves all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

T = TypeVar("T")

ECHO_MARK = b"\x00"
"""Stands, inside a stored event, for the response's immutable echo (stored once, joined at read). NUL cannot
occur in JSON text, which escapes it.
"""

Order = Literal["asc", "desc"]
Direction = Literal["in", "out"]


# ------------------------------------------------------------------------------------------------------------
# Written


@dataclass(frozen=True, slots=True)
class NewItem:
    """An item: its wire form in `body`; `kind` is its type; `call_id` where it is a call or a call's output.

    `name` only on a call that the client answers: storage tells calls from outputs by it.
    """

    id: str
    kind: str
    body: bytes
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One engine chunk of one run in the log, or a step of its lifecycle (then without tokens).

    num_events is at least 1: a chunk that makes no event yet is joined to the next one before it becomes a
    record.
    events: one JSON text per event, joined by LF, ECHO_MARK where the echo belongs.
    facts: JSON of what tokens do not determine (prompt and cached token counts, finish reason, times).
    """

    first_seq: int
    num_events: int
    events: bytes
    generation: int = 0
    first_token: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: bytes | None = None
    facts: bytes | None = None


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A response at its start: everything of it that never changes, and its first events.

    With `store=False` the row exists only to hold the conversation's lock: no items, no records; it is gone
    at the end and invisible to every read.
    """

    id: str
    owner: str
    created_at: int
    status: str
    model: str
    background: bool
    store: bool
    head: bytes
    echo: bytes
    plan: bytes
    previous_response_id: str | None
    conversation_id: str | None
    input_items: tuple[NewItem, ...]  # new ones and references to existing ones, in order
    record: Record | None
    runner: str | None  # the replica that runs it from the start; None leaves it queued for a claim
    conversation_head: int | None = None  # where the planned history ended


@dataclass(frozen=True, slots=True)
class ClosedItem:
    """An output item that is whole: it takes its place in the response's output."""

    position: int
    item: NewItem


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a run. append: its items, input first, go to the conversation's end in this transaction."""

    status: str
    completed_at: int | None
    append: bool
    inputs: tuple[NewItem, ...] = ()  # with store=False: the items to append, which exist nowhere yet
    outputs: tuple[NewItem, ...] = ()


@dataclass(frozen=True, slots=True)
class Park:
    """The run waits for tool outputs, without an owner, until `deadline` (microseconds since the epoch)."""

    deadline: int


@dataclass(frozen=True, slots=True)
class RunAppend:
    """What one run adds in one transaction; refused as a whole unless (response_id, fence) still holds."""

    response_id: str
    fence: int
    records: tuple[Record, ...] = ()
    closed: tuple[ClosedItem, ...] = ()
    head: bytes | None = None
    status: str | None = None  # a change that is not an end: queued -> in_progress
    finish: Finish | None = None
    park: Park | None = None

    @property
    def promise(self) -> bool:
        """True when this must survive power loss: it ends or parks the run."""
        return self.finish is not None or self.park is not None


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A tool output posted to a waiting run. `body` is the whole item, `kind` its type."""

    call_id: str
    body: bytes
    body_hash: bytes
    item_id: str
    kind: str = "function_call_output"


# ------------------------------------------------------------------------------------------------------------
# Read


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item as stored."""

    id: str
    kind: str
    body: bytes
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class HistoryItem:
    """An item of a run's context and the response it came from (None: added to a conversation)."""

    item: StoredItem
    response_id: str | None
    response_status: str | None
    direction: Direction


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`head` and `echo`, the two halves of its wire form, and `output`, its closed items in order."""

    id: str
    owner: str
    created_at: int
    completed_at: int | None
    status: str
    model: str
    background: bool
    head: bytes
    echo: bytes
    plan: bytes
    previous_response_id: str | None
    conversation_id: str | None
    conversation_head: int | None  # the conversation's length when the run was pinned to it
    output: tuple[StoredItem, ...]
    waiting: bool  # parked for tool outputs


@dataclass(frozen=True, slots=True)
class RunClaim:
    """The right to write to a run: valid while `fence` is the run's.

    attempt: how often an engine was given it. strikes: how often in a row the process that did so ended before
    the run got anywhere; only for one found running.
    """

    response_id: str
    owner: str
    fence: int
    next_seq: int
    attempt: int
    strikes: int
    state: str  # as found: queued, running, waiting
    cancel_requested: bool
    deadline: int | None


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation; `metadata` is its JSON object."""

    id: str
    created_at: int
    metadata: bytes
    active_response_id: str | None
    head: int


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list, in the order asked for."""

    data: tuple[T, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class StoredKey:
    """An API key: never the key itself. `owner` is the tenant that it speaks for."""

    id: str
    owner: str
    name: str
    hint: str  # its last characters, to tell keys apart
    created_at: int
    revoked_at: int | None


@dataclass(frozen=True, slots=True)
class WaitingInputs:
    """A waiting run after some outputs came: which calls are still pending (call_id -> name)."""

    pending: Mapping[str, str]
    runnable: bool  # nothing is pending any more: whoever claims it goes on


@dataclass(frozen=True, slots=True)
class CommitStats:
    """What the writer did since it was opened, for metrics."""

    commits: int
    synced: int  # times that all commits so far were put on the disk
    jobs: int
    checkpoints: int
    seconds: tuple[float, ...]  # durations of the latest commits, oldest first
    wal_bytes: int


# ------------------------------------------------------------------------------------------------------------
# Errors


class StorageError(Exception):
    """The root:

    StorageError
    +- NotFound               unknown, deleted, or another owner's: never told apart
    +- ConversationLocked     a run holds the conversation
    +- ConversationMoved      items came after the history that the run was planned with
    +- NotWaiting             tool outputs for a run that does not wait
    +- UnknownCall            an output for a call that the run did not make
    +- OutputConflict         a second, different output for one call
    +- ItemConflict           an item of this id exists, with another body
    +- RunLost                the fence no longer holds: somebody else owns the run, or it is gone
    +- FolderHeld             another server holds the data folder
    +- SchemaTooNew           the database was written by a newer version
    +- StorageUnavailable     the database cannot be reached or written now; try again
    """


class NotFound(StorageError):
    """No such row for this owner."""

    def __init__(self, kind: str, id: str) -> None:
        super().__init__(kind, id)
        self.kind, self.id = kind, id


class ConversationLocked(StorageError):
    """The run `holder` is still at work on the conversation."""

    def __init__(self, conversation_id: str, holder: str) -> None:
        super().__init__(conversation_id, holder)
        self.conversation_id, self.holder = conversation_id, holder


class ConversationMoved(StorageError):
    """The conversation's head is no longer where the plan's history ended: read it again."""

    def __init__(self, conversation_id: str, head: int) -> None:
        super().__init__(conversation_id, head)
        self.conversation_id, self.head = conversation_id, head


class NotWaiting(StorageError):
    """The run does not wait for tool outputs."""


class UnknownCall(StorageError):
    """`call_id` is not a call of this run."""

    def __init__(self, call_id: str) -> None:
        super().__init__(call_id)
        self.call_id = call_id


class OutputConflict(StorageError):
    """`call_id` was answered already, with another body."""

    def __init__(self, call_id: str) -> None:
        super().__init__(call_id)
        self.call_id = call_id


class ItemConflict(StorageError):
    """The owner has an item `item_id` with another body: give the new one another id."""

    def __init__(self, item_id: str) -> None:
        super().__init__(item_id)
        self.item_id = item_id


class RunLost(StorageError):
    """The run `response_id` belongs to another claim by now, or is gone; nothing was written."""

    def __init__(self, response_id: str) -> None:
        super().__init__(response_id)
        self.response_id = response_id


class FolderHeld(StorageError):
    """Another server holds the data folder; the message names it."""


class SchemaTooNew(StorageError):
    """The database's revision is unknown to this version."""


class StorageUnavailable(StorageError):
    """The database cannot be reached or written now."""
