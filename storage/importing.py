"""Puts back what an export of one owner holds: rows as they were, each object in a transaction of its own.

An object that is there already stays as it is, so that an import which was cut short is simply begun again.
What was deleted comes back as such, in the transaction of a response that needs it: nobody sees it, and it
goes with the last that needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from sqlalchemy import Connection, insert, select, update

from storage import pairs
from storage.prompts import StoredPrompt, StoredPromptVersion, put_back
from storage.queries import items
from storage.records import CONVERSATION_BYTES, TERMINAL_STATUSES, Direction, NewItem, StorageError
from storage.tables import (
    conversation_items,
    conversations,
    files,
    prompts,
    response_items,
    responses,
    vector_stores,
)

if TYPE_CHECKING:
    from storage.drivers import Run

_TABLES = {
    "response": responses,
    "conversation": conversations,
    "prompt": prompts,
    "file": files,
    "vector_store": vector_stores,
}


class OwnedByAnother(StorageError):
    """What is to be imported is there, and belongs to somebody else."""

    def __init__(self, kind: str, id: str) -> None:
        super().__init__(f"the {kind} {id} is in this database already, and belongs to another owner")
        self.kind = kind
        self.id = id


@dataclass(frozen=True, slots=True)
class Place:
    """An item at its position in a conversation; its other fields are those of `PositionedItem`."""

    position: int
    item: NewItem
    created_at: int | None = None
    direction: Direction = "in"
    status: str | None = None


@dataclass(frozen=True, slots=True)
class ImportedConversation:
    """A conversation with all of its items, those that it had from its parent included. head: the position
    that the next item takes. parent_id, parent_item: as in `StoredConversation`; a parent that is not there
    is forgotten. deleted_at: it was deleted, and counts as deleted since then. Times are microseconds;
    metadata is a JSON object."""

    id: str
    created_at: int
    metadata: bytes
    title: str | None
    used_at: int
    archived_at: int | None
    head: int
    places: Sequence[Place]
    parent_id: str | None = None
    parent_item: str | None = None
    deleted_at: int | None = None


@dataclass(frozen=True, slots=True)
class ImportedResponse:
    """A response that has ended, with its own input and its output. head, echo, plan, metadata: as in
    `NewResponse`. conversation_head: the length of its conversation when it began. deleted_at: as for a
    conversation; then it may have no end, and its head, echo and plan are empty. deleted,
    deleted_conversation: what its history needs of what was deleted, as in `ExportedResponse`."""

    id: str
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
    conversation_head: int | None
    input: Sequence[NewItem]
    output: Sequence[NewItem]
    deleted_at: int | None = None
    deleted: Sequence[ImportedResponse] = ()
    deleted_conversation: ImportedConversation | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


class Imports:
    """The verbs of an import. Each says whether it stored anything: False where the object is there."""

    def __init__(self, read: Run, write: Run) -> None:
        self._read = read
        self._write = write

    async def is_there(self, owner: str, kind: str, id: str) -> bool:
        """Whether the owner has a `response`, `conversation`, `prompt`, `file` or `vector_store` of this id.
        OwnedByAnother."""
        return await self._read(partial(is_there, owner=owner, kind=kind, id=id))

    async def conversation(self, owner: str, new: ImportedConversation) -> bool:
        """Stores a conversation with its items. OwnedByAnother, ItemConflict."""
        return await self._write(partial(put_conversation, owner=owner, new=new))

    async def response(self, owner: str, new: ImportedResponse) -> bool:
        """Stores a response that has ended, after its conversation, with what of its history was deleted;
        that also where the response itself is there, and lacks it. OwnedByAnother, ItemConflict."""
        return await self._write(partial(put_response, owner=owner, new=new))

    async def prompt(self, prompt: StoredPrompt, versions: Sequence[StoredPromptVersion]) -> bool:
        """Stores a prompt template with its versions. OwnedByAnother."""
        return await self._write(partial(put_prompt, prompt=prompt, versions=versions))


def is_there(conn: Connection, owner: str, kind: str, id: str, *, hold: bool = False) -> bool:
    """Whether the owner has it, also where it was deleted since. OwnedByAnother. hold: nobody removes it
    before this transaction's end."""
    table = _TABLES[kind]
    query = select(table.c.owner).where(table.c.id == id)
    found = conn.execute(query.with_for_update(read=True) if hold else query).scalar()
    if found is not None and found != owner:
        raise OwnedByAnother(kind, id)
    return found is not None


