"""The routes under /v1/responses.

They create, fork, list, retrieve, cancel and delete responses, list their input items, count input tokens and
take the outputs of tools. A request is read and checked here and handed to `Runs`; the answer goes out as one
JSON body or as a stream of events.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from server import encrypted_reasoning
from server.config import THREADED_BYTES
from server.errors import ApiError, to_api_error
from server.event_profiles import PROFILES, View
from server.http import (
    INSIDE,
    Context,
    EventStream,
    Outcome,
    StreamCut,
    actor,
    choice,
    context,
    flag,
    include,
    integer,
    json_reply,
    keyed,
    limited,
    number,
    owner,
    page_args,
    page_json,
    principal,
    query_text,
    read_as,
    read_body,
    require_stored_bytes,
    standing_of,
    tell_outcome,
    texts,
    timestamp,
    while_connected,
)
from server.ignored import collecting, ignore, unread
from server.items import COMPACTION, FILLED, answering, compacted, filled_body, key_of
from server.prompting import name_idle_drafts, name_untold, name_unused_key
from server.routes.chosen_model import with_model
from server.routes.documented import PAGE, documented
from server.runs import Started, interrupted, no_events, prepare_fork, require_servers
from server.runs.events import (
    Channel,
    Reader,
    ReaderLagged,
    Snapshot,
    short_members,
    terminal_response,
)
from server.runs.planning import TERMINAL, RunPlan, read_items, turn_tools
from server.schema import (
    LEAST_THRESHOLD,
    TEXT,
    Api,
    CreateResponse,
    Item,
    ToolOutputs,
    Unsupported,
    as_output,
    check_metadata,
    fill,
    leave_out_lacking,
    normalize_input,
    parse_compact,
    parse_create,
    parse_fork,
    parse_input_tokens,
    parse_prompt,
    parse_tool_outputs,
    refuse,
    require_added_offered,
    secrets_of_items,
    without_trigger,
)
from server.shapes import one_of
from server.sse_frame import frames
from server.threads import THREADED_PARTS, aside, begin_large_request, in_large_request
from storage import EventsExpired, NotFound, StoredResponse

router = APIRouter(prefix="/v1/responses", tags=["Responses"])

STATUSES = ("queued", "in_progress", *sorted(TERMINAL))

WAITING = "waiting"
MAX_WAIT_S = 300.0
"""How long a GET may ask to wait for the end of a response."""


def new_id(prefix: str) -> str:
    """A fresh id for an input item that came without one."""
    return prefix + secrets.token_hex(24)


# ------------------------------------------------------------------------------------------------------------
# Creating


@router.post(
    "",
    **documented(
        "Response",
        "responses.write",
        body="CreateResponse",
        query=("beta",),
        headers=("X-Antiphon-Profile",),
        stream="ResponseEvent",
    ),
)
async def create_response(request: Request) -> Response:
    """Start a run and answer with its stream, its result, or (background) its beginning."""
    models, known, who = context(request).models, keyed(request).response_id, principal(request)

    def first(body: Mapping[str, Any]) -> None:
        if known is not None or body.get("background") is True:  # that waits where no place is free
            return
        if body.get("model") is not None or body.get("prompt") is None:  # else a template may name the model
            models.require_room(body, who.owner, who.service.weight)

    if known is not None and (body := await read_body(request)).get("prompt") is not None:
        # What its prompt was filled with is in the run that it repeats; the prompt may be gone by now.
        pads = (body.get("stream_options") or {}).get("include_obfuscation") is True
        return await _again(request, known, stream=body.get("stream") is True, pads=pads)
    filled = partial(with_prompt, request, "responses")
    parsed, items = await read_as(request, creating(request), first=first, ahead=filled)
    if (response_id := keyed(request).response_id) is not None:
        name_in_vain(request, parsed, items)
        return await _again(
            request, response_id, stream=parsed.stream, pads=bool(parsed.stream_options.include_obfuscation)
        )
    parsed = await with_model(request, parsed)
    name_in_vain(request, parsed, items)
    return await _start(request, parsed, items)


async def with_prompt(request: HTTPConnection, api: Api, body: dict[str, Any]) -> dict[str, Any]:
    """A body with the prompt template that it names filled in. Raises ApiError 400, and 404 for a prompt that
    its owner does not have."""
    if body.get("prompt") is None:
        return body
    wanted = parse_prompt(body["prompt"])
    try:
        prompts = context(request).storage.prompts
        _, version = await prompts.version(owner(request), wanted.id, wanted.version)
    except NotFound as unknown:
        param = "prompt.id" if unknown.kind == "prompt" else "prompt.version"
        raise to_api_error(unknown, param=param) from None
    return fill(body, wanted, version.version, orjson.loads(version.body), new_id=new_id, api=api)


def creating(request: HTTPConnection) -> Callable[[Mapping[str, Any]], tuple[CreateResponse, list[Item]]]:
    """What reads a body that creates a response, as this server is configured to."""
    config = context(request).config
    return asking(request, partial(parse_create, waits=config.await_tool_outputs and config.store))


def asking(
    request: HTTPConnection, parse: Callable[..., CreateResponse]
) -> Callable[[Mapping[str, Any]], tuple[CreateResponse, list[Item]]]:
    """What reads a body as this server is configured to."""
    return partial(_asked, parse, context(request).config.unsupported_tools)


def _asked(
    parse: Callable[..., CreateResponse], unsupported: Unsupported, body: Mapping[str, Any]
) -> tuple[CreateResponse, list[Item]]:
    """A body as the request, and its input's items. Raises ApiError 400."""
    parsed = parse(body, unsupported_tools=unsupported)
    value, triggered = without_trigger(parsed.input, new_id)
    items = [] if value is None else normalize_input(value, new_id=new_id)
    require_added_offered(items, unsupported)
    secrets = parsed.secrets | secrets_of_items(parsed.input)
    # The input as it came is freed here, because ten thousand items take long enough to hold the loop.
    compacts = parsed.compacts or triggered
    return parsed.model_copy(update={"input": None, "secrets": secrets, "compacts": compacts}), items


