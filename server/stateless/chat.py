"""Chat completions: a stateless view over the engine, with messages in and chunks out.

Owns the way from a chat request to generations, and from deltas to the parts of chunks. Refuses to know how
messages become a prompt (`server.prompting.messages`), how generations run side by side
(`server.stateless.choices`), and storage.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from engine import (
    CallArgs,
    CallEnd,
    CallStart,
    Chunk,
    Done,
    GenerateRequest,
    Place,
    Prompt,
    Reasoning,
    RenderInput,
    Text,
    check_request,
)
from server.errors import ApiError
from server.metrics import Telemetry
from server.model_registry import ServedModel
from server.prompting import (
    InputReader,
    Offer,
    check,
    custom_tool_names,
    offer,
    require_room,
    sampling,
    steady,
    to_messages,
)
from server.runs.events import item_logprob
from server.schema import PRIORITIES, ChatRequest, effective_tier, num_parts, num_requests, unsupported_in
from server.stateless.choices import Completion, Part, Usage, check_search
from server.threads import THREADED_PARTS, aside


async def prepare_chat(
    request: ChatRequest, served: ServedModel, place: Place, *, owner: str, telemetry: Telemetry
) -> Completion:
    """Render the prompt, once for all choices, and resolve everything else. Raises ApiError 400 and
    RequestError."""
    await aside(num_parts(request.items) > THREADED_PARTS, check_modalities, request, served)
    check_logprobs(request.sampling.logprobs, served)
    check_search(request.search, served)
    offered = offer_of(request)
    await check(offered, served, request.tools, request.shape_param, owner)
    prompt = await rendered(request, served, offered, scope=owner)
    params = sampling(request.sampling, served.info, prompt_tokens=len(prompt.ids), seed=secrets.randbits(63))
    limit = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    require_room(request.sampling.max_tokens, limit, prompt_tokens=len(prompt.ids), info=served.info)
    reader = offered.reader(prompt.starts_in)
    tier = effective_tier(request.service_tier)
    completion_id = f"chatcmpl-{secrets.token_hex(12)}"
    requests = [
        GenerateRequest(
            id=f"{completion_id}/{choice}",
            prompt_ids=prompt.ids,
            sampling=steady(params, offered.answer),
            reader=reader,
            constraint=offered.enforced(served.info),
            choice=choice,
            owner=owner,
            cache_salt=request.cache_salt or "",
            priority=PRIORITIES[tier],
            adapter=served.adapter,
        )
        for choice in range(num_requests(request.search, request.n))
    ]
    for each in requests:
        check_request(each, served.info)
    head = {
        "id": completion_id,
        "created": int(time.time()),
        "model": served.name,
        "service_tier": tier,
        "system_fingerprint": served.info.fingerprint,
    }
    return Completion(
        engine=served.engine,
        telemetry=telemetry,
        requests=requests,
        writers=[
            ChatWriter(
                choice,
                logprobs=request.logprobs,
                custom_tool_names=custom_tool_names(request.tools),
                thoughts=request.include_reasoning,
            )
            for choice in range(request.n)
        ],
        head=head,
        place=place,
        usage=Usage([len(prompt.ids)], request.n),
        search=request.search,
    )


def offer_of(request: ChatRequest) -> Offer:
    """What the model is offered. Raises ApiError 400."""
    return offer(request.tools, request.tool_choice, request.parallel_tool_calls, request.shape)


async def rendered(request: ChatRequest, served: ServedModel, offered: Offer, *, scope: str) -> Prompt:
    """The prompt, through the model's chat template. scope: the owner, whose earlier prompts it may build
    upon. Raises the engine's RequestErrors."""
    much = num_parts(request.items) > THREADED_PARTS
    asked = await aside(much, _render_input, request, offered, time.time())
    return await served.engine.render(replace(asked, scope=scope))


def _render_input(request: ChatRequest, offered: Offer, now: float) -> RenderInput:
    """What the template is given. now: unix seconds."""
    going_on = request.continue_final_message
    asked = request.add_generation_prompt
    return RenderInput(
        to_messages(request.items),
        tools=offered.tools,
        add_generation_prompt=not going_on if asked is None else asked,
        continue_final_message=going_on,
        template_kwargs=request.chat_template_kwargs,
        effort=request.reasoning_effort,
        answer=offered.answer,
        now=now,
    )


def check_modalities(request: ChatRequest, served: ServedModel) -> None:
    """Raise ApiError 400 `unsupported_content` for the first part that the model cannot read."""
    for path, modality in unsupported_in(request.messages, modalities=served.info.modalities):
        message = f"The model '{served.name}' cannot read {modality} content."
        raise ApiError(400, message, code="unsupported_content", param=path)


