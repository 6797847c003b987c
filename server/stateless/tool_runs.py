"""Chat completions with tools that the server runs: a view of a response that is not stored.

A request that offers such tools becomes a response, so that its limits, its calls and its end are those of
`/v1/responses`. Here the events of that response become chunks, and its output becomes a message.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from engine import RequestError
from server.access import Actor, Principal, admitted, require_use
from server.config import THREADED_BYTES
from server.errors import ApiError
from server.items import Item, execution_of, is_server_run
from server.model_registry import ServedModel
from server.prompting import name_idle_drafts, name_untold, name_unused_key
from server.runs import Planning, Runs, Started, require_servers
from server.runs.events import Events, ReaderLagged, terminal_response
from server.schema import ChatRequest, ChatStreamOptions, Unsupported, leave_out_lacking, refuse
from server.sse_frame import event_type
from server.stateless.chat import (
    CONTENT,
    FILES_CITED,
    MADE,
    check_modalities,
    folded,
    name_unread_authors,
    opening,
)
from server.stateless.choices import Keep, Part, body, check_logprobs, framed, new_head
from server.stateless.moderated import told_of_response
from server.threads import aside, in_large_request


def runs_tools(request: ChatRequest, runs: Runs, unsupported: Unsupported) -> bool:
    """Whether a request offers tools that the server runs. Raises ApiError 400 for one that it cannot run, or
    only names its place if `unsupported` is `ignore`."""
    if all(tool["type"] in ("function", "custom") for tool in request.tools):
        return False  # at no cost, because most requests are such
    left_out = runs.intake.lacking(request.tools)
    for index, why in left_out.items():
        leave_out_lacking(request.tools[index], request.place_of(index), why, unsupported)
    runs.intake.name_unkept_memory(
        request.tools, [request.place_of(index) for index, _ in enumerate(request.tools)]
    )
    return any(is_server_run(tool) and index not in left_out for index, tool in enumerate(request.tools))


async def start_tool_run(
    request: ChatRequest,
    served: ServedModel,
    runs: Runs,
    *,
    principal: Principal,
    by: Actor,
    planning: Planning,
) -> ToolRun:
    """Begin the response that makes a completion, whose reader the caller closes. planning, by: see
    `Runs.create`, whose errors are raised."""
    require_use(principal, served.allowed_as, request.tools)
    _require_no_approval(request, runs)
    await aside(in_large_request(), check_modalities, request, served)
    check_logprobs(request.sampling.logprobs, served)
    name_unused_key(request.cache_salt, request.prompt_cache_key, served.caps)
    name_untold(
        served.info,
        effort=request.reasoning_effort,
        effort_param="reasoning_effort",
        template_kwargs=request.chat_template_kwargs,
    )
    name_idle_drafts(served.info, request.sampling)
    name_unread_authors(request, served)
    tier = admitted(principal.service, request).service_tier
    with _words_of_chat():
        response = request.as_response()
        started = await runs.create(principal, response, request.items, planning=planning, by=by)
    head = new_head(f"chatcmpl-{started.response_id.removeprefix('resp_')}", served)
    return ToolRun(
        started,
        {**head, "service_tier": tier},
        request.logprobs,
        request.include_reasoning,
        served.caps.response_role,
    )


def _require_no_approval(request: ChatRequest, runs: Runs) -> None:
    """Raise ApiError 400 for a tool whose calls the client may have to approve."""
    for index, why in runs.intake.asking(request.tools).items():
        message = (
            "The calls of this tool may need the client's approval, which chat completions have no way to "
            f"give. {why} On POST /v1/responses calls can be approved."
        )
        refuse(f"{request.place_of(index)}.require_approval", message, "unsupported_parameter")


@contextmanager
def _words_of_chat() -> Iterator[None]:
    """Have what is wrong with the input of a response name the field of a chat completion that it came
    from."""
    try:
        yield
    except (ApiError, RequestError) as error:
        if (error.param or "").partition("[")[0] == "input":
            error.param = "messages"
        raise


@dataclass(frozen=True, slots=True)
class ToolRun:
    """A completion that a response makes. head: what its body and its chunks say. logprobs, thoughts: whether
    log probabilities and reasoning are shown. role: the message's. usage: filled in at its end."""

    started: Started
    head: dict[str, Any]
    logprobs: bool
    thoughts: bool
    role: str = "assistant"
    usage: dict[str, Any] = field(default_factory=dict)

    async def whole(self, object_name: str) -> bytes:
        """The body of a reply that is not streamed. Raises ApiError where the response has failed."""
        events = await self.started.finished()
        if events is None:
            raise _interrupted("The server stopped before the completion was done.")
        last = events.bodies[-1]
        return await aside(len(last) > THREADED_BYTES, self._folded, object_name, last)

    def _folded(self, object_name: str, last: bytes) -> bytes:
        response, writer = self._ended(last), self._writer()
        parts = [part for item in response["output"] for part in writer.item(item)]
        choice = folded([*parts, *writer.end(response)], logprobs=self.logprobs)
        head = {**self.head, **told_of_response(response.get("moderation"))}
        self.usage.update(_usage(response))
        return body(head, object_name, [choice], self.usage)

    def frames(
        self, object_name: str, options: ChatStreamOptions, keep: Keep | None = None
    ) -> AsyncGenerator[bytes]:
        """The frames of a streamed reply; `keep` stores the whole completion before its last chunk. Raises
        ApiError where the response fails."""
        usage: dict[str, Any] = {}
        told: dict[str, Any] = {}
        parts = self._parts(usage, told, keep)
        used = (lambda: usage) if options.include_usage else None
        pads = bool(options.include_obfuscation)
        return framed(self.head, object_name, parts, used, last=lambda: told, pads=pads)

    async def _parts(
        self, usage: dict[str, Any], told: dict[str, Any], keep: Keep | None
    ) -> AsyncGenerator[list[Part]]:
        """The parts of events that come together. At the end usage is filled in, and what was judged is
        told."""
        writer = self._writer()
        try:
            async with aclosing(self.started.reader.events()) as stream:
                async for events in stream:
                    much = events.size > THREADED_BYTES
                    if parts := await aside(much, _written, writer, events):
                        yield parts
                    if events.terminal:
                        response = await aside(much, self._ended, events.bodies[-1])
                        usage |= _usage(response)
                        told |= told_of_response(response.get("moderation"))
                        if keep is not None:
                            await keep(await aside(much, self._folded, "chat.completion", events.bodies[-1]))
                        yield writer.end(response)
                        return
        except ReaderLagged:
            raise _interrupted("The client has read so slowly that chunks were lost.") from None
        raise _interrupted("The server stopped before the completion was done.")

    def _writer(self) -> RunWriter:
        return RunWriter(logprobs=self.logprobs, thoughts=self.thoughts, role=self.role)

    def _ended(self, last: bytes) -> dict[str, Any]:
        """The response in its last event. Raises ApiError where it has not come to an answer."""
        response: dict[str, Any] = orjson.loads(terminal_response(last))
        if response["status"] in ("completed", "incomplete"):
            return response
        if response["status"] == "cancelled":
            raise _interrupted("The completion was cancelled.", {"x-should-retry": "false"})
        require_servers(response["output"])
        raise self.started.failure() or ApiError(
            500, response["error"]["message"], code=response["error"]["code"]
        )