def name_in_vain(request: HTTPConnection, parsed: CreateResponse, items: Sequence[Item]) -> None:
    """Name what the request says to a chat template that does not read it, and of drafts that are not made, a
    key that salts nothing, and tools that this server cannot run, where these are not refused. Raises
    ApiError for them, and for an unknown model."""
    here = context(request)
    tools = turn_tools(parsed, items, len(items))
    for index, why in here.runs.intake.lacking(tools.tools).items():
        leave_out_lacking(tools.tools[index], tools.paths[index], why, here.config.unsupported_tools)
    here.runs.intake.name_unkept_memory(tools.tools, tools.paths)
    served = here.models.get(parsed.model)
    if parsed.cache_salt is not None or _profile(request) == "openai":  # in an older one the key is the salt
        name_unused_key(parsed.cache_salt, parsed.prompt_cache_key, served.caps)
    name_untold(
        served.info,
        effort=parsed.reasoning.effort if parsed.reasoning else None,
        effort_param="reasoning.effort",
        template_kwargs=parsed.chat_template_kwargs,
    )
    name_idle_drafts(served.info, parsed.sampling)


async def _start(request: Request, parsed: CreateResponse, items: Sequence[Item]) -> Response:
    here = context(request)
    if not here.config.store:
        parsed = unstored(parsed)
    profile = _profile(request)
    parsed = _salted(parsed, profile)
    headers = here.models.headers(parsed.model)
    key = keyed(request)
    # Until it has begun there is nothing to come back to: a client that leaves takes the trial of its shapes
    # along, say. A background response is begun all the same, for its webhook or its conversation.
    planning = partial(while_connected, request)
    model = here.models.get(parsed.model).name
    subjects = limited(request, model)
    with ExitStack() as stack:
        if parsed.stream:
            stack.enter_context(here.limiter.stream(subjects))
        started = await here.runs.create(
            principal(request), parsed, items, key.request, planning, by=actor(request)
        )
        key.started(started.response_id)
        if parsed.stream:
            secret = started.secret if parsed.stream_options.include_obfuscation else None
            view = View(profile, rates=_rates(request), key=secret)
            return _stream(request, started.reader, stack.pop_all(), view, headers=headers)
    if parsed.background:
        started.reader.close()
        _tell_outcome(request, started.response.body, model)
        return await _reply(request, started.response, headers)
    try:
        result = _result(here, started, owner(request) if parsed.store else None)
        body = await while_connected(request, result)
        _tell_outcome(request, body, model)
        return json_reply(await View(profile).response(body), headers)
    finally:
        started.reader.close()