def check_logprobs(asked: int | None, served: ServedModel) -> None:
    """Raise ApiError 400 when log probabilities are asked of an engine that has none."""
    if asked is not None and "logprobs" not in served.info.capabilities:
        message = f"The model '{served.name}' gives no log probabilities."
        raise ApiError(400, message, code="unsupported_parameter", param="logprobs")


_CONTENT = {"function": "arguments", "custom": "input"}


class ChatWriter:
    """One choice: deltas to the parts of chunks, and those to a message.

    Thoughts go out under both names that clients know, `reasoning` and `reasoning_content`.
    """

    def __init__(
        self, index: int, *, logprobs: bool, custom_tool_names: Collection[str] = (), thoughts: bool = True
    ) -> None:
        """customs: the names of tools that take a text. thoughts: whether they go out at all."""
        self._index = index
        self._preamble = False
        self._logprobs = logprobs
        self._customs = custom_tool_names
        self._thoughts = thoughts
        self._input: InputReader | None = None  # of a custom call
        self._num_calls = 0
        self._whole_call = False
        self._begun = False

    # -- writing
    # --------------------------------------------------------------------------------------------------------

    def write(self, chunk: Chunk) -> list[Part]:
        """One part for most chunks; a new one where what comes would stand before what the last one has."""
        parts: list[Part] = []
        if not self._begun:
            self._begun = True
            parts.append(self._part({"role": "assistant", "content": ""}))
        delta: dict[str, Any] = {}
        logprobs: list[dict[str, Any]] = []
        finish: str | None = None
        for each in chunk.deltas:
            match each:
                case Text():
                    if "tool_calls" in delta:
                        parts.append(self._part(delta, logprobs))
                        delta, logprobs = {}, []
                    # Chat has one message: what was said before calls or the answer is a paragraph of it.
                    gap = "\n\n" if self._preamble and not each.preamble else ""
                    self._preamble = each.preamble
                    delta["content"] = delta.get("content", "") + gap + each.text
                    if self._logprobs:
                        logprobs += [item_logprob(entry) for entry in each.logprobs]
                case Reasoning():
                    if not self._thoughts:
                        continue
                    if "tool_calls" in delta or "content" in delta:
                        parts.append(self._part(delta, logprobs))
                        delta, logprobs = {}, []
                    delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + each.text
                case CallStart():
                    delta.setdefault("tool_calls", []).append(self._call(each.name))
                case CallArgs():
                    calls = delta.get("tool_calls", [])
                    self._arguments(calls, each.text)
                    if calls:
                        delta["tool_calls"] = calls
                case CallEnd():
                    self._whole_call |= each.complete
                case Done():
                    finish = self._finish(each)
        if delta:
            parts.append(self._part(delta, logprobs))
        if finish is not None:
            parts.append({**self._part({}), "finish_reason": finish})
        return parts

    def _part(self, delta: dict[str, Any], logprobs: Sequence[dict[str, Any]] = ()) -> Part:
        content = {"content": list(logprobs), "refusal": None} if logprobs else None
        return {"index": self._index, "delta": delta, "logprobs": content, "finish_reason": None}

    def _call(self, name: str) -> dict[str, Any]:
        kind = "custom" if name in self._customs else "function"
        self._input = InputReader() if kind == "custom" else None
        call = {"index": self._num_calls, "id": f"call_{secrets.token_hex(12)}", "type": kind}
        self._num_calls += 1
        return call | {kind: {"name": name, _CONTENT[kind]: ""}}

    def _arguments(self, calls: list[dict[str, Any]], text: str) -> None:
        """More of the newest call's arguments: onto its start where that is in the same part."""
        kind = "function"
        if self._input is not None:
            kind, text = "custom", self._input.feed(text)
        if calls:
            calls[-1][kind][_CONTENT[kind]] += text
        elif text:
            calls.append({"index": self._num_calls - 1, kind: {_CONTENT[kind]: text}})

    def _finish(self, done: Done) -> str:
        if done.reason == "length":
            return "length"
        return "tool_calls" if self._whole_call else "stop"

    # -- folding
    # --------------------------------------------------------------------------------------------------------

    def fold(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The choice with its message; `content` is null where there are only calls."""
        text: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        logprobs: list[dict[str, Any]] = []
        for part in parts:
            delta = part["delta"]
            text.append(delta.get("content", ""))
            thoughts.append(delta.get("reasoning", ""))
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    kind = call["type"]
                    calls.append({"id": call["id"], "type": kind, kind: dict(call[kind])})
                else:
                    kind = calls[-1]["type"]
                    calls[-1][kind][_CONTENT[kind]] += call[kind][_CONTENT[kind]]
            logprobs += (part["logprobs"] or {}).get("content", ())
        content = "".join(text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
            "annotations": [],
        }
        if thought := "".join(thoughts):
            message["reasoning"] = message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return {
            "index": self._index,
            "message": message,
            "logprobs": {"content": logprobs, "refusal": None} if self._logprobs else None,
            "finish_reason": parts[-1]["finish_reason"],
        }
