"""`antiphon runs`: the responses that are being made now, of all owners, how one is followed, cancelled and
forked; whether or not a server runs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import orjson

from server.access import OPERATOR, Actor
from server.admin.database_access import AdminError, Unreachable, carry_out, is_served
from server.admin.listing import Columns, list_lines
from server.admin.owner_names import shown_owner
from server.config import Config
from server.errors import ApiError
from server.masking import one_line
from server.runs import no_events, prepare_fork
from server.runs.events import Events
from server.runs.planning import TERMINAL
from server.schema import Fork
from storage import LiveRun, NotFound, Storage

PATH = "/admin/runs"
ORGANIZATION_PATH = "/v1/organization/runs"

MOST = 1000
"""Runs of one list, the oldest: whoever has more looks at `/metrics`."""


POLL_S = 0.25
"""Seconds between two looks for the events of a run that is followed."""

STATES = ("queued", "running", "waiting", "unowned")

PAGE_BYTES = 1 << 18
"""Of the events that one look brings, about."""


async def listed(storage: Storage) -> dict[str, Any]:
    """The stored runs that have not ended, oldest first."""
    found = await storage.live_runs(MOST)
    if not storage.shared:  # whoever else had a run did not give it back, and is gone: this process holds all
        found = tuple(run if run.runner == storage.runner else replace(run, runner=None) for run in found)
    return {"object": "list", "data": [as_json(run) for run in found]}


async def cancel(storage: Storage, by: Actor, id: str, owner: str | None = None) -> dict[str, Any]:
    """Have whichever process carries a stored run on, or takes it up next, cancel it. owner: whose it has to
    be; None: anybody's. NotFound, RunEnded."""
    whose = await storage.run_owner(id)
    if owner not in (None, whose):
        raise NotFound("run", id)
    await storage.cancel_run(id, entry=by.did("run.cancelled", id, whose))
    return cancelled(id, over=False)


async def events_after(storage: Storage, by: Actor, id: str, after: int, *, begins: bool) -> dict[str, Any]:
    """Some of the stored events of a response of any owner, behind the one with the number `after`.

    The reply is `{"events": [...], "status", "over"}`; `over` says that none will follow these. begins: the
    audit log is told that somebody reads them. NotFound, EventsExpired, and ApiError 400 for a fork.
    """
    owner = await storage.response_owner(id)
    stored = await storage.get_response(owner, id)
    if stored.fork_of is not None:
        raise no_events(stored)
    await storage.log_end(id)  # raises where the events have gone
    if begins:
        await storage.add_audit(by.did("run.followed", id, owner))
    found: list[bytes] = []
    over = stored.status in TERMINAL
    for record in await storage.records(id, after=after, limit_bytes=PAGE_BYTES):
        events = Events.of(record, stored.echo).after(after + len(found))
        found += events.bodies
        over = events.terminal
    bodies = [orjson.loads(body) for body in found]
    return {"object": "list", "events": bodies, "status": stored.status, "over": over}


async def fork(storage: Storage, by: Actor, id: str, wanted: Fork) -> dict[str, Any]:
    """Make a response of the same owner that ends where `wanted` says, and can be gone on from. NotFound,
    EventsExpired, and ApiError 400 for a point that there is not."""
    owner = await storage.response_owner(id)
    new = await prepare_fork(storage, owner, id, wanted)
    await storage.fork_response(owner, id, new)
    await storage.add_audit(by.did("run.forked", id, owner, fork=new.id))
    return {"id": new.id, "object": "response", "forked_from": id, "owner": owner}


def cancelled(id: str, *, over: bool) -> dict[str, Any]:
    """What is said of a run that was cancelled. over: whether it has ended already."""
    return {"id": id, "object": "organization.run.cancelled", "cancelled": over}


