"""`antiphon keys`: makes, lists and revokes API keys, whether or not a server runs."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Iterator
from typing import Any

from server.admin.database_access import AdminError, carry_out
from server.admin.listing import Columns, list_lines, shown_time
from server.api_keys import LOCAL_OWNER, hash_key, new_key
from server.clock import now_us
from server.config import Config
from storage import Storage, StoredKey

PATH = "/admin/keys"

# ------------------------------------------------------------------------------------------------------------
# What can be done


async def create(storage: Storage, *, name: str, owner: str | None) -> dict[str, Any]:
    """Make a key; the reply is the only place where `key` ever stands. `first`: there was no live one."""
    key = new_key()
    first = not any(other.revoked_at is None for other in await storage.list_keys())
    stored = await storage.create_key(
        f"key_{secrets.token_hex(12)}",
        owner or f"own_{secrets.token_hex(12)}",
        name,
        hash_key(key),
        key[-4:],
        now_us(),
    )
    return {**as_json(stored), "key": key, "first": first}


async def list_all(storage: Storage) -> dict[str, Any]:
    """The keys of all owners, oldest first, revoked ones included; never the keys themselves."""
    return {"object": "list", "data": [as_json(key) for key in await storage.list_keys()]}


async def revoke(storage: Storage, id: str) -> dict[str, Any]:
    """End a key. `last`: no live one is left. AdminError where there is no live key of this id."""
    if not await storage.revoke_key(id, now_us()):
        raise AdminError(f"there is no live key with id {id!r}")
    last = all(key.revoked_at is not None for key in await storage.list_keys())
    return {"id": id, "object": "key", "revoked": True, "last": last}


def as_json(key: StoredKey) -> dict[str, Any]:
    """A stored key, as the admin routes and the command line show it; times in unix seconds."""
    return {
        "id": key.id,
        "owner": key.owner,
        "name": key.name,
        "hint": f"...{key.hint}",
        "created_at": key.created_at // 1_000_000,
        "revoked_at": key.revoked_at and key.revoked_at // 1_000_000,
    }


# ------------------------------------------------------------------------------------------------------------
# The command


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon keys ...`; yields the lines to print. Raises AdminError."""
    return _VERBS[options.verb](config, options)


def _create(config: Config, options: argparse.Namespace) -> Iterator[str]:
    body = {"name": options.name, "owner": options.owner}
    made = carry_out(config, lambda storage: create(storage, **body), "POST", PATH, body)
    yield made["key"]
    yield f"id {made['id']}, owner {made['owner']}. The key is not stored and not shown again."
    if made["first"]:
        yield from _first(made["owner"])


def _list(config: Config, options: argparse.Namespace) -> Iterator[str]:
    return list_lines(config, options, PATH, list_all, COLUMNS)


def _revoke(config: Config, options: argparse.Namespace) -> Iterator[str]:
    path = f"{PATH}/{options.id}"
    done = carry_out(config, lambda storage: revoke(storage, options.id), "DELETE", path)
    yield f"{options.id} is revoked"
    if done["last"]:
        yield (
            "No stored key is live any more. Unless keys are configured too, a server on loopback needs none "
            f"again (requests then belong to the owner {LOCAL_OWNER}), and one on another address does not "
            "start."
        )


def _first(owner: str) -> Iterator[str]:
    """What the first key changes."""
    yield "From now on every request needs a key, in the header 'authorization: Bearer KEY'."
    if owner == LOCAL_OWNER:
        yield f"This one sees what was made without a key, which belongs to the owner {LOCAL_OWNER}."
    else:
        yield (
            f"What was made without a key belongs to the owner {LOCAL_OWNER}, and this key does not see it: "
            f"`antiphon keys create --owner {LOCAL_OWNER}` makes one that does."
        )


COLUMNS: Columns = {
    "ID": lambda key: key["id"],
    "KEY": lambda key: key["hint"],
    "STATE": lambda key: "revoked" if key["revoked_at"] else "live",
    "CREATED": shown_time,
    "OWNER": lambda key: key["owner"],
    "NAME": lambda key: key["name"],
}
_VERBS = {"create": _create, "list": _list, "revoke": _revoke}
