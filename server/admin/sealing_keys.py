"""Listing the keys that seal reasoning, and having another one seal, whether or not a server runs
(`server.admin`).

Owns how both are shown. Refuses to know what is sealed and how (`server.encrypted_reasoning`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from server.admin.database_access import carry_out
from server.config import Config
from server.encrypted_reasoning import Sealing
from storage import SealingKey, Storage

PATH = "/admin/sealing_keys"


async def listed(storage: Storage) -> dict[str, Any]:
    """All keys, oldest first."""
    return {"object": "list", "data": [as_json(key) for key in await storage.sealing_keys()]}


def as_json(key: SealingKey) -> dict[str, Any]:
    """A key, as the admin routes and the command line show it, never its secret; `created_at` in unix
    seconds."""
    return {"number": key.number, "created_at": key.created_at // 1_000_000}


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon sealing ...`; yields the lines to print. Raises AdminError."""
    if options.verb == "rotate":

        async def rotate(storage: Storage) -> dict[str, Any]:
            return as_json(await Sealing(storage, config.sealing_key_s).rotate())

        made = carry_out(config, rotate, "POST", PATH)
        yield f"key {made['number']} seals from now on; the keys before it still open"
        return
    keys = carry_out(config, listed, "GET", PATH)["data"]
    for key in keys:
        at = datetime.fromtimestamp(key["created_at"], UTC).strftime("%Y-%m-%d %H:%M")
        yield f"{key['number']:4}  {'seals' if key is keys[-1] else 'opens'}  {at}"
