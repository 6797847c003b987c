"""What a chat can go on with: conversations, and responses that nothing has gone on from; and which one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import httpx

from server.cli.connection import ChatError, read_json
from server.cli.session import text_of
from server.masking import printable

MOST = 10
"""Choices that are offered, the latest ones."""

LOOKED_AT = "100"
MAX_WORDS = 60


@dataclass(frozen=True, slots=True)
class Choice:
    """id: of the conversation or response. at: when it was last gone on with, in Unix seconds. words: its
    title, or what was said last."""

    id: str
    at: int
    words: str
    status: str = ""
    forked: bool = False


def choices(http: httpx.Client) -> list[Choice]:
    """The latest ones, the newest first. Raises ChatError."""
    page = read_json(http.get("/v1/responses", params={"limit": LOOKED_AT}))["data"]
    continued = {response.get("previous_response_id") for response in page}
    last_use: dict[str, dict[str, Any]] = {}
    found: list[tuple[int, str, dict[str, Any]]] = []
    for response in page:
        if response.get("conversation"):
            last_use.setdefault(response["conversation"]["id"], response)
        elif response["id"] not in continued:
            found.append((response["created_at"], response["id"], response))
    for conversation in read_json(http.get("/v1/conversations", params={"limit": LOOKED_AT}))["data"]:
        used = last_use.get(conversation["id"], {})
        at = used.get("created_at", conversation["created_at"])
        found.append((at, conversation["id"], {**conversation, "status": used.get("status", "")}))
    found.sort(key=lambda one: one[0], reverse=True)
    return [
        Choice(id, at, _words(http, id, one), one["status"], "forked_from" in one)
        for at, id, one in found[:MOST]
    ]


def _words(http: httpx.Client, id: str, one: dict[str, Any]) -> str:
    """What a person knows it by, on one line."""
    if one.get("title"):
        return _line(str(one["title"]))
    kind = "conversations" if id.startswith("conv_") else "responses"
    path = f"/v1/{kind}/{id}/{'items' if kind == 'conversations' else 'input_items'}"
    try:
        items = read_json(http.get(path, params={"limit": "20"}))["data"]
    except ChatError:  # it has gone in this very moment
        return ""
    return next((_line(text_of(item)) for item in items if item.get("role") == "user"), "")


def _line(text: str) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= MAX_WORDS else line[: MAX_WORDS - 3] + "..."


def pick(http: httpx.Client, out: TextIO, ask: Callable[[str], str] | None) -> str:
    """Which one to go on with: the latest where nobody can be asked. Raises ChatError where there is none,
    and EOFError where the one who is asked leaves."""
    offered = choices(http)
    if not offered:
        raise ChatError("nothing is stored that a chat could go on with")
    if ask is None:
        return offered[0].id
    out.writelines(f"{line}\n" for line in _table(offered))
    out.flush()
    while True:
        try:
            answer = ask(f"Which one (1 to {len(offered)}, Enter for 1)? ").strip() or "1"
        except KeyboardInterrupt:
            out.write("\n")
            raise
        if answer.isdecimal() and 1 <= int(answer) <= len(offered):
            return offered[int(answer) - 1].id
        if any(answer == one.id for one in offered):
            return answer


def _table(offered: list[Choice]) -> Iterator[str]:
    now = time.time()
    for number, one in enumerate(offered, 1):
        status = f" ({one.status})" if one.status in ("queued", "in_progress") else ""
        mark = "fork: " if one.forked else ""
        yield f"{number:3}  {_ago(now - one.at):>8}  {one.id[:17]}...  {mark}{one.words}{status}".rstrip()


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
