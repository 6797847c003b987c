"""Adds to a route what FastAPI cannot read off it for the OpenAPI document.

Handlers take the plain request, so the document's query parameters, bodies, replies, errors and keys are
stated here. Bodies and replies are only named; their schemas are in `server.schema.description`. The scope
that a key needs for a route is declared here too, and read by the door before the route is reached.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypedDict

from fastapi import Depends
from starlette.requests import Request

from server import ignored
from server.access import OPEN
from server.http import MAX_PAGE, SCOPE
from server.schema import INCLUDES, STATUSES
from server.settings import nearest
from server.shapes import refuse, shorten

Json = dict[str, Any]

_WHOLE: Json = {"type": "integer", "minimum": 0}
_LIST: Json = {"type": "array", "items": {"type": "string"}}
NOBODY_HAS = ("user_ids", "vector_store_ids", "context_levels", "sizes", "sources")
"""Lists of what no usage here belongs to: asking for some of it is asking for nothing."""

QUERY: Mapping[str, tuple[Json, str]] = {
    "limit": ({"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 20}, "How many at most."),
    "order": ({"enum": ["asc", "desc"], "default": "desc"}, "Oldest or newest first."),
    "after": ({"type": "string"}, "The id after which the page begins."),
    "limit:files": (
        {"type": "integer", "minimum": 1, "maximum": 10_000, "default": 10_000},
        "How many at most.",
    ),
    "name": ({"type": "string"}, "Only those of this name."),
    "model": ({"type": "string"}, "Only those of this model."),
    "metadata": (
        {"type": "object", "additionalProperties": {"type": "string"}},
        "Only those that have all of these pairs: `metadata[key]=value`.",
    ),
    "limit:events": (
        {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100},
        "How many at most.",
    ),
    "purpose": ({"type": "string"}, "Only files of this purpose."),
    "status": ({"enum": [*STATUSES]}, "Only those that are in this state."),
    "status:responses": (
        {"enum": [*STATUSES, "waiting"]},
        "Only those that are in this state; `waiting`: in progress, and somebody has to answer a call.",
    ),
    "conversation": ({"type": "string"}, "Only those of the conversation with this id."),
    "status:conversations": ({"enum": ["active", "archived"]}, "Only those that are in this state."),
    "timestamps": (
        {"type": "boolean", "default": True},
        "Items say when they came, in Unix seconds (an extension).",
    ),
    "after:event": (
        {"type": "integer", "minimum": -1},
        "The number of the event behind which the page begins.",
    ),
    "order:oldest_event": ({"enum": ["asc", "desc"], "default": "asc"}, "First or last event first."),
    "created_after": (_WHOLE, "Only those that were created later; Unix seconds."),
    "created_before": (_WHOLE, "Only those that were created earlier; Unix seconds."),
    "stream": ({"type": "boolean"}, "Answer with the events."),
    "starting_after": ({"type": "integer", "minimum": -1}, "Of a stream: the last event that is known."),
    "include_obfuscation": (
        {"type": "boolean", "default": False},
        "Of a stream: pad the events that carry pieces of text.",
    ),
    "beta": (
        {"type": "boolean"},
        "Changes nothing: clients add it where they call an API of which there is a beta.",
    ),
    "wait": ({"type": "number", "minimum": 0, "maximum": 300}, "Seconds to wait for the end at most."),
    "probe": ({"type": "boolean"}, "Have the model generate two tokens first."),
    "scope": ({"enum": ["own", "all"]}, "All: with the history before the response."),
    "include": (
        {"type": "array", "items": {"enum": sorted(INCLUDES)}},
        "What items are to say besides, such as `compaction.summary` (an extension).",
    ),
    "before:of_page": ({"type": "string"}, "The id before which the page ends."),
    "filter": (
        {"enum": ["in_progress", "completed", "failed", "cancelled"]},
        "Only those whose reading has come so far.",
    ),
    "page:chunks": ({"type": "string"}, "The `next_page` of the page before."),
    # Of administrators
    "order:oldest": ({"enum": ["asc", "desc"], "default": "asc"}, "Oldest or newest first."),
    "before": ({"type": "string"}, "The id before which the page ends."),
    "limit:all": ({"type": "integer", "minimum": 1, "maximum": MAX_PAGE}, "How many at most."),
    "include_archived": ({"type": "boolean", "default": False}, "Archived ones, too."),
    "owner_project_access": ({"enum": ["active", "inactive", "any"]}, "By whether the project is archived."),
    "number": (_WHOLE, "Of an entry whose hash is wanted, too."),
    "effective_at": (
        {"type": "object", "properties": dict.fromkeys(("gt", "gte", "lt", "lte"), _WHOLE)},
        "When they were written, in Unix seconds.",
    ),
    "event_types": (_LIST, "Only those of these types."),
    "actor_ids": (_LIST, "Only what these did."),
    "actor_emails": (
        _LIST,
        "Only what people with these addresses did: nobody, because actors here have none.",
    ),
    "resource_ids": (_LIST, "Only what was done to these."),
    "project_ids": (_LIST, "Only of these projects."),
    "api_key_ids": (_LIST, "Only of these keys."),
    "models": (_LIST, "Only of these models."),
    "line_items": (_LIST, "Only of these lines."),
    "safety_identifiers": (
        {"type": "array", "items": {"type": "string", "pattern": "^[0-9a-f]{16}$"}},
        "An extension. Only for these persons, by the digests that results have as `safety_identifier`.",
    ),
    "group_by": (
        _LIST,
        "What results are told apart by. `safety_identifier` is an extension, for hours and days.",
    ),
    "start_time": (_WHOLE, "Where the first bucket begins, in Unix seconds."),
    "end_time": (_WHOLE, "Where the last bucket ends, in Unix seconds; now, where there is none."),
    "bucket_width": ({"enum": ["1m", "1h", "1d"], "default": "1d"}, "How long a bucket is."),
    "bucket_width:day": ({"const": "1d"}, "How long a bucket is."),
    "limit:buckets": (
        {"type": "integer", "minimum": 1, "maximum": 1440},
        "How many buckets at most: by default 60 minutes, 24 hours or 7 days.",
    ),
    "limit:days": ({"type": "integer", "minimum": 1, "maximum": 180, "default": 7}, "How many at most."),
    "page": ({"type": "string"}, "The `next_page` of the page before."),
    "batch": ({"type": "boolean"}, "Only of batches, or of none."),
    **dict.fromkeys(NOBODY_HAS, (_LIST, "Only of these: nothing, because no usage here belongs to any.")),
}
"""Every parameter of a query: its schema, and what it is for. One that routes read in several ways is here
several times, its name followed by a colon and a word."""

_STRICT = frozenset({"after", "start_time"})
"""Parameters of queries for lists, and for sums, in which no other one is ignored."""

REQUIRED = frozenset({"start_time"})
"""Parameters without which a route refuses a request."""

PAGE = ("limit", "order", "after")
PAGE_FROM_OLDEST = ("limit", "order:oldest", "after")

HEADERS: Mapping[str, str] = {
    "Idempotency-Key": (
        "An extension. 1 to 255 characters that name this request: a repeat with the same key and body is "
        "not carried out again, and gets the first reply, also after a crash."
    ),
    "Last-Event-ID": (
        "Of a stream: the last event that is known, as browsers send it; `starting_after` wins over it."
    ),
    "X-Antiphon-Profile": (
        "An extension. `openai`, `legacy` or `legacy-string`: how the events and items of the reply are "
        "named, in the place of the setting `responses_profile`."
    ),
    "anthropic-version": (
        "Clients of Anthropic's API send it: errors have the shape of that API, and so have models."
    ),
    "X-Request-Id": "The client's own name for the request, which the reply and the log have too.",
}
"""Headers of requests that change a reply, and what each is for."""

REPLY_HEADERS: Mapping[str, str] = {
    ignored.HEADER: (
        "An extension. What the request said in vain, by path, between commas; absent where all of it was "
        "honoured."
    ),
    "x-request-id": "The name of this request in the server's log.",
    "x-antiphon-version": "The server's version.",
    "openai-version": "The request's own header of this name, else the server's setting.",
    "openai-processing-ms": "Milliseconds from the request's head to the reply's.",
    "openai-poll-after-ms": "Of a response that has not ended: when it may be worth to ask again.",
    "x-antiphon-exact-resume": (
        "An extension. `false`: a run of this model that is cut off goes on from its last token, but not "
        "with the very tokens that it would have had."
    ),
    "idempotent-replayed": "An extension. `true`: this is the first reply to a request that was sent again.",
    "retry-after": "Seconds after which the request may succeed.",
    "x-should-retry": "`true` or `false`: whether SDKs try again by themselves.",
}
"""Headers of replies that clients may read, and what each says."""

_ALWAYS = ("x-request-id", "x-antiphon-version", "openai-version", "openai-processing-ms")


class RouteDocs(TypedDict):
    """Arguments of a route's decorator."""

    responses: dict[int | str, dict[str, Any]]
    openapi_extra: dict[str, Any]
    dependencies: list[Any]


