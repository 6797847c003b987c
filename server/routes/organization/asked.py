"""What requests of administrators have in common: names, ends, scopes, pages of objects, and revoked keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from server.access import read_scopes
from server.admin import keys
from server.errors import invalid_value
from server.http import MAX_PAGE, actor, choice, context, integer, json_reply, life, page_json, query_text
from server.ignored import queried
from server.shapes import array, label, missing, text, whole

MAX_NAME = 256


def name(body: Mapping[str, Any]) -> str:
    """The required `name`, which is not empty. Raises ApiError 400."""
    if body.get("name") is None:
        missing("name")
    found: str = label(1, MAX_NAME)(body["name"], "name")
    return found


def name_or(body: Mapping[str, Any], default: str) -> str:
    """The `name`, or the default without one. Raises ApiError 400."""
    return default if body.get("name") is None else name(body)


def seconds(body: Mapping[str, Any], field: str, *, least: int = 1) -> int | None:
    """A duration in seconds; None where there is none. Raises ApiError 400."""
    found: int | None = None if body.get(field) is None else whole(least, keys.MAX_S)(body[field], field)
    return found


def scopes(body: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The `scopes`; None where there are none. Raises ApiError 400, also for an empty list, by which somebody
    may mean a key that may do nothing."""
    if body.get("scopes") is None:
        return None
    try:
        return read_scopes(array(text(1), 1)(body["scopes"], "scopes"))
    except ValueError as error:
        raise invalid_value("scopes", str(error)) from None


def limit(query: QueryParams) -> int:
    """`limit`, from 1 to 100, by default 20. Raises ApiError 400."""
    found = integer(query, "limit", minimum=1, maximum=MAX_PAGE)
    return 20 if found is None else found


def order(query: QueryParams) -> Literal["asc", "desc"]:
    """`order`, by default the oldest first. Raises ApiError 400."""
    return "desc" if choice(query, "order", ("asc", "desc")) == "desc" else "asc"


def after(query: QueryParams) -> str | None:
    """`after`: the id behind which the page begins."""
    return query_text(query, "after")


def listed(query: QueryParams, name: str) -> tuple[str, ...]:
    """A list, spelled `name[]=a` or `name=a`, once for each element."""
    queried(f"{name}[]")
    queried(name)
    return tuple(value for value in (*query.getlist(f"{name}[]"), *query.getlist(name)) if value)


async def deleted_key(request: Request, key_id: str, kind: str) -> Response:
    """End a key, and say so as an object of this kind, with what its end means (`Keys.without`)."""
    await keys.end(context(request).storage, actor(request), key_id)
    accepted = life(request).keys
    accepted.forget()
    means = await accepted.without(key_id)
    return json_reply(orjson.dumps({"id": key_id, "object": kind, "deleted": True, **means}))


def page(objects: Sequence[Mapping[str, Any]], *, has_more: bool) -> Response:
    """The list object of one page."""
    bodies = [orjson.dumps(each) for each in objects]
    return json_reply(page_json(bodies, [each["id"] for each in objects], has_more=has_more))
