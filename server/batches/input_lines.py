"""The input of a batch: a file of JSON lines, each a request. All are checked before any is carried out."""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from server.errors import ApiError
from server.http import require_parsable
from storage import BatchLine

MAX_REQUESTS = 50_000
MAX_LINES = 2 * MAX_REQUESTS
"""Of one input, those without a request among them."""
MAX_ERRORS = 100
"""Faults that are told of one input; who mends these finds the others."""
MAX_CUSTOM_ID = 512
MAX_LINE = 16 << 20
"""Bytes of one line."""
CHUNK = 4 << 20
"""Bytes of lines that are checked in one go, on a thread."""


@dataclass
class InputLines:
    """The requests of an input, as far as it was read. max_values: brackets and commas that a line may have.
    faults: why it cannot be carried out."""

    endpoint: str
    max_values: int
    lines: list[BatchLine] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    model: str | None = None
    _ids: set[str] = field(default_factory=set)
    _number: int = 0
    _at: int = 0
    _is_over: bool = False  # nothing more of it is looked at

    async def read(self, content: AsyncIterable[bytes]) -> None:
        """Check a whole input."""
        held = bytearray()
        async for part in content:
            held += part
            if len(held) >= CHUNK and (end := held.rfind(b"\n") + 1):
                whole, held = bytes(held[:end]), held[end:]
                await asyncio.to_thread(self._take, whole)
            elif len(held) > MAX_LINE:
                self._number += 1
                self._fault("line_too_long", f"A line has at most {MAX_LINE} bytes.", None)
                return
            if self._is_over:
                return
        await asyncio.to_thread(self._take, bytes(held))
        if not self.lines and not self.faults:
            self._fault("empty_file", "The input file has no requests.", None, line=None)

    def _take(self, data: bytes) -> None:
        start = 0
        while start < len(data) and not self._is_over:
            # Not split: a list of four million lines would be made in one go, with all streams waiting.
            end = found if (found := data.find(b"\n", start)) >= 0 else len(data)
            self._number += 1
            if self._number > MAX_LINES:
                self._fault("too_many_requests", f"An input has at most {MAX_LINES} lines.", None)
            elif (line := data[start:end]).strip():
                self._line(line, self._at + start, self._at + end)
            start = end + 1
        self._at += len(data)

    def _line(self, line: bytes, start: int, stop: int) -> None:
        if len(self.lines) >= MAX_REQUESTS:
            self._fault("too_many_requests", f"A batch has at most {MAX_REQUESTS} requests.", None)
            return
        if self._number == 1 and line.startswith(BOM_UTF8):
            line, start = line.removeprefix(BOM_UTF8), start + len(BOM_UTF8)
        try:
            require_parsable(line, self.max_values)
            asked = orjson.loads(line)
        except ApiError as error:
            self._fault("invalid_json_line", error.message, None)
            return
        except orjson.JSONDecodeError:
            asked = None
        if not isinstance(asked, dict):
            self._fault("invalid_json_line", "This line is no JSON object.", None)
        elif (fault := self._fault_of(asked)) is not None:
            self._fault(*fault)
        else:
            self._ids.add(asked["custom_id"])
            self.lines.append(BatchLine(self._number, asked["custom_id"], start, stop))
            if self.model is None and isinstance(model := asked["body"].get("model"), str):
                self.model = model

    def _fault_of(self, asked: Mapping[str, Any]) -> tuple[str, str, str] | None:
        """Code, message and param of what is wrong with a request."""
        custom_id, body = asked.get("custom_id"), asked.get("body")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
            told = f"'custom_id' must be a text of 1 to {MAX_CUSTOM_ID} characters."
            return "invalid_custom_id", told, "custom_id"
        if not custom_id.isprintable():
            return (
                "invalid_custom_id",
                "'custom_id' must have only characters that can be printed.",
                "custom_id",
            )
        if custom_id in self._ids:
            return "duplicate_custom_id", f"Another line has the custom_id '{custom_id}', too.", "custom_id"
        if asked.get("method") != "POST":
            return "invalid_method", "'method' must be 'POST'.", "method"
        if asked.get("url") != self.endpoint:
            return "mismatched_url", f"'url' must be that of the batch, '{self.endpoint}'.", "url"
        if not isinstance(body, dict):
            return "missing_required_parameter", "'body' must be the request, a JSON object.", "body"
        for name in ("stream", "background", "await_tool_outputs"):
            if body.get(name):
                return "unsupported_parameter", f"A request of a batch cannot have '{name}'.", f"body.{name}"
        return None

    def _fault(self, code: str, message: str, param: str | None, *, line: int | None = -1) -> None:
        number = self._number if line == -1 else line
        self.faults.append({"code": code, "message": message, "param": param, "line": number})
        self._is_over = code == "too_many_requests" or len(self.faults) >= MAX_ERRORS