class RouteScope(TypedDict):
    """Arguments of the decorator of a route that the document does not show."""

    openapi_extra: dict[str, Any]


def needs(scope: str) -> RouteScope:
    """The declaration of a route that the document does not show: which scope its key must have."""
    return RouteScope(openapi_extra={SCOPE: scope})


def documented(
    reply: str,
    scope: str,
    *,
    body: str | None = None,
    body_required: bool = True,
    body_type: str = "application/json",
    query: tuple[str, ...] = (),
    headers: tuple[str, ...] = (),
    stream: str | None = None,
    error: str = "Error",
    texts: tuple[str, ...] = (),
) -> RouteDocs:
    """A route's entry. reply, body, error: names of schemas. stream: that of the events, where it can answer
    with them. texts: media types of other contents that it can answer with. query, headers: names among QUERY
    and HEADERS. scope: what its key must have, or OPEN where none is needed."""
    content = {"application/json": {"schema": _named(reply)}} if reply else {}
    content |= {each: {"schema": _named("")} for each in texts}
    if stream is not None:
        content["text/event-stream"] = {"schema": _named(stream)}
    told = ("openai-poll-after-ms", "x-antiphon-exact-resume") if reply == "Response" else ()
    good = {
        "description": "Done.",
        "content": content,
        "headers": _reply_headers(ignored.HEADER, *_ALWAYS, *told),
    }
    failed = {
        "content": {"application/json": {"schema": _named(error)}},
        "headers": _reply_headers("retry-after", "x-should-retry", *_ALWAYS),
    }
    extra: Json = {"parameters": [*map(_parameter, query), *map(_header, headers)], SCOPE: scope}
    if body is not None:
        described = {body_type: {"schema": _named(body)}}
        extra["requestBody"] = {"required": body_required, "content": described}
    if scope != OPEN:
        # The last is none: on loopback no key is needed until there is one.
        extra["security"] = [{"bearer": []}, {"x-api-key": []}, {}]
    return RouteDocs(
        responses={
            200: good,
            "4XX": {"description": "The request is at fault; `error.code` says how.", **failed},
            "5XX": {"description": "The server is at fault, or not ready.", **failed},
        },
        openapi_extra=extra,
        dependencies=[
            *([Depends(_refusing_others(query))] if _STRICT & set(_names(query)) else ()),
            *([Depends(_read_beta)] if "beta" in query else ()),
        ],
    )


