"""Says what a chat template has no words for in words that it has.

Tools, calls and outputs become text where a template prints none, and messages are reordered and joined for
templates that insist on an order of roles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from engine.dialects import CallMarks

Message = dict[str, Any]


def told(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    source: str,
    reads: frozenset[str],
    layout: CallMarks | None,
) -> list[Message]:
    """Messages (plain data, changed in place) for a template of this source, which `reads` these variables.

    With a `layout`, what the template would leave out stands in the text: calls that it does not print, and
    tools that it never looks at. Text beside calls that would hide them stands in a message of its own, and
    arguments have names where it prints them one by one.
    """
    found = list(messages)
    if _HIDES_CALLS in source:
        found = [part for message in found for part in _apart(message)]
    if _WALKS_ARGUMENTS.search(source):
        _name_arguments(found)
    if layout is None:
        return found
    if "tool_calls" not in source:
        for message in found:
            if calls := message.pop("tool_calls", None):
                message["content"] = (message.get("content") or "") + in_text(calls, layout)
    if tools and "tools" not in reads:
        functions = [tool.get("function", tool) for tool in tools]
        found = _with_system(found)
        if _READS_TOOLS_OF_MESSAGE.search(source):
            found[0]["tools"] = json.dumps(functions, ensure_ascii=False)
        else:
            text = _INVITATION.format(
                form=in_text([{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}], layout),
                functions="\n".join(json.dumps(function, ensure_ascii=False) for function in functions),
            )
            found[0]["content"] = "\n\n".join(filter(None, [found[0].get("content"), text]))
    return found


# As the templates of DeepSeek's first releases ask; their later ones print both.
_HIDES_CALLS = "'assistant' and message['content'] is none"
_WALKS_ARGUMENTS = re.compile(r"\|\s*(?:items|dictsort)\b|\.items\(\)")
_READS_TOOLS_OF_MESSAGE = re.compile(r"message(?:\.tools\b|\[['\"]tools['\"]\])")
_INVITATION = """\
You may call functions. To call one, or several at once, write nothing but calls, in this form:
{form}
The functions, each with the JSON Schema of its parameters:
{functions}"""


def in_text(calls: Sequence[Mapping[str, Any]], layout: CallMarks) -> str:
    """Calls as a model writes them. Arguments are an object, or its JSON."""
    written = []
    for call in calls:
        function = call.get("function", call)
        name, arguments = function["name"], function.get("arguments") or {}
        if layout.kind == "python" and isinstance(arguments, Mapping):
            inside = ", ".join(f"{key}={_json(value)}" for key, value in arguments.items())
        else:
            inside = arguments if isinstance(arguments, str) else _json(arguments)
        name = _json(name) if layout.quoted else name
        written.append(f"{layout.before_name}{name}{layout.before_arguments}{inside}{layout.end}")
    opening, close = ("", "") if layout.bare else (layout.open, layout.close)
    if layout.many:
        return f"{opening}{layout.front}{layout.separator.join(written)}{layout.back}{close}"
    return layout.separator.join(f"{opening}{each}{close}" for each in written)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _name_arguments(messages: Sequence[Message]) -> None:
    """Arguments that are no object, as models write them now and then, as the one entry of an object: a
    template that prints them one by one refuses anything else."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            if not isinstance(function.get("arguments", {}), Mapping):
                function["arguments"] = {"arguments": function["arguments"]}


def _apart(message: Message) -> list[Message]:
    """Text and calls as two messages."""
    if not (message.get("tool_calls") and message.get("content")):
        return [message]
    text = {key: value for key, value in message.items() if key != "tool_calls"}
    return [text, {**message, "content": None}]


def _with_system(messages: list[Message]) -> list[Message]:
    if messages and messages[0].get("role") == "system":
        return messages
    return [{"role": "system", "content": ""}, *messages]


# ------------------------------------------------------------------------------------------------------------
# Templates that insist on an order of roles


def orders(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """A conversation as it is, and then in orders that stricter templates take: one system message, in front,
    and never two messages of one role in a row; outputs said by the user; no system message at all."""
    found = list(messages)
    yield found
    for change in (_system_first, _outputs_as_user, _without_system):
        found = _joined(change(found))
        yield found


def says_all(prompt: str, messages: Sequence[Message]) -> bool:
    """Whether a prompt holds what the system said: some templates print the first of its messages alone, and
    some the last. One that prints none at all means it."""
    num_said = sum(message["role"] == "system" for message in messages)
    return holds_system(prompt, messages) or (num_said == 1 and messages[0]["role"] == "system")


def holds_system(prompt: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a prompt certainly holds every text of the system, in time with its length: each is looked for
    from where the one before was found, and a few are in front of that."""
    said = (message.get("content") for message in messages if message.get("role") == "system")
    at, num_before = 0, 0
    for text in dict.fromkeys(content.strip() for content in said if isinstance(content, str)):
        found = prompt.find(text, at)
        if found < 0:
            num_before += 1
            found = prompt.find(text) if num_before <= MAX_BEFORE else -1
        if found < 0:
            return False
        at = found
    return True


MAX_BEFORE = 16
"""Texts of the system that a template may print in front of earlier ones, and still be seen to print them."""


def _system_first(messages: Sequence[Message]) -> list[Message]:
    """System messages after others are the user's."""
    begun, found = False, []
    for message in messages:
        late = begun and message["role"] == "system"
        begun = begun or message["role"] != "system"
        found.append({**message, "role": "user"} if late else message)
    return found


def _outputs_as_user(messages: Sequence[Message]) -> list[Message]:
    return [
        {"role": "user", "content": message.get("content")} if message["role"] == "tool" else message
        for message in messages
    ]


def _without_system(messages: Sequence[Message]) -> list[Message]:
    return [{**message, "role": "user"} if message["role"] == "system" else message for message in messages]


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message, outputs aside."""
    runs: list[list[Message]] = []
    for message in messages:
        if runs and runs[-1][0]["role"] == message["role"] != "tool":
            runs[-1].append(message)
        else:
            runs.append([message])
    return [run[0] if len(run) == 1 else _as_one(run) for run in runs]


def _as_one(run: Sequence[Message]) -> Message:
    both = {key: value for message in run for key, value in message.items()}
    both["content"] = _with([message.get("content") for message in run])
    for key in ("tool_calls", "reasoning_content", "thinking"):
        if key in both:
            both[key] = _with([message[key] for message in run if key in message])
    return both


def _with(several: Sequence[Any]) -> Any:
    """Contents, or lists, as one. All at once: there may be thousands of them."""
    filled = [each for each in several if each]
    if len(filled) < 2:
        return filled[0] if filled else several[-1]
    if all(isinstance(each, str) for each in filled):
        return "\n\n".join(filled)
    found: list[Any] = []
    for before, each in pairwise([None, *filled]):
        if isinstance(before, str) or (before is not None and isinstance(each, str)):  # others have images
            found.append({"type": "text", "text": "\n\n"})
        found += _parts(each)
    return found


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
