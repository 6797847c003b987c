"""`antiphon sealing`: lists the keys that seal reasoning and makes new ones, whether or not a server runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from server.access import OPERATOR
from server.admin.database_access import carry_out
from server.admin.listing import Columns, list_lines, shown_time
from server.config import Config
from server.encrypted_reasoning import Sealing
from storage import SealingKey, Storage

PATH = "/admin/sealing_keys"


async def listed(storage: Storage) -> dict[str, Any]:
    """All keys, oldest first."""
    stored = await storage.sealing_keys()
    return {"object": "list", "data": [as_json(key, seals=key is stored[-1]) for key in stored]}


def as_json(key: SealingKey, *, seals: bool) -> dict[str, Any]:
    """A key, as the admin routes and the command line show it, never its secret.

    created_at: unix seconds. seals: whether it is the one that seals; every other key only opens.
    """
    return {"number": key.number, "created_at": key.created_at // 1_000_000, "seals": seals}


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon sealing ...`; yields the lines to print. Raises AdminError."""
    return _VERBS[options.verb](config, options)


def _rotate(config: Config, options: argparse.Namespace) -> Iterator[str]:
    async def rotate(storage: Storage) -> dict[str, Any]:
        return as_json(await Sealing(storage, config.sealing_key_s).rotate(OPERATOR), seals=True)

    made = carry_out(config, rotate, "POST", PATH)
    yield f"key {made['number']} seals from now on; the keys before it still open"


def _list(config: Config, options: argparse.Namespace) -> Iterator[str]:
    return list_lines(config, options, PATH, listed, COLUMNS)


COLUMNS: Columns = {
    "NUMBER": lambda key: str(key["number"]),
    "USE": lambda key: "seals" if key["seals"] else "opens",
    "CREATED": shown_time,
}
_VERBS = {"list": _list, "rotate": _rotate}
