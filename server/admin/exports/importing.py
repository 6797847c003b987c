"""`antiphon import`: puts back what `antiphon export` wrote, into an empty database or beside what is there.

The whole file is checked before anything is stored. What is there already stays as it is, so an import that
was cut short is begun again.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import shutil
import sys
import tempfile
from base64 import b64decode
from binascii import Error as NotBase64
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from server.access import LOCAL_OWNER, OPERATOR
from server.admin.database_access import AdminError, opened
from server.admin.exports.exporting import COUNTED
from server.admin.owner_names import every_owner, owner_id
from server.clock import now_us
from server.config import Config
from server.progress import Progress
from server.runs.events import echo_members
from storage import (
    TERMINAL_STATUSES,
    ChatCompletionKnown,
    FolderHeld,
    ImportedConversation,
    ImportedResponse,
    NewChatCompletion,
    NewItem,
    NewStoreFile,
    NewVectorStore,
    NotFound,
    Place,
    Storage,
    StorageError,
    StoredFile,
    StoredOwner,
    StoredPrompt,
    StoredPromptVersion,
)

Line = Mapping[str, Any]

NOT_KEPT = ("attempt", "queue_position", "pending_tool_calls", "tool_timeout_at")
"""Members of a response in flight that nothing stores."""

LEFT_OUT = {
    "batch": "a batch is left out; its files are not",
    "container": "a container is left out; it would have expired",
    "container_file": "a file of a container is left out",
}
"""Lines that nothing is made of, and why."""

DAY_US = 86_400_000_000


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon import`; yields the lines to print. Raises AdminError."""
    with _source(options.file) as (source, size):
        found = check(source, size)
        owner = options.owner or found["owner"]
        if options.check:
            yield f"the file is whole: {_listed(found)}, of the owner {found['owner']}"
            return
        source.seek(0)
        if options.owner is not None:
            owner = owner_id(config, options.owner, makes=True)
        try:
            whose = _owner(found) if options.owner is None else StoredOwner(owner, options.owner, now_us())
            counts, has_key, is_archived = asyncio.run(_import(config, whose, source, size))
        except FolderHeld as exc:
            raise AdminError(f"{exc}: stop it, or import into another --data and serve from that") from None
        except (StorageError, ValueError) as exc:
            raise AdminError(exc) from None
    for kind in COUNTED:
        if found[kind] and (new := counts["new", kind]) + (known := counts["known", kind]):
            there = f", and {known} were there already" if known else ""
            yield f"{new} {kind.replace('_', ' ')} imported{there}"
    for (what, told), number in sorted(counts.items()):
        if what == "left out":
            yield f"{told} ({number} times)" if number > 1 else told
    if not has_key:
        yield (
            "no stored key is live here, and exports hold none: unless keys are configured, a server on "
            f"loopback takes whoever reaches it for the owner {LOCAL_OWNER}, until one is made"
        )
    command = f"antiphon keys create --owner {shlex.quote(owner)}{config.flags}"
    yield f"all of it belongs to the owner {owner}{', who is archived' if is_archived else f': {command}'}"


@contextmanager
def _source(name: str) -> Iterator[tuple[BinaryIO, int]]:
    """The file, which is read twice, and its size in bytes. Raises AdminError."""
    with tempfile.TemporaryFile() as spooled:
        try:
            if name == "-":
                shutil.copyfileobj(sys.stdin.buffer, spooled)
                size = spooled.tell()
                spooled.seek(0)
                yield spooled, size
                return
            with Path(name).open("rb") as file:
                yield file, Path(name).stat().st_size
        except OSError as exc:
            raise AdminError(f"{name}: {exc.strerror or exc}") from None


