"""GET /v1/tools (extension): which tools of this server a request may have, and why not the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.access import tool_scope
from server.http import context, json_reply, owner, principal
from server.routes.documented import documented

router = APIRouter(prefix="/v1", tags=["Tools"])

HOSTED: tuple[Mapping[str, Any], ...] = (
    {"type": "web_search"},
    {"type": "file_search", "vector_store_ids": []},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation"},
)
"""Hosted tools as a request would write them; `file_search` lacks the stores that it is to search."""


@router.get("/tools", **documented("OfferedTools", "responses.read"))
async def list_tools(request: Request) -> Response:
    """The tools that this server carries out, as a request with this key would write them, and whose key it
    is: the `owner`, of whom all that a request with it makes is (extension)."""
    runs, who = context(request).runs, principal(request)
    servers = ({"type": "mcp", **each} for each in runs.intake.servers_of(owner(request)))
    tools: list[Mapping[str, Any]] = [*servers, *HOSTED]
    lacking = runs.intake.lacking([dict(tool) for tool in tools])
    data = []
    for index, tool in enumerate(tools):
        scope = tool_scope(tool)
        why = lacking.get(index)
        if why is None and not who.scopes.allow(scope):
            why = f"The key lacks the scope {scope}."
        data.append({"object": "tool", "tool": tool, "available": why is None, "reason": why})
    return json_reply(orjson.dumps({"object": "list", "owner": who.owner, "data": data}))