def _tell_outcome(request: Request, body: bytes, model: str) -> None:
    """Tell a batch what a Response object, which it stores as it is, says of its request."""
    if INSIDE in request.scope:
        said = short_members(body)
        failure = (said["error"] or {}) if said["status"] == "failed" else None
        tell_outcome(request, Outcome(model, said["usage"], failure))


def _salted(parsed: CreateResponse, profile: str) -> CreateResponse:
    """A request whose `prompt_cache_key` is the salt of its cache, as the older profile has it."""
    if profile == "openai" or parsed.cache_salt is not None or parsed.prompt_cache_key is None:
        return parsed
    return parsed.model_copy(update={"cache_salt": parsed.prompt_cache_key})


def unstored(parsed: CreateResponse) -> CreateResponse:
    """A request at a server that stores no responses. Raises ApiError 400 for what cannot be done so."""
    for param in ("background", "await_tool_outputs"):
        if getattr(parsed, param):
            message = f"This server stores no responses, and '{param}' needs one that is stored."
            refuse(param, message, "unsupported_parameter")
    if parsed.store and "store" in parsed.model_fields_set:
        ignore("store")
    return parsed.model_copy(update={"store": False})


async def _result(here: Context, started: Started, who: str | None) -> bytes:
    """The Response at its end; `who` owns it where it is stored."""
    events = await started.finished()
    if events is not None:
        body = terminal_response(events.bodies[-1])
        if events.bodies[-1].startswith(b'{"type":"response.failed"'):
            _require_begun(body, started.failure())
        return body
    if who is not None and not started.reader.removed:
        await here.runs.views.get(who, started.response_id)  # raises NotFound when it was deleted elsewhere
    raise interrupted(started.reader)


LISTS_TOOLS = b'"mcp_list_tools"'


def _require_begun(body: bytes, failure: ApiError | None = None) -> None:
    """Raise ApiError where a response has failed before its model was asked, by what other servers said of
    their tools: 424 where one could not list them, 400 for a request that does not fit them. Had this been
    known at once, the request would have been refused, and there would be no response.

    body: the response. failure: why it has failed, where this process knows more than the response tells.
    """
    if LISTS_TOOLS not in body:  # parsing a long answer would hold up everybody
        return
    response = orjson.loads(body)
    if response["background"]:  # acknowledged before anybody was asked
        return
    output, error = response["output"], response["error"]
    require_servers(output)
    if not output or output[-1]["type"] != "mcp_list_tools":
        return
    if failure is None and error["code"] == "invalid_prompt":
        failure = ApiError(400, error["message"], code=error["code"])
    if failure is not None and failure.status == 400:
        raise failure


async def _again(request: Request, response_id: str, *, stream: bool, pads: bool = False) -> Response:
    """Answer the repeat of a request with what it started, or with the refusal that it got."""
    runs, who = context(request).runs, owner(request)
    if not stream:
        found = await while_connected(request, runs.views.answer(who, response_id))
        if short_members(found.body)["status"] == "failed":
            _require_begun(found.body)
        _tell_outcome(request, found.body, found.model)
        return await _reply(request, found)
    profile = _profile(request)  # refused before there is a reader
    with ExitStack() as stack:
        stack.enter_context(context(request).limiter.stream(principal(request).subjects))
        reader, stored = await runs.views.follow(who, response_id, hidden=True)
        stack.callback(reader.close)
        _require_events(reader, stored)
        headers = context(request).models.headers(stored.model)
        ended = stored.status in TERMINAL
        view = View(profile, rates=_rates(request), key=_secret(stored) if pads else None)
        return _stream(request, reader, stack.pop_all(), view, ended=ended, headers=headers)