_LATER: Mapping[str, str] = {"retry-after": "5"}


def _interrupted(message: str, headers: Mapping[str, str] = _LATER) -> ApiError:
    return ApiError(503, message, code="response_interrupted", headers=headers)


def _usage(response: Mapping[str, Any]) -> dict[str, Any]:
    """The official usage object of chat: each prompt of the response counts, and all that was generated."""
    usage = response["usage"]
    return {
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
        "total_tokens": usage["total_tokens"],
        "prompt_tokens_details": usage["input_tokens_details"],
        "completion_tokens_details": {"reasoning_tokens": usage["output_tokens_details"]["reasoning_tokens"]},
    }


# ------------------------------------------------------------------------------------------------------------
# Events to parts

_READ = frozenset(
    f"response.{name}".encode()
    for name in (
        *("output_item.added", "output_item.done", "output_text.delta", "output_text.annotation.added"),
        *("reasoning_text.delta", "function_call_arguments.delta", "custom_tool_call_input.delta"),
    )
)
"""The events that a message shows something of."""

_KINDS = {"function_call": "function", "custom_tool_call": "custom"}
"""The items of calls that the client carries out -> what chat calls them."""

_GAP = "\n\n"
"""Chat has one message: what each turn says is a paragraph of it."""


def _written(writer: RunWriter, events: Events) -> list[Part]:
    """The parts of events, one by one."""
    bodies = (each for each in events.bodies if event_type(each) in _READ)
    return [part for each in bodies for part in writer.event(orjson.loads(each))]


_PLACES = ("index", "start_index", "end_index")
"""Where a citation has places in the text."""


