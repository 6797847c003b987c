"""Chat completions: what `/v1/chat/completions` asks of the engine and answers; nothing is stored.

A request becomes one generation for each choice, and a `ChatWriter` makes chunks, or a message, of what each
of them brings.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from orjson import Fragment

from engine import (
    CallArgs,
    CallEnd,
    CallStart,
    Chunk,
    Delta,
    Done,
    GenerateRequest,
    Place,
    Prompt,
    Reasoning,
    RenderInput,
    Text,
)
from server.access import Principal, admitted, require_use
from server.errors import ApiError
from server.ignored import ignore
from server.items import InputReader
from server.model_registry import ServedModel
from server.prompting import (
    Offer,
    cache_salt,
    check,
    custom_tool_names,
    image_options,
    name_capped_limit,
    name_cut_limit,
    name_idle_drafts,
    name_untold,
    name_unused_key,
    naming_source,
    offer,
    require_room,
    sampling,
    steady,
    to_messages,
    words_of_field,
)
from server.runs.events import encoded, item_logprob
from server.schema import ChatRequest, authors, completion_name, echoed, unsupported_in
from server.stateless.choices import (
    Completion,
    Part,
    PromptTold,
    Usage,
    check_logprobs,
    check_scores,
    check_search,
    logprob_by_id,
    new_head,
    prompt_requests,
)
from server.telemetry import Telemetry
from server.threads import THREADED_TOKENS, aside, in_large_request
from server.usage import Meter
from storage import Account


async def prepare_chat(
    request: ChatRequest,
    served: ServedModel,
    place: Place,
    *,
    principal: Principal,
    person: str | None,
    telemetry: Telemetry,
    meter: Meter,
) -> Completion:
    """Render the prompt, once for all choices, and resolve everything else. person: a digest of the person
    for whom the client asks. Raises ApiError 400 and 403, and RequestError."""
    require_use(principal, served.allowed_as, request.tools)
    name_unused_key(request.cache_salt, request.prompt_cache_key, served.caps)
    name_idle_drafts(served.info, request.sampling)
    owner = principal.owner
    request = admitted(principal.service, request)
    await aside(in_large_request(), check_modalities, request, served)
    check_logprobs(request.sampling.logprobs, served)
    check_logprobs(request.prompt_logprobs, served, "prompt_logprobs")
    check_search(request.search, served)
    offered = await aside(in_large_request(), offer_of, request)
    await check(offered, served, request.tools, request.shape_param, owner)
    echo = echoed(request) if request.echo else None  # rendering takes the messages apart
    prompt = await rendered(request, served, offered, scope=owner)
    prompt = await _as_asked(prompt, request, served)
    much = in_large_request() or len(prompt.ids) > THREADED_TOKENS
    return await aside(
        much, _completion, request, served, place, offered, prompt, echo, principal, person, telemetry, meter
    )


def _completion(
    request: ChatRequest,
    served: ServedModel,
    place: Place,
    offered: Offer,
    prompt: Prompt,
    echo: str | None,
    principal: Principal,
    person: str | None,
    telemetry: Telemetry,
    meter: Meter,
) -> Completion:
    """The choices of a request whose prompt is rendered. Raises ApiError 400 and RequestError."""
    owner = principal.owner
    with words_of_field("messages"):
        params = sampling(
            request.sampling,
            served.info,
            prompt_tokens=len(prompt.ids),
            seed=secrets.randbits(63),
            caps=served.caps,
        )
    limit = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    fits = name_cut_limit if request.cuts_max_tokens else require_room
    fits(request.sampling.max_tokens, limit, prompt_tokens=len(prompt.ids), info=served.info)
    name_capped_limit(request.sampling.max_tokens, limit, served.caps)
    num_scores = check_scores(len(prompt.ids), request.prompt_logprobs, "prompt_logprobs")
    params = replace(params, prompt_logprobs=request.prompt_logprobs)
    reader = replace(offered.reader(prompt.starts_in), special_tokens=not request.skip_special_tokens)
    completion_id = completion_name("chatcmpl", request.request_id, secrets.token_hex(12))
    asked = GenerateRequest(
        id=completion_id,
        prompt_ids=prompt.ids,
        sampling=steady(params, offered.answer),
        reader=reader,
        constraint=offered.enforced(served.info),
        owner=principal.owner,
        cache_salt=cache_salt(request.cache_salt, request.prompt_cache_key, served.caps),
        weight=principal.service.weight,
        priority=request.priority or 0,
        adapter=served.adapter,
        media=prompt.media,
        deadline=served.caps.deadline(),
    )
    return Completion(
        answered=served.answered,
        engine=served.engine,
        telemetry=telemetry,
        meter=meter,
        account=Account(
            owner,
            principal.key_id,
            served.name,
            request.service_tier or "default",
            batch=principal.batch,
            person=person,
        ),
        requests=prompt_requests(asked, served, request.search, request.n),
        writers=[
            ChatWriter(
                choice,
                logprobs=request.logprobs,
                custom_tool_names=custom_tool_names(request.tools),
                thoughts=request.include_reasoning,
                shows_ids=request.return_token_ids,
                names_ids=request.return_tokens_as_token_ids,
                echo=echo,
                role=_role(request, served),
            )
            for choice in range(request.n)
        ],
        head={**new_head(completion_id, served), "service_tier": request.service_tier},
        place=place,
        named=lambda error: naming_source(error, offered.constraint, request.tools, request.shape_param),
        usage=Usage([len(prompt.ids)], request.n, place, served.info),
        search=request.search,
        messages=lambda: to_messages(request.items),
        told=PromptTold(prompt.ids if request.return_token_ids else None, request.prompt_logprobs),
        num_scores=num_scores,
    )


def _role(request: ChatRequest, served: ServedModel) -> str:
    """The role of the answer: that of the last message where the answer goes on with it."""
    return "assistant" if request.continue_final_message else served.caps.response_role


def _require_own_template(request: ChatRequest, served: ServedModel) -> None:
    """Raise ApiError 400 for a chat template in a request, unless the operator trusts those."""
    if request.chat_template is not None and not served.caps.request_templates:
        message = (
            "Unsupported parameter: 'chat_template' is taken with the setting "
            "trust_request_chat_template only. Pass chat_template_kwargs to the model's own template."
        )
        raise ApiError(400, message, code="unsupported_parameter", param="chat_template")


async def _as_asked(prompt: Prompt, request: ChatRequest, served: ServedModel) -> Prompt:
    """A rendered prompt with the tokenizer's special tokens around it, and cut, where that is asked for."""
    ids: Sequence[int] = prompt.ids
    moved = 0
    if request.add_special_tokens:
        before, behind = await _special_tokens(served)
        ids, moved = (*before, *ids, *behind), len(before)
    if request.truncate_prompt_tokens is not None:
        kept = ids[-request.truncate_prompt_tokens :]
        ids, moved = kept, moved - (len(ids) - len(kept))
    media = [replace(span, offset=span.offset + moved) for span in prompt.media]
    if any(span.offset < 0 < span.offset + span.length for span in media):
        message = "The prompt cannot be cut in the middle of an image."
        raise ApiError(400, message, code="invalid_value", param="truncate_prompt_tokens")
    return replace(prompt, ids=ids, media=tuple(span for span in media if span.offset >= 0))


