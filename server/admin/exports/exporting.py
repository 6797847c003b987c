"""All that an owner keeps, as JSON lines: what `antiphon export` and its route write.

A line shows an object as the API does. Its member `kept` has what the API does not show and `antiphon import`
needs to put the object back as it was. Of a response this has under `deleted` what its history needs of
what was deleted before it; a deleted response or conversation stands in the line of the first that needs it.
"""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, Protocol, TypeVar

import orjson

from server.access import PURGED, Actor
from server.batches import batch_json
from server.clock import now_us
from server.errors import to_api_error
from server.http import (
    container_file_json,
    container_json,
    conversation_json,
    file_json,
    prompt_json,
    prompt_version_json,
    stored_completion_json,
)
from server.items import filled_body
from server.runs.events import snapshot
from server.vector_stores.wire import file_object, store_object
from storage import (
    AuditFilter,
    Cursor,
    DeletedConversation,
    DeletedResponse,
    ExportedResponse,
    NotFound,
    Page,
    PositionedItem,
    Storage,
    StorageUnavailable,
    StoredConversation,
    StoredItem,
    StoredResponse,
    WaitingInputs,
    each_row,
)

T = TypeVar("T")

RESPONSES_AT_ONCE = 8
ITEMS_AT_ONCE = 100
FILES_AT_ONCE = 10_000
PURGES = 100
"""Purges of an owner, the latest ones, that may not be over."""

COUNTED = (
    "conversations",
    "responses",
    "chat_completions",
    "batches",
    "prompts",
    "files",
    "vector_stores",
    "containers",
    "container_files",
)


async def note_export(storage: Storage, owner: str, by: Actor) -> str | None:
    """Have the audit log tell of an export that begins. Where the database can be read alone now, the export
    is made all the same, and this returns why that is, in ASCII. Raises StorageUnavailable for one that
    cannot be reached."""
    try:
        await storage.add_audit(by.did("project.exported", owner, owner))
    except StorageUnavailable as error:
        if not (error.full or error.moved or error.read_only):
            raise
        return to_api_error(error).message
    return None


async def exported(storage: Storage, owner: str) -> AsyncGenerator[bytes]:
    """The lines in pieces, each with the `type` of what it holds. The last one says that it is whole, and how
    many there are of each. An object is as it was when its line was written."""
    counts: Counter[str] = Counter()
    for kind in (
        *(_conversations, _responses, _chat_completions, _prompts),
        *(_batches, _files, _stores, _containers),
    ):
        async with aclosing(kind(storage, owner, counts)) as pieces:
            async for piece in pieces:
                yield piece
    end = {"type": "end", "owner": owner, **await _told_of(storage, owner)}
    yield orjson.dumps({**end, **{name: counts[name] for name in COUNTED}}) + b"\n"


async def _told_of(storage: Storage, owner: str) -> dict[str, Any]:
    """The members of the last line that say what the owner is; times in microseconds."""
    names = ("owner_name", "owner_created_at", "owner_archived_at")
    try:
        found = await storage.get_owner(owner)
    except NotFound:
        return dict.fromkeys(names)
    return dict(zip(names, (found.name, found.created_at, found.archived_at), strict=True))


async def _conversations(storage: Storage, owner: str, counts: Counter[str]) -> AsyncGenerator[bytes]:
    after: tuple[int, str] | None = None
    while page := await storage.export_conversations(owner, after=after, limit=ITEMS_AT_ONCE):
        for conversation in page:
            yield b'{"type":"conversation","conversation":' + conversation_json(conversation) + b',"items":['
            separator = b""
            at = -1
            places: list[_Place] = []
            kept: dict[str, Any] = {}
            while page_items := await storage.export_conversation_items(
                owner, conversation.id, after=at, limit=ITEMS_AT_ONCE
            ):
                yield separator + b",".join(positioned.item.body for positioned in page_items)
                separator, at = b",", page_items[-1].position
                places += map(_place, page_items)
                kept |= _kept_items(one.item for one in page_items)
            yield b'],"kept":' + orjson.dumps(_kept_conversation(conversation, places, kept)) + b"}\n"
        counts["conversations"] += len(page)
        after = (page[-1].created_at, page[-1].id)


async def _responses(storage: Storage, owner: str, counts: Counter[str]) -> AsyncGenerator[bytes]:
    after: tuple[int, str] | None = None
    carried: set[str] = set()
    while page := await storage.export_responses(
        owner, after=after, limit=RESPONSES_AT_ONCE, carried=carried
    ):
        new = {id for found in page for id in _deleted_ids(found)}
        carried |= new
        purges = await _purges(storage, owner) if new else ()
        for found in page:
            body = await _response(storage, found.response)
            items = b",".join(item.body for item in found.input)
            kept = orjson.dumps(_kept_response(_unpurged(found, purges)))
            yield b'{"type":"response","response":' + body + b',"input":[' + items
            yield b'],"kept":' + kept + b"}\n"
        counts["responses"] += len(page)
        last = page[-1].response
        after = (last.created_at, last.id)


def _deleted_ids(found: ExportedResponse) -> Iterator[str]:
    yield from (one.id for one in found.deleted)
    if found.deleted_conversation is not None:
        yield found.deleted_conversation.conversation.id


