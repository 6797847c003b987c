"""Verdicts, and the texts of items that they are on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from server.items import file_texts

Verdict = dict[str, Any]
"""An official moderation result, or the error that stands in its place."""

GAP = "\n\n"

_WORDS = frozenset(
    (
        *("content", "output", "arguments", "input", "text", "refusal", "reason"),
        *("code", "logs", "command", "commands", "stdout", "stderr", "diff", "path"),
        *("query", "queries", "pattern"),
    )
)
"""The members of items, at any depth, whose texts are words that somebody writes or reads; others are ids,
names, places and bytes."""

_DEFINITIONS = "tools"
"""The member whose tools are defined, by schemas in which members of any name are no words."""


def unjudged(code: str, message: str) -> Verdict:
    """What stands in the place of a verdict."""
    return {"type": "error", "code": code, "message": message}


def blocks(mode: str, verdict: Verdict) -> bool:
    """Whether a text goes no further: what could not be judged does not, either."""
    return mode == "block" and (verdict["type"] == "error" or bool(verdict["flagged"]))


def said_in(items: Iterable[Mapping[str, Any]]) -> str:
    """All that items say: texts, thoughts, refusals, what calls are given and what comes of them, and what
    their files say."""
    return GAP.join(text for item in items for text in (*_texts(item), *file_texts(item).values()) if text)


def asked_in(items: Sequence[Mapping[str, Any]], added: Iterable[Mapping[str, Any]] = ()) -> str:
    """What a client says of items, oldest first, since the model's last word. added: what client and model
    have added to them since then; all that the client did counts."""
    first = len(items)
    while first and not _is_models(items[first - 1]):
        first -= 1
    return said_in([*items[first:], *(item for item in added if not _is_models(item))])


def _is_models(item: Mapping[str, Any]) -> bool:
    """Whether a model wrote an item."""
    kind = item["type"]
    writes = kind.endswith("_call") or kind in ("reasoning", "mcp_approval_request")
    return writes or item.get("role") == "assistant"


def _texts(value: object, name: str = "") -> Iterator[str]:
    """The words of an item, or of what a member of this name has. Arguments that are an object are all
    words, whatever its members are called."""
    if isinstance(value, str):
        if name in _WORDS:
            yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, name)
    elif isinstance(value, Mapping):
        for member, inner in value.items():
            if member != _DEFINITIONS:
                yield from _texts(inner, name if name == "arguments" else member)
