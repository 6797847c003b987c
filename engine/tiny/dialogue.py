"""What a dialogue is, and how it becomes text or a chat request.

`render` writes a dialogue exactly as the checkpoint's chat template does (a test compares them), marked with
which characters the assistant has to learn.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Json = Any
"""Whatever a JSON document may hold."""


@dataclass(frozen=True)
class Call:
    """A tool call: the function's name and its arguments."""

    name: str
    arguments: dict[str, Json]


@dataclass(frozen=True)
class Message:
    """One message; `learn` is false for assistant turns that only stand in the history."""

    role: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    learn: bool = True


@dataclass(frozen=True)
class Dialogue:
    """Messages ending with the assistant's; `skill` names what the last turn shows.

    `schema`: what the last answer fits; `told`: and the request says so, so that the template shows it.
    """

    skill: str
    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()
    thinking: bool = True
    schema: Json = None
    told: bool = False

    @property
    def target(self) -> Message:
        return self.messages[-1]


@dataclass
class Turn:
    """What one skill contributes: the last user message and what follows it."""

    skill: str
    messages: list[Message]
    schema: Json = None
    told: bool = False


def dumps(value: Json) -> str:
    """JSON as the template's `tojson` writes it."""
    return json.dumps(value, ensure_ascii=False)


def user(text: str) -> Message:
    return Message("user", text)


def says(text: str, reasoning: str = "", learn: bool = True) -> Message:
    return Message("assistant", text, reasoning, learn=learn)


def chat_messages(messages: tuple[Message, ...]) -> list[dict[str, Json]]:
    """Messages as the chat template and the chat endpoint take them, calls and results tied by their ids."""
    out: list[dict[str, Json]] = []
    pending: list[str] = []
    for index, message in enumerate(messages):
        one: dict[str, Json] = {"role": message.role, "content": message.content}
        if message.reasoning:
            one["reasoning_content"] = message.reasoning
        if message.calls:
            pending = [f"call_{index}_{number}" for number in range(len(message.calls))]
            one["tool_calls"] = [
                {
                    "id": id_,
                    "type": "function",
                    "function": {"name": call.name, "arguments": dumps(call.arguments)},
                }
                for id_, call in zip(pending, message.calls, strict=True)
            ]
        if message.role == "tool":
            one["tool_call_id"] = pending.pop(0)
        out.append(one)
    return out


# ---------------------------------------------------------------------------------------------- rendering


def render(dialogue: Dialogue) -> list[tuple[str, bool]]:
    """The dialogue's text in pieces, each with whether the model learns to write it."""
    pieces: list[tuple[str, bool]] = []
    messages = dialogue.messages
    systems = ("system", "developer")
    sections = [tool_section(dialogue.tools)] if dialogue.tools else []
    if dialogue.told:
        sections.append(f"# Answer\nJSON that fits this schema: {dumps(dialogue.schema)}")
    if sections:
        head = [messages[0].content] if messages[0].role in systems else []
        pieces.append(("<|im_start|>system\n" + "\n\n".join([*head, *sections]) + "<|im_end|>\n", False))
    for index, message in enumerate(messages):
        if message.role in systems:
            if not (sections and index == 0):
                pieces.append((f"<|im_start|>system\n{message.content}<|im_end|>\n", False))
        elif message.role == "assistant":
            pieces.append(("<|im_start|>assistant\n", False))
            if not dialogue.thinking:
                pieces.append(("<think>\n\n</think>\n\n", False))
            pieces.append((answer_text(message), message.learn))
            pieces.append(("<|im_end|>", message.learn))
            pieces.append(("\n", False))
        elif message.role == "tool":
            first = index == 0 or messages[index - 1].role != "tool"
            last = index + 1 == len(messages) or messages[index + 1].role != "tool"
            text = (
                "<|im_start|>user" if first else ""
            ) + f"\n<tool_response>\n{message.content}\n</tool_response>"
            pieces.append((text + ("<|im_end|>\n" if last else ""), False))
        else:
            pieces.append((f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n", False))
    return pieces


def tool_section(tools: tuple[Json, ...]) -> str:
    """How tools are announced in the system message."""
    lines = []
    for tool in tools:
        function = tool["function"]
        kept = {key: function[key] for key in ("name", "description", "parameters") if function.get(key)}
        lines.append("\n" + dumps(kept))
    return (
        "# Tools\n<tools>" + "".join(lines) + "\n</tools>\nTo call a tool:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def answer_text(message: Message) -> str:
    """What the model writes for an assistant message, up to its end token."""
    text = f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""
    text += message.content
    for index, call in enumerate(message.calls):
        text += "\n" if message.content or index else ""
        text += (
            f'<tool_call>\n{{"name": {dumps(call.name)}, "arguments": {dumps(call.arguments)}}}\n</tool_call>'
        )
    return text
