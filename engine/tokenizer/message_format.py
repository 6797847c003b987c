"""Puts earlier messages into the form that a family's chat template expects.

That is the form of earlier calls and their ids, messages that a template can print only one by one, and how a
template is told the effort of reasoning and the format of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import Any

from engine.dialects import History
from engine.types import Shape

Message = dict[str, Any]

LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Tokens of thought, for templates that take a budget; more than "high" is without one.
BUDGETS = {"none": 0, "minimal": 512, "low": 1024, "medium": 4096, "high": 16384}


def in_form(messages: Sequence[Message], form: History) -> list[Message]:
    """Messages (plain data, changed in place) in a family's form."""
    if form.arguments == "object":
        for message in messages:
            _parse_arguments(message)
    if form.call_ids:
        _rename_calls(messages, form.call_ids)
    for message in messages if form.null_text else ():
        if message.get("tool_calls") and not message.get("content"):
            message["content"] = None
    return _one_by_one(messages) if form.single else list(messages)


def _parse_arguments(message: Message) -> None:
    """Replace call arguments that are JSON objects by the object, so that the template's `tojson` prints them
    in its one layout, however a client wrote them; none at all are an empty one, and anything else stays the
    string that it is."""
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        text = function.get("arguments")
        if isinstance(text, str):
            try:
                value = json.loads(text.strip() or "{}")
                json.dumps(value, ensure_ascii=False).encode()  # an escaped lone surrogate has no UTF-8
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                function["arguments"] = value


def _rename_calls(messages: Sequence[Message], form: str) -> None:
    """Give calls, and the outputs that answer them, ids of a form. A family's own ids follow from the
    conversation alone, so that a later prompt has the same."""
    names: dict[Any, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            old, name = str(call.get("id", "")), call.get("function", call).get("name", "")
            digest = int.from_bytes(blake2b(old.encode(), digest_size=8).digest(), "big")
            digits = "".join(_DIGITS[digest // 36**place % 36] for place in range(9))
            call["id"] = names[old] = form.format(name=name, index=len(names), digest=digits)
        if message.get("tool_call_id") in names:
            message["tool_call_id"] = names[message["tool_call_id"]]


_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Each text and each call in a message of its own, each output after its call."""
    outputs = {message.get("tool_call_id"): message for message in messages if message.get("role") == "tool"}
    placed: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        if not calls:
            if not any(message is output for output in placed):
                placed.append(message)
            continue
        if message.get("content"):
            placed.append({"role": message["role"], "content": message["content"]})
        rest = {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
        for call in calls:
            placed.append({**rest, "tool_calls": [call]})
            rest = {"role": message["role"]}
            if (output := outputs.get(call.get("id"))) is not None:
                placed.append(output)
    return placed


def in_parts(messages: Sequence[Message]) -> list[Message]:
    """Messages whose texts are lists of one part."""
    return [
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
        for message in messages
        for content in (message.get("content"),)
    ]


def answer_arguments(answer: Shape) -> dict[str, Any]:
    """How a template is told what its answer must look like: JSON, and the schema that it fits.

    `response_format` is in the form of chat completions; some templates read the schema alone.
    """
    if answer.kind != "json":
        return {}
    schema = json.loads(answer.source)
    if schema == {"type": "object"}:
        return {"response_format": {"type": "json_object"}}
    return {"response_format": answer_format(schema), "response_schema": schema}


def answer_format(schema: Any) -> dict[str, Any]:
    """The `response_format` of chat completions that asks for JSON of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def effort_arguments(effort: str, variables: Collection[str]) -> dict[str, Any]:
    """How a template that reads these variables is told the effort; nothing where it cannot be told."""
    level = LEVELS.index(effort) if effort in LEVELS else LEVELS.index("medium")
    ways: dict[str, Any] = {  # EFFORT_VARIABLES
        "reasoning_effort": LEVELS[min(max(level, LEVELS.index("low")), LEVELS.index("high"))],
        "enable_thinking": level > 0,
        "thinking": level > 0,
        "thinking_budget": BUDGETS.get(effort, -1),
    }
    return {name: value for name, value in ways.items() if name in variables}
