"""Decides in which container the calls of a request's tools run, before its run begins.

A tool may name one. For any other the conversation's own is taken as long as it is there, and else a new one,
which is made with its first call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from server.clock import now_us
from server.errors import ApiError
from server.shapes import refuse
from storage import NotFound

if TYPE_CHECKING:
    from storage import Storage

Tool = dict[str, Any]

CODE_TOOL, CALL = "code_interpreter", "code_interpreter_call"


async def placed(
    storage: Storage, owner: str, tools: Sequence[Tool], items: Sequence[Tool], secret: bytes
) -> list[Tool]:
    """The tools of a request, each that runs code with the id of its container. items: of the conversation.
    secret: from which the id of a new container follows. Raises ApiError 400 and 404."""
    found = []
    for index, tool in enumerate(tools):
        if tool["type"] == CODE_TOOL:
            tool = {**tool, "container": await _place(storage, owner, tool, items, secret, index)}
        found.append(tool)
    return found


async def _place(
    storage: Storage, owner: str, tool: Tool, items: Sequence[Tool], secret: bytes, index: int
) -> Tool:
    asked, path = tool["container"], f"tools[{index}].container"
    if isinstance(asked, str):
        if not await _is_there(storage, owner, asked):
            message = f"Container with id '{asked}' not found: it is unknown, was deleted, or has expired."
            raise ApiError(404, message, param=path, code="container_not_found")
        return {"type": "id", "container_id": asked}
    wanted: Sequence[str] = asked.get("file_ids") or ()
    known = await storage.files.get_many(owner, wanted, now_us())
    for number, file_id in enumerate(wanted):
        if file_id not in known:
            refuse(f"{path}.file_ids[{number}]", f"File with id '{file_id}' not found.", "file_not_found")
    before = next((item["container_id"] for item in reversed(items) if item["type"] == CALL), None)
    if before is None or not await _is_there(storage, owner, before):
        before = "cntr_" + hashlib.blake2b(b"container", key=secret, digest_size=24).hexdigest()
    return {**asked, "container_id": before}


async def _is_there(storage: Storage, owner: str, container_id: str) -> bool:
    try:
        await storage.containers.get(owner, container_id, now_us())
    except NotFound:
        return False
    return True