def as_json(run: LiveRun) -> dict[str, Any]:
    """A run, as the admin route and the command line show it; nothing of what it says.

    state: queued, running, waiting (for the outputs of its client's tools), or `unowned`, where its process
    is gone and no other has taken it up. node: the process that carries it on. attempt: how often an engine
    was given it. created_at: unix seconds.
    """
    unowned = run.state == "running" and run.runner is None
    return {
        "id": run.response_id,
        "owner": run.owner,
        "model": run.model,
        "state": "unowned" if unowned else run.state,
        "background": run.background,
        "created_at": run.created_at // 1_000_000,
        "output_tokens": run.num_tokens,
        "attempt": run.attempt,
        "node": run.runner,
    }


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon runs ...`; yields the lines to print. Raises AdminError."""
    if options.verb == "list":
        yield from list_lines(config, options, PATH, listed, COLUMNS, keep=_in_state(options.state))
        return
    yield from {"cancel": _cancel, "tail": _tail, "fork": _fork}[options.verb](config, options)


def _in_state(state: str | None) -> Callable[[dict[str, Any]], bool]:
    return lambda one: state is None or one["state"] == state


def _cancel(config: Config, options: argparse.Namespace) -> Iterator[str]:
    id, owner = options.id, options.owner
    path = f"{ORGANIZATION_PATH}/{quote(id, safe='')}/cancel"
    body = None if owner is None else {"owner": owner}
    done = carry_out(
        config, lambda storage: cancel(storage, OPERATOR, id, owner), "POST", path, body, makes=False
    )
    if done["cancelled"]:
        yield f"{id} is cancelled"
    else:
        yield f"{id} will be cancelled by the server that carries it on, or by the next that starts"


def _tail(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """The events of a response, a line each, until the last; over the end of the server that makes it."""
    after, began = options.after, True
    while True:
        try:
            page = _events(config, options.id, after, begins=began)
        except Unreachable:
            if began:
                raise
            page = None  # its server has just gone
        if page is not None:
            began = False
            for event in page["events"]:
                after = event["sequence_number"]
                yield orjson.dumps(event).decode() if options.json else shown_event(event)
            if page["over"]:
                return
        if page is None or not page["events"]:
            time.sleep(POLL_S if config.db_file is not None else 4 * POLL_S)
        _await_server(config)


def _await_server(config: Config) -> None:
    """Wait until a server is there to go on with a run. Whoever opens a database of SQLite holds it: a look
    into it could keep that server from starting."""
    told = config.db_file is None
    while config.db_file is not None and not is_served(config):
        if not told:
            print("antiphon: no server carries it on now; waiting for one (Ctrl-C ends)", file=sys.stderr)
            told = True
        time.sleep(POLL_S)


def _events(config: Config, id: str, after: int, *, begins: bool) -> dict[str, Any]:
    async def here(storage: Storage) -> dict[str, Any]:
        return await events_after(storage, OPERATOR, id, after, begins=begins)

    path = f"{PATH}/{quote(id, safe='')}/events?after={after}&begins={str(begins).lower()}"
    return _allowed(lambda: carry_out(config, here, "GET", path, makes=False))


def _fork(config: Config, options: argparse.Namespace) -> Iterator[str]:
    event = None if options.after < 0 else options.after
    wanted = Fork(starting_after=event)
    path = f"{PATH}/{quote(options.id, safe='')}/fork"
    body = {} if event is None else {"starting_after": event}

    async def here(storage: Storage) -> dict[str, Any]:
        return await fork(storage, OPERATOR, options.id, wanted)

    made = _allowed(lambda: carry_out(config, here, "POST", path, body, makes=False))
    yield made["id"]


def _allowed(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it gives. Raises AdminError for what a route would refuse."""
    try:
        return work()
    except ApiError as error:
        raise AdminError(error.message) from None


def shown_event(event: dict[str, Any]) -> str:
    """An event as a line: its number, its type without `response.`, and what it brings."""
    kind = event["type"].removeprefix("response.")
    item, part = event.get("item") or {}, event.get("part") or {}
    told = next(
        (event[name] for name in ("delta", "arguments", "text", "code") if isinstance(event.get(name), str)),
        None,
    )
    if told is not None:
        words = orjson.dumps(told).decode()
    elif item:
        words = " ".join(filter(None, (item["type"], item.get("name"), item.get("status"))))
    elif error := (event.get("response") or {}).get("error"):
        words = error["message"]
    else:
        words = part.get("type") or (event.get("response") or {}).get("status") or ""
    words = words if len(words) <= MAX_WORDS else words[:MAX_WORDS] + "..."
    return one_line(f"{event['sequence_number']:5}  {kind:32}  {words}".rstrip())


MAX_WORDS = 200
"""Characters that a line shows of what an event brings."""


def _age(run: dict[str, Any]) -> str:
    seconds = max(0, int(time.time()) - run["created_at"])
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


COLUMNS: Columns = {
    "ID": lambda run: run["id"],
    "OWNER": shown_owner,
    "MODEL": lambda run: run["model"],
    "STATE": lambda run: run["state"],
    "AGE": _age,
    "TOKENS": lambda run: str(run["output_tokens"]),
    "NODE": lambda run: run["node"] or "-",
}
