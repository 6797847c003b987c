"""The values that the server hands to storage and gets from it, and storage's errors.

Bodies, heads, echoes and events are the exact UTF-8 JSON bytes of the wire; storage never parses them. Times
are integer microseconds since the epoch, which the caller gives, so that one clock serves all.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
C = TypeVar("C")

TERMINAL_STATUSES = ("completed", "failed", "incomplete", "cancelled")
"""The statuses of a response that has ended; it is on its way in every other."""

CONVERSATION_BYTES = 256
"""What a conversation takes besides its metadata, its title and its items."""

ECHO_MARK = b"\x00"
"""Stands, inside a stored event, for the response's immutable echo (stored once, joined at read). NUL cannot
occur in JSON text, which escapes it.
"""

PROGRESS_EVENTS = 4
"""A run that wrote this many since an engine was given it has got somewhere."""

Order = Literal["asc", "desc"]

Cursor = str | tuple[int, str]
"""Behind which row a page by time begins: its id, which must be there, or its time and id, which outlive
it."""
Direction = Literal["in", "out"]


# ------------------------------------------------------------------------------------------------------------
# Written


@dataclass(frozen=True, slots=True)
class NewItem:
    """An item: its wire form in `body`; `kind` is its type; `call_id` where it is a call or a call's output.

    `name` only on a call that the client answers: storage tells calls from outputs by it. `private`: JSON
    that is kept with the item, and that no client is shown.
    """

    id: str
    kind: str
    body: bytes
    call_id: str | None = None
    name: str | None = None
    private: bytes | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One engine chunk of one run in the log, or a step of its lifecycle (then without tokens).

    num_events is at least 1: a chunk that makes no event yet is joined to the next one before it becomes a
    record.
    events: one JSON text per event, joined by LF, ECHO_MARK where the echo belongs.
    facts: JSON of what tokens do not determine (prompt and cached token counts, finish reason, times).
    created_at: when its events were made, in microseconds; None where an earlier version wrote it.
    """

    first_seq: int
    num_events: int
    events: bytes
    generation: int = 0
    first_token: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: bytes | None = None
    facts: bytes | None = None
    created_at: int | None = None


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """A request that came with an `Idempotency-Key`: whose it is, its path, its key, a hash of its body."""

    owner: str
    route: str
    key: str
    body_hash: bytes
    created_at: int


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A response at its start: everything of it that never changes, and its first events.

    With `store=False` the row exists only to hold the conversation's lock: no items, no records; it is gone
    at the end and invisible to every read. hidden: stored, but only for the repeats of `request`, which
    started it; its turn is appended to its conversation as an unstored one's is.
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
    priority: int = 0  # lower runs first
    queue_limit: int | None = None  # of the runs that its owner may have in the queue
    conversation_limit: int | None = None  # of the items of a conversation, when the run begins
    cost: int = 1  # the tokens that it will probably take, by which its owner's turn in the queue is reckoned
    request: KeyedRequest | None = None
    hidden: bool = False
    named: bool = False  # its client chose the id, which may be taken
    audit: tuple[AuditEntry, ...] = ()  # what the audit log is to tell of the start
    metadata: Mapping[str, str] = field(default_factory=dict)  # by which lists find it


@dataclass(frozen=True, slots=True)
class ClosedItem:
    """An output item that is whole: it takes its place in the response's output."""

    position: int
    item: NewItem


@dataclass(frozen=True, slots=True)
class Notice:
    """What the owner's webhooks are told of a run or a batch: `body`, if they want its `type`."""

    id: str
    type: str
    body: bytes
    created_at: int


MAX_PERSONS = 1000
"""Of one owner, whose usage is told apart within one hour, unless whoever opens storage says otherwise."""


