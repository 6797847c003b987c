"""POST /v1/chat/completions, /v1/completions and /inference/v1/generate.

A client that leaves ends its generations. A chat completion with `store` is kept once it has ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine import Place
from server.access import Principal
from server.http import (
    EventStream,
    Outcome,
    actor,
    context,
    json_reply,
    limited,
    principal,
    read_as,
    tell_outcome,
    while_connected,
)
from server.model_registry import ServedModel
from server.moderation import asked_in
from server.pooling import require_moderator
from server.routes.chosen_model import chosen_model
from server.routes.documented import documented
from server.routes.stored_completions import Keeping, keeping_of
from server.schema import (
    ChatRequest,
    CompletionRequest,
    MessagesRequest,
    file_paths,
    image_paths,
    parse_chat,
    parse_completion,
    parse_generation,
)
from server.stateless import (
    ChatWriter,
    Completion,
    MessageWriter,
    Moderated,
    begin,
    prepare_chat,
    prepare_completion,
    prepare_generation,
    runs_tools,
    start_tool_run,
)
from server.telemetry import Telemetry, note_end_user
from server.usage import Meter
from server.vector_stores import Payer

router = APIRouter(tags=["Completions"])

T = TypeVar("T")
Asked = TypeVar("Asked", ChatRequest, CompletionRequest, MessagesRequest, contravariant=True)
Said = TypeVar("Said", ChatRequest, MessagesRequest)

CHAT = ("chat.completion", "chat.completion.chunk")
"""The `object` of a whole chat completion, and of a chunk."""


class _Prepare(Protocol[Asked]):
    async def __call__(
        self,
        request: Asked,
        served: ServedModel,
        place: Place,
        /,
        *,
        principal: Principal,
        person: str | None,
        telemetry: Telemetry,
        meter: Meter,
    ) -> Completion: ...


@router.post(
    "/v1/chat/completions",
    **documented("ChatCompletion", "chat.write", body="CreateChatCompletion", stream="ChatCompletionChunk"),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer with a chat completion, or (`stream`) with its chunks."""
    here = context(request)
    unsupported = here.config.unsupported_tools
    asked = await _read(request, partial(parse_chat, unsupported_tools=unsupported))
    keeping = await keeping_of(request, asked)
    if runs_tools(asked, here.runs, unsupported):
        return await _run(request, asked, keeping)
    prepare = with_inputs(partial(_read_inputs, request), judged(request, asked, prepare_chat))
    return await answer(request, asked, prepare, *CHAT, keeping)


async def _read_inputs(request: Request, asked: ChatRequest, served: ServedModel) -> None:
    """Have a request hold what its files and images say to a model. Raises ApiError."""
    files, images = file_paths(asked.messages), image_paths(asked.messages)
    if files or images:
        read, who = context(request).runs.intake.read_inputs, principal(request).owner
        asked.items[:] = await read(who, asked.items, served, files=files, images=images)


def with_inputs(
    read: Callable[[Said, ServedModel], Awaitable[None]], prepare: _Prepare[Said]
) -> _Prepare[Said]:
    """How what is asked is prepared once its files and images are read. That is a part of it because it takes
    long: a request that is refused must have caused none of it, and a client that leaves ends it."""

    async def once_read(asked: Said, served: ServedModel, place: Place, **known: Any) -> Completion:
        await read(asked, served)
        return await prepare(asked, served, place, **known)

    return once_read


def judged(request: Request, asked: Said, prepare: _Prepare[Said]) -> _Prepare[Said]:
    """How what is asked is prepared, together with what judges it where that is asked for. Raises ApiError
    400 and 404 where nothing can judge it."""
    moderation, moderator = asked.moderation, context(request).runs.moderator
    require_moderator(moderation, moderator)
    if moderation is None or moderator is None:
        return prepare
    who = principal(request)
    payer = Payer(who.owner, who.subjects, who.key_id, who.service.weight)

    async def with_judge(asked: Said, served: ServedModel, place: Place, **known: Any) -> Completion:
        text = asked_in(asked.items)  # rendering takes them apart
        completion = await prepare(asked, served, place, **known)
        writers = [writer for writer in completion.writers if isinstance(writer, ChatWriter | MessageWriter)]
        return replace(completion, moderated=Moderated(moderation, moderator, payer, text, writers))

    return with_judge


