"""POST /v1/messages and POST /v1/messages/count_tokens, as Anthropic has them.

A client that leaves ends its generation. Errors have the form of that API; `server.errors` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.http import context, json_reply, owner, principal, read_as, while_connected
from server.model_registry import Models, ServedModel
from server.routes.chosen_model import chosen_model
from server.routes.completions import answer, judged, with_inputs
from server.routes.documented import documented
from server.schema import MessagesRequest, parse_count, parse_messages
from server.stateless import count_message_tokens, opened, prepare_message, read_inputs

router = APIRouter(tags=["Messages"])

FOREIGN = "claude"
"""What the names of Anthropic's models begin with, which clients send without being told to."""


@router.post(
    "/v1/messages",
    **documented(
        "Message",
        "chat.write",
        body="CreateMessage",
        stream="MessageEvent",
        error="MessagesError",
        query=("beta",),
    ),
)
async def create_message(request: Request) -> Response:
    """Answer with a message, or (`stream`) with its events."""
    here = context(request)
    asked = await _read(request, parse_messages)
    prepare = judged(request, asked, partial(prepare_message, sealing=here.sealing))
    prepare = with_inputs(partial(_read_inputs, request), prepare)
    return await answer(request, asked, prepare, "message", "message")


@router.post(
    "/v1/messages/count_tokens",
    **documented(
        "MessageTokens", "chat.write", body="CountMessageTokens", error="MessagesError", query=("beta",)
    ),
)
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a message's prompt: exactly those that it would be counted for."""
    asked = await _read(request, parse_count)
    served = await chosen_model(request, asked.model, None)
    await while_connected(request, _read_inputs(request, asked, served))
    count = await count_message_tokens(asked, served, principal=principal(request))
    return json_reply(orjson.dumps({"input_tokens": count}))


Parse = Callable[..., MessagesRequest]


async def _read(request: Request, parse: Parse) -> MessagesRequest:
    """The request in a body, to a model that is served, unless the queue of that is full."""
    here, who = context(request), principal(request)

    def first(body: Mapping[str, Any]) -> None:
        named = body.get("model")
        model = served_as(named, here.models, here.config.messages_model) if isinstance(named, str) else None
        here.models.require_room({"model": model}, owner=who.owner, weight=who.service.weight)

    asked = await read_as(
        request, partial(parse, unsupported_tools=here.config.unsupported_tools), first=first
    )
    assert asked.model is not None
    name = served_as(asked.model, here.models, here.config.messages_model)
    return await opened(asked, name, here.sealing, who.owner)


async def _read_inputs(request: Request, asked: MessagesRequest, served: ServedModel) -> None:
    """Have a request hold what its files and images say to a model. Raises ApiError."""
    read = context(request).runs.intake.read_inputs
    await read_inputs(asked, partial(read, owner(request), served=served))


def served_as(name: str, models: Models, fallback: str | None) -> str | None:
    """The served model that a name stands for, None for the default one: its own, else the operator's choice
    for all others, else the default for names of Anthropic's. Any other name is left as it is."""
    if name in models.names:
        return name
    if fallback is not None:
        return fallback
    return None if name.startswith(FOREIGN) else name