def _secret(stored: StoredResponse) -> bytes:
    """What the padding of a response's events is made of."""
    return RunPlan.load(stored.plan).id_secret


async def _reply(request: Request, snapshot: Snapshot, headers: Mapping[str, str] | None = None) -> Response:
    hint = {}
    if snapshot.poll_after_ms is not None:
        hint["openai-poll-after-ms"] = str(snapshot.poll_after_ms)
    if snapshot.queue_position is not None:
        hint["x-queue-position"] = str(snapshot.queue_position)
    body = await View(_profile(request)).response(snapshot.body)
    return json_reply(body, {**(headers or {}), **hint})


# ------------------------------------------------------------------------------------------------------------
# Streaming


PROFILE = "x-antiphon-profile"


def _profile(request: HTTPConnection) -> str:
    """The profile of events that a request asks for, else the server's. Raises ApiError 400."""
    asked = request.headers.get(PROFILE)
    if asked is None:
        return context(request).config.responses_profile
    found: str = one_of(*PROFILES)(asked.strip(), PROFILE)
    return found


def _rates(request: Request) -> Callable[[], list[dict[str, Any]]]:
    """What tells how much is left of the limits of whoever asks."""
    standing = standing_of(request)
    return list if standing is None else standing.rates


def _stream(
    request: Request,
    reader: Reader,
    held: ExitStack,
    view: View,
    *,
    ended: bool = False,
    headers: Mapping[str, str] | None = None,
) -> EventStream:
    """The stream of a reader; `id:` lines only for clients that ask for an event stream by `Accept`, because
    they break an SDK that does not. held: given back at its end."""
    numbered = "text/event-stream" in request.headers.get("accept", "")
    held.callback(reader.close)
    return EventStream(_frames(reader, view, ended, numbered), headers, on_close=held.close, ping=view.ping)


async def _frames(reader: Reader, view: View, ended: bool, numbered: bool) -> AsyncIterator[bytes]:
    terminal, after = ended, view.reads_after
    try:
        async with aclosing(reader.events(view.reads_after, ended=ended)) as stream:
            async for events in stream:
                terminal, after = events.terminal, events.last_seq
                if shown := await view.shown(events.first_seq, events.bodies):
                    yield frames(shown, numbered=numbered)
        if not terminal and reader.final:  # a client that came back would learn no more
            after, why = after + 1, interrupted(reader)
            event = view.error(after, why.code, why.message)
            yield frames(await view.shown(after, [event]), numbered=numbered)
    except (ReaderLagged, EventsExpired):
        terminal = False
    if not terminal:
        raise StreamCut
    if view.end:
        yield view.end


def _require_events(reader: Reader, stored: StoredResponse) -> None:
    """EventsExpired, or for a fork ApiError 400, and the reader has left, where nothing is to be streamed."""
    if stored.fork_of is not None:
        reader.close()
        raise no_events(stored)
    if stored.log_erased_at is not None:
        reader.close()
        raise EventsExpired(stored.id, stored.log_erased_at)


# ------------------------------------------------------------------------------------------------------------
# Reading


@router.get(
    "",
    **documented(
        "Responses",
        "responses.read",
        query=(
            *PAGE,
            "status:responses",
            "conversation",
            "model",
            "metadata",
            "created_after",
            "created_before",
        ),
        headers=("X-Antiphon-Profile",),
    ),
)
async def list_responses(request: Request) -> Response:
    """The owner's stored responses, newest first (extension). The `status` `waiting` is that of responses in
    progress that wait for somebody."""
    query, here, view = request.query_params, context(request), View(_profile(request))
    page = await here.storage.list_responses(
        owner(request),
        **page_args(query),
        status=choice(query, "status", (*STATUSES, WAITING)),
        conversation_id=query_text(query, "conversation"),
        model=query_text(query, "model"),
        metadata=check_metadata(texts(query, "metadata")),
        created_after=timestamp(query, "created_after"),
        created_before=timestamp(query, "created_before"),
    )
    bodies = [await view.response(body) for body in await here.runs.views.bodies(page)]
    return json_reply(page_json(bodies, [stored.id for stored in page.data], has_more=page.has_more))