@dataclass(frozen=True, slots=True)
class Account:
    """What usage is counted by. key_id: of the API key, None without one. tier: the service tier. kind: of
    use, as the paths under `/v1/organization/usage` name them. batch: whether a batch asked for it. person: a
    digest of the person for whom its client asked, None without one."""

    owner: str
    key_id: str | None
    model: str
    tier: str
    kind: str = "completions"
    batch: bool = False
    person: str | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """What was used. cached_tokens are among input_tokens, and reasoning_tokens among output_tokens. Of
    sound, input_tokens are its seconds."""

    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.requests + other.requests,
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class Spent:
    """What was used at one time, in microseconds, of which storage keeps the minute.

    served: what fair shares count of it, in tokens divided by the owner's weight; of stored runs only.
    """

    at: int
    account: Account
    counts: Counts
    served: float = 0.0


Spending = Callable[[bytes, Sequence[tuple[int, bytes | None]]], "Spent | None"]
"""Says what a run in flight has used so far: by its plan, and by the number of tokens and the facts of each
of its records, in order."""

LimitsChange = Callable[[bytes | None], bytes | None]
"""From the limits of a key or an owner, as they are when the change is written, to those that replace them.
What it raises undoes the whole change. It may be called again where a transaction is repeated."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a run. append: its items, input first, go to the conversation's end in this transaction.

    completed_at: when it ended, whichever way. spent: what it used, None where no generation began. plan: in
    place of the one that it was started with, where that holds what must not outlive the run.
    """

    status: str
    completed_at: int
    append: bool
    inputs: tuple[NewItem, ...] = ()  # with store=False: the items to append, which exist nowhere yet
    outputs: tuple[NewItem, ...] = ()
    notice: Notice | None = None
    spent: Spent | None = None
    plan: bytes | None = None


@dataclass(frozen=True, slots=True)
class Park:
    """The run waits for tool outputs, without an owner, for `timeout` microseconds from now on. at: now, by
    this process's clock, which counts only where it has the database alone: others would wait by theirs."""

    timeout: int
    at: int
    notice: Notice | None = None


@dataclass(frozen=True, slots=True)
class StoredContainer:
    """A container of an owner. lifetime: microseconds from its last use to its expiry. memory_limit: as its
    client said it. version: raised by each change of its files or its session. cells: how many have run.
    given: ids of the uploaded files that were copied into it."""

    id: str
    owner: str
    name: str
    created_at: int
    last_active_at: int
    lifetime: int
    memory_limit: str
    version: int = 0
    cells: int = 0
    given: tuple[str, ...] = ()

    @property
    def expires_at(self) -> int:
        """From then on it is gone, unless it is used before."""
        return self.last_active_at + self.lifetime


@dataclass(frozen=True, slots=True)
class ContainerFile:
    """A file of a container. Its content is the blob `digest`. path: below the container's folder. source:
    `user` or `assistant`."""

    id: str
    container_id: str
    owner: str
    path: str
    num_bytes: int
    digest: str
    created_at: int
    source: str


