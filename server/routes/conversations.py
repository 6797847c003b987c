"""The routes under /v1/conversations.

A conversation is a log of items with metadata, a title and a status. Clients create, list, change, fork and
delete it, and add, list and remove its items; responses that name the conversation append to it too. One
request may add at most `MAX_ITEMS` items.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.clock import now_us
from server.config import Config
from server.http import (
    choice,
    context,
    conversation_json,
    flag,
    include,
    json_reply,
    kept,
    owner,
    page_args,
    page_json,
    read_as,
    read_body,
    require_stored_bytes,
    texts,
)
from server.ignored import ignore
from server.item_ids import identify
from server.items import SEEN, approves, filled_body, is_left_out, private_bytes, words_of
from server.routes.documented import PAGE, documented
from server.routes.responses import asked_by, new_id
from server.runs.execution import new_items
from server.schema import (
    Item,
    Unsupported,
    check_length,
    check_metadata,
    check_sizes,
    missing,
    mistyped,
    normalize_input,
    parse_fork,
    require_added_offered,
    secrets_of_items,
)
from server.shapes import label, name_others, one_of, refuse
from server.threads import aside, in_large_request
from storage import CONVERSATION_BYTES, ConversationChange, ItemConflict, NewFork, NewItem, PositionedItem

T = TypeVar("T")

router = APIRouter(prefix="/v1/conversations", tags=["Conversations"])

MAX_ITEMS = 20
"""Items that one request may add."""

SHOWN = ("include", "timestamps")
"""Parameters of queries that say how items are shown."""

STATUSES = ("active", "archived")
_STATUS = one_of(*STATUSES)
_TITLE = label(0, 512)


@router.post(
    "", **documented("Conversation", "conversations.write", body="CreateConversation", body_required=False)
)
async def create_conversation(request: Request) -> Response:
    """Create one, with its first items if there are any."""
    body, items = await read_as(request, _reader(request), allow_empty=True)
    name_others(body, ("items", "metadata", "title"))
    here, who = context(request), owner(request)
    title = _title(body)
    metadata = _metadata(body)
    conversation_id = new_id("conv_")
    create = partial(
        here.storage.create_conversation,
        *(who, conversation_id, now_us(), metadata),
        title=title or None,
        kept=kept(request, conversation_json, conversation_id),
    )
    stored = await _stored(request, items or [], create, num_bytes=len(metadata) + len(title))
    return json_reply(conversation_json(stored))


@router.get(
    "", **documented("Conversations", "conversations.read", query=(*PAGE, "status:conversations", "metadata"))
)
async def list_conversations(request: Request) -> Response:
    """The owner's conversations, newest first unless `order=asc` (extension)."""
    query = request.query_params
    status = choice(query, "status", STATUSES)
    page = await context(request).storage.list_conversations(
        owner(request),
        **page_args(query),
        archived=None if status is None else status == "archived",
        metadata=check_metadata(texts(query, "metadata")),
    )
    ids = [stored.id for stored in page.data]
    return json_reply(page_json([*map(conversation_json, page.data)], ids, has_more=page.has_more))


@router.get("/{conversation_id}", **documented("Conversation", "conversations.read"))
async def get_conversation(request: Request, conversation_id: str) -> Response:
    """The conversation, without its items."""
    stored = await context(request).storage.get_conversation(owner(request), conversation_id)
    return json_reply(conversation_json(stored))


@router.post(
    "/{conversation_id}", **documented("Conversation", "conversations.write", body="UpdateConversation")
)
async def update_conversation(request: Request, conversation_id: str) -> Response:
    """Replace the metadata, which null empties; the title, which null takes away; or the status (both
    extensions). An archived conversation takes no new items and turns."""
    body = await read_body(request)
    name_others(body, ("metadata", "title", "status"))
    if not any(name in body for name in ("title", "status", "metadata")):
        message = "Nothing is to be changed: give 'metadata', 'title' or 'status'."
        refuse("metadata", message, "missing_required_parameter")
    change = ConversationChange(
        metadata=_metadata(body) if "metadata" in body else None,
        title=_title(body) if "title" in body else None,
        archived=_STATUS(body["status"], "status") == "archived" if body.get("status") is not None else None,
    )
    here, who = context(request), owner(request)
    await require_stored_bytes(request, len(change.metadata or b"") + len(change.title or ""))
    stored = await here.storage.update_conversation(who, conversation_id, change, now_us())
    return json_reply(conversation_json(stored))


