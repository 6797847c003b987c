"""What the model is shown and how it may answer: items to messages, tools to an offer, fields to sampling.

Owns the one way from items to a prompt, for Responses and chat alike. Refuses to know storage, events and
HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine import Constraint, ModelInfo, PromptTooLong, SamplingParams, ToolShape
from server.schema.fields import SamplingFields
from server.schema.shapes import refuse

Item = dict[str, Any]

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

OUTPUT_KINDS: Mapping[str, str] = {
    "function_call_output": "function_call",
    "custom_tool_call_output": "custom_tool_call",
}
"""Output items that answer a call, and the kind of call that they answer."""


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
    out.
    """
    messages: list[dict[str, Any]] = []
    if isinstance(instructions, str):
        messages.append({"role": "system", "content": instructions})
    elif instructions:
        messages.extend(to_messages(instructions))
    names = {item["call_id"]: item["name"] for item in items if "call_id" in item and "name" in item}
    turn = _AssistantTurn(messages)
    for item in items:
        kind = item["type"]
        if kind == "message" and item["role"] == "assistant":
            turn.say(text_of(item["content"]))
        elif kind == "reasoning":
            turn.think(text_of(item.get("content") or item.get("summary")))
        elif kind in ("function_call", "custom_tool_call"):
            turn.call(
                item["call_id"], item["name"], item["arguments" if kind == "function_call" else "input"]
            )
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
        message["reasoning_content"] = message.get("reasoning_content", "") + text

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
# Tools to an offer


@dataclass(frozen=True, slots=True)
class Offer:
    """What the model is offered in one generation, and what is enforced.

    tools: for the template. calls: call markup in the output means calls. max_calls: the generation ends
    after.
    """

    tools: tuple[dict[str, Any], ...] = ()
    constraint: Constraint | None = None
    calls: bool = False
    max_calls: int | None = None


def offer(
    tools: Sequence[dict[str, Any]], tool_choice: Any, parallel: bool, *, param: str = "tool_choice"
) -> Offer:
    """Resolve function tools (flat form) and a tool choice (official forms) into an offer.

    Raises ApiError 400 when the choice names a tool that is not among `tools`, or needs one where there is
    none.
    """
    functions = [tool for tool in tools if tool.get("type") == "function"]
    mode, names = _choice(tool_choice, [tool["name"] for tool in functions], param)
    allowed = [tool for tool in functions if tool["name"] in names]
    if mode in ("required", "named") and not allowed:
        refuse(param, "tool_choice requires a tool call, but there is no tool to call.")
    if mode == "none" or not allowed:
        return Offer()
    if mode == "auto":
        # Without a grammar only what is shown can be called, so an allow-list narrows what is shown.
        return Offer(tuple(map(_for_template, allowed)), None, True, None if parallel else 1)
    max_calls = 1 if mode == "named" or not parallel else None
    shapes = tuple(ToolShape(tool["name"], closed_schema(tool)) for tool in allowed)
    constraint = Constraint("calls", tools=shapes, max_calls=max_calls)
    return Offer(tuple(map(_for_template, functions)), constraint, True, max_calls)


def _choice(choice: Any, names: Sequence[str], param: str) -> tuple[str, frozenset[str]]:
    """(mode, allowed names); mode is none, auto, required or named."""
    everything = frozenset(names)
    if choice is None or isinstance(choice, str):
        return choice or "auto", everything
    kind = choice.get("type")
    if kind == "function":
        return "named", frozenset({_known(choice.get("name"), everything, param)})
    if kind == "allowed_tools":
        refs = [tool for tool in choice.get("tools", ()) if tool.get("type", "function") == "function"]
        allowed = frozenset(_known(ref.get("name"), everything, f"{param}.tools") for ref in refs)
        return choice.get("mode", "auto"), allowed
    refuse(param, f"This server cannot force a tool of type {kind!r}.", "unsupported_parameter")


def _known(name: Any, names: Iterable[str], param: str) -> str:
    if not isinstance(name, str) or name not in names:
        refuse(param, f"Tool choice {name!r} was not found in the 'tools' parameter.")
    return name


def _for_template(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description") or ""}
    function["parameters"] = tool.get("parameters") or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def closed_schema(tool: Mapping[str, Any]) -> str:
    """The JSON Schema text that the decoder enforces for a tool's arguments.

    Objects that list properties and say nothing of others are closed: every text that fits the closed schema
    fits the client's, and a small model is kept from inventing arguments. Under a combinator that adds to
    properties listed elsewhere nothing is closed, since each part would then forbid what the other lists.
    """
    return json.dumps(_close(tool.get("parameters") or NO_ARGUMENTS))


_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_PLAIN_VALUES = frozenset({"enum", "const", "default", "examples", "required", "type"})
_ADDING = frozenset({"allOf", "not", "if", "then", "else", "dependentSchemas"})
_CHOOSING = frozenset({"anyOf", "oneOf"})


def _close(schema: Any, closing: bool = True) -> Any:
    if not isinstance(schema, dict):
        return schema
    combined = bool(schema.keys() & (_ADDING | _CHOOSING))
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        inside = closing and key not in _ADDING and not (key in _CHOOSING and "properties" in schema)
        if key in _PLAIN_VALUES:
            closed[key] = value
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            closed[key] = {name: _close(part, inside) for name, part in value.items()}
        elif isinstance(value, list):
            closed[key] = [_close(part, inside) for part in value]
        else:
            closed[key] = _close(value, inside)
    if closing and not combined and isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


# ------------------------------------------------------------------------------------------------------------
# Fields to sampling


def sampling(fields: SamplingFields, info: ModelInfo, *, prompt_tokens: int, seed: int) -> SamplingParams:
    """Resolve sampling: the request's field, else the checkpoint's generation config, else the API's default.

    `max_tokens` unset means up to the context. Raises PromptTooLong when the prompt leaves no room for a
    token.
    """
    room = info.max_model_len - prompt_tokens
    if room < 1:
        raise PromptTooLong(prompt_tokens, info.max_model_len)
    defaults = info.defaults

    def pick(asked: Any, checkpoint: Any, api: Any) -> Any:
        return next(value for value in (asked, checkpoint, api) if value is not None)

    return SamplingParams(
        seed=seed if fields.seed is None else fields.seed,
        max_tokens=min(room, fields.max_tokens) if fields.max_tokens is not None else room,
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
    )