@router.get(
    "/{response_id}",
    **documented(
        "Response",
        "responses.read",
        query=("stream", "starting_after", "include_obfuscation", "wait", "include", "beta"),
        headers=("Last-Event-ID", "X-Antiphon-Profile"),
        stream="ResponseEvent",
    ),
)
async def retrieve_response(request: Request, response_id: str) -> Response:
    """A response as it stands, or after `wait` seconds at most (extension) at its end; or (`stream=true`) its
    events from any point on."""
    query = request.query_params
    runs, stream = context(request).runs, flag(query, "stream")
    pads = stream and flag(query, "include_obfuscation")
    # Events come again as they were.
    shown = include(query, fills=lambda name: name in FILLED and not stream)
    wait_s = number(query, "wait", minimum=0, maximum=MAX_WAIT_S)
    if stream and wait_s is not None:
        refuse("wait", "A stream waits anyway: 'wait' cannot be given together with 'stream'.")
    if not stream:
        waiting = runs.views.get(owner(request), response_id, wait_s=wait_s or 0.0, include=shown)
        return await _reply(request, await (while_connected(request, waiting) if wait_s else waiting))
    with ExitStack() as stack:
        stack.enter_context(context(request).limiter.stream(principal(request).subjects))
        return await _resumed(request, response_id, stack, pads=pads)


async def _resumed(request: Request, response_id: str, held: ExitStack, *, pads: bool) -> Response:
    """The events of a response from `starting_after` on."""
    runs, after, profile = context(request).runs, _starting_after(request), _profile(request)
    if (run := runs.views.unkept(owner(request), response_id)) is not None:
        view = View(profile, after=after, rates=_rates(request), key=run.plan.id_secret if pads else None)
        _require_in_memory(request, run.entry.channel, after, first=view.reads_after)
        headers = context(request).models.headers(run.plan.model)
        return _stream(request, runs.feed.join(response_id), held.pop_all(), view, headers=headers)
    reader, stored = await runs.views.rejoin(owner(request), response_id)
    held.callback(reader.close)
    ended = stored.status in TERMINAL
    _require_events(reader, stored)
    await _require_event(request, stored, after)
    view = View(profile, after=after, rates=_rates(request), key=_secret(stored) if pads else None)
    headers = context(request).models.headers(stored.model)
    return _stream(request, reader, held.pop_all(), view, ended=ended, headers=headers)


async def _require_event(request: Request, stored: StoredResponse, after: int) -> None:
    """ApiError 400 unless a response has the event that its client says it has. A client that has the last
    one waits for the next, or, where that was the end, gets an empty stream."""
    if stored.run is not None:
        known = after < stored.run.next_seq
    else:
        storage = context(request).storage
        known = after < 0 or bool(await storage.records(stored.id, after=after - 1, limit_bytes=1))
    if not known:
        raise _beyond_log(request, stored.id, after, in_flight=stored.run is not None)


def _require_in_memory(request: Request, channel: Channel, after: int, *, first: int) -> None:
    """ApiError 400 unless the events of a response that is not stored are in memory: those behind `after`,
    and those that the stream reads without sending them, from behind `first` on."""
    if channel.next_seq is not None and after >= channel.next_seq:
        raise _beyond_log(request, channel.response_id, after, in_flight=not channel.ended)
    if not channel.covers(first):
        message = (
            f"Response '{channel.response_id}' is not stored, and its first events are in memory no more: "
            "read it from a later one, or retrieve it without 'stream'."
        )
        raise ApiError(400, message, code="events_expired", param="stream")


def _beyond_log(request: Request, response_id: str, after: int, *, in_flight: bool) -> ApiError:
    message = f"Response '{response_id}' has no event {after}{' yet' if in_flight else ''}."
    source = "starting_after" if "starting_after" in request.query_params else "Last-Event-ID"
    return ApiError(400, message, code="cursor_beyond_log", param=source)