class RunWriter:
    """One message: the events of a response, or its whole items, to the parts of chunks.

    Annotations come in one delta at the end, because clients merge lists in deltas by an `index`, which
    annotations do not have. A call that the server has made is shown once its outcome is known, and those of
    all calls before it: such clients take an index beyond the end of a list for the end.
    """

    def __init__(self, *, logprobs: bool, thoughts: bool, role: str) -> None:
        """logprobs, thoughts: whether log probabilities and reasoning are shown. role: the message's."""
        self._role = role
        self._logprobs = logprobs
        self._thoughts = thoughts
        self._begun = False
        self._fresh = True  # nothing of the item at work was shown
        self._num_said = 0  # characters of the message so far
        self._start = 0  # where the text of the item at work begins among them
        self._has_thought = False
        self._kind = ""  # of the client's call at work
        self._num_calls = 0
        self._num_made = 0
        self._made: dict[str, Item | None] = {}  # the server's, by their ids; None: no outcome yet
        self._whole_call = False
        self._annotations: list[dict[str, Any]] = []
        self._file_citations: list[dict[str, Any]] = []

    def event(self, event: Mapping[str, Any]) -> list[Part]:
        """The parts of one event."""
        match event["type"].removeprefix("response."):
            case "output_item.added":
                return self._added(event["item"])
            case "output_text.delta":
                return self._text(event["delta"], list(map(_with_bytes, event["logprobs"])))
            case "output_text.annotation.added":
                self._cite(event["annotation"])
            case "reasoning_text.delta":
                return self._thought(event["delta"])
            case "function_call_arguments.delta" | "custom_tool_call_input.delta":
                return self._arguments(event["delta"])
            case "output_item.done":
                return self._done(event["item"])
        return []

    def item(self, item: Item) -> list[Part]:
        """The parts of a whole item."""
        parts = self._added(item)
        for part in item.get("content") or ():
            if part["type"] == "output_text":
                parts += self._text(part["text"], part["logprobs"])
                for annotation in part["annotations"]:
                    self._cite(annotation)
            elif part["type"] == "reasoning_text":
                parts += self._thought(part["text"])
        if item["type"] in _KINDS:
            parts += self._arguments(item[CONTENT[_KINDS[item["type"]]]])
        return parts + self._done(item)

    def end(self, response: Mapping[str, Any]) -> list[Part]:
        """The last parts, of a response that has come to an answer."""
        parts: list[Part] = []
        for name, notes in (("annotations", self._annotations), (FILES_CITED, self._file_citations)):
            parts += self._part({name: notes}) if notes else []
        finish = "tool_calls" if self._whole_call else "stop"
        if response["status"] == "incomplete":
            filtered = response["incomplete_details"]["reason"] == "content_filter"
            finish = "content_filter" if filtered else "length"
        *before, last = [*parts, *self._part({})]
        return [*before, {**last, "finish_reason": finish}]

    def _part(self, delta: dict[str, Any], logprobs: Sequence[dict[str, Any]] = ()) -> list[Part]:
        """A part with this delta, and with what begins the message where nothing has."""
        *before, delta = [delta] if self._begun else opening(self._role, delta)
        self._begun = True
        content = {"content": list(logprobs), "refusal": None} if logprobs else None
        return [
            *({"index": 0, "delta": each, "logprobs": None, "finish_reason": None} for each in before),
            {"index": 0, "delta": delta, "logprobs": content, "finish_reason": None},
        ]

    def _added(self, item: Item) -> list[Part]:
        self._fresh = True
        self._start = self._num_said + (len(_GAP) if self._num_said else 0)
        if execution_of(item) is not None:
            self._made[item["id"]] = None
        if item["type"] not in _KINDS:
            return []
        self._kind = _KINDS[item["type"]]
        call = {"index": self._num_calls, "id": item["call_id"], "type": self._kind}
        self._num_calls += 1
        return self._part(
            {"tool_calls": [{**call, self._kind: {"name": item["name"], CONTENT[self._kind]: ""}}]}
        )

    def _text(self, text: str, logprobs: Sequence[dict[str, Any]]) -> list[Part]:
        if not text:
            return []
        if self._fresh:
            text = _GAP * bool(self._num_said) + text
        self._fresh = False
        self._num_said += len(text)
        return self._part({"content": text}, logprobs if self._logprobs else ())

    def _cite(self, annotation: Mapping[str, Any]) -> None:
        """Keep a citation of the item's text, placed in that of the message. The annotations of chat are of
        the web alone, and a client that checks replies would refuse others: so files have a list of their
        own, in which they are as Responses has them."""
        placed = {
            name: value + self._start if name in _PLACES else value for name, value in annotation.items()
        }
        kind = placed["type"]
        if kind == "url_citation":
            del placed["type"]
            self._annotations.append({"type": kind, kind: placed})
        else:
            self._file_citations.append(placed)

    def _thought(self, text: str) -> list[Part]:
        if not (text and self._thoughts):
            return []
        text = _GAP * (self._fresh and self._has_thought) + text
        self._fresh, self._has_thought = False, True
        return self._part({"reasoning": text, "reasoning_content": text})

    def _arguments(self, text: str) -> list[Part]:
        if not text:
            return []
        call = {"index": self._num_calls - 1, self._kind: {CONTENT[self._kind]: text}}
        return self._part({"tool_calls": [call]})

    def _done(self, item: Item) -> list[Part]:
        if item["type"] in _KINDS:
            self._whole_call |= item["status"] == "completed"
        if execution_of(item) is not None:
            self._made[item["id"]] = item
        parts: list[Part] = []
        while self._made and (made := next(iter(self._made.values()))) is not None:
            del self._made[made["id"]]
            parts += self._part({MADE: [{"index": self._num_made, **made}]})
            self._num_made += 1
        return parts


def _with_bytes(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A log probability of an event as chat has it: with the bytes of its text, which are not known where
    that is a part of a character."""

    def with_bytes(token: Mapping[str, Any]) -> dict[str, Any]:
        text = token["token"]
        return {**token, "bytes": None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())}

    return {**with_bytes(entry), "top_logprobs": list(map(with_bytes, entry["top_logprobs"]))}