@router.post(
    "/v1/completions", **documented("Completion", "chat.write", body="CreateCompletion", stream="Completion")
)
async def create_completion(request: Request) -> Response:
    """Answer with completions, or (`stream`) with their chunks."""
    asked = await _read(request, parse_completion)
    return await answer(request, asked, prepare_completion, "text_completion", "text_completion")


@router.post(
    "/inference/v1/generate",
    **documented("Generation", "chat.write", body="CreateGeneration", stream="Generation"),
)
async def create_generation(request: Request) -> Response:
    """Answer token ids with token ids, or (`stream`) with chunks of them."""
    asked = await _read(request, parse_generation)
    return await answer(request, asked, prepare_generation, "generation", "generation.chunk")


async def _read(request: Request, parse: Callable[[Mapping[str, Any]], T]) -> T:
    """The request in a body, unless the queue of its model is full."""
    who = principal(request)
    require_room = context(request).models.require_room
    return await read_as(
        request, parse, first=partial(require_room, owner=who.owner, weight=who.service.weight)
    )


async def answer(
    request: Request,
    asked: Asked,
    prepare: _Prepare[Asked],
    whole: str,
    chunk: str,
    keeping: Keeping | None = None,
) -> Response:
    """The way from a request to its reply. whole, chunk: the `object` of a whole reply, and of a part.
    keeping: how what comes of it is stored."""
    here = context(request)
    who = principal(request)
    owner, weight = who.owner, who.service.weight
    served = await chosen_model(request, asked.model, getattr(asked, "prompt_cache_key", None))
    headers = here.models.headers(served.name)
    subjects = limited(request, served.name)
    person = note_end_user(owner, asked.safety_identifier or asked.user)
    visit = await here.limiter.enter(subjects, served.name, person)
    async with AsyncExitStack() as stack:
        stack.callback(visit.leave)
        if asked.stream:
            stack.enter_context(here.limiter.stream(subjects))
        # Before anything is done for it: a refusal must cost next to nothing.
        place = stack.enter_context(served.engine.admission.enter(owner, weight))
        preparing = prepare(
            asked, served, place, principal=who, person=person, telemetry=here.telemetry, meter=here.meter
        )
        completion = await while_connected(request, preparing)
        visit.used = completion.usage.limited
        visit.bring(place, completion.tokens()[0])
        await visit.reserve(*completion.tokens(), answers=len(completion.requests))
        stack.enter_context(here.completions.enter(completion))
        if keeping is not None:
            await stack.enter_async_context(keeping.claimed(completion.head))
        if not asked.stream:
            body = await while_connected(request, completion.whole(whole))
            tell_outcome(request, Outcome(served.name, completion.usage.totals()))
            return json_reply(
                body if keeping is None else await keeping.whole(completion.head, body), headers
            )
        keep = None if keeping is None else partial(keeping.streamed, completion.head)
        frames = completion.frames(chunk, asked.stream_options, keep)
        form = completion.form
        begun = await begin(frames, failure=form.failure)
        return EventStream(begun, headers, on_close=stack.pop_all().aclose, keepalive=form.keepalive)


async def _run(request: Request, asked: ChatRequest, keeping: Keeping | None) -> Response:
    """The same for tools that the server runs: a response that is not stored makes the reply."""
    here = context(request)
    served = await chosen_model(request, asked.model, asked.prompt_cache_key)
    asked = asked.model_copy(update={"model": served.name, "asked_model": served.allowed_as})
    headers = here.models.headers(served.name)
    subjects = limited(request, served.name)
    with ExitStack() as stack:
        if asked.stream:
            stack.enter_context(here.limiter.stream(subjects))
        run = await start_tool_run(
            asked,
            served,
            here.runs,
            principal=principal(request),
            by=actor(request),
            planning=partial(while_connected, request),
        )
        stack.callback(run.started.reader.close)
        whole, chunk = CHAT
        if not asked.stream:
            body = await while_connected(request, run.whole(whole))
            tell_outcome(request, Outcome(served.name, run.usage))
            return json_reply(body if keeping is None else await keeping.whole(run.head, body), headers)
        keep = None if keeping is None else partial(keeping.streamed, run.head)
        frames = run.frames(chunk, asked.stream_options, keep)
        return EventStream(await begin(frames), headers, on_close=stack.pop_all().close)
