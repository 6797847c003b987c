"""Messages: what `/v1/messages` asks of the engine and answers; nothing is stored.

The engine is asked what a chat completion of the same items would ask. Deltas become the events of a message
here, and a whole message is folded from the same events.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import orjson

from engine import CallArgs, CallEnd, CallStart, Chunk, Done, Place, Reasoning, Text
from server.access import Principal, require_use
from server.encrypted_reasoning import INCLUDE, Seal, Sealing
from server.errors import ApiError, messages_error
from server.items import Item
from server.model_registry import ServedModel
from server.schema import ChatRequest, MessagesRequest, in_words_of_messages, words_of_messages
from server.sse_frame import frame
from server.stateless.chat import offer_of, prepare_chat, rendered
from server.stateless.choices import Completion, Form, Part, noted_failure
from server.telemetry import Telemetry, current
from server.threads import aside, in_large_request
from server.usage import Meter

Json = dict[str, Any]

_TIERS: Mapping[str, str] = {"priority": "priority"}
"""Our service tiers that the official API has, too; all others are its `standard`."""


class ReadInputs(Protocol):
    """Reads the files and the images of items, whose paths are given in their order."""

    async def __call__(
        self, items: Sequence[Item], *, files: Sequence[str], images: Sequence[str]
    ) -> Sequence[Item]:
        """The items, which hold what was read. Raises ApiError."""
        ...


async def opened(request: MessagesRequest, name: str | None, sealing: Sealing, owner: str) -> MessagesRequest:
    """The request to the model of this name, with what its thoughts say. Raises ApiError 400 for a signature
    that this server did not make for this owner, or that was changed."""
    try:
        # Thoughts are shown to whichever model goes on: clients change models within a conversation.
        items = await sealing.opened(owner, request.items, model=None)
    except ApiError as error:
        raise _of_signature(error, request) from None
    return request.to_model(name, list(items))


async def read_inputs(request: MessagesRequest, read: ReadInputs) -> None:
    """Have a request hold what its files and images say, which `read` reads. Raises what that raises."""
    files, images = request.file_paths(), request.image_paths()
    if files or images:
        with words_of_messages():
            request.items[:] = await read(request.items, files=files, images=images)


def _of_signature(error: ApiError, request: MessagesRequest) -> ApiError:
    """The error of a seal, as one of the block that has it."""
    index = int((error.param or "").partition("[")[2].partition("]")[0])
    path = request.places[index].path
    why = error.message.partition(" could not be verified: ")[2].partition(". ")[0]
    message = (
        f"Invalid '{path}': the thought could not be verified: {why}. Send the block as it was returned, or "
        "leave it out."
    )
    return ApiError(400, message, code=error.code, param=path)


def _asked(request: MessagesRequest, served: ServedModel) -> ChatRequest:
    """What the engine of a model is asked. Raises ApiError 400 `unsupported_content` for the first block that
    the model cannot read."""
    found = request.unreadable(served.info.modalities)
    if found is not None:
        path, modality = found
        message = f"The model '{served.name}' cannot read {modality} content."
        raise ApiError(400, message, code="unsupported_content", param=path)
    if request.budget is None or "thinking_budget" not in served.info.template_variables:
        return request.chat
    return request.chat.model_copy(update={"chat_template_kwargs": {"thinking_budget": request.budget}})


async def count_message_tokens(request: MessagesRequest, served: ServedModel, *, principal: Principal) -> int:
    """Tokens of the prompt, as `prepare_message` renders it. Raises ApiError 400 and 403."""
    chat = await aside(in_large_request(), _asked, request, served)
    require_use(principal, served.allowed_as, chat.tools)
    with words_of_messages():
        offered = await aside(in_large_request(), offer_of, chat)
        prompt = await rendered(chat, served, offered, scope=principal.owner)
    return len(prompt.ids)


async def prepare_message(
    request: MessagesRequest,
    served: ServedModel,
    place: Place,
    *,
    principal: Principal,
    person: str | None,
    telemetry: Telemetry,
    meter: Meter,
    sealing: Sealing,
) -> Completion:
    """Render the prompt and resolve everything else. Raises ApiError 400 and 403, and RequestError."""
    chat = await aside(in_large_request(), _asked, request, served)
    with words_of_messages():
        completion = await prepare_chat(
            chat, served, place, principal=principal, person=person, telemetry=telemetry, meter=meter
        )
    seal = None
    if request.display is not None:
        seal = await sealing.seal(principal.owner, await sealing.by([INCLUDE], served.name))
    tier = "batch" if principal.batch else _TIERS.get(completion.head["service_tier"], "standard")
    head = {**completion.head, "id": f"msg_{secrets.token_hex(12)}", "service_tier": tier}
    told = partial(message_head, head)
    limit = completion.requests[0].sampling.max_tokens
    is_cut = limit < min(chat.max_tokens or limit, served.caps.output(chat.max_tokens) or limit)
    writer = MessageWriter(
        lambda: told(completion.usage.totals()),
        seal=seal,
        shows=request.display == "summarized",
        silent=request.only_reads,
        limit="model_context_window_exceeded" if is_cut else "max_tokens",
    )
    named = completion.named
    return replace(
        completion,
        writers=[writer],
        head=head,
        silent=request.only_reads,
        form=FORM,
        named=lambda error: in_words_of_messages(named(error)),
    )


# ------------------------------------------------------------------------------------------------------------
# Usage, and the head of a message


def message_usage(head: Mapping[str, Any], totals: Mapping[str, Any]) -> Json:
    """The official usage object. The three counts of input are together the tokens of the prompt: those that
    were in the prefix cache, those that are in it from now on, and the rest, which is no whole block."""
    read = totals["prompt_tokens_details"]["cached_tokens"]
    written = totals["prompt_tokens_details"]["cache_write_tokens"]
    return {
        "input_tokens": totals["prompt_tokens"] - read - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "cache_creation": {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": 0},
        "output_tokens": totals["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": totals["completion_tokens_details"]["reasoning_tokens"]},
        "service_tier": head["service_tier"],
    }


def message_head(head: Mapping[str, Any], totals: Mapping[str, Any]) -> Json:
    """A message of which nothing is said yet."""
    return {
        "id": head["id"],
        "type": "message",
        "role": "assistant",
        "model": head["model"],
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "usage": message_usage(head, totals),
        **({"moderation": head["moderation"]} if "moderation" in head else {}),
    }


# ------------------------------------------------------------------------------------------------------------
# Deltas to events

_GAP = "\n\n"
"""Between what was said before the answer, and the answer."""
_SAID = ("text", "thinking", "partial_json")
"""The members of deltas that say something."""
_WITHHELD: Json = {
    "type": "refusal",
    "category": None,
    "explanation": "The moderation that the request asks for has kept this back.",
}


class MessageWriter:
    """One message: deltas to events, `{"index": 0, "events": [...]}` for each chunk, and those to a whole."""

    def __init__(
        self,
        head: Callable[[], Json],
        *,
        seal: Seal | None,
        shows: bool,
        silent: bool,
        limit: str,
    ) -> None:
        """head: the message as it begins, with the usage so far. seal: signs thoughts; None: they are not
        told at all. shows: their texts are told, not only their signatures. silent: nothing is told. limit:
        why an answer stops that has no room left."""
        self._head = head
        self._seal = seal
        self._shows = shows
        self._silent = silent
        self._limit = limit
        self._begun = False
        self._kind = ""  # of the block at work
        self._index = -1  # of the newest block
        self._thought: list[str] = []
        self._preamble = False
        self._has_call = False

    def write(self, chunk: Chunk) -> list[Part]:
        """One part, with the events of a chunk."""
        events: list[Json] = []
        if not self._begun:
            self._begun = True
            events.append({"type": "message_start", "message": self._head()})
        for delta in chunk.deltas:
            if isinstance(delta, Done):
                events += self._end(delta)
            elif not self._silent:
                events += self._event(delta)
        return [_part(events)] if events else []

    def _event(self, delta: Any) -> Iterable[Json]:
        match delta:
            case Text(text=text) if text:
                # Chat has one text, and so has a message: what was said before the answer is a paragraph.
                gap = _GAP if self._preamble and not delta.preamble and self._kind == "text" else ""
                self._preamble = delta.preamble
                yield from self._block("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": gap + text})
            case Reasoning(text=text) if text and self._seal is not None:
                yield from self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                self._thought.append(text)
                if self._shows:
                    yield self._delta({"type": "thinking_delta", "thinking": text})
            case CallStart(name=name):
                yield from self._close()
                call_id = f"toolu_{secrets.token_hex(12)}"
                yield from self._block(
                    "tool_use", {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                )
            case CallArgs(text=text) if text:
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnd(complete=complete):
                self._has_call |= complete
                yield from self._close()

    def _block(self, kind: str, block: Json) -> Iterable[Json]:
        """Have a block of this kind be at work: the one that is, or a new one."""
        if self._kind == kind:
            return
        yield from self._close()
        self._kind = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterable[Json]:
        """End the block at work, a thought with its signature."""
        if not self._kind:
            return
        if self._kind == "thinking" and self._seal is not None:
            content = [{"type": "reasoning_text", "text": "".join(self._thought)}]
            signature = self._seal.thought(f"{self._head()['id']}/{self._index}", content)
            self._thought = []
            yield self._delta({"type": "signature_delta", "signature": signature})
        self._kind = ""
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _end(self, done: Done) -> Iterable[Json]:
        yield from self._close()
        stop = done.stop if isinstance(done.stop, str) else None
        yield from self._stopped(self._reason(done, stop), stop)

    def _stopped(self, reason: str, sequence: str | None, details: Json | None = None) -> Iterable[Json]:
        usage = self._head()["usage"]
        del usage["cache_creation"], usage["service_tier"]
        delta = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": details}
        yield {"type": "message_delta", "delta": delta, "usage": usage}
        yield {"type": "message_stop"}

    def _reason(self, done: Done, stop: str | None) -> str:
        if self._silent:
            return "max_tokens"
        if done.reason == "length":
            return self._limit
        if self._has_call:
            return "tool_use"
        return "end_turn" if stop is None else "stop_sequence"

    def said(self, part: Part) -> str:
        """All that a part says."""
        deltas = (event["delta"] for event in part["events"] if event["type"] == "content_block_delta")
        return "".join(delta.get(member, "") for delta in deltas for member in _SAID)

    def withheld(self) -> list[Part]:
        """The part of a message without words that moderation has ended."""
        start = {"type": "message_start", "message": self._head()}
        return [_part([start, *self._stopped("refusal", None, _WITHHELD)])]

    def fold(self, parts: Sequence[Part]) -> Json:
        """What is said by the events of all parts."""
        content: list[Json] = []
        inputs: dict[int, list[str]] = {}
        end: Json = {}
        for event in (event for part in parts for event in part["events"]):
            match event["type"]:
                case "content_block_start":
                    content.append(dict(event["content_block"]))
                case "content_block_delta":
                    _add(content[event["index"]], event["delta"], inputs.setdefault(event["index"], []))
                case "message_delta":
                    end = event["delta"]
        for index, pieces in inputs.items():
            block = content[index]
            if block["type"] == "tool_use":
                block["input"] = _input("".join(pieces))
            else:
                _join(block, pieces)
        return {"content": content, **end}


def _part(events: list[Json]) -> Part:
    """Events that come together; the reason is that of the last ones."""
    reasons = (event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta")
    return {"index": 0, "events": events, "finish_reason": next(reasons, None)}


def _add(block: Json, delta: Json, pieces: list[str]) -> None:
    """Take a delta of a block: its text is joined at the end."""
    if delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
    else:
        pieces += (delta[member] for member in _SAID if member in delta)


def _join(block: Json, pieces: Sequence[str]) -> None:
    block[block["type"]] = "".join(pieces)


def _input(arguments: str) -> Json:
    """The input of a call. What is no JSON object, as of a call that was cut off, is kept as a text in one:
    clients take nothing else."""
    try:
        found = orjson.loads(arguments or "{}")  # what this does not read, the reply could not say
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}


# ------------------------------------------------------------------------------------------------------------
# On the wire


def _body(head: Mapping[str, Any], _object: str, choices: Sequence[Json], totals: Mapping[str, Any]) -> bytes:
    return orjson.dumps({**message_head(head, totals), **choices[0]})


async def _framed(
    _head: Mapping[str, Any],
    _object: str,
    parts: AsyncGenerator[list[Part]],
    *_usage: object,
    last: Callable[[], Mapping[str, Any]],
    **_options: object,
) -> AsyncGenerator[bytes]:
    """The frames of a stream: one write for events that come together. last: what the event of the end says
    besides."""
    async with aclosing(parts) as stream:
        async for together in stream:
            events = [event for part in together for event in part["events"]]
            for event in events:
                if event["type"] == "message_delta":
                    event.update(last())
            yield b"".join(frame(event["type"], orjson.dumps(event)) for event in events)


def _failure(exc: Exception) -> bytes:
    record = current.get()
    request_id = "" if record is None else record.request_id
    return frame("error", messages_error(noted_failure(exc), request_id))


FORM = Form(_body, _framed, _failure, keepalive=b'{"type":"ping"}')
"""How messages are written."""