@router.post(
    "/{conversation_id}/fork",
    **documented("Conversation", "conversations.write", body="ForkConversation", body_required=False),
)
async def fork_conversation(request: Request, conversation_id: str) -> Response:
    """Make a conversation that begins as this one does, up to an item or as a whole (extension)."""
    wanted = await read_as(request, partial(parse_fork, at_event=False), allow_empty=True)
    metadata = None if wanted.metadata is None else orjson.dumps(wanted.metadata)
    parent = await context(request).storage.get_conversation(owner(request), conversation_id)
    inherited = len((metadata or parent.metadata) + (parent.title or "").encode())
    await require_stored_bytes(request, CONVERSATION_BYTES + inherited)
    new = NewFork(new_id("conv_"), now_us(), wanted.after, metadata)
    with asked_by("after"):
        stored = await context(request).storage.fork_conversation(
            owner(request), conversation_id, new, kept=kept(request, conversation_json, new.id)
        )
    return json_reply(conversation_json(stored))


@router.delete("/{conversation_id}", **documented("Deleted", "conversations.write"))
async def delete_conversation(request: Request, conversation_id: str) -> Response:
    """Make the id unknown; the items that responses refer to stay theirs."""
    await context(request).runs.delete_conversation(owner(request), conversation_id)
    return json_reply(
        orjson.dumps({"id": conversation_id, "object": "conversation.deleted", "deleted": True})
    )


@router.post(
    "/{conversation_id}/items",
    **documented("Items", "conversations.write", body="AddItems", query=SHOWN),
)
async def add_items(request: Request, conversation_id: str) -> Response:
    """Append items; answers with what was added, in the order of the request."""
    shown = _shown(request)
    body, items = await read_as(request, _reader(request))
    if items is None:
        missing("items")
    name_others(body, ("items",))
    here, who = context(request), owner(request)
    limit = here.config.max_items_per_conversation

    def reply(added: Sequence[PositionedItem]) -> bytes:
        return page_json([*map(shown, added)], [place.item.id for place in added], has_more=False)

    add = partial(
        here.storage.add_conversation_items,
        *(who, conversation_id),
        now=now_us(),
        limit=limit,
        kept=kept(request, reply, conversation_id),
    )
    return json_reply(reply(await _stored(request, items, add)))


@router.get(
    "/{conversation_id}/items",
    **documented("Items", "conversations.read", query=(*PAGE, *SHOWN)),
)
async def list_items(request: Request, conversation_id: str) -> Response:
    """One page of the items, newest first unless `order=asc`."""
    shown = _shown(request)
    page = await context(request).storage.list_conversation_places(
        owner(request), conversation_id, **page_args(request.query_params)
    )
    ids = [place.item.id for place in page.data]
    return json_reply(page_json([*map(shown, page.data)], ids, has_more=page.has_more))


@router.delete("/{conversation_id}/items", **documented("Conversation", "conversations.write"))
async def delete_items(request: Request, conversation_id: str) -> Response:
    """Take all items out (extension); answers with the conversation."""
    here, who = context(request), owner(request)
    stored = await here.storage.clear_conversation(who, conversation_id, now_us())
    here.runs.changed(conversation_id)
    return json_reply(conversation_json(stored))


@router.get(
    "/{conversation_id}/items/{item_id}",
    **documented("Item", "conversations.read", query=SHOWN),
)
async def get_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """One item, bare."""
    shown = _shown(request)
    place = await context(request).storage.get_conversation_item(owner(request), conversation_id, item_id)
    return json_reply(shown(place))