def check(source: BinaryIO, size: int) -> dict[str, Any]:
    """Read an export to its end; returns its last line. Raises AdminError, with the line's number, for a line
    that is none, a file's content that is not what it was, and for an export that is not whole."""
    counts: Counter[str] = Counter()
    end: dict[str, Any] | None = None
    with Progress("checking the file", total=size, unit="B") as progress:
        for number, raw in enumerate(source, 1):
            progress.add(len(raw))
            try:
                if end is not None:
                    raise ValueError("it comes behind the last one")
                line = orjson.loads(raw)
                if line["type"] == "end":
                    _owner(line)
                    end = line
                    continue
                _check_line(line)
            except (ValueError, TypeError, KeyError) as fault:
                told = f"has no {fault}" if isinstance(fault, KeyError) else str(fault)
                raise AdminError(f"line {number} is not of an export that can be imported: {told}") from None
            counts[_plural(line["type"])] += 1
    if end is None:
        raise AdminError("the file is not whole: its last line is missing")
    for kind in COUNTED:
        if end[kind] != counts[kind]:
            raise AdminError(f"the file is not whole: it has {counts[kind]} {kind} of {end[kind]}")
    return end


def _plural(type: str) -> str:
    return "batches" if type == "batch" else f"{type}s"


def _check_line(line: Line) -> None:
    """ValueError, TypeError or KeyError for what nothing can be made of."""
    kind = line["type"]
    if kind in LEFT_OUT:
        return
    if kind == "vector_store":
        _store(line, "", {})
        return
    if "kept" not in line:
        raise ValueError("it was written by a version whose exports hold too little")
    if kind == "file":
        content = _content(line)
        if len(content) != line["file"]["bytes"] or sha256(content).hexdigest() != line["kept"]["sha256"]:
            raise ValueError("the content of the file is not what it was")
    elif kind == "response":
        if line["response"]["status"] in TERMINAL_STATUSES:
            _response(line, "")
    else:
        {"conversation": _conversation, "chat_completion": _completion, "prompt": _prompt}[kind](line, "")


def _content(line: Line) -> bytes:
    try:
        return b64decode(line["content"], validate=True)
    except NotBase64 as fault:
        raise ValueError(f"the content of the file is no base64: {fault}") from None


def _listed(end: Mapping[str, Any]) -> str:
    return ", ".join(f"{end[kind]} {kind.replace('_', ' ')}" for kind in COUNTED if end[kind]) or "nothing"


# ------------------------------------------------------------------------------------------------------------
# Storing


async def _import(
    config: Config, told: StoredOwner, source: BinaryIO, size: int
) -> tuple[Counter[tuple[str, str]], bool, bool]:
    """Store the lines as those of an owner; returns how many of each kind, whether the database has a key,
    and whether the owner is archived there."""
    counts: Counter[tuple[str, str]] = Counter()
    owner = told.id
    async with opened(config, makes=True) as storage:
        is_archived = await _ensure_owner(storage, told)
        await storage.add_audit(OPERATOR.did("project.imported", owner, owner))
        with Progress("importing", total=size, unit="B") as progress:
            for raw in source:
                line = orjson.loads(raw)
                kind = line["type"]
                if kind in LEFT_OUT:
                    counts["left out", LEFT_OUT[kind]] += 1
                elif kind == "response" and line["response"]["status"] not in TERMINAL_STATUSES:
                    counts["left out", "a response that was being made is left out"] += 1
                elif kind != "end":
                    new = await _STORED[kind](storage, owner, line)
                    counts["new" if new else "known", _plural(kind)] += 1
                progress.add(len(raw))
        return counts, await storage.any_key(), is_archived


async def _ensure_owner(storage: Storage, told: StoredOwner) -> bool:
    """Make the owner as it is told, unless there is one of its id; returns whether it is archived. Its name
    is given unless it means somebody else here."""
    owner, name = told.id, told.name
    if owner == LOCAL_OWNER:  # the first server without keys would make it
        await storage.ensure_owners((owner,), told.created_at)
        return False
    known = await every_owner(storage)
    for one in known:
        if one.id == owner:
            return one.archived_at is not None
    if any(name == one.id or (name == one.name and one.archived_at is None) for one in known):
        name = owner
    entry = OPERATOR.did("project.created", owner, owner, name=name)
    await storage.create_owner(owner, name, told.created_at, entry=entry)
    if told.archived_at is None:
        return False
    entry = OPERATOR.did("project.archived", owner, owner)
    await storage.archive_owner(owner, told.archived_at, entry=entry)
    return True


async def _store_conversation(storage: Storage, owner: str, line: Line) -> bool:
    return await storage.imports.conversation(owner, _conversation(line, owner))