@dataclass(frozen=True, slots=True)
class ContainerRoom:
    """What the files of a container may be: their number, and their bytes together."""

    files: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ContainerChange:
    """What a finished cell changes of a container, in the transaction of its outcome. state: the session from
    now on. files: new ones, each in the place of one of the same path. removed: paths."""

    container_id: str
    owner: str
    at: int
    state: bytes | None
    files: tuple[ContainerFile, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunAppend:
    """What one run adds in one transaction; refused as a whole unless (response_id, fence) still holds.

    effects: what the tools changed whose outcomes are among the records.
    """

    response_id: str
    fence: int
    records: tuple[Record, ...] = ()
    closed: tuple[ClosedItem, ...] = ()
    head: bytes | None = None
    status: str | None = None  # a change that is not an end: queued -> in_progress
    finish: Finish | None = None
    park: Park | None = None
    effects: tuple[ContainerChange, ...] = ()

    @property
    def notice(self) -> Notice | None:
        """What the webhooks of its owner are told of it."""
        rests = self.finish or self.park
        return None if rests is None else rests.notice

    @property
    def durable(self) -> bool:
        """True when this must survive power loss: it ends or parks the run, or takes away rows that name
        contents, which go then."""
        changes_files = any(change.files or change.removed for change in self.effects)
        return self.finish is not None or self.park is not None or changes_files


@dataclass(frozen=True, slots=True)
class Appended:
    """What has come of appends. refused: the runs that added nothing, and why. gone: digests of files whose
    rows went."""

    refused: Mapping[str, Exception]
    gone: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ConversationChange:
    """What is to be replaced of a conversation; None leaves it as it is. title: empty takes it away."""

    metadata: bytes | None = None
    title: str | None = None
    archived: bool | None = None


@dataclass(frozen=True, slots=True)
class NewFork:
    """A conversation that is to begin as another one does. after: the id of the last item that they share;
    None: all. metadata: a JSON object; None: that of the other one."""

    id: str
    created_at: int
    after: str | None = None
    metadata: bytes | None = None


@dataclass(frozen=True, slots=True)
class NewResponseFork:
    """A response that is to have the first items of another one, of its input and then of its output.

    after: the id of the last of them; None: all, or with `input_only` no output. head, echo, plan, metadata:
    as in `NewResponse`; it has ended.
    """

    id: str
    created_at: int
    head: bytes
    echo: bytes
    plan: bytes
    after: str | None = None
    input_only: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """A request that this process has begun, to be recorded with its reply in the transaction that carries it
    out. headers: makes those of the reply, a JSON array of pairs. reply: makes its body of what came of the
    request; None for one that is not kept. about: the id of what the reply tells of, with which it goes."""

    request: KeyedRequest
    headers: Callable[[], bytes]
    reply: Callable[[T], bytes | None]
    about: str


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A tool output posted to a waiting run. `body` is the whole item, `kind` its type; private: see
    `StoredItem`. audit: what the audit log is to tell of it."""

    call_id: str
    body: bytes
    body_hash: bytes
    item_id: str
    kind: str = "function_call_output"
    audit: AuditEntry | None = None
    private: bytes | None = None


@dataclass(frozen=True, slots=True)
class NewKey:
    """An API key to be stored: its SHA-256 in `hash`; the rest as in `StoredKey`."""

    id: str
    owner: str
    name: str
    hash: bytes
    hint: str
    created_at: int
    scopes: tuple[str, ...]
    expires_at: int | None = None
    limits: bytes | None = None


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One thing that was done to keys, owners, webhooks or the data of an owner, or an approval that was
    given, and by whom.

    actor: the id of an API key, or a word for who holds none. action: such as `api_key.created`. target: the
    id of what it was done to. owner: the owner that this belongs to, if it belongs to one. details: a JSON
    object. request_id, ip: of the request that asked for it; None for the command line.
    """

    id: str
    at: int
    actor: str
    action: str
    target: str
    owner: str | None = None
    details: bytes = b"{}"
    request_id: str | None = None
    ip: str | None = None


# ------------------------------------------------------------------------------------------------------------
# Read


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item as stored; `private` is no part of what a client is shown."""

    id: str
    kind: str
    body: bytes
    call_id: str | None = None
    name: str | None = None
    private: bytes | None = None


@dataclass(frozen=True, slots=True)
class HistoryItem:
    """An item of a run's context and the response it came from (None: added to a conversation).

    in_conversation: it is there because a conversation holds it, and may be taken out of that.
    """

    item: StoredItem
    response_id: str | None
    response_status: str | None
    direction: Direction
    in_conversation: bool = False


@dataclass(frozen=True, slots=True)
class ConversationHistory:
    """What a conversation holds from some position on, oldest first.

    head: where it ends. epoch: grows whenever an item that it shows is deleted, if not more often; it is that
    of the time at which it was read, as the items are. num_before: the number of its items in front of that
    position. Items are only ever added behind it, so as long as it is the same, the items in front are.
    """

    head: int
    epoch: int
    num_before: int
    items: tuple[HistoryItem, ...]


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
    run: RunGlance | None  # while it is in flight
    log_erased_at: int | None = None  # when its events were pruned
    fork_of: str | None = None  # the response that was run, of one that is a fork: it has no events

    @property
    def waiting(self) -> bool:
        """Whether it is parked for tool outputs."""
        return self.run is not None and self.run.state == "waiting"

    @property
    def queued(self) -> bool:
        """Whether it waits for its turn and has never begun."""
        return self.run is not None and self.run.state == "queued" and not self.run.attempt


@dataclass(frozen=True, slots=True)
class RunGlance:
    """How a run in flight stands. place: its turn in the queue, from 1, while it has not begun, as it was
    within the last second; only in a response that was read."""

    state: str  # queued, running, waiting
    runner: str | None  # who owns it
    attempt: int
    next_seq: int
    cancel_requested: bool
    place: int | None = None


@dataclass(frozen=True, slots=True)
class FleetView:
    """What one process sees of all: the beats of those that own runs or say that they live (None: it has no
    beat), which of them own runs, and whether there are runs that nobody owns, and waiting ones whose time
    has come. serves: of those that tell, a digest of the models that they serve."""

    beats: Mapping[str, int | None]
    owners: frozenset[str]
    has_free: bool
    has_due: bool
    serves: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OfModels:
    """Runs by the names of their models: those of `names`, or, with `others`, of all that are not among
    them. but: ids of runs that are left out."""

    names: tuple[str, ...]
    others: bool = False
    but: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunClaim:
    """The right to write to a run: valid while `fence` is the run's.

    attempt: how often an engine was given it. strikes: how often in a row the process that did so ended
    before the run got anywhere; only for one found running. watched: how often its owner had been told until
    then that it is read elsewhere.
    """

    response_id: str
    owner: str
    fence: int
    next_seq: int
    attempt: int
    strikes: int
    state: str  # as found: queued, running, waiting
    cancel_requested: bool
    watched: int = 0


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run that has not ended. state: queued, running or waiting. runner: the process that carries it on, if
    one does. created_at: microseconds. attempt: how often an engine was given it. num_tokens: output tokens
    so far."""

    response_id: str
    owner: str
    model: str
    state: str
    runner: str | None
    background: bool
    created_at: int
    attempt: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """What is known of a keyed request: the run that it started, or its reply, or that it is at work.

    status: of the reply; None while there is none. body: None where the reply was not kept.
    """

    body_hash: bytes
    response_id: str | None
    status: int | None
    headers: bytes | None
    body: bytes | None


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation; `metadata` is its JSON object.

    parent_id: the conversation that it was forked from, which may be gone by now; parent_item: the last item
    that it had then. used_at: when something was last added, changed or begun in it. archived_at: since then
    it takes nothing new; None: it is active.
    """

    id: str
    created_at: int
    metadata: bytes
    active_response_id: str | None
    head: int
    parent_id: str | None = None
    parent_item: str | None = None
    title: str | None = None
    used_at: int = 0
    archived_at: int | None = None


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list, in the order asked for."""

    data: tuple[T, ...]
    has_more: bool


PAGE_BYTES = 16 << 20
"""A page of a list ends with the row by which it has so many bytes, however many are asked for: an item alone
may have as many. Whoever reads on has the rest."""


def page_length(sizes: Sequence[int], limit: int) -> int:
    """How many rows a page has, at most `limit` and at least one, if there is any. sizes: their bytes."""
    num_bytes = 0
    for length, size in enumerate(sizes[:limit], start=1):
        num_bytes += size
        if num_bytes >= PAGE_BYTES:
            return length
    return min(len(sizes), limit)


async def each_row(
    page_after: Callable[[C | None], Awaitable[Page[T]]], cursor: Callable[[T], C]
) -> AsyncGenerator[T]:
    """The rows of a list, page after page. page_after: reads the page behind a cursor. cursor: of a row, and
    one that outlives it where rows may go meanwhile."""
    after, more = None, True
    while more:
        page = await page_after(after)
        for row in page.data:
            yield row
            after = cursor(row)
        more = page.has_more


@dataclass(frozen=True, slots=True)
class StoredKey:
    """An API key: never the key itself. `owner` is the tenant that it speaks for.

    scopes: what it may do, in words that storage never reads. expires_at: from then on it is refused.
    last_used_at: to within minutes. replaces: the id of the key whose successor it is. limits: the JSON
    object of its own limits, as the server wrote it; None: it has none of its own.
    """

    id: str
    owner: str
    name: str
    hint: str  # its last characters, to tell keys apart
    created_at: int
    revoked_at: int | None = None
    scopes: tuple[str, ...] = ()
    expires_at: int | None = None
    last_used_at: int | None = None
    replaces: str | None = None
    limits: bytes | None = None

    def live(self, now: int) -> bool:
        """Whether it is accepted at `now`: neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, slots=True)
class StoredOwner:
    """An owner, that is, a tenant; the API calls it a project. limits: as those of a key, for all its keys
    together. archived_at: since then it has no live key and gets none."""

    id: str
    name: str
    created_at: int
    archived_at: int | None = None
    limits: bytes | None = None


@dataclass(frozen=True, slots=True)
class FoundKey:
    """A key that was presented, and the owner that it speaks for."""

    key: StoredKey
    owner: StoredOwner


@dataclass(frozen=True, slots=True)
class StoredAudit:
    """An entry of the audit log at its place. hash: SHA-256 of the entry and of the hash before it."""

    number: int  # from 1, without gaps
    entry: AuditEntry
    hash: bytes


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which entries of the audit log are asked for; an empty tuple, or None, asks for any.

    since, before: microseconds since the epoch, `since` included and `before` not.
    """

    since: int | None = None
    before: int | None = None
    actions: tuple[str, ...] = ()
    actors: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AuditState:
    """What an examination of the audit log found: the number and hash of its last entry, and the number of
    the first entry that is not what was written, or is not there (None: all are)."""

    number: int
    hash: bytes
    broken: int | None


Dimension = Literal["owner", "key_id", "model", "tier", "batch", "person"]
"""What usage of one kind can be told apart by."""


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """Which usage is asked for: of one kind, from `since` to before `before`, in microseconds.

    An empty tuple, or None, asks for any. Where persons are asked for, or told apart, both ends are whole
    hours.
    """

    kind: str
    since: int
    before: int
    owners: tuple[str, ...] = ()
    key_ids: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    batch: bool | None = None
    persons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UsageSum:
    """What was used in one bucket of time, which began at `start` (microseconds), by one combination of the
    dimensions that were asked for."""

    start: int
    by: Mapping[Dimension, str | bool | None]
    counts: Counts


@dataclass(frozen=True, slots=True)
class SealingKey:
    """A key that seals what clients keep for us; the one with the highest number does."""

    number: int
    secret: bytes = field(repr=False)
    created_at: int


@dataclass(frozen=True, slots=True)
class StoredWebhook:
    """An endpoint that is told of the ends of its owner's runs. `secret` signs; it never leaves in a list.
    pending: how many notices are still to reach it; attempts: how often one of these was tried at most."""

    id: str
    owner: str
    url: str
    secret: bytes = field(repr=False)
    event_types: tuple[str, ...]
    created_at: int
    disabled_at: int | None = None
    pending: int = 0
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Delivery:
    """One attempt to tell a webhook of one event, claimed; `attempt` counts from 1."""

    webhook_id: str
    event_id: str
    url: str
    secret: bytes = field(repr=False)
    body: bytes
    attempt: int


@dataclass(frozen=True, slots=True)
class DueDeliveries:
    """What is still to be told: to whom now, when next (None: nothing later), and how much in all."""

    webhook_ids: tuple[str, ...]
    next_at: int | None
    num_pending: int


@dataclass(frozen=True, slots=True)
class WaitingInputs:
    """A waiting run after some outputs came: which calls are still pending (call_id -> name).

    deadline: when it ends unless they are answered, in microseconds since the epoch; None where nothing is
    pending, or it is to end at once.
    """

    pending: Mapping[str, str]
    runnable: bool  # nothing is pending any more: whoever claims it goes on
    deadline: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What is kept: ages in microseconds since the end, the others for each owner; None: no limit.

    measured: the bytes of responses are noted in any case, for whoever wants to know them.
    """

    age: int | None = None
    log_age: int | None = None
    request_age: int | None = None  # of requests with an `Idempotency-Key`, since they came
    max_responses: int | None = None
    max_bytes: int | None = None
    conversation_age: int | None = None  # since a conversation was last used
    measured: bool = False


@dataclass(frozen=True, slots=True)
class Swept:
    """What one step of a sweep let go of."""

    responses: int = 0
    logs: int = 0  # of responses that stay
    requests: int = 0
    conversations: int = 0

    def __add__(self, other: Swept) -> Swept:
        return Swept(
            self.responses + other.responses,
            self.logs + other.logs,
            self.requests + other.requests,
            self.conversations + other.conversations,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes that an owner stores: in `total`, and of them in `held` what no sweep by bytes lets go of:
    conversations with their items, items of deleted responses that later ones need, files, and what is kept
    for repeats of requests."""

    total: int
    held: int


@dataclass(frozen=True, slots=True)
class Purged:
    """What one step of a purge removed; `runs` are those responses that were in flight."""

    responses: int = 0
    conversations: int = 0
    webhooks: int = 0
    keys: int = 0  # revoked
    runs: tuple[str, ...] = ()
    files: int = 0
    containers: int = 0
    chat_completions: int = 0
    batches: int = 0
    vector_stores: int = 0
    prompts: int = 0

    def __add__(self, other: Purged) -> Purged:
        return Purged(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Purged)))