def _starting_after(request: Request) -> int:
    """The last event that the client has: `starting_after`, else Last-Event-ID, else -1."""
    after = integer(request.query_params, "starting_after", minimum=-1)
    if after is not None:
        return after
    last = request.headers.get("last-event-id", "").strip()
    if last and not (last.isascii() and last.isdigit() and len(last) < 19):
        refuse("Last-Event-ID", "Last-Event-ID must be the number of an event.")
    return int(last) if last else -1


@router.get(
    "/{response_id}/input_items",
    **documented("Items", "responses.read", query=(*PAGE, "scope", "include", "beta")),
)
async def list_input_items(request: Request, response_id: str) -> Response:
    """The response's own new input, newest first; `scope=all` (extension) adds the history before it."""
    query = request.query_params
    storage, who = context(request).storage, owner(request)
    args = page_args(query)
    if choice(query, "scope", ("own", "all")) == "all":
        page = await storage.all_input_items(who, response_id, **args)
    else:
        page = await storage.input_items(who, response_id, **args)

    def fills(name: str) -> bool:
        return any(filled_body(item.body, item.private, [name]) != item.body for item in page.data)

    shown = include(query, fills)
    bodies = [filled_body(item.body, item.private, shown) for item in page.data]
    return json_reply(page_json(bodies, [item.id for item in page.data], has_more=page.has_more))


@router.post(
    "/input_tokens",
    **documented(
        "InputTokens", "responses.read", body="CountInputTokens", body_required=False, query=("beta",)
    ),
)
async def count_input_tokens(request: Request) -> Response:
    """How many prompt tokens a request would have, through the very rendering that a run uses."""
    filled = partial(with_prompt, request, "input_tokens")
    read = asking(request, parse_input_tokens)
    parsed, items = await read_as(request, read, allow_empty=True, ahead=filled)
    parsed = await with_model(request, parsed)
    name_in_vain(request, parsed, items)
    count = await context(request).runs.intake.count_input(principal(request), parsed, items)
    return json_reply(orjson.dumps({"object": "response.input_tokens", "input_tokens": count}))


@router.post(
    "/compact", **documented("Compaction", "responses.write", body="CompactResponse", query=("beta",))
)
async def compact_conversation(request: Request) -> Response:
    """Summarise a conversation: the user's newest messages, and an item that stands for all of it. Their list
    is the input of a next response, in the place of the conversation."""
    here, who, key = context(request), principal(request), keyed(request)

    def first(body: Mapping[str, Any]) -> None:
        if key.response_id is None:
            here.models.require_room(body, who.owner, who.service.weight)

    parsed, items = await read_as(request, _compact_asked, first=first)
    name_in_vain(request, parsed, items)
    if key.response_id is not None:
        found = await while_connected(request, here.runs.views.answer(who.owner, key.response_id))
        history = await here.storage.history(who.owner, previous_response_id=key.response_id, hidden=True)
        much = len(history) > THREADED_PARTS
        return await aside(much, _compaction, found.body, [item for item, _ in read_items(history)])
    parsed = _salted(parsed, _profile(request))
    limited(request, here.models.get(parsed.model).name)
    planning = partial(while_connected, request)
    started = await here.runs.create(who, parsed, items, key.request, planning, by=actor(request))
    key.started(started.response_id)
    try:
        body = await while_connected(request, _result(here, started, None))
        failure = started.failure()
        if failure is not None:
            raise failure
        past = await aside(in_large_request(), started.past, "completed")
        return await aside(in_large_request(), _compaction, body, past.items)
    finally:
        started.reader.close()


def _compact_asked(body: Mapping[str, Any]) -> tuple[CreateResponse, list[Item]]:
    """A body of POST /responses/compact as the request, and its input's items. Raises ApiError 400."""
    parsed = parse_compact(body)
    value, _ = without_trigger(parsed.input, new_id)
    items = [] if value is None else normalize_input(value, new_id=new_id)
    return parsed.model_copy(update={"input": None}), items