@router.delete("/{conversation_id}/items/{item_id}", **documented("Conversation", "conversations.write"))
async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Take an item out; answers with the conversation."""
    here, who = context(request), owner(request)
    stored = await here.storage.delete_conversation_item(who, conversation_id, item_id, now_us())
    here.runs.changed(conversation_id)
    return json_reply(conversation_json(stored))


# ------------------------------------------------------------------------------------------------------------


def _shown(request: Request) -> Callable[[PositionedItem], bytes]:
    """What makes the JSON of items at their places, as a query asks for them. Raises ApiError 400."""
    asked, timed = include(request.query_params), flag(request.query_params, "timestamps", default=True)

    def shown(place: PositionedItem) -> bytes:
        body = filled_body(place.item.body, place.item.private, asked)
        if b'"created_at"' in body:  # an earlier version kept what a client said
            body = orjson.dumps({k: v for k, v in orjson.loads(body).items() if k != "created_at"})
        return _timed(body, place.created_at) if timed else body

    return shown


def _timed(body: bytes, created_at: int | None) -> bytes:
    """An item that says when it came (extension); null for one of an earlier version of this server."""
    seconds = None if created_at is None else created_at // 1_000_000
    return body[:-1] + b',"created_at":' + orjson.dumps(seconds) + b"}"


def _metadata(body: Mapping[str, Any]) -> bytes:
    """The metadata of a body, empty where there is none. Raises ApiError 400."""
    return orjson.dumps(check_metadata({} if body.get("metadata") is None else body["metadata"]))


def _title(body: Mapping[str, Any]) -> str:
    """The title of a body, empty where there is none. Raises ApiError 400."""
    found: str = "" if body.get("title") is None else _TITLE(body["title"], "title")
    return found


def _reader(request: Request) -> Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], list[Item] | None]]:
    """What reads a body as this server is configured to."""
    return partial(_read, context(request).config.unsupported_tools)


def _read(unsupported: Unsupported, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Item] | None]:
    """A body and its items, normalised; None where it has none. Raises ApiError 400."""
    value = body.get("items")
    if value is None:
        return body, None
    if not isinstance(value, list):
        mistyped("items", "an array", value)
    check_length("items", len(value), "array", most=MAX_ITEMS)
    items = normalize_input(value, new_id=new_id, param="items")
    require_added_offered(items, unsupported, "items")
    for index, item in enumerate(items):
        if approves(item):  # only a response makes calls, of what its own input approves
            ignore(f"items[{index}].approve")
    for path, given in secrets_of_items(value, "items").items():
        for name in given:
            ignore(f"{path}.{name}")  # a run keeps credentials as long as it lasts, and nothing else does
    return body, items


def _size(items: list[Item], config: Config) -> int:
    """What items take in storage; ApiError 400 for one that is larger than it may be."""
    return check_sizes(items, config.max_item_bytes, outputs=config.max_tool_output_bytes, param="items")


async def _stored(
    request: Request,
    items: list[Item],
    store: Callable[[Sequence[NewItem]], Awaitable[T]],
    *,
    num_bytes: int = 0,
) -> T:
    """Store a request's items by `store`, under ids that are free. num_bytes: what is stored beside them.
    Raises ApiError 400, 404, and 429 where the owner's quota is used up."""
    here, who = context(request), owner(request)
    size = await aside(in_large_request(), _size, items, here.config)
    await require_stored_bytes(request, num_bytes + size)
    items = await here.sealing.opened(who, items, model=None, param="items")
    items = await identify(here.storage, who, items, param="items")
    items = await here.runs.intake.read_inputs(who, items, None, param="items")
    if told := await aside(in_large_request(), private_bytes, items, SEEN):
        await require_stored_bytes(request, told)
    for index, item in enumerate(items):  # a reference may lead to one from before it was refused
        words_of(item, f"items[{index}]")
        if is_left_out(item):
            ignore(f"items[{index}]")
    while True:
        try:
            return await store(await aside(in_large_request(), new_items, items))
        except ItemConflict as conflict:  # the id was taken meanwhile, or by an item that is out of sight
            items = await identify(here.storage, who, items, param="items", taken=conflict.item_id)