async def _purges(storage: Storage, owner: str) -> Sequence[tuple[int, int]]:
    """The purges of an owner, the latest ones: what was there at the first time was deleted by the second, if
    it is to go."""
    wanted = AuditFilter(actions=(PURGED,), targets=(owner,))
    noted = [one.entry for one in (await storage.list_audit(wanted, limit=PURGES)).data]
    befores = [int(orjson.loads(entry.details)["before"]) for entry in noted]
    return [(before, max(before, entry.at)) for before, entry in zip(befores, noted, strict=True)]


def _unpurged(found: ExportedResponse, purges: Sequence[tuple[int, int]]) -> ExportedResponse:
    """The same without what a purge that is at work, or was stopped, is to erase: what came meanwhile may
    still stand on it."""

    def goes(created_at: int, deleted_at: int) -> bool:
        return any(created_at <= before and deleted_at <= until for before, until in purges)

    deleted = tuple(takewhile(lambda one: not goes(one.created_at, one.deleted_at), found.deleted))
    kept = found.deleted_conversation
    if kept is not None and goes(kept.conversation.created_at, kept.deleted_at):
        kept = None
    whole = len(deleted) == len(found.deleted)
    return replace(found, deleted=deleted, deleted_conversation=kept if whole else None)


async def _chat_completions(storage: Storage, owner: str, counts: Counter[str]) -> AsyncGenerator[bytes]:
    """The stored ones, each with the messages that it answers. One that goes meanwhile is left out."""
    listed = partial(storage.chat_completions.list, owner, limit=RESPONSES_AT_ONCE)
    async for stored in each_row(partial(_behind, listed), _by_time):
        with suppress(NotFound):
            messages = await storage.chat_completions.messages(owner, stored.id)
            shown = stored_completion_json(stored)
            yield b'{"type":"chat_completion","chat_completion":' + shown
            yield b',"messages":' + messages + b',"kept":{"created_at":%d}}\n' % stored.created_at
            counts["chat_completions"] += 1


async def _prompts(storage: Storage, owner: str, counts: Counter[str]) -> AsyncGenerator[bytes]:
    page_after = partial(_behind, partial(storage.prompts.list, owner, limit=ITEMS_AT_ONCE))
    async for prompt in each_row(page_after, _by_time):
        yield b'{"type":"prompt","prompt":' + prompt_json(prompt) + b',"versions":['
        listed = partial(storage.prompts.versions, owner, prompt.id, limit=ITEMS_AT_ONCE)
        separator = b""
        with suppress(NotFound):  # it was deleted in this very moment
            async for version in each_row(partial(_behind, listed), lambda version: version.version):
                yield separator + prompt_version_json(version)
                separator = b","
        yield b'],"kept":{"created_at":%d}}\n' % prompt.created_at
        counts["prompts"] += 1


async def _batches(storage: Storage, owner: str, counts: Counter[str]) -> AsyncGenerator[bytes]:
    page_after = partial(_behind, partial(storage.batches.list, owner, limit=ITEMS_AT_ONCE))
    async for batch in each_row(page_after, _by_time):
        yield b'{"type":"batch","batch":' + batch_json(batch) + b"}\n"
        counts["batches"] += 1


async def _files(storage: Storage, owner: str, counts: Counter[str]) -> AsyncGenerator[bytes]:
    page_after = partial(_behind, partial(storage.files.list, owner, now=now_us(), limit=FILES_AT_ONCE))
    async for file in each_row(page_after, _by_time):
        kept = {"created_at": file.created_at, "expires_at": file.expires_at, "sha256": file.digest}
        shown = file_json(file) + b',"kept":' + orjson.dumps(kept)
        async with aclosing(_with_content(storage, "file", shown, file.digest, counts)) as pieces:
            async for piece in pieces:
                yield piece


async def _with_content(
    storage: Storage, type: str, shown: bytes, digest: str, counts: Counter[str]
) -> AsyncGenerator[bytes]:
    """The line of a file with its content in base64; nothing where it was deleted in this very moment."""
    async with aclosing(storage.blobs.open(digest)) as content:
        try:
            rest = await anext(content, b"")
        except NotFound:
            return
        yield b'{"type":"%s","file":%s,"content":"' % (type.encode(), shown)
        async for piece in content:
            rest += piece
            whole = len(rest) - len(rest) % 3
            yield b64encode(rest[:whole])
            rest = rest[whole:]
        yield b64encode(rest) + b'"}\n'
        counts[f"{type}s"] += 1


async def _stores(storage: Storage, owner: str, counts: Counter[str]) -> AsyncGenerator[bytes]:
    page_after = partial(_behind, partial(storage.vector_stores.list, owner, limit=ITEMS_AT_ONCE))
    async for store in each_row(page_after, _by_time):
        shown = orjson.dumps(store_object(store, now_us()))
        yield b'{"type":"vector_store","vector_store":' + shown + b',"files":['
        async with aclosing(_files_of(storage, owner, store.id)) as pieces:
            async for piece in pieces:
                yield piece
        yield b"]}\n"
        counts["vector_stores"] += 1