@dataclass(frozen=True, slots=True)
class PositionedItem:
    """An item at its place in a conversation. created_at: when it came there, where that is known. direction,
    status: of the turn that brought it, and how that ended; None for what no turn brought."""

    position: int
    item: StoredItem
    created_at: int | None = None
    direction: Direction = "in"
    status: str | None = None


@dataclass(frozen=True, slots=True)
class DeletedResponse:
    """What is left of a deleted response for those that continue it: all that their history has of it.
    Times are microseconds; completed_at: None where it was deleted before its end."""

    id: str
    created_at: int
    completed_at: int | None
    status: str
    model: str
    background: bool
    previous_response_id: str | None
    conversation_id: str | None
    conversation_head: int | None
    deleted_at: int
    input: tuple[StoredItem, ...]
    output: tuple[StoredItem, ...]


@dataclass(frozen=True, slots=True)
class DeletedConversation:
    """What is left of a deleted conversation for the responses that stand on it: its items below the highest
    position that the history of one of them reaches."""

    conversation: StoredConversation
    deleted_at: int
    items: tuple[PositionedItem, ...]


@dataclass(frozen=True, slots=True)
class ExportedResponse:
    """A response as an export reads it: with its own input, and with what its history needs of what nobody
    sees any more: the deleted responses before it, the nearest first, and the deleted conversation that it,
    or the last of them, ran in."""

    response: StoredResponse
    input: tuple[StoredItem, ...]
    deleted: tuple[DeletedResponse, ...] = ()
    deleted_conversation: DeletedConversation | None = None


