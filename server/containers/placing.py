"""Decides in which container the calls of a request's tools run, before its run begins.

A tool may name one. For any other the conversation's own is taken as long as it is there, and else a new one,
which is made with its first call. All tools of a request that name none share one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from server.clock import now_us
from server.containers.files import wanted_files
from server.errors import ApiError
from storage import NotFound

if TYPE_CHECKING:
    from storage import Storage

Tool = dict[str, Any]

CALL = "code_interpreter_call"


async def placed(
    storage: Storage, owner: str, tools: Sequence[Tool], items: Sequence[Tool], secret: bytes
) -> list[Tool]:
    """The tools of a request, each that runs code or commands here with its `container`, which says the id.
    items: of the conversation. secret: from which the id of a new container follows. Raises ApiError 400 and
    404."""
    found = []
    for index, tool in enumerate(tools):
        environment = tool.get("environment") or {}
        if tool["type"] == "code_interpreter":
            asked, path = tool["container"], f"tools[{index}].container"
        elif tool["type"] == "shell" and environment.get("type") == "container_auto":
            asked, path = {**environment, "type": "auto"}, f"tools[{index}].environment"
        elif tool["type"] == "shell" and environment.get("type") == "container_reference":
            asked, path = environment["container_id"], f"tools[{index}].environment.container_id"
        else:
            found.append(tool)
            continue
        found.append({**tool, "container": await _place(storage, owner, asked, path, items, secret)})
    return found


async def _place(
    storage: Storage, owner: str, asked: str | Tool, path: str, items: Sequence[Tool], secret: bytes
) -> Tool:
    if isinstance(asked, str):
        if not await _is_there(storage, owner, asked):
            message = f"Container with id '{asked}' not found: it is unknown, was deleted, or has expired."
            raise ApiError(404, message, param=path, code="container_not_found")
        return {"type": "id", "container_id": asked}
    await wanted_files(storage, owner, asked.get("file_ids") or (), f"{path}.file_ids", now_us())
    before = next((id for item in reversed(items) if (id := _container_of(item)) is not None), None)
    if before is not None and await _is_there(storage, owner, before):
        return {**asked, "container_id": before, "renews": True}
    new = "cntr_" + hashlib.blake2b(b"container", key=secret, digest_size=24).hexdigest()
    return {**asked, "container_id": new, "renews": before is not None}


def _container_of(item: Tool) -> str | None:
    """The container that a call was run in."""
    said = item if item["type"] == CALL else item.get("environment") if item["type"] == "shell_call" else None
    found: str | None = None if said is None else said.get("container_id")
    return found


async def _is_there(storage: Storage, owner: str, container_id: str) -> bool:
    try:
        await storage.containers.get(owner, container_id, now_us())
    except NotFound:
        return False
    return True