async def _files_of(storage: Storage, owner: str, store_id: str) -> AsyncGenerator[bytes]:
    """What is known of a store's files, as the members of a JSON array."""
    listed = partial(storage.vector_stores.list_files, owner, store_id, limit=ITEMS_AT_ONCE)
    separator = b""
    with suppress(NotFound):  # the store was deleted in this very moment
        async for file in each_row(partial(_behind, listed), lambda file: (file.created_at, file.file_id)):
            yield separator + orjson.dumps(file_object(file))
            separator = b","


async def _containers(storage: Storage, owner: str, counts: Counter[str]) -> AsyncGenerator[bytes]:
    """The lines of containers, each before those of its files. One that goes meanwhile is left out."""
    page_after = partial(_behind, partial(storage.containers.list, owner, now=now_us(), limit=ITEMS_AT_ONCE))
    async for container in each_row(page_after, _by_time):
        try:
            files = await storage.containers.files(owner, container.id, now_us())
        except NotFound:
            continue
        yield b'{"type":"container","container":' + container_json(container) + b"}\n"
        counts["containers"] += 1
        for file in files:
            shown = container_file_json(file)
            line = _with_content(storage, "container_file", shown, file.digest, counts)
            async with aclosing(line) as pieces:
                async for piece in pieces:
                    yield piece


def _kept_items(items: Iterable[StoredItem]) -> dict[str, Any]:
    """What is kept of items besides what is shown of them, by id."""
    found = {}
    for item in items:
        kept: dict[str, Any] = {"call_id": item.call_id, "name": item.name}
        if item.private is not None:
            kept["private"] = orjson.Fragment(item.private)
        if filled_body(item.body, item.private, ()) != item.body:
            kept["body"] = orjson.Fragment(item.body)
        if given := {name: value for name, value in kept.items() if value is not None}:
            found[item.id] = given
    return found


_Place = tuple[int, int | None, str, str | None]
"""Of an item in a conversation its position, when it came, its direction in its turn, and how that ended."""


def _place(one: PositionedItem) -> _Place:
    return one.position, one.created_at, one.direction, one.status


def _kept_conversation(
    conversation: StoredConversation, places: Sequence[_Place], items: dict[str, Any]
) -> dict[str, Any]:
    """turns: what the responses of the items would tell, if they are still there."""
    return {
        "created_at": conversation.created_at,
        "used_at": conversation.used_at,
        "archived_at": conversation.archived_at,
        "head": conversation.head,
        "places": [place[:2] for place in places],
        "turns": [place[2:] for place in places],
        "items": items,
    }


def _kept_response(found: ExportedResponse) -> dict[str, Any]:
    """head: the names of the members that are not from the echo of the request. What a plan has sealed can be
    opened by this database's keys only, and is left out."""
    stored = found.response
    kept = {
        "created_at": stored.created_at,
        "completed_at": stored.completed_at,
        "head": list(orjson.loads(stored.head)),
        "plan": {**orjson.loads(stored.plan), "secrets": None},
        "previous_response_id": stored.previous_response_id,
        "conversation_id": stored.conversation_id,
        "conversation_head": stored.conversation_head,
        "items": _kept_items((*found.input, *stored.output)),
    }
    if found.deleted or found.deleted_conversation is not None:
        kept["deleted"] = {
            "responses": [_deleted_response(one) for one in found.deleted],
            "conversation": found.deleted_conversation and _deleted_conversation(found.deleted_conversation),
        }
    return kept


def _deleted_response(one: DeletedResponse) -> dict[str, Any]:
    return {
        "id": one.id,
        "created_at": one.created_at,
        "completed_at": one.completed_at,
        "status": one.status,
        "model": one.model,
        "background": one.background,
        "previous_response_id": one.previous_response_id,
        "conversation_id": one.conversation_id,
        "conversation_head": one.conversation_head,
        "input": [orjson.Fragment(item.body) for item in one.input],
        "output": [orjson.Fragment(item.body) for item in one.output],
        "items": _kept_items((*one.input, *one.output)),
    }


def _deleted_conversation(one: DeletedConversation) -> dict[str, Any]:
    return {
        "id": one.conversation.id,
        "items": [orjson.Fragment(place.item.body) for place in one.items],
        "kept": _kept_conversation(
            one.conversation,
            [_place(place) for place in one.items],
            _kept_items(place.item for place in one.items),
        ),
    }


async def _response(storage: Storage, stored: StoredResponse) -> bytes:
    waits = None
    if stored.waiting:
        try:
            waits = await storage.pending_calls(stored.owner, stored.id)
        except NotFound:  # it was deleted in this very moment
            waits = WaitingInputs({}, runnable=False)
    return snapshot(stored, waits).body


class _Timed(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def created_at(self) -> int: ...


def _by_time(row: _Timed) -> tuple[int, str]:
    """Where a row stands in its list, also when it is gone."""
    return row.created_at, row.id


async def _behind(listed: Callable[..., Awaitable[Page[T]]], after: Cursor | int | None) -> Page[T]:
    """A page of a list from its oldest on."""
    return await listed(order="asc", after=after)
