"""`antiphon runs`: the responses that are being made now, of all owners, whether or not a server runs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

from server.admin.listing import Columns, list_lines
from server.admin.owner_names import shown_owner
from server.config import Config
from storage import LiveRun, Storage

PATH = "/admin/runs"

MOST = 1000
"""Runs of one list, the oldest: whoever has more looks at `/metrics`."""


async def listed(storage: Storage) -> dict[str, Any]:
    """The stored runs that have not ended, oldest first."""
    return {"object": "list", "data": [as_json(run) for run in await storage.live_runs(MOST)]}


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
    """Carry out `antiphon runs`; yields the lines to print. Raises AdminError."""
    return list_lines(config, options, PATH, listed, COLUMNS)


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