def _compaction(body: bytes, items: Sequence[Item]) -> Response:
    """The reply to a request for a compaction. body: the response that made it. items: all that led to it,
    and its output. Raises ApiError where it was not made."""
    response = orjson.loads(body)
    output, error = response["output"], response["error"]
    made = next((item for item in reversed(items) if item["type"] == COMPACTION), None)
    content = None if made is None else compacted(made)
    if response["status"] != "completed" or content is None:
        message = "The compaction was cancelled." if error is None else error["message"]
        raise ApiError(500, message, code="server_error" if error is None else error["code"])
    said = [item for item in items if item["type"] == "message" and item["role"] == "user"]
    kept = said[len(said) - content.num_users :] if content.num_users else []
    reply = {"id": response["id"], "object": "response.compaction", "output": [*kept, *output]}
    return json_reply(
        orjson.dumps({**reply, "created_at": response["created_at"], "usage": response["usage"]})
    )


# ------------------------------------------------------------------------------------------------------------
# Changing


@router.delete("/{response_id}", **documented("Deleted", "responses.write", query=("beta",)))
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a response, its events and what only it refers to; one in flight is cancelled."""
    await context(request).runs.delete(owner(request), response_id)
    return json_reply(orjson.dumps({"id": response_id, "object": "response", "deleted": True}))


@router.post(
    "/{response_id}/fork",
    **documented(
        "Response",
        "responses.write",
        body="ForkResponse",
        body_required=False,
        headers=("X-Antiphon-Profile",),
    ),
)
async def fork_response(request: Request, response_id: str) -> Response:
    """Make a response that ends at an item of this one, or at an event, and can be gone on from
    (extension)."""
    wanted = await read_as(request, partial(parse_fork, at_event=True), allow_empty=True)
    _profile(request)  # refused before anything is made
    key, here, who = keyed(request), context(request), owner(request)
    if key.response_id is not None:
        return await _again(request, key.response_id, stream=False)
    new = await prepare_fork(here.storage, who, response_id, wanted)
    await require_stored_bytes(request, len(new.head) + len(new.echo) + len(new.plan))
    with asked_by("after"):
        await here.storage.fork_response(who, response_id, new, key.request)
    key.started(new.id)
    return await _reply(request, await here.runs.views.get(who, new.id))


@contextmanager
def asked_by(param: str) -> Iterator[None]:
    """Has the 404 for an item name the field of the body that asked for it."""
    try:
        yield
    except NotFound as unknown:
        raise (to_api_error(unknown, param=param) if unknown.kind == "item" else unknown) from None


@router.post(
    "/{response_id}/cancel",
    **documented("Response", "responses.write", query=("beta",), headers=("X-Antiphon-Profile",)),
)
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancel a run in flight. SDKs send no body, and nothing that stands in one changes anything."""
    unread(await read_body(request, allow_empty=True), ())
    _profile(request)  # refused before the run is cancelled
    return await _reply(request, await context(request).runs.cancel(owner(request), response_id))


@router.post(
    "/{response_id}/tool_outputs",
    **documented(
        "Response",
        "responses.write",
        body="ToolOutputs",
        headers=("X-Antiphon-Profile",),
        stream="ResponseEvent",
    ),
)
async def submit_tool_outputs(request: Request, response_id: str) -> Response:
    """Feed a waiting run, or continue a response that completed with unanswered calls (extension)."""
    outputs = await read_as(request, partial(parse_tool_outputs, new_id=new_id))
    _profile(request)  # refused before the run is fed
    runs, who = context(request).runs, owner(request)
    if (known := keyed(request).response_id) is not None:
        return await _again(request, known, stream=outputs.stream)
    stored, pending = await runs.tool_outputs.pending(who, response_id)
    if stored.status != "completed" or not pending:
        if outputs.stream:
            ignore("stream")  # the run goes on in the stream that it has
        limited(request, stored.model)
        fed = await runs.tool_outputs.feed(principal(request), stored, outputs.items, by=actor(request))
        return await _reply(request, fed)
    if len(stored.plan) > THREADED_BYTES:
        begin_large_request()
    with collecting():  # what the first request said was named in its reply
        parsed, items = await aside(in_large_request(), _goes_on, stored, outputs, pending)
    with _named_as_outputs():
        return await _start(request, parsed, items)