def _names(query: tuple[str, ...]) -> list[str]:
    return [name.partition(":")[0] for name in query]


def _refusing_others(query: tuple[str, ...]) -> Callable[[Request], Awaitable[None]]:
    """What refuses any other parameter of a query for a list or for sums: ApiError 400. With a filter left
    out, they would be of more than its client meant."""
    types = {name.partition(":")[0]: QUERY[name][0].get("type") for name in query}

    async def refuse_others(request: Request) -> None:
        for name in request.query_params:
            plain, bracket, key = name.partition("[")
            if types.get(plain) == "object":
                if not key.endswith("]"):
                    refuse(plain, f"Invalid '{plain}': write '{plain}[key]=value'.")
            elif plain not in types or (bracket and (key != "]" or types[plain] != "array")):
                meant = nearest(name, list(types))
                hint = f"Did you mean '{meant}'?" if meant else f"There are: {', '.join(types)}."
                refuse(shorten(name), f"Unknown parameter: '{shorten(name)}'. {hint}", "unknown_parameter")

    return refuse_others


async def _read_beta() -> None:
    """Say that the parameter was read, so that the reply does not name it as ignored: there is nothing that a
    client could have meant by it."""
    ignored.queried("beta")


def _named(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"} if name else {"type": "string"}


def _parameter(name: str) -> Json:
    schema, description = QUERY[name]
    name = name.partition(":")[0]
    how = {"style": "deepObject", "explode": True} if schema.get("type") == "object" else {}
    told = {"required": name in REQUIRED, "schema": schema, "description": description}
    return {"name": name, "in": "query", **told, **how}


def _header(name: str) -> Json:
    schema = {"type": "string"}
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": HEADERS[name]}


def _reply_headers(*names: str) -> Json:
    return {name: {"description": REPLY_HEADERS[name], "schema": {"type": "string"}} for name in names}


def add_common_headers(paths: Mapping[str, Mapping[str, Json]]) -> None:
    """Add to the operations of a document the headers that all of one method have."""
    for operations in paths.values():
        for method, operation in operations.items():
            common = ["X-Request-Id"]
            if method == "post":
                common.append("Idempotency-Key")
                operation["responses"]["200"]["headers"] |= _reply_headers("idempotent-replayed")
            operation["parameters"] = [*operation.get("parameters", ()), *map(_header, common)]
