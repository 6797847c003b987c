"""`antiphon export` and `antiphon purge`: all data of one owner as JSON lines, or removed."""

from __future__ import annotations

import argparse
import asyncio
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, BinaryIO

import orjson

from server.access import LOCAL_OWNER, OPERATOR, Actor
from server.admin.database_access import (
    AdminError,
    UnknownOwner,
    asking,
    carry_out,
    opened,
    refusal_of,
    require_database,
)
from server.admin.owner_names import owner_id
from server.clock import now_us
from server.config import Config
from server.http import conversation_json, file_json
from server.runs import spent_so_far
from server.runs.events import snapshot
from server.vector_stores.wire import file_object, store_object
from storage import (
    AuditEntry,
    AuditFilter,
    FolderHeld,
    NotFound,
    Purged,
    Storage,
    StorageError,
    StoredResponse,
)

RESPONSES_AT_ONCE = 8
ITEMS_AT_ONCE = 100
FILES_AT_ONCE = 10_000

SLICE_S = 5.0
"""How long a server purges before it says how far it is; the command then asks again."""


async def require_owner(storage: Storage, owner: str) -> None:
    """UnknownOwner where no stored key, and nothing that is kept, belongs to `owner`. The owner of a server
    without keys is always known."""
    if owner != LOCAL_OWNER and not await storage.owner_known(owner):
        raise UnknownOwner(f"no such owner: no stored key, and nothing that is kept, belongs to {owner!r}")


# ------------------------------------------------------------------------------------------------------------
# Export


async def exported(storage: Storage, owner: str, by: Actor) -> AsyncGenerator[bytes]:
    """What an owner keeps, as JSON lines in pieces: conversations, responses, files with their contents in
    base64, vector stores with what is known of their files, and a last line that says that it is whole. Each
    object is as it was when its line was written. The audit log is told first."""
    await storage.add_audit(by.did("project.exported", owner, owner))
    counts = {"conversations": 0, "responses": 0, "files": 0, "vector_stores": 0}
    after: tuple[int, str] | None = None
    while page := await storage.export_conversations(owner, after=after, limit=ITEMS_AT_ONCE):
        for conversation in page:
            yield b'{"type":"conversation","conversation":' + conversation_json(conversation) + b',"items":['
            separator = b""
            at = -1
            while page_items := await storage.export_conversation_items(
                owner, conversation.id, after=at, limit=ITEMS_AT_ONCE
            ):
                yield separator + b",".join(positioned.item.body for positioned in page_items)
                separator, at = b",", page_items[-1].position
            yield b"]}\n"
        counts["conversations"] += len(page)
        after = (page[-1].created_at, page[-1].id)
    after = None
    while responses := await storage.export_responses(owner, after=after, limit=RESPONSES_AT_ONCE):
        for exported_response in responses:
            body = await _response(storage, exported_response.response)
            items = b",".join(item.body for item in exported_response.input)
            yield b'{"type":"response","response":' + body + b',"input":[' + items + b"]}\n"
        counts["responses"] += len(responses)
        last = responses[-1].response
        after = (last.created_at, last.id)
    place: str | None = None
    while True:
        files = await storage.files.list(owner, now=now_us(), limit=FILES_AT_ONCE, order="asc", after=place)
        for file in files.data:
            content = storage.blobs.open(file.digest)
            try:
                first = await anext(content, b"")
            except NotFound:  # it was deleted in this very moment
                continue
            yield b'{"type":"file","file":' + file_json(file) + b',"content":"'
            async for piece in _base64(first, content):
                yield piece
            yield b'"}\n'
            counts["files"] += 1
        if not files.has_more:
            break
        place = files.data[-1].id
    place = None
    while True:
        stores = await storage.vector_stores.list(owner, limit=ITEMS_AT_ONCE, order="asc", after=place)
        for store in stores.data:
            shown = orjson.dumps(store_object(store, now_us()))
            yield b'{"type":"vector_store","vector_store":' + shown + b',"files":['
            async for piece in _files_of(storage, owner, store.id):
                yield piece
            yield b"]}\n"
        counts["vector_stores"] += len(stores.data)
        if not stores.has_more:
            break
        place = stores.data[-1].id
    yield orjson.dumps({"type": "end", "owner": owner, **counts}) + b"\n"


async def _files_of(storage: Storage, owner: str, store_id: str) -> AsyncGenerator[bytes]:
    """What is known of a store's files, as the members of a JSON array."""
    separator, place = b"", None
    while True:
        try:
            page = await storage.vector_stores.list_files(
                owner, store_id, limit=ITEMS_AT_ONCE, order="asc", after=place
            )
        except NotFound:  # it was deleted in this very moment
            return
        if page.data:
            yield separator + b",".join(orjson.dumps(file_object(file)) for file in page.data)
            separator, place = b",", page.data[-1].file_id
        if not page.has_more:
            return


