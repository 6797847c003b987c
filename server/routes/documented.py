"""Adds to a route what FastAPI cannot read off it for the OpenAPI document.

Handlers take the plain request, so the document's query parameters, bodies, replies, errors and keys are
stated here. Bodies and replies are only named; their schemas are in `server.schema.description`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from server import ignored
from server.http import MAX_PAGE
from server.schema import INCLUDES, STATUSES

Json = dict[str, Any]

_WHOLE: Json = {"type": "integer", "minimum": 0}
QUERY: Mapping[str, tuple[Json, str]] = {
    "limit": ({"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 20}, "How many at most."),
    "order": ({"enum": ["asc", "desc"], "default": "desc"}, "Oldest or newest first."),
    "after": ({"type": "string"}, "The id after which the page begins."),
    "status": ({"enum": [*STATUSES]}, "Only those that are in this state."),
    "created_after": (_WHOLE, "Only those that were created later; Unix seconds."),
    "created_before": (_WHOLE, "Only those that were created earlier; Unix seconds."),
    "stream": ({"type": "boolean"}, "Answer with the events."),
    "starting_after": ({"type": "integer", "minimum": -1}, "Of a stream: the last event that is known."),
    "wait": ({"type": "number", "minimum": 0, "maximum": 300}, "Seconds to wait for the end at most."),
    "probe": ({"type": "boolean"}, "Have the model generate two tokens first."),
    "scope": ({"enum": ["own", "all"]}, "All: with the history before the response."),
    "include": (
        {"type": "array", "items": {"enum": sorted(INCLUDES)}},
        "Checked, without effect: what is kept is always shown.",
    ),
}
"""Every parameter of a query: its schema, and what it is for."""

PAGE = ("limit", "order", "after")


class RouteDocs(TypedDict):
    """Arguments of a route's decorator."""

    responses: dict[int | str, dict[str, Any]]
    openapi_extra: dict[str, Any]


def documented(
    reply: str,
    *,
    body: str | None = None,
    body_required: bool = True,
    query: tuple[str, ...] = (),
    stream: str | None = None,
    is_open: bool = False,
    media_type: str = "application/json",
) -> RouteDocs:
    """A route's entry. reply, body: names of schemas. stream: that of the events, where it can answer with
    them. query: names among QUERY. is_open: it needs no key."""
    content = {media_type: {"schema": _named(reply)}}
    if stream is not None:
        content["text/event-stream"] = {"schema": _named(stream)}
    names = {"description": "Paths of what the request said in vain.", "schema": {"type": "string"}}
    good = {"description": "Done.", "content": content, "headers": {ignored.HEADER: names}}
    error = {"application/json": {"schema": _named("Error")}}
    extra: Json = {"parameters": [_parameter(name) for name in query]}
    if body is not None:
        described = {"application/json": {"schema": _named(body)}}
        extra["requestBody"] = {"required": body_required, "content": described}
    if not is_open:
        # The last is none: on loopback no key is needed until there is one.
        extra["security"] = [{"bearer": []}, {"x-api-key": []}, {}]
    return RouteDocs(
        responses={
            200: good,
            "4XX": {"description": "The request is at fault; `error.code` says how.", "content": error},
            "5XX": {"description": "The server is at fault, or not ready.", "content": error},
        },
        openapi_extra=extra,
    )


def _named(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"} if name else {"type": "string"}


def _parameter(name: str) -> Json:
    schema, description = QUERY[name]
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}