async def _special_tokens(served: ServedModel) -> tuple[Sequence[int], Sequence[int]]:
    """What the tokenizer puts in front of a text, and behind it."""
    bare = await served.engine.tokenize("a", add_special_tokens=False)
    full = await served.engine.tokenize("a", add_special_tokens=True)
    places = range(len(full) - len(bare) + 1)
    at = next((at for at in places if full[at : at + len(bare)] == bare), 0)
    return full[:at], full[at + len(bare) :]


def offer_of(request: ChatRequest) -> Offer:
    """What the model is offered. Raises ApiError 400."""
    return offer(request.tools, request.tool_choice, request.parallel_tool_calls, request.shape)


async def rendered(request: ChatRequest, served: ServedModel, offered: Offer, *, scope: str) -> Prompt:
    """The prompt, through the model's chat template. scope: the owner, whose earlier prompts it may build
    upon. Raises the engine's RequestErrors, and ApiError 400."""
    _require_own_template(request, served)
    if request.chat_template is None:  # what another template reads is its client's to know
        name_untold(
            served.info,
            effort=request.reasoning_effort if request.effort_param else None,
            effort_param=request.effort_param or "",
            template_kwargs=request.chat_template_kwargs,
        )
        if request.documents and "documents" not in served.info.template_variables:
            ignore("documents")
        name_unread_authors(request, served)
    options = image_options(request.mm_processor_kwargs, served.info)
    words = partial(_render_input, request, offered, served.caps.text_parts, time.time(), sees=served.sees)
    asked = replace(await aside(in_large_request(), words), image_options=options)
    with words_of_field("messages" if request.chat_template is None else "chat_template"):
        return await served.engine.render(replace(asked, scope=scope))