def put_conversation(conn: Connection, owner: str, new: ImportedConversation) -> bool:
    """Stores a conversation with its items; False where it is there. OwnedByAnother, ItemConflict."""
    if is_there(conn, owner, "conversation", new.id, hold=True):
        return False
    ids = [place.item.id for place in new.places]
    items.put(conn, owner, [place.item for place in new.places])
    size = CONVERSATION_BYTES + len(new.metadata) + len((new.title or "").encode())
    row = {
        "id": new.id,
        "owner": owner,
        "created_at": new.created_at,
        "metadata": new.metadata,
        "head": new.head,
        "num_bytes": size + (items.num_bytes(conn, owner, ids) if ids else 0),
        "used_at": new.used_at,
        "title": new.title,
        "archived_at": new.archived_at,
        "deleted_at": new.deleted_at,
        **_parent(conn, owner, new),
    }
    conn.execute(insert(conversations), row)
    if new.deleted_at is None:
        pairs.add(conn, owner, "conversation", new.id, new.created_at, orjson.loads(new.metadata))
    rows = [
        {
            "conversation_id": new.id,
            "position": place.position,
            "owner": owner,
            "item_id": place.item.id,
            "direction": place.direction,
            "response_status": place.status,
            "created_at": place.created_at,
        }
        for place in new.places
    ]
    if rows:
        conn.execute(insert(conversation_items), rows)
    return True


def _parent(conn: Connection, owner: str, new: ImportedConversation) -> dict[str, Any]:
    """The columns that say what a conversation was forked from. It shares no positions with its parent."""
    there = select(conversations.c.id).where(
        conversations.c.id == new.parent_id, conversations.c.owner == owner
    )
    if conn.execute(there).first() is None:
        return {}
    return {"parent_id": new.parent_id, "parent_head": 0, "parent_item": new.parent_item}


def put_response(conn: Connection, owner: str, new: ImportedResponse) -> bool:
    """Stores a response with what of its history was deleted, and notes what they brought into their
    conversation, which is there by now if it is to be; False where the response is there. OwnedByAnother,
    ItemConflict."""
    for one in (new, *new.deleted):
        if one.status not in TERMINAL_STATUSES:
            raise ValueError(f"the response {one.id} has not ended")
    there = _held(conn, owner, [new.id, *(one.id for one in new.deleted)])
    if new.deleted_conversation is not None:
        put_conversation(conn, owner, new.deleted_conversation)
    for one in (new, *new.deleted):
        if one.id not in there:
            _put(conn, owner, one)
    for part in items.parts([one.id for one in new.deleted if one.id not in there]):
        for id, size in items.num_bytes_of(conn, part).items():
            conn.execute(update(responses).where(responses.c.id == id).values(num_bytes=size))
    return new.id not in there


def _held(conn: Connection, owner: str, ids: Sequence[str]) -> frozenset[str]:
    """Those of the responses that are there. OwnedByAnother. Held, lest they be collected before they are
    needed; in one order, as whoever collects them does."""
    found: dict[str, str] = {}
    for part in items.parts(sorted(set(ids))):
        there = select(responses.c.id, responses.c.owner).where(responses.c.id.in_(part))
        rows = conn.execute(there.order_by(responses.c.id).with_for_update(read=True)).all()
        found |= {row.id: row.owner for row in rows}
    for id in ids:
        if found.get(id, owner) != owner:
            raise OwnedByAnother("response", id)
    return frozenset(found)


def _put(conn: Connection, owner: str, new: ImportedResponse) -> None:
    items.put(conn, owner, [*new.input, *new.output])
    row = {
        "id": new.id,
        "owner": owner,
        "created_at": new.created_at,
        "completed_at": new.completed_at,
        "status": new.status,
        "model": new.model,
        "background": new.background,
        "store": True,
        "head": new.head,
        "echo": new.echo,
        "plan": new.plan,
        "previous_response_id": new.previous_response_id,
        "conversation_id": new.conversation_id,
        "conversation_head": new.conversation_head,
        # An export holds no events.
        "log_erased_at": new.completed_at,
        "deleted_at": new.deleted_at,
    }
    conn.execute(insert(responses), row)
    if new.deleted_at is None:
        pairs.add(conn, owner, "response", new.id, new.created_at, new.metadata)
    for direction, turn in (("in", new.input), ("out", new.output)):
        places = [
            {
                "response_id": new.id,
                "direction": direction,
                "position": position,
                "owner": owner,
                "item_id": item.id,
            }
            for position, item in enumerate(turn)
        ]
        if places:
            conn.execute(insert(response_items), places)
        if new.conversation_id is not None:
            _note_turn(conn, owner, new, direction, [item.id for item in turn])


def _note_turn(
    conn: Connection, owner: str, new: ImportedResponse, direction: str, ids: Sequence[str]
) -> None:
    table = conversation_items
    for part in items.parts(ids):
        brought = update(table).where(
            table.c.conversation_id == new.conversation_id,
            table.c.owner == owner,
            table.c.position >= (new.conversation_head or 0),
            table.c.item_id.in_(part),
        )
        values = {"direction": direction, "response_id": new.id, "response_status": new.status}
        conn.execute(brought.values(values))


def put_prompt(conn: Connection, prompt: StoredPrompt, versions: Sequence[StoredPromptVersion]) -> bool:
    """Stores a prompt template with its versions; False where it is there. OwnedByAnother."""
    if is_there(conn, prompt.owner, "prompt", prompt.id):
        return False
    put_back(conn, prompt, versions)
    return True