@dataclass(frozen=True, slots=True)
class DatabaseState:
    """A database as `inspect_database` finds it.

    schema: absent where there is no database, or an empty one; older where the next server migrates it.
    revision: of its schema, four digits; None where it is absent. newest: the one that this version brings it
    to. num_keys: live API keys; None where the schema is newer. holder: the server that holds it for itself,
    in words. shared: whether several servers may use it at once. limits: of the owners who have some of their
    own, JSON objects by their ids; empty where the schema is newer. webhooks: of all owners, where the schema
    is current. missing: the folder of blobs, where it lacks one that a row names. id: what tells it from
    every other; None unless the schema is current. free: bytes on its disk; None where that is not this
    machine's. barred: why this user cannot read and write it, by its files, of those that are there, or by
    what it says itself; None where nothing is in the way. last_used: when anything was last used or stored
    before the time that was asked about, and at all; None where nothing was, or the schema is not current.
    clock: the time by its own clock; None where it has none, or the schema is not current.
    """

    shown: str  # its name for messages, without a password
    schema: Literal["absent", "older", "current", "newer"]
    num_keys: int | None
    holder: str | None
    shared: bool
    revision: str | None
    newest: str
    limits: Mapping[str, bytes] = field(default_factory=dict)
    webhooks: tuple[StoredWebhook, ...] = ()
    missing: str | None = None
    id: str | None = None
    free: int | None = None
    barred: str | None = None
    last_used: tuple[int | None, int | None] = (None, None)
    clock: int | None = None


