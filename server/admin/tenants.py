"""`antiphon export` and `antiphon purge`: all data of one owner as JSON lines, or removed."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlencode

from server.access import LOCAL_OWNER, OPERATOR, PURGED, Actor
from server.admin.database_access import (
    AdminError,
    UnknownOwner,
    Unreachable,
    answer_of,
    asking,
    carry_out,
    is_served,
    opened,
)
from server.admin.exports import exported, note_export
from server.admin.keys import without_owner
from server.admin.owner_names import owner_id
from server.clock import now_us
from server.config import Config
from server.progress import Progress
from server.runs import spent_so_far
from server.runs.planning import kv_folders
from storage import (
    AuditEntry,
    AuditFilter,
    FolderHeld,
    Purged,
    Storage,
    StorageError,
)

UNAUDITED = "x-antiphon-unaudited"
"""The header by which a server says why its audit log does not tell of an export."""

SLICE_S = 5.0
"""How long a server purges before it says how far it is; the command then asks again."""


async def require_owner(storage: Storage, owner: str) -> None:
    """UnknownOwner where no stored key, and nothing that is kept, belongs to `owner`. The owner of a server
    without keys is always known."""
    if owner != LOCAL_OWNER and not await storage.owner_known(owner):
        raise UnknownOwner(f"no such owner: no stored key, and nothing that is kept, belongs to {owner!r}")


# ------------------------------------------------------------------------------------------------------------
# Export


def export(config: Config, owner: str, out: BinaryIO) -> None:
    """Carry out `antiphon export`. Raises AdminError, and BrokenPipeError where nobody reads `out`."""
    owner = owner_id(config, owner)
    try:
        missed = asyncio.run(_export_database(config, owner, out))
    except FolderHeld:
        missed = _export_served(config, owner, out)
    except (StorageError, ValueError) as exc:
        raise AdminError(exc) from None
    with _writing():
        out.flush()
    if missed is not None:
        told = f"only the audit log has no entry of it, because of this: {missed}"
        print(f"antiphon: the export is whole; {told}", file=sys.stderr)


async def _export_database(config: Config, owner: str, out: BinaryIO) -> str | None:
    """Returns why the audit log does not tell of it, if it does not. FolderHeld where a server holds the
    database."""
    async with opened(config, makes=False) as storage:
        await require_owner(storage, owner)
        missed = await note_export(storage, owner, OPERATOR)
        async with aclosing(exported(storage, owner)) as pieces:
            async for piece in pieces:
                with _writing():
                    out.write(piece)
    return missed


def _export_served(config: Config, owner: str, out: BinaryIO) -> str | None:
    """The same, from the server that holds the database."""
    with asking(config) as http, http.stream("GET", "/admin/export", params={"owner": owner}) as reply:
        if reply.status_code != 200:
            reply.read()
            answer_of(reply)  # which raises it
        for piece in reply.iter_bytes():
            with _writing():
                out.write(piece)
        missed: str | None = reply.headers.get(UNAUDITED)
        return missed


@contextmanager
def _writing() -> Iterator[None]:
    """Around what is written of an export. Raises AdminError where there is no room for it."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as exc:
        raise AdminError(f"the export cannot be written: {exc.strerror or exc}") from None


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
    begun: Callable[[], None] = lambda: None,
    cut: Callable[[Sequence[str]], None] = lambda response_ids: None,
    reached: Callable[[Mapping[str, int]], None] = lambda counts: None,
) -> dict[str, Any]:
    """Remove everything that an owner had at `before` (microseconds), for `limit_s` seconds at most.

    The reply says what went and whether it is `done`; if not, begin again with the same `before`. begun:
    called once, before anything goes: completions that are made then will not be stored. cut: told which runs
    in flight went. reached: told after each short step what went by then, as the reply says it.
    """
    entry = by.did(PURGED, owner, owner, before=before, keys=with_keys)
    first = None if await _is_noted(storage, entry) else entry
    if first is not None:
        begun()
    until = time.monotonic() + limit_s
    total, done = Purged(), True
    purging = storage.purge(owner, before, entry=first, with_keys=with_keys, spending=spent_so_far)
    async with aclosing(purging) as steps:
        async for step in steps:
            total += step
            cut(step.runs)
            reached(_counts(total))
            if time.monotonic() > until:
                done = False
                break
    return {"done": done, **_counts(total)}


async def purgeable(storage: Storage, owner: str) -> dict[str, Any]:
    """What a purge of an owner and its keys would remove now: the numbers that one which is done says."""
    return _counts(await storage.purgeable(owner, now_us()))


KINDS = {
    "responses": "response",
    "conversations": "conversation",
    "files": "file",
    "vector_stores": "vector store",
    "batches": "batch",
    "prompts": "prompt template",
    "containers": "container",
    "webhooks": "webhook",
    "chat_completions": "stored chat completion",
}
"""What goes with an owner: the names of counts, and what one of each is called."""


