"""Follows references within a JSON Schema: what a `$ref` leads through, and where it ends."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

Way = tuple[Any, str | int] | None
"""A path as the way before its last step, and that step: thousands of deep ones share what they have in
common."""


def pointed(target: str, root: Any) -> Any:
    """What a reference within a schema leads to; None where nothing is found."""
    _, ends = followed(target, root)
    return ends[0][0] if ends else None


def followed(target: str, root: Any) -> tuple[list[tuple[int, str | int]], list[tuple[Any, Way]]]:
    """What a reference within a schema leads through, as objects and their members, and where it ends; both
    empty where nothing is found."""
    at: Any = root
    way: Way = None
    members: list[tuple[int, str | int]] = []
    if not target.startswith("#"):
        return [], []
    for name in steps_to(target):
        step: Any = name
        if isinstance(at, list):  # no list has a place with more digits, and `int` refuses thousands
            step = int(name) if name.isdecimal() and len(name) < 10 else None
        found = step in range(len(at)) if isinstance(at, list) else isinstance(at, dict) and step in at
        if not found:
            return [], []
        members.append((id(at), step))
        at, way = at[step], (way, step)
    return members, [(at, way)]


def steps_to(target: str) -> tuple[str, ...]:
    """What a reference within a schema leads through, by name."""
    parts = filter(None, unquote(target[1:]).split("/"))
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)