async def _base64(rest: bytes, content: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The base64 of what comes in pieces of any length, of which `rest` is the first."""
    async with aclosing(content):
        async for piece in content:
            rest += piece
            whole = len(rest) - len(rest) % 3
            yield b64encode(rest[:whole])
            rest = rest[whole:]
    yield b64encode(rest)


async def _response(storage: Storage, stored: StoredResponse) -> bytes:
    pending = None
    if stored.waiting:
        try:
            pending = (await storage.pending_calls(stored.owner, stored.id)).pending
        except NotFound:  # it was deleted in this very moment
            pending = {}
    return snapshot(stored, pending).body


def export(config: Config, owner: str, out: BinaryIO) -> None:
    """Carry out `antiphon export`. Raises AdminError."""
    owner = owner_id(config, owner)
    try:
        asyncio.run(_export_database(config, owner, out))
    except FolderHeld:
        with asking(config) as http, http.stream("GET", "/admin/export", params={"owner": owner}) as reply:
            if reply.status_code != 200:
                raise refusal_of(orjson.loads(reply.read())) from None
            for piece in reply.iter_bytes():
                out.write(piece)
    except (StorageError, ValueError) as exc:
        raise AdminError(exc) from None
    out.flush()


async def _export_database(config: Config, owner: str, out: BinaryIO) -> None:
    await require_database(config)
    async with opened(config) as storage:
        await require_owner(storage, owner)
        async with aclosing(exported(storage, owner, OPERATOR)) as pieces:
            async for piece in pieces:
                out.write(piece)


# ------------------------------------------------------------------------------------------------------------
# Purge


async def purge(
    storage: Storage,
    owner: str,
    *,
    by: Actor,
    before: int,
    with_keys: bool,
    limit_s: float = float("inf"),
    cut: Callable[[Sequence[str]], None] = lambda response_ids: None,
) -> dict[str, Any]:
    """Remove everything that an owner had at `before` (microseconds), for `limit_s` seconds at most.

    The reply says what went and whether it is `done`; if not, begin again with the same `before`. cut: told
    which runs in flight went.
    """
    entry = by.did("project.purged", owner, owner, before=before, keys=with_keys)
    first = None if await _is_noted(storage, entry) else entry
    until = time.monotonic() + limit_s
    total, done = Purged(), True
    purging = storage.purge(owner, before, entry=first, with_keys=with_keys, spending=spent_so_far)
    async with aclosing(purging) as steps:
        async for step in steps:
            total += step
            cut(step.runs)
            if time.monotonic() > until:
                done = False
                break
    return {
        "done": done,
        "responses": total.responses,
        "runs": len(total.runs),
        "conversations": total.conversations,
        "files": total.files,
        "webhooks": total.webhooks,
        "keys": total.keys,
    }


async def _is_noted(storage: Storage, entry: AuditEntry) -> bool:
    """Whether the audit log tells of this very purge already, which then only goes on."""
    same = AuditFilter(actions=(entry.action,), targets=(entry.target,), actors=(entry.actor,))
    latest = await storage.list_audit(same, limit=1)
    return any(one.entry.details == entry.details for one in latest.data)


def run_purge(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon purge`; yields the lines to print. Raises AdminError."""
    owner = owner_id(config, options.owner)
    if not options.yes:
        raise AdminError(
            f"nothing was removed: all responses, conversations, files and webhooks of owner {owner!r} would "
            "go, and none of it comes back: add --yes to do it"
        )
    body = {"owner": owner, "before": now_us(), "keys": options.keys}
    total: dict[str, int] = {}

    async def in_database(storage: Storage) -> dict[str, Any]:
        await require_owner(storage, owner)
        return await purge(storage, owner, by=OPERATOR, before=body["before"], with_keys=options.keys)

    done = False
    while not done:
        try:
            went = carry_out(config, in_database, "POST", "/admin/purge", body, makes=False)
        except UnknownOwner:
            if not total:
                raise
            break  # the last of it went by itself
        done = went.pop("done")
        total = {name: total.get(name, 0) + num for name, num in went.items()}
    yield (
        f"everything of the owner {owner} is removed: {_num(total['responses'], 'response')} "
        f"({total['runs']} in flight), {_num(total['conversations'], 'conversation')}, "
        f"{_num(total['files'], 'file')}, {_num(total['webhooks'], 'webhook')}"
    )
    if options.keys:
        yield f"{_num(total['keys'], 'key')} revoked"
    else:
        yield "the owner's keys, if any, are still accepted: --keys revokes them"


def _num(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
