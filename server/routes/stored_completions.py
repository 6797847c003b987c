"""Chat completions that are stored: how one is kept when it has ended, and the routes that give it back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.access import PURGED
from server.clock import now_us
from server.config import THREADED_BYTES
from server.errors import ApiError
from server.http import (
    context,
    json_reply,
    kept,
    keyed,
    owner,
    page_args,
    page_json,
    query_text,
    read_body,
    require_stored_bytes,
    stored_completion_json,
    texts,
)
from server.ignored import ignore
from server.routes.documented import PAGE_FROM_OLDEST, documented
from server.schema import ChatRequest, check_metadata, completion_name, missing
from server.shapes import name_others
from server.threads import aside, in_large_request
from storage import ChatCompletionKnown, Kept, KeyedRequest, NewChatCompletion, StoredChatCompletion

router = APIRouter(prefix="/v1/chat/completions", tags=["Completions"])

CLAIMS = "/v1/chat/completions#id"
"""In the place of a route, where ids are recorded that clients chose for what is being made; no request can
have it."""


# ------------------------------------------------------------------------------------------------------------
# Keeping one


@dataclass(frozen=True, slots=True)
class Keeping:
    """How a completion is stored once it has ended. messages: those of its request, a JSON array. named: its
    client chose the id. asked_at: microseconds since the epoch; a purge that is noted later has it go."""

    request: Request
    metadata: Mapping[str, str]
    messages: bytes
    named: bool = False
    asked_at: int = field(default_factory=now_us)

    @asynccontextmanager
    async def claimed(self, head: Mapping[str, Any]) -> AsyncGenerator[None]:
        """Held while the completion is made whose id the client chose: no other one of its owner gets the
        same id meanwhile, on whichever server, so that its end finds the id free. ChatCompletionKnown."""
        if not self.named:  # ids of the server's are random
            yield
            return
        storage, whose, id = context(self.request).storage, owner(self.request), head["id"]
        # The claim of a process that died is taken over, and so is that of this one, which knows what it
        # makes itself (`LiveCompletions`).
        claim = KeyedRequest(whose, CLAIMS, id, b"", now_us())
        if await storage.begin_request(claim) is not None:
            raise ChatCompletionKnown(id)
        try:
            if await storage.chat_completions.is_known(whose, id):
                raise ChatCompletionKnown(id)
            yield
        finally:
            await storage.release_request(claim)

    async def whole(self, head: Mapping[str, Any], body: bytes) -> bytes:
        """Store the completion with this body; the reply, which a repeat with the same idempotency key gets,
        too. ChatCompletionKnown, OwnerPurged."""
        keeping = kept(self.request, stored_completion_json, head["id"])
        return stored_completion_json(await self._store(head, body, keeping))

    async def streamed(self, head: Mapping[str, Any], body: bytes) -> None:
        """Store the completion whose chunks come to this body. ChatCompletionKnown, OwnerPurged."""
        keyed(self.request).about = head["id"]
        await self._store(head, body)

    async def _store(
        self, head: Mapping[str, Any], body: bytes, keeping: Kept[StoredChatCompletion] | None = None
    ) -> StoredChatCompletion:
        new = NewChatCompletion(
            id=head["id"],
            owner=owner(self.request),
            created_at=self.asked_at,
            model=head["model"],
            metadata=self.metadata,
            body=body,
            messages=self.messages,
        )
        completions = context(self.request).storage.chat_completions
        return await completions.create(new, purge=PURGED, kept=keeping)


async def keeping_of(request: Request, asked: ChatRequest) -> Keeping | None:
    """How what comes of a request is stored; None where it is not. Raises ApiError 429 where there is no
    room, and ChatCompletionKnown where its owner has a completion of its id."""
    if not asked.store:
        return None
    here = context(request)
    if not here.config.store:
        ignore("store")
        if asked.metadata:
            ignore("metadata")
        return None
    if asked.request_id is not None:
        id = completion_name("chatcmpl", asked.request_id, "")
        if await here.storage.chat_completions.is_known(owner(request), id):
            raise ChatCompletionKnown(id)
    messages = await aside(in_large_request(), orjson.dumps, asked.messages)
    await require_stored_bytes(request, len(messages) + len(orjson.dumps(dict(asked.metadata))))
    return Keeping(request, asked.metadata, messages, named=asked.request_id is not None)


# ------------------------------------------------------------------------------------------------------------
# Giving it back


@router.get(
    "",
    **documented("ChatCompletions", "chat.read", query=(*PAGE_FROM_OLDEST, "model", "metadata")),
)
async def list_chat_completions(request: Request) -> Response:
    """One page of the stored chat completions, oldest first unless `order=desc`."""
    query = request.query_params
    page = await context(request).storage.chat_completions.list(
        owner(request),
        **page_args(query, "asc"),
        model=query_text(query, "model"),
        metadata=check_metadata(texts(query, "metadata")),
    )
    bodies = [stored_completion_json(stored) for stored in page.data]
    return json_reply(page_json(bodies, [stored.id for stored in page.data], has_more=page.has_more))


@router.get("/{completion_id}", **documented("ChatCompletion", "chat.read"))
async def get_chat_completion(request: Request, completion_id: str) -> Response:
    """A stored chat completion."""
    return json_reply(stored_completion_json(await _stored(request, completion_id)))


@router.post("/{completion_id}", **documented("ChatCompletion", "chat.write", body="UpdateChatCompletion"))
async def update_chat_completion(request: Request, completion_id: str) -> Response:
    """Replace the metadata; null empties it."""
    body = await read_body(request)
    name_others(body, ("metadata",))
    if "metadata" not in body:
        missing("metadata")
    metadata = check_metadata({} if body["metadata"] is None else body["metadata"])
    await _stored(request, completion_id)  # nothing is counted for one that is not there
    await require_stored_bytes(request, len(orjson.dumps(metadata)))
    changed = await context(request).storage.chat_completions.change(owner(request), completion_id, metadata)
    return json_reply(stored_completion_json(changed))


@router.delete("/{completion_id}", **documented("Deleted", "chat.write"))
async def delete_chat_completion(request: Request, completion_id: str) -> Response:
    """Make the id unknown, and remove what is stored of it."""
    await context(request).storage.chat_completions.delete(owner(request), completion_id)
    return json_reply(
        orjson.dumps({"object": "chat.completion.deleted", "id": completion_id, "deleted": True})
    )


@router.get(
    "/{completion_id}/messages",
    **documented("ChatCompletionMessages", "chat.read", query=PAGE_FROM_OLDEST),
)
async def list_messages(request: Request, completion_id: str) -> Response:
    """One page of the messages that a stored chat completion answers, in their order unless `order=desc`."""
    wanted = page_args(request.query_params, "asc")
    written = await context(request).storage.chat_completions.messages(owner(request), completion_id)

    def page() -> bytes:
        named = [(f"{completion_id}-{place}", message) for place, message in enumerate(orjson.loads(written))]
        if wanted["order"] == "desc":
            named.reverse()
        ids = [id for id, _ in named]
        if wanted["after"] is not None and wanted["after"] not in ids:
            message = f"Message with id '{wanted['after']}' not found."
            raise ApiError(404, message, code="not_found", param="after")
        start = 0 if wanted["after"] is None else ids.index(wanted["after"]) + 1
        stop = start + wanted["limit"]
        bodies = [_message_json(id, message) for id, message in named[start:stop]]
        return page_json(bodies, ids[start:stop], has_more=stop < len(named))

    return json_reply(await aside(len(written) > THREADED_BYTES, page))


def _message_json(id: str, message: Mapping[str, Any]) -> bytes:
    """A message of a request in the form of the list: what is said is one text, and its parts stand beside it
    where it came in parts."""
    content, parts = message.get("content"), None
    if isinstance(content, list):
        parts = content
        content = "".join(part["text"] for part in parts if part["type"] == "text")
    shown = {"id": id, **message, "content": content, "content_parts": parts}
    return orjson.dumps({"refusal": None, **shown})


async def _stored(request: Request, completion_id: str) -> StoredChatCompletion:
    return await context(request).storage.chat_completions.get(owner(request), completion_id)
