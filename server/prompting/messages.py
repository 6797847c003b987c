"""What the model is shown: items to messages, fields to sampling.

Owns the one way from items to a prompt, for Responses and chat alike. Refuses to know tools (`offer`),
storage, events and HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine import ModelInfo, PromptTooLong, SamplingParams
from server.schema import SamplingFields

Item = dict[str, Any]

OUTPUT_KINDS: Mapping[str, str] = {
    "function_call_output": "function_call",
    "custom_tool_call_output": "custom_tool_call",
}
"""Output items that answer a call, and the kind of call that they answer."""


def answering(outputs: Iterable[Item], items: Iterable[Item]) -> list[Item]:
    """Outputs under the type that answers their calls, which are among `items`."""
    calls = {item["call_id"]: item["type"] for item in items if item["type"] in OUTPUT_KINDS.values()}
    kinds = {call: output for output, call in OUTPUT_KINDS.items()}
    return [{**item, "type": kinds.get(calls.get(item["call_id"], ""), item["type"])} for item in outputs]


# ------------------------------------------------------------------------------------------------------------
# Items to messages


def text_of(content: Any) -> str:
    """The text of a message's content or a tool's output: a string, or its text parts joined by newlines."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(
        part.get("text") or part.get("refusal") or "" for part in content if isinstance(part, dict)
    )


def to_messages(
    items: Sequence[Item], instructions: str | Sequence[Item] | None = None
) -> list[dict[str, Any]]:
    """Items, oldest first, as the messages that chat templates expect; `instructions` become a system
    message.

    What one assistant turn said (reasoning, text, calls) becomes one message, because templates print it as
    one. Items that a text prompt has no words for (hosted tool calls of other servers, compaction) are left
    out, and so are calls that are not whole, unless they were answered all the same.
    """
    messages: list[dict[str, Any]] = []
    if isinstance(instructions, str):
        messages.append({"role": "system", "content": instructions})
    elif instructions:
        messages.extend(to_messages(instructions))
    names = {item["call_id"]: item["name"] for item in items if "call_id" in item and "name" in item}
    answered = {item.get("call_id") for item in items if item["type"] in OUTPUT_KINDS}
    turn = _AssistantTurn(messages)
    for item in items:
        kind = item["type"]
        if (
            kind in OUTPUT_KINDS.values()
            and item.get("status") == "incomplete"
            and item["call_id"] not in answered
        ):
            continue
        if kind == "message" and item["role"] == "assistant":
            turn.say(text_of(item["content"]))
        elif kind == "reasoning":
            if thought := text_of(item.get("content") or item.get("summary")):
                turn.think(thought)
        elif kind == "function_call":
            turn.call(item["call_id"], item["name"], item["arguments"])
        elif kind == "custom_tool_call":
            turn.call(item["call_id"], item["name"], input_arguments(item["input"]))
        elif kind == "mcp_call":
            turn.call(item["id"], item["name"], item["arguments"])
            turn.answer(item["id"], item["name"], mcp_output(item))
        elif kind in OUTPUT_KINDS:
            call_id: str = item.get("call_id") or ""
            turn.answer(call_id, names.get(call_id, ""), text_of(item["output"]))
        elif kind == "message":
            turn.end()
            role = "system" if item["role"] in ("system", "developer") else item["role"]
            messages.append({"role": role, "content": text_of(item["content"])})
    return messages


def input_arguments(text: str) -> str:
    """The arguments that a model writes for the input of a custom tool."""
    return json.dumps({"input": text}, ensure_ascii=False)


def mcp_output(item: Item) -> str:
    """What the model is told about a server-run call: its output, or its error in words."""
    if item.get("error"):
        error = item["error"]
        return f"error: {error.get('message') or text_of(error.get('content'))}"
    return item.get("output") or ""


class _AssistantTurn:
    """Gathers consecutive assistant items into one message, the form in which templates print a turn."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._messages = messages
        self._open: dict[str, Any] | None = None

    def _message(self, *closed_by: str) -> dict[str, Any]:
        """The turn's message; a new one when what comes would stand before something that it has already."""
        if self._open is None or any(self._open.get(key) for key in closed_by):
            self._open = {"role": "assistant", "content": ""}
            self._messages.append(self._open)
        return self._open

    def think(self, text: str) -> None:
        message = self._message("content", "tool_calls")
        thoughts = filter(None, (message.get("reasoning_content"), text))
        message["reasoning_content"] = "\n\n".join(thoughts)

    def say(self, text: str) -> None:
        self._message("content", "tool_calls")["content"] = text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._message().setdefault("tool_calls", []).append(call)

    def answer(self, call_id: str, name: str, output: str) -> None:
        self.end()
        self._messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": output})

    def end(self) -> None:
        self._open = None


# ------------------------------------------------------------------------------------------------------------
# Fields to sampling


def sampling(fields: SamplingFields, info: ModelInfo, *, prompt_tokens: int, seed: int) -> SamplingParams:
    """Resolve sampling: the request's field, else the checkpoint's generation config, else the API's default.

    `max_tokens` unset, there too, means up to the context. Raises PromptTooLong when the prompt leaves no
    room for a token.
    """
    room = info.max_model_len - prompt_tokens
    if room < 1:
        raise PromptTooLong(prompt_tokens, info.max_model_len)
    defaults = info.defaults

    def pick(asked: Any, checkpoint: Any, api: Any) -> Any:
        return next(value for value in (asked, checkpoint, api) if value is not None)

    return SamplingParams(
        seed=seed if fields.seed is None else fields.seed,
        max_tokens=min(room, pick(fields.max_tokens, defaults.max_new_tokens, room)),
        temperature=pick(fields.temperature, defaults.temperature, 1.0),
        top_p=pick(fields.top_p, defaults.top_p, 1.0),
        top_k=pick(fields.top_k, defaults.top_k, 0),
        min_p=pick(fields.min_p, defaults.min_p, 0.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=pick(fields.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=tuple(sorted((int(token), bias) for token, bias in (fields.logit_bias or {}).items())),
        min_tokens=fields.min_tokens or 0,
        stop=tuple(fields.stop or ()),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=fields.logprobs,
        num_assistant_tokens=fields.num_assistant_tokens,
        max_ngram_size=fields.max_ngram_size,
        assistant_confidence_threshold=fields.assistant_confidence_threshold,
    )