async def _store_response(storage: Storage, owner: str, line: Line) -> bool:
    return await storage.imports.response(owner, _response(line, owner))


async def _store_prompt(storage: Storage, owner: str, line: Line) -> bool:
    return await storage.imports.prompt(*_prompt(line, owner))


async def _store_completion(storage: Storage, owner: str, line: Line) -> bool:
    try:
        await storage.chat_completions.create(_completion(line, owner))
    except ChatCompletionKnown:
        return False
    return True


async def _store_file(storage: Storage, owner: str, line: Line) -> bool:
    shown, kept = line["file"], line["kept"]
    if await storage.imports.is_there(owner, "file", shown["id"]):
        return False

    async def content() -> Any:
        yield _content(line)

    async with storage.blobs.incoming(content()) as blob:
        await storage.files.create(
            StoredFile(
                shown["id"],
                owner,
                shown["filename"],
                shown["purpose"],
                blob.num_bytes,
                blob.digest,
                kept["created_at"],
                kept["expires_at"],
            )
        )
    return True


async def _store_vector_store(storage: Storage, owner: str, line: Line) -> bool:
    """The store, with its files to be read again: chunks and vectors are made of them."""
    shown = line["vector_store"]
    if await storage.imports.is_there(owner, "vector_store", shown["id"]):
        return False
    there = {}
    for file in line["files"]:
        try:
            there[file["id"]] = (await storage.files.get(owner, file["id"], now_us())).filename
        except NotFound:  # it was deleted, or has expired since
            continue
    await storage.vector_stores.create(*_store(line, owner, there))
    return True


_STORED: Mapping[str, Callable[[Storage, str, Line], Awaitable[bool]]] = {
    "conversation": _store_conversation,
    "response": _store_response,
    "chat_completion": _store_completion,
    "prompt": _store_prompt,
    "file": _store_file,
    "vector_store": _store_vector_store,
}


# ------------------------------------------------------------------------------------------------------------
# Lines as what is stored


def _owner(end: Line) -> StoredOwner:
    """The owner that an export is of, from its last line; older exports have its id alone."""
    created_at, archived_at = end.get("owner_created_at"), end.get("owner_archived_at")
    return StoredOwner(
        end["owner"],
        end.get("owner_name") or end["owner"],
        now_us() if created_at is None else int(created_at),
        None if archived_at is None else int(archived_at),
    )


def _items(shown: list[dict[str, Any]], kept: Mapping[str, Any]) -> list[NewItem]:
    made = []
    for item in shown:
        more = kept.get(item["id"], {})
        private = more.get("private")
        made.append(
            NewItem(
                item["id"],
                item["type"],
                orjson.dumps(more.get("body", item)),
                more.get("call_id"),
                more.get("name"),
                None if private is None else orjson.dumps(private),
            )
        )
    return made


def _conversation(line: Line, owner: str) -> ImportedConversation:
    shown, kept = line["conversation"], line["kept"]
    parent = shown.get("forked_from") or {"conversation_id": None, "after": None}
    return ImportedConversation(
        shown["id"],
        int(kept["created_at"]),
        orjson.dumps(shown["metadata"]),
        shown.get("title"),
        int(kept["used_at"]),
        kept["archived_at"],
        int(kept["head"]),
        _places(line),
        parent["conversation_id"],
        parent["after"],
    )


def _places(line: Line) -> list[Place]:
    """The places of the items of a conversation, deleted or not."""
    kept = line["kept"]
    items = _items(line["items"], kept["items"])
    turns = kept.get("turns") or [("in", None)] * len(items)  # older exports do not have them
    return [
        Place(int(at), item, came, "out" if direction == "out" else "in", status)
        for (at, came), (direction, status), item in zip(kept["places"], turns, items, strict=True)
    ]


def _deleted_conversation(line: Line | None, now: int) -> ImportedConversation | None:
    """The conversation that a response needs of those that were deleted, if it needs one."""
    if line is None:
        return None
    kept = line["kept"]
    return ImportedConversation(
        line["id"],
        int(kept["created_at"]),
        b"{}",
        None,
        int(kept["used_at"]),
        kept["archived_at"],
        int(kept["head"]),
        _places(line),
        deleted_at=now,
    )


