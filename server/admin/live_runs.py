"""`antiphon runs`: the responses that are being made now, of all owners, and how one is cancelled; whether or
not a server runs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from server.access import OPERATOR, Actor
from server.admin.database_access import AdminError, carry_out
from server.admin.listing import Columns, list_lines
from server.admin.owner_names import shown_owner
from server.config import Config
from storage import LiveRun, NotFound, Storage

PATH = "/admin/runs"
ORGANIZATION_PATH = "/v1/organization/runs"

MOST = 1000
"""Runs of one list, the oldest: whoever has more looks at `/metrics`."""


async def listed(storage: Storage) -> dict[str, Any]:
    """The stored runs that have not ended, oldest first."""
    return {"object": "list", "data": [as_json(run) for run in await storage.live_runs(MOST)]}


async def cancel(storage: Storage, by: Actor, id: str, owner: str | None = None) -> dict[str, Any]:
    """Have whichever process carries a stored run on, or takes it up next, cancel it. owner: whose it has to
    be; None: anybody's. NotFound."""
    whose = await storage.run_owner(id)
    if owner not in (None, whose):
        raise NotFound("run", id)
    await storage.cancel_run(id, entry=by.did("run.cancelled", id, whose))
    return cancelled(id, over=False)


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
    if options.verb == "cancel":
        yield _cancel(config, options.id, options.owner)
    elif options.id is not None:
        raise AdminError("`antiphon runs` lists all runs: an ID belongs to `antiphon runs cancel ID`")
    else:
        yield from list_lines(config, options, PATH, listed, COLUMNS)


def _cancel(config: Config, id: str | None, owner: str | None) -> str:
    if not id:
        raise AdminError("which run? `antiphon runs cancel ID`, with an id that `antiphon runs` shows")
    path = f"{ORGANIZATION_PATH}/{quote(id, safe='')}/cancel"
    body = None if owner is None else {"owner": owner}
    done = carry_out(
        config, lambda storage: cancel(storage, OPERATOR, id, owner), "POST", path, body, makes=False
    )
    if done["cancelled"]:
        return f"{id} is cancelled"
    return f"{id} will be cancelled by the server that carries it on, or by the next that starts"


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
