"""Turns what a call of an MCP tool gave into what the model is told of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tools.spec import ToolResult

if TYPE_CHECKING:
    from mcp.types import CallToolResult


def read_result(result: CallToolResult) -> ToolResult:
    """Text parts, one under the other, or else the structured content as JSON; what no text can show is
    named. A result that the server marks as an error is one."""
    parts = [_words(part) for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    if result.is_error:
        return ToolResult(error=text or "The tool failed and did not say why.")
    return ToolResult(output=text)


def _words(part: Any) -> str:
    """One part of a result: its text, or what it is."""
    if part.type == "text":
        return str(part.text)
    if part.type == "resource_link":
        return f"[resource {part.uri}]"
    if part.type == "resource":
        text = getattr(part.resource, "text", None)
        if text is not None:
            return str(text)
        return _unseen(part.resource.mime_type, part.resource.blob)
    return _unseen(part.mime_type, part.data)


def _unseen(mime_type: str | None, encoded: str) -> str:
    """In place of bytes that the model is not shown; `encoded` is their base64."""
    num_bytes = len(encoded) * 3 // 4
    size = f"{num_bytes / 1000:.0f} kB" if num_bytes >= 1000 else f"{num_bytes} bytes"
    return f"[{mime_type or 'data'}, {size}, not shown]"
