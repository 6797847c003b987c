"""`antiphon sealing`: lists the keys that seal reasoning and makes new ones, whether or not a server runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from server.access import OPERATOR
from server.admin.database_access import carry_out
from server.admin.listing import Columns, list_lines, shown_time
from server.config import Config
from server.encrypted_reasoning import GIVEN, Sealing, given_keys
from storage import SealingKey, Storage

PATH = "/admin/sealing_keys"


async def listed(storage: Storage, given: Sequence[SealingKey]) -> dict[str, Any]:
    """All keys: those of the database, oldest first, and those that the settings give."""
    stored = await storage.sealing_keys()
    seals = given[0] if given else stored[-1] if stored else None
    return {"object": "list", "data": [as_json(key, seals=key is seals) for key in (*stored, *given)]}


def as_json(key: SealingKey, *, seals: bool) -> dict[str, Any]:
    """A key, as the admin routes and the command line show it, never its secret.

    created_at: unix seconds, null for one that the settings give. seals: whether it is the one that seals;
    every other key only opens.
    """
    created_at = None if key.number >= GIVEN else key.created_at // 1_000_000
    return {"number": key.number, "created_at": created_at, "seals": seals}


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon sealing ...`; yields the lines to print. Raises AdminError."""
    return _VERBS[options.verb](config, options)


def _rotate(config: Config, options: argparse.Namespace) -> Iterator[str]:
    async def rotate(storage: Storage) -> dict[str, Any]:
        sealing = Sealing(storage, config.sealing_key_s, config.sealing_keys())
        return as_json(await sealing.rotate(OPERATOR), seals=True)

    made = carry_out(config, rotate, "POST", PATH, makes=False)
    yield f"key {made['number']} seals from now on; the keys before it still open"


def _list(config: Config, options: argparse.Namespace) -> Iterator[str]:
    async def in_database(storage: Storage) -> dict[str, Any]:
        return await listed(storage, given_keys(config.sealing_keys()))

    return list_lines(config, options, PATH, in_database, COLUMNS)


COLUMNS: Columns = {
    "NUMBER": lambda key: str(key["number"]),
    "USE": lambda key: "seals" if key["seals"] else "opens",
    "CREATED": lambda key: "by the settings" if key["created_at"] is None else shown_time(key),
}
_VERBS = {"list": _list, "rotate": _rotate}