LEAST_ROOM = 4 << 20
"""Bytes on the disk that what is new leaves free: for the ends of what was begun, and for what is deleted."""


COMMIT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Bounds between which the durations of commits are counted."""


@dataclass(frozen=True, slots=True)
class CommitStats:
    """What the writer did since it was opened, for metrics."""

    commits: int
    synced: int  # times that all commits so far were put on the disk
    jobs: int
    checkpoints: int
    seconds: tuple[int, ...]  # commits by duration: up to each of COMMIT_SECONDS, and last above all of them
    seconds_sum: float
    wal_bytes: int


# ------------------------------------------------------------------------------------------------------------
# Errors


class StorageError(Exception):
    """The root:

    StorageError
    +- NotFound               unknown, deleted, or another owner's: never told apart
    +- EventsExpired          the response is there, its events were pruned
    +- RunEnded               a run that is to be cancelled has ended already
    +- ConversationLocked     a run holds the conversation
    +- ConversationFull       it has as many items as it may have
    +- TooManyForks           a conversation has as many forks as it may have, or is too deep a fork itself
    +- ContainerFull          a container's files would be too many, or too large together
    +- PathTaken              a container has a folder where the file would be, or a file above it
    +- ConversationMoved      items came after the history that the run was planned with
    +- NotWaiting             tool outputs for a run that does not wait
    +- UnknownCall            an output for a call that the run did not make
    +- BadText                an id or a name that this database cannot hold
    +- OutputConflict         a second, different output for one call
    +- ItemConflict           an item of this id exists, with another body
    +- RequestKnown           a request with this key has started a run already
    +- KeyEnded               the key is revoked or expired: it has no future to change
    +- OwnerArchived          the owner takes no keys any more
    +- TooManyQueued          the owner has as many runs in the queue as it may have
    +- BlobTooLarge           more bytes come in than the caller wants
    +- UploadEnded            an upload is completed, cancelled or expired
    +- RunLost                the fence no longer holds: somebody else owns the run, or it is gone
    +- FolderHeld             another server holds the data folder
    +- SchemaTooNew           the database was written by a newer version
    +- ForeignDatabase        the database was written by another program
    +- StorageUnavailable     the database cannot be reached or written now; try again
    """


class NotFound(StorageError):
    """No such row for this owner."""

    def __init__(self, kind: str, id: str) -> None:
        super().__init__(kind, id)
        self.kind, self.id = kind, id


class RunEnded(StorageError):
    """The run has ended already; status: as what."""

    def __init__(self, id: str, status: str) -> None:
        super().__init__(f"run {id!r} is {status} already")
        self.id, self.status = id, status


class EventsExpired(StorageError):
    """The events of a response were pruned at `erased_at` (microseconds); the response itself is there."""

    def __init__(self, response_id: str, erased_at: int) -> None:
        super().__init__(response_id, erased_at)
        self.response_id, self.erased_at = response_id, erased_at


class ConversationArchived(StorageError):
    """The conversation takes nothing new."""

    def __init__(self, conversation_id: str) -> None:
        super().__init__(conversation_id)
        self.conversation_id = conversation_id


class ConversationLocked(StorageError):
    """The run `holder` is still at work on the conversation. waits: for tool outputs."""

    def __init__(self, conversation_id: str, holder: str, *, waits: bool = False) -> None:
        super().__init__(conversation_id, holder)
        self.conversation_id, self.holder, self.waits = conversation_id, holder, waits


class ConversationMoved(StorageError):
    """The conversation's head is no longer where the plan's history ended: read it again."""

    def __init__(self, conversation_id: str, head: int) -> None:
        super().__init__(conversation_id, head)
        self.conversation_id, self.head = conversation_id, head


class ConversationFull(StorageError):
    """The conversation has as many items as it may have, `limit`, or would have more."""

    def __init__(self, conversation_id: str, limit: int) -> None:
        super().__init__(conversation_id, limit)
        self.conversation_id, self.limit = conversation_id, limit


class TooManyForks(StorageError):
    """A conversation is not forked once more; the message says which limit is reached."""


class ContainerFull(StorageError):
    """A container's files would be too many, or too large together; the message says which."""


