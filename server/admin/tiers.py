"""`antiphon tiers`: shows and changes how the requests of an owner or a key are served.

What can be done is here as functions of the storage, which the command line and the HTTP route share.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import orjson
from pydantic import ValidationError

from server.access import OPERATOR, Actor
from server.admin.database_access import AdminError, carry_out
from server.admin.owner_names import known_owner_id
from server.clock import now_us
from server.config import Config
from server.limits import ServiceShape
from storage import NotFound, Storage, StoredKey, StoredOwner

PATH = "/admin/tiers"
MEMBERS = tuple(ServiceShape.model_fields)

# ------------------------------------------------------------------------------------------------------------
# What can be done


async def shown(storage: Storage, id: str) -> dict[str, Any]:
    """What limits say of service; members of which they say nothing are null. NotFound."""
    return _as_json(await _find(storage, id))


async def change(storage: Storage, by: Actor, id: str, **changes: Any) -> dict[str, Any]:
    """Change how an owner's or a key's requests are served; what is not named stays, None ends it.

    Other limits stay as they are. ValueError for what is no weight, tier or priority, and for the weight of a
    key; NotFound, KeyEnded, OwnerArchived.
    """
    found = await _find(storage, id)
    if isinstance(found, StoredKey) and changes.get("weight") is not None:
        raise ValueError("weight: it is an owner's, for all its keys together")
    try:
        shape = ServiceShape.model_validate(changes)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{first['loc'][0]}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None
    told = {name: value for name, value in shape.model_dump().items() if name in changes}

    def after(stored: bytes | None) -> bytes | None:
        limits = {name: value for name, value in (_limits(stored) | told).items() if value is not None}
        return orjson.dumps(limits) if limits else None

    if isinstance(found, StoredKey):
        entry = by.did("api_key.updated", id, found.owner, limits=told)
        return _as_json(await storage.change_key(id, now_us(), {}, entry=entry, limits=after))
    entry = by.did("project.updated", id, id, limits=told)
    return _as_json(await storage.limit_owner(id, after, entry=entry))


async def _find(storage: Storage, id: str) -> StoredKey | StoredOwner:
    """The key of this id, else the owner. NotFound."""
    try:
        return await storage.get_key(id)
    except NotFound:
        return await storage.get_owner(id)


def _limits(stored: bytes | None) -> dict[str, Any]:
    read: dict[str, Any] = {} if stored is None else orjson.loads(stored)
    return read


def _as_json(found: StoredKey | StoredOwner) -> dict[str, Any]:
    return {"id": found.id, **{name: _limits(found.limits).get(name) for name in MEMBERS}}


# ------------------------------------------------------------------------------------------------------------
# The command


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon tiers ...`; yields the lines to print. Raises AdminError."""
    id = options.id if options.id.startswith("key_") else known_owner_id(config, options.id)
    changes = _changes(options)
    path = f"{PATH}/{quote(id, safe='')}"
    if changes:
        now = carry_out(
            config,
            lambda storage: change(storage, OPERATOR, id, **changes),
            "POST",
            path,
            changes,
            makes=False,
        )
    else:
        now = carry_out(config, lambda storage: shown(storage, id), "GET", path)
    told = [f"{name}={_words(now[name])}" for name in MEMBERS if now[name] is not None]
    yield f"{id}: {' '.join(told) or 'nothing is set'}"


def _number(text: str) -> float:
    """ValueError for what no JSON has a number for, too."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


READ: Mapping[str, Callable[[str], Any]] = {
    "weight": _number,
    "service_tiers": lambda text: text.split(","),
    "max_priority": int,
}
"""How the words of flags are read."""


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    """The members that a command names, None for those that it ends. Raises AdminError."""
    found: dict[str, Any] = {}
    for name, read in READ.items():
        if (text := getattr(options, name)) is not None:
            try:
                found[name] = None if text == "none" else read(text)
            except ValueError:
                raise AdminError(f"--{name.replace('_', '-')}: {text!r} is no number") from None
    return found


def _words(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else f"{value:g}"