def name_unread_authors(request: ChatRequest, served: ServedModel) -> None:
    """Name the names of authors that the chat template does not print."""
    if "messages.name" not in served.info.template_variables:
        for path in authors(request.messages):
            ignore(path)


def _render_input(
    request: ChatRequest, offered: Offer, text_parts: bool | None, now: float, *, sees: bool
) -> RenderInput:
    """What the template is given. text_parts: see `Caps`. now: unix seconds. sees: whether the model is shown
    images."""
    going_on = request.continue_final_message
    asked = request.add_generation_prompt
    messages = to_messages(request.items, sees=sees)
    # Nobody needs them any more, and to free ten thousand takes long enough to be done here.
    request.messages.clear()
    request.items.clear()
    return RenderInput(
        messages,
        tools=offered.tools,
        add_generation_prompt=not going_on if asked is None else asked,
        continue_final_message=going_on,
        template_kwargs=_template_arguments(request),
        effort=request.reasoning_effort,
        chat_template=request.chat_template,
        answer=offered.answer,
        now=now,
        text_parts=text_parts,
    )


def _template_arguments(request: ChatRequest) -> dict[str, Any]:
    if request.documents is None:
        return request.chat_template_kwargs
    return {**request.chat_template_kwargs, "documents": request.documents}


def check_modalities(request: ChatRequest, served: ServedModel) -> None:
    """Raise ApiError 400 `unsupported_content` for the first part that the model cannot read."""
    for path, modality in unsupported_in(request.messages, modalities=served.info.modalities):
        message = f"The model '{served.name}' cannot read {modality} content."
        raise ApiError(400, message, code="unsupported_content", param=path)


CONTENT = {"function": "arguments", "custom": "input"}
"""The kinds of calls, and what the model writes of each."""
MADE = "server_tool_calls"
"""Where a message and a delta have the calls that the server has made itself."""

FILES_CITED = "file_citations"
"""Where they have citations of files."""


def opening(role: str, first: dict[str, Any]) -> list[dict[str, Any]]:
    """The first deltas of a message, whose first words are these: a client takes a `content` that is a text,
    be it empty, for the beginning of one, so a message that begins otherwise has none there."""
    if not first or "content" in first:
        return [{"role": role, "content": ""}, first]
    return [{"role": role, "content": None, **first}]


