"""Verdicts, and the texts of items that they are on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Verdict = dict[str, Any]
"""An official moderation result, or the error that stands in its place."""

GAP = "\n\n"


def unjudged(code: str, message: str) -> Verdict:
    """What stands in the place of a verdict."""
    return {"type": "error", "code": code, "message": message}


def blocks(mode: str, verdict: Verdict) -> bool:
    """Whether a text goes no further: what could not be judged does not, either."""
    return mode == "block" and (verdict["type"] == "error" or bool(verdict["flagged"]))


def said_in(items: Iterable[Mapping[str, Any]]) -> str:
    """All that items say: texts, thoughts, refusals, what calls are given and what comes of them."""
    return GAP.join(text for item in items for text in _texts(item) if text)


def asked_in(items: Sequence[Mapping[str, Any]]) -> str:
    """What a client says of items, oldest first, since the model's last word."""
    first = len(items)
    while first and not _is_models(items[first - 1]):
        first -= 1
    return said_in(items[first:])


def _is_models(item: Mapping[str, Any]) -> bool:
    """Whether a model wrote an item."""
    kind = item["type"]
    return item.get("role") == "assistant" or kind == "reasoning" or kind.endswith("_call")


def _texts(item: Mapping[str, Any]) -> Iterable[str]:
    for member in ("content", "output", "arguments", "input"):
        value = item.get(member)
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            for part in value:
                if isinstance(part, Mapping):
                    yield from (part[name] for name in ("text", "refusal") if isinstance(part.get(name), str))