def _counts(purged: Purged) -> dict[str, int]:
    of_kinds = {kind: getattr(purged, kind) for kind in KINDS}
    return {**of_kinds, "runs": len(purged.runs), "keys": purged.keys}


def _size(counts: Mapping[str, int]) -> int:
    return sum(counts.get(kind, 0) for kind in KINDS)  # a server of an older version tells of fewer


async def _is_noted(storage: Storage, entry: AuditEntry) -> bool:
    """Whether the audit log tells of this very purge already, which then only goes on."""
    same = AuditFilter(actions=(entry.action,), targets=(entry.target,), actors=(entry.actor,))
    latest = await storage.list_audit(same, limit=1)
    return any(one.entry.details == entry.details for one in latest.data)


def run_purge(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon purge`; yields the lines to print. Raises AdminError."""
    owner = owner_id(config, options.owner)
    would_go = carry_out(
        config, partial(_look, owner=owner), "GET", f"/admin/purge?{urlencode({'owner': owner})}"
    )
    if not options.yes:
        keys = f", and {_num(would_go['keys'], 'key')} would be revoked" if options.keys else ""
        raise AdminError(
            f"nothing was removed. All of the owner {owner} would go: {_listed(would_go)}{keys}. None of it "
            "comes back: add --yes to do it"
        )
    left_of_keys = without_owner(config, owner) if options.keys else []
    with Progress("removing what the owner has", total=_size(would_go), unit="objects") as progress:
        total, left = _purge(config, owner, options.keys, progress)
    for words in left:
        print(f"antiphon: {words}", file=sys.stderr)
    yield f"everything of the owner {owner} is removed: {_listed(total)}"
    if options.keys:
        yield f"{_num(total['keys'], 'key')} revoked"
        yield from left_of_keys
    else:
        yield "the owner's keys, if any, are still accepted: --keys revokes them"


def _purge(
    config: Config, owner: str, with_keys: bool, progress: Progress
) -> tuple[dict[str, int], list[str]]:
    """Remove everything of an owner; returns the counts of what went, and a sentence for each folder of saved
    KV that still has some of it."""
    before = now_us()
    body = {"owner": owner, "before": before, "keys": with_keys}
    total: dict[str, int] = {}
    left: list[str] = []

    async def in_database(storage: Storage) -> dict[str, Any]:
        await require_owner(storage, owner)
        went = await purge(
            storage,
            owner,
            by=OPERATOR,
            before=before,
            with_keys=with_keys,
            reached=lambda counts: progress.reached(_size(counts)),
        )
        left.extend(await _forget_saved(config, storage, owner))
        return went

    done = False
    while not done:
        try:
            went = carry_out(config, in_database, "POST", "/admin/purge", body, makes=False)
        except UnknownOwner:
            if not total:
                raise
            break  # the last of it went by itself
        except Unreachable as exc:
            told = "some of it may be removed already: run the command again, which goes on with the rest"
            raise Unreachable(f"{exc}; {told}") from None
        done = went.pop("done")
        total = {name: total.get(name, 0) + num for name, num in went.items()}
        progress.reached(_size(total))
    return total, left


async def _forget_saved(config: Config, storage: Storage, owner: str) -> list[str]:
    """Remove what was computed for an owner and is kept on disk, unless a server of this data folder does it,
    which is there only beside a database that is shared. Returns a sentence for each folder that still has
    some."""
    if storage.shared and is_served(config):
        return []
    database = await storage.database_id()
    folders = sorted({folder for folder in kv_folders(config).values() if os.path.isdir(folder)})
    found = [await asyncio.to_thread(_still_saved, folder, owner, database) for folder in folders]
    return [words for words in found if words is not None]


def _still_saved(folder: Path, owner: str, database: str | None) -> str | None:
    from engine import ForeignFolder, SavedKV  # numpy, which other commands do without

    why = "files cannot be removed"
    try:
        if SavedKV(folder, database=database).forget_owner(owner):
            return None
    except ForeignFolder:  # nothing in it was computed for an owner of this database
        return None
    except OSError as error:
        why = error.strerror or str(error)
    return (
        f"{folder} still has what was computed for the owner: {why}. The next server that starts tries again"
    )


async def _look(storage: Storage, owner: str) -> dict[str, Any]:
    await require_owner(storage, owner)
    return await purgeable(storage, owner)


def _listed(counts: Mapping[str, int]) -> str:
    in_flight = {"responses": f" ({counts['runs']} in flight)"}
    return ", ".join(
        _num(counts[kind], noun) + in_flight.get(kind, "") for kind, noun in KINDS.items() if kind in counts
    )


def _num(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"
