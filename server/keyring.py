"""Making, listing and revoking keys, whether or not a server runs.

Owns the two ways there: the database itself when its folder is free, else the server that holds it, by a
token that only this user can read. Refuses to know what a key opens (`server.auth`).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from server.auth import hash_key, new_key
from server.clock import now_us
from server.config import Config
from storage import FolderHeld, Storage, StorageError, StoredKey, open_storage


class KeyringError(Exception):
    """It could not be done; the message says why."""


# ------------------------------------------------------------------------------------------------------------
# What can be done


async def create(storage: Storage, *, name: str, owner: str | None) -> dict[str, Any]:
    """Make a key; the reply is the only place where `key` ever stands."""
    key = new_key()
    stored = await storage.create_key(
        f"key_{secrets.token_hex(12)}",
        owner or f"own_{secrets.token_hex(12)}",
        name,
        hash_key(key),
        key[-4:],
        now_us(),
    )
    return {**as_json(stored), "key": key}


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
# The running server's address


def address_file(config: Config) -> Path:
    """Where the server of this database leaves its address and admin token; readable by its user only."""
    return config.data / f"server-{hashlib.sha256(config.db.encode()).hexdigest()[:12]}.json"


def leave_address(config: Config, url: str, token: str) -> None:
    """Write the file; it names this process, so that a later reader can tell an old one."""
    config.data.mkdir(parents=True, exist_ok=True)
    file = address_file(config)
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        out.write(orjson.dumps({"url": url, "token": token, "pid": os.getpid()}))


# ------------------------------------------------------------------------------------------------------------
# The command


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon keys ...`; yields the lines to print. Raises KeyringError."""
    try:
        result = asyncio.run(_in_database(config, options))
    except FolderHeld:
        result = _at_server(config, options)
    except (StorageError, ValueError) as exc:
        raise KeyringError(exc) from None
    if options.verb == "create":
        yield result["key"]
        yield f"id {result['id']}, owner {result['owner']}. The key is not stored and not shown again."
    elif options.verb == "list":
        for key in result["data"]:
            made = datetime.fromtimestamp(key["created_at"], UTC).strftime("%Y-%m-%d %H:%M")
            state = "revoked" if key["revoked_at"] else "live"
            columns = (key["id"], key["hint"], f"{state:7}", made, f"owner {key['owner']}", key["name"])
            yield "  ".join(columns).rstrip()
    else:
        yield f"{options.id} is revoked"


async def _in_database(config: Config, options: argparse.Namespace) -> dict[str, Any]:
    storage = await open_storage(config.db, runner="keys")
    try:
        if options.verb == "create":
            return await create(storage, name=options.name, owner=options.owner)
        if options.verb == "list":
            return {"data": [as_json(key) for key in await storage.list_keys()]}
        if not await storage.revoke_key(options.id, now_us()):
            raise KeyringError(f"there is no live key with id {options.id!r}")
        return {}
    finally:
        await storage.close()


def _at_server(config: Config, options: argparse.Namespace) -> dict[str, Any]:
    import httpx

    try:
        address = orjson.loads(address_file(config).read_bytes())
    except (OSError, ValueError) as exc:
        raise KeyringError(
            f"the database is in use, and its server's address cannot be read: {exc}"
        ) from None
    try:
        with httpx.Client(
            base_url=address["url"], headers={"authorization": f"Bearer {address['token']}"}, timeout=10
        ) as http:
            if options.verb == "create":
                body = {"name": options.name, "owner": options.owner}
                reply = http.post("/admin/keys", json=body)
            elif options.verb == "list":
                reply = http.get("/admin/keys")
            else:
                reply = http.delete(f"/admin/keys/{options.id}")
    except httpx.HTTPError as exc:
        raise KeyringError(f"the server at {address['url']} does not answer: {exc}") from None
    result: dict[str, Any] = orjson.loads(reply.content)
    if reply.status_code != 200:
        raise KeyringError(result["error"]["message"])
    return result