class ChatWriter:
    """One choice: deltas to the parts of chunks, and those to a message.

    Thoughts go out under both names that clients know, `reasoning` and `reasoning_content`.
    """

    def __init__(
        self,
        index: int,
        *,
        logprobs: bool,
        custom_tool_names: Collection[str] = (),
        thoughts: bool = True,
        shows_ids: bool = False,
        names_ids: bool = False,
        echo: str | None = None,
        role: str = "assistant",
    ) -> None:
        """custom_tool_names: of the tools that take a text. thoughts: whether reasoning goes out at all.
        shows_ids: parts have the ids of their tokens. names_ids: log probabilities write a token as its id.
        echo: the text that the message begins with. role: the message's."""
        self._index = index
        self._preamble = False
        self._logprobs = logprobs
        self._customs = custom_tool_names
        self._thoughts = thoughts
        self._shows_ids = shows_ids
        self._ids: list[int] = []  # of tokens that no part has told yet
        self._names_ids = names_ids
        self._echo = echo
        self._role = role
        self._input: InputReader | None = None  # of a custom call
        self._num_calls = 0
        self._whole_call = False
        self._begun = False

    # -- writing ---------------------------------------------------------------------------------------------

    def write(self, chunk: Chunk) -> list[Part]:
        """One part for most chunks; a new one where what comes would stand before what the last one has."""
        parts: list[Part] = []
        delta: dict[str, Any] = {}
        logprobs: list[Fragment] = []
        done: Done | None = None
        for event in chunk.deltas:
            if self._comes_before(event, delta):
                parts.append(self._part(delta, logprobs))
                delta, logprobs = {}, []
            match event:
                case Text():
                    self._text(delta, logprobs, event)
                case Reasoning() if self._thoughts:
                    delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + event.text
                case CallStart():
                    delta.setdefault("tool_calls", []).append(self._call(event.name))
                case CallArgs():
                    self._arguments(delta, event.text)
                case CallEnd():
                    self._whole_call |= event.complete
                case Done():
                    done = event
        if delta:
            parts.append(self._part(delta, logprobs))
        if done is not None:
            ended = {"finish_reason": self._finish(done), "stop_reason": done.stop}
            parts.append({**self._part({}), **ended})
        if not self._begun and (parts or self._echo):
            self._begun = True
            parts = self._opened(parts)
        return self._with_ids(parts, chunk) if self._shows_ids else parts

    def _opened(self, parts: list[Part]) -> list[Part]:
        """The first parts of a message, with what begins it."""
        if self._echo:
            return [self._part({"role": self._role, "content": self._echo}), *parts]
        *before, delta = opening(self._role, parts[0]["delta"])
        return [*map(self._part, before), {**parts[0], "delta": delta}, *parts[1:]]

    def _with_ids(self, parts: list[Part], chunk: Chunk) -> list[Part]:
        """The parts of a chunk, the last of which has the ids of its tokens."""
        self._ids += chunk.token_ids
        for part in parts:
            part["token_ids"] = []
        if parts:
            parts[-1]["token_ids"], self._ids = self._ids, []
        return parts

    def _comes_before(self, event: Delta, delta: dict[str, Any]) -> bool:
        """Whether clients would show an event before something that a part holds already."""
        if isinstance(event, Reasoning):
            return self._thoughts and ("tool_calls" in delta or "content" in delta)
        return isinstance(event, Text) and "tool_calls" in delta

    def _text(self, delta: dict[str, Any], logprobs: list[Fragment], text: Text) -> None:
        # Chat has one message: what was said before calls or the answer is a paragraph of it.
        gap = "\n\n" if self._preamble and not text.preamble else ""
        self._preamble = text.preamble
        delta["content"] = delta.get("content", "") + gap + text.text
        if self._logprobs:
            named = logprob_by_id if self._names_ids else item_logprob
            logprobs += [encoded(named(entry)) for entry in text.logprobs]

    def _part(self, delta: dict[str, Any], logprobs: Sequence[Fragment] = ()) -> Part:
        content = {"content": list(logprobs), "refusal": None} if logprobs else None
        return {"index": self._index, "delta": delta, "logprobs": content, "finish_reason": None}

    def _call(self, name: str) -> dict[str, Any]:
        kind = "custom" if name in self._customs else "function"
        self._input = InputReader() if kind == "custom" else None
        call = {"index": self._num_calls, "id": f"call_{secrets.token_hex(12)}", "type": kind}
        self._num_calls += 1
        return call | {kind: {"name": name, CONTENT[kind]: ""}}

    def _arguments(self, delta: dict[str, Any], text: str) -> None:
        """More of the newest call's arguments: onto its start where that is in the same part."""
        kind = "function"
        if self._input is not None:
            kind, text = "custom", self._input.feed(text)
        if calls := delta.get("tool_calls"):
            calls[-1][kind][CONTENT[kind]] += text
        elif text:
            delta["tool_calls"] = [{"index": self._num_calls - 1, kind: {CONTENT[kind]: text}}]

    def _finish(self, done: Done) -> str:
        if done.reason == "length":
            return "length"
        return "tool_calls" if self._whole_call else "stop"

    def said(self, part: Part) -> str:
        """All that a part says."""
        delta = part["delta"]
        written = (
            call[kind].get(content, "")
            for call in delta.get("tool_calls", ())
            for kind, content in CONTENT.items()
            if kind in call
        )
        return "".join((delta.get("content") or "", delta.get("reasoning", ""), *written))

    def withheld(self) -> list[Part]:
        """The parts of an answer without words that moderation has ended."""
        self._echo = None
        opening = self._part({"role": self._role, "content": ""})
        parts = [opening, {**self._part({}), "finish_reason": "content_filter", "stop_reason": None}]
        return [{**part, "token_ids": []} for part in parts] if self._shows_ids else parts

    # -- folding ---------------------------------------------------------------------------------------------

    def fold(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The choice with its message."""
        choice = folded(parts, logprobs=self._logprobs)
        if self._shows_ids:
            choice["token_ids"] = [token_id for part in parts for token_id in part["token_ids"]]
        return choice


def folded(parts: Sequence[Part], *, logprobs: bool) -> dict[str, Any]:
    """The choice that its parts make; the message's `content` is null where there are only calls. logprobs:
    whether they were asked for."""
    text: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    written: list[list[str]] = []  # what each call was given, piece by piece
    made: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    cited: list[dict[str, Any]] = []
    scored: list[Fragment | dict[str, Any]] = []
    role = "assistant"
    for part in parts:
        delta = part["delta"]
        role = delta.get("role", role)
        text.append(delta.get("content") or "")
        thoughts.append(delta.get("reasoning", ""))
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                kind = call["type"]
                calls.append({"id": call["id"], "type": kind, kind: dict(call[kind])})
                written.append([call[kind][CONTENT[kind]]])
            else:
                kind = calls[-1]["type"]
                written[-1].append(call[kind][CONTENT[kind]])
        made += ({key: each[key] for key in each if key != "index"} for each in delta.get(MADE, ()))
        annotations += delta.get("annotations", ())
        cited += delta.get(FILES_CITED, ())
        scored += (part["logprobs"] or {}).get("content", ())
    for call, pieces in zip(calls, written, strict=True):
        call[call["type"]][CONTENT[call["type"]]] = "".join(pieces)
    content = "".join(text)
    message: dict[str, Any] = {
        "role": role,
        "content": content if content or not calls else None,
        "refusal": None,
        "annotations": annotations,
    }
    if thought := "".join(thoughts):
        message["reasoning"] = message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    if made:
        message[MADE] = made
    if cited:
        message[FILES_CITED] = cited
    last = parts[-1]
    return {
        "index": last["index"],
        "message": message,
        "logprobs": {"content": scored, "refusal": None} if logprobs else None,
        "finish_reason": last["finish_reason"],
        **({"stop_reason": last["stop_reason"]} if "stop_reason" in last else {}),
    }
