"""Reads query parameters, and answers a wrong one with the official 400.

A list is spelled `include[]=a` or `include=a`, once for each element; booleans are `true` and `false`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

from starlette.datastructures import QueryParams

from server.ignored import queried
from server.items import FILLED
from server.schema import parse_include, refuse

MAX_PAGE = 100

_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")


class PageArgs(TypedDict):
    """The paging parameters of every list."""

    limit: int
    order: Literal["asc", "desc"]
    after: str | None


def query_text(query: QueryParams, name: str) -> str | None:
    """A parameter as it came; None when absent or empty. That it was read is noted: it is not ignored."""
    queried(name)
    return query.get(name) or None


def integer(
    query: QueryParams, name: str, *, minimum: int | None = None, maximum: int | None = None
) -> int | None:
    """A whole number within bounds; None when absent."""
    raw = query_text(query, name)
    if raw is None:
        return None
    digits = raw.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
        refuse(name, f"Invalid '{name}': expected an integer.")
    value = int(raw)
    if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
        bounds = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        refuse(name, f"Invalid '{name}': expected an integer {bounds}.")
    return value


def number(query: QueryParams, name: str, *, minimum: float, maximum: float) -> float | None:
    """A decimal number within bounds; None when absent."""
    raw = query_text(query, name)
    if raw is None:
        return None
    if not (_NUMBER.fullmatch(raw) and minimum <= float(raw) <= maximum):
        refuse(name, f"Invalid '{name}': expected a number between {minimum:g} and {maximum:g}.")
    return float(raw)


def flag(query: QueryParams, name: str, *, default: bool = False) -> bool:
    """A boolean; the default when absent."""
    found = choice(query, name, ("true", "false", "1", "0"))
    return default if found is None else found in ("true", "1")


def choice(query: QueryParams, name: str, choices: Sequence[str]) -> str | None:
    """One of a few words; None when absent."""
    value = query_text(query, name)
    if value is None:
        return None
    if value not in choices:
        wanted = ", ".join(f"'{known}'" for known in choices)
        refuse(name, f"Invalid '{name}'. Supported values are: {wanted}.")
    return value


def include(query: QueryParams, fills: Callable[[str], bool] = FILLED.__contains__) -> tuple[str, ...]:
    """The `include` list, in either spelling. It counts as read where all that it asks for can be filled in
    from what is kept of items; the rest of what is kept is always shown, so that asking changes nothing.

    fills: whether the reply can fill in what a value asks for.
    """
    spelled = {name: query.getlist(name) for name in ("include[]", "include")}
    found = parse_include([*spelled["include[]"], *spelled["include"]])
    for name, values in spelled.items():
        if values and all(map(fills, values)):
            queried(name)
    return found


def timestamp(query: QueryParams, name: str) -> int | None:
    """Unix seconds, as microseconds."""
    seconds = integer(query, name, minimum=0, maximum=10**11)
    return None if seconds is None else seconds * 1_000_000


def texts(query: QueryParams, name: str) -> dict[str, str]:
    """The members of an object of texts, which are spelled `NAME[key]=value`."""
    found = {}
    for spelled, value in query.multi_items():
        if spelled.startswith(f"{name}[") and spelled.endswith("]"):
            queried(spelled)
            found[spelled[len(name) + 1 : -1]] = value
    return found


def page_args(query: QueryParams, order: Literal["asc", "desc"] = "desc") -> PageArgs:
    """`limit` (1 to 100, default 20), `order` and `after`. order: that of a query which names none."""
    limit: int | None = integer(query, "limit", minimum=1, maximum=MAX_PAGE)
    wanted: Any = choice(query, "order", ("asc", "desc")) or order
    return PageArgs(limit=20 if limit is None else limit, order=wanted, after=query_text(query, "after"))