class PathTaken(StorageError):
    """A container has a folder of this path, or a file in the place of one of the folders above it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class NotWaiting(StorageError):
    """The run does not wait for tool outputs."""


class UnknownCall(StorageError):
    """`call_id` is not a call of this run."""

    def __init__(self, call_id: str) -> None:
        super().__init__(call_id)
        self.call_id = call_id


class BadText(StorageError):
    """An id or a name holds a character that the database cannot: NUL, in PostgreSQL."""


class OutputConflict(StorageError):
    """`call_id` was answered already, with another body."""

    def __init__(self, call_id: str) -> None:
        super().__init__(call_id)
        self.call_id = call_id


class ResponseKnown(StorageError):
    """There is a response of this id, which a client chose."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id


class ItemConflict(StorageError):
    """The owner has an item `item_id` with another body: give the new one another id."""

    def __init__(self, item_id: str) -> None:
        super().__init__(item_id)
        self.item_id = item_id


class RequestKnown(StorageError):
    """A request with the same key came first; nothing was written: look at what came of it."""


class KeyEnded(StorageError):
    """The API key `key_id` is revoked or expired."""

    def __init__(self, key_id: str) -> None:
        super().__init__(f"the key {key_id} is revoked or expired")
        self.key_id = key_id


class OwnerArchived(StorageError):
    """The owner is archived: it takes no keys and no changes."""

    def __init__(self, owner: str) -> None:
        super().__init__(f"the owner {owner} is archived")
        self.owner = owner


class TooManyQueued(StorageError):
    """The owner has `limit` runs in the queue already."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


class RunLost(StorageError):
    """The run `response_id` belongs to another claim by now, or is gone; nothing was written."""

    def __init__(self, response_id: str) -> None:
        super().__init__(response_id)
        self.response_id = response_id


class FolderHeld(StorageError):
    """Another server holds the data folder; the message names it."""


class SchemaTooNew(StorageError):
    """The database's revision is unknown to this version."""


class ForeignDatabase(StorageError):
    """The database has tables, and was never this program's."""


class StorageUnavailable(StorageError):
    """The database cannot be reached or written now. What only an operator can mend is told apart:

    full: there is no room on its disk. moved: its file was removed, or another stands in its place.
    read_only: it can be read alone.
    """

    def __init__(
        self, message: str = "", *, full: bool = False, moved: bool = False, read_only: bool = False
    ) -> None:
        super().__init__(message)
        self.full = full
        self.moved = moved
        self.read_only = read_only


UNSURE = (CancelledError, StorageUnavailable)
"""What leaves it open whether a write takes place: one that nobody waits for any more goes on."""