def _deleted_response(one: Line, now: int) -> ImportedResponse:
    """A response that was deleted, of which only those need something that continue it."""
    if one["status"] not in TERMINAL_STATUSES:
        raise ValueError(f"the deleted response {one['id']} has not ended")
    return ImportedResponse(
        id=one["id"],
        created_at=int(one["created_at"]),
        completed_at=one["completed_at"],
        status=one["status"],
        model=one["model"],
        background=bool(one["background"]),
        head=b"",
        echo=b"",
        plan=b"",
        previous_response_id=one["previous_response_id"],
        conversation_id=one["conversation_id"],
        conversation_head=one["conversation_head"],
        input=_items(one["input"], one["items"]),
        output=_items(one["output"], one["items"]),
        deleted_at=now,
    )


def _response(line: Line, owner: str) -> ImportedResponse:
    shown, kept = line["response"], line["kept"]
    head = {name: shown[name] for name in kept["head"]}
    besides = {"output", *NOT_KEPT, *head}
    echo = {name: value for name, value in shown.items() if name not in besides}
    plan = {**kept["plan"], "owner": owner or kept["plan"]["owner"]}
    needs, now = kept.get("deleted") or {"responses": (), "conversation": None}, now_us()
    return ImportedResponse(
        id=shown["id"],
        created_at=int(kept["created_at"]),
        completed_at=int(kept["completed_at"]),
        status=shown["status"],
        model=shown["model"],
        background=bool(shown["background"]),
        head=orjson.dumps(head),
        echo=echo_members(echo),
        plan=orjson.dumps(plan),
        previous_response_id=kept["previous_response_id"],
        conversation_id=kept["conversation_id"],
        conversation_head=kept["conversation_head"],
        input=_items(line["input"], kept["items"]),
        output=_items(shown["output"], kept["items"]),
        # Deleted from now on, whenever that was: it is none of what a purge before this import has promised.
        deleted=[_deleted_response(one, now) for one in needs["responses"]],
        deleted_conversation=_deleted_conversation(needs["conversation"], now),
        metadata=shown.get("metadata") or {},
    )


def _completion(line: Line, owner: str) -> NewChatCompletion:
    shown = dict(line["chat_completion"])
    metadata = shown.pop("metadata")
    return NewChatCompletion(
        shown["id"],
        owner,
        int(line["kept"]["created_at"]),
        shown["model"],
        metadata,
        orjson.dumps(shown),
        orjson.dumps(line["messages"]),
    )


def _prompt(line: Line, owner: str) -> tuple[StoredPrompt, list[StoredPromptVersion]]:
    shown = line["prompt"]
    prompt = StoredPrompt(
        shown["id"],
        owner,
        int(line["kept"]["created_at"]),
        shown["name"],
        orjson.dumps(shown["metadata"]),
        int(shown["default_version"]),
        int(shown["latest_version"]),
    )
    versions = [
        StoredPromptVersion(
            prompt.id,
            int(one["version"]),
            int(one["created_at"]) * 1_000_000,
            orjson.dumps(one["template"]),
        )
        for one in line["versions"]
    ]
    return prompt, versions


def _store(line: Line, owner: str, there: Mapping[str, str]) -> tuple[NewVectorStore, list[NewStoreFile]]:
    """there: names of the files that can be read, by id."""
    shown = line["vector_store"]
    expiry = shown.get("expires_after")
    store = NewVectorStore(
        shown["id"],
        owner,
        int(shown["created_at"]) * 1_000_000,
        shown["name"],
        shown["description"],
        orjson.dumps(shown["metadata"]),
        None if expiry is None else int(expiry["days"]) * DAY_US,
        last_active_at=now_us(),  # it is of use from now on, and would otherwise be gone before it was used
    )
    files = []
    for file in line["files"]:
        sizes = file["chunking_strategy"]["static"]
        if file["id"] in there:
            files.append(
                NewStoreFile(
                    file["id"],
                    there[file["id"]],
                    int(sizes["max_chunk_size_tokens"]),
                    int(sizes["chunk_overlap_tokens"]),
                    orjson.dumps(file["attributes"]) if file["attributes"] else None,
                )
            )
    return store, files