@contextmanager
def _named_as_outputs() -> Iterator[None]:
    """Have errors about items of a request's input name the outputs that its client has sent them as."""
    try:
        yield
    except ApiError as error:
        if error.param is not None and error.param.startswith("input["):
            error.param = f"tool_outputs{error.param.removeprefix('input')}"
            error.message = error.message.replace("'input[", "'tool_outputs[")
        raise


def _goes_on(
    stored: StoredResponse, outputs: ToolOutputs, pending: Collection[str]
) -> tuple[CreateResponse, list[Item]]:
    """The request that goes on where a completed response stopped, and its input. pending: the keys of its
    calls without an answer. Raises ApiError 400."""
    if secured := RunPlan.load(stored.plan).secured:
        refuse(
            "tool_outputs",
            f"The credentials of the MCP server '{secured[0]}' were erased when the response ended. Go on by "
            "POST /v1/responses, with previous_response_id, these outputs as input, and the tools once more.",
            "mcp_credentials_erased",
        )
    answers = answering(outputs.items, [orjson.loads(item.body) for item in stored.output])
    if missing := sorted(set(pending) - {key_of(item) for item in answers}):
        refuse("tool_outputs", f"Outputs of all pending calls are needed; missing: {', '.join(missing)}.")
    body = _continuation(stored, answers, stream=outputs.stream)
    # Its parent was taken with these tools, whatever the server would say of them now.
    parsed, items = _asked(parse_create, "ignore", body)
    return parsed.model_copy(update={"prompt": RunPlan.load(stored.plan).prompt}), items


def _continuation(stored: StoredResponse, items: list[dict[str, Any]], *, stream: bool) -> dict[str, Any]:
    """The body of a request with everything that its parent asked for."""
    parent = orjson.loads(b"{" + stored.echo + b"}")
    plan = RunPlan.load(stored.plan)
    body = {name: parent[name] for name in INHERITED if parent.get(name) is not None}
    if isinstance(body.get("instructions"), list):  # those of a prompt template, which the plan has
        del body["instructions"]
    if "conversation" not in body:
        body["previous_response_id"] = stored.id
    if "tools" in body:  # strict is the default: who asks for it by name is told of more that cannot hold
        body["tools"] = [
            {k: v for k, v in tool.items() if (k, v) != ("strict", True)} for tool in body["tools"]
        ]
    body["reasoning"] = {"effort": parent["reasoning"]["effort"], "context": parent["reasoning"]["context"]}
    choice = parent["tool_choice"]
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        body["tool_choice"] = {**choice, "mode": "auto"}  # a forced choice held for the first generation only
    sampling = {name: value for name, value in plan.sampling.items() if name != "logprobs"}
    wanted = {
        "message.output_text.logprobs": plan.logprobs,
        encrypted_reasoning.INCLUDE: plan.sealed_by is not None,
    }
    body["include"] = [*plan.include, *(name for name, asked in wanted.items() if asked)]
    if plan.compaction is not None and plan.compaction.threshold is not None:
        threshold = max(plan.compaction.threshold, LEAST_THRESHOLD)
        body["context_management"] = [{"type": "compaction", "compact_threshold": threshold}]
    if plan.cache_salt:
        body["cache_salt"] = plan.cache_salt
    if plan.answer is not None and parent["text"]["format"] == TEXT:  # an extension asked for it
        body["structured_outputs"] = as_output(*plan.answer)
    if plan.moderation:
        policy = {half: {"mode": plan.moderation[half]} for half in ("input", "output")}
        body["moderation"] = {"model": plan.moderation["model"], "policy": policy}
    if plan.template_kwargs:
        body["chat_template_kwargs"] = plan.template_kwargs
    return {**body, **sampling, "input": items, "stream": stream}


INHERITED = (
    "model", "instructions", "tools", "text", "metadata", "background", "parallel_tool_calls",
    "max_tool_calls", "max_output_tokens", "top_logprobs", "truncation", "conversation", "safety_identifier",
    "prompt_cache_key", "user",
)  # fmt: skip
"""Fields of a response's echo that its continuation by tool outputs takes over."""
