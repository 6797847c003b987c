"""Turns messages of content blocks into items.

What a block says becomes an item of its own, or a part of one; where it came from is kept, so that whatever
is wrong with an item later is told by the path of its block.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from server.ignored import ignore, unread
from server.items import MAX_FILENAME, Item, identifier
from server.schema.items import check_number, normalize_item
from server.shapes import (
    NAME,
    STRING,
    anything,
    array,
    boolean,
    check_length,
    described,
    either,
    mapping,
    member,
    missing,
    mistyped,
    one_of,
    record,
    refuse,
    tagged,
)

Json = dict[str, Any]

BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
"""What Claude Code begins its system prompt with. It is another one with each request, so a prompt that had
it would share nothing with the one before."""

UNNAMED = "unnamed"
"""What a document is called that has no title."""

# ------------------------------------------------------------------------------------------------------------
# Blocks

_CACHED = {"cache_control": anything}
"""Prompts are kept in the prefix cache whether or not a block asks for it."""


def _uncited(value: Any, path: str) -> Any:
    """Whether answers are to cite a document: they do not."""
    if mapping(value, path).get("enabled"):
        ignore(path)
    return value


described(_uncited, lambda: {"type": "object"})

_IMAGE_SOURCE = tagged(
    {
        "base64": record(
            {"media_type": one_of("image/jpeg", "image/png", "image/gif", "image/webp"), "data": STRING}
        ),
        "url": record({"url": STRING}),
        "file": record({"file_id": STRING}),
    }
)
_TEXT = record({"text": STRING}, {**_CACHED, "citations": anything})
_IMAGE = record({"source": _IMAGE_SOURCE}, _CACHED)
_DOCUMENT_SOURCE = tagged(
    {
        "base64": record({"media_type": STRING, "data": STRING}),
        "text": record({"data": STRING}, {"media_type": STRING}),
        "url": record({"url": STRING}),
        "file": record({"file_id": STRING}),
        "content": record({"content": either(STRING, array(tagged({"text": _TEXT, "image": _IMAGE})))}),
    }
)
_DOCUMENT = record(
    {"source": _DOCUMENT_SOURCE}, {**_CACHED, "title": STRING, "context": STRING, "citations": _uncited}
)
_SEARCH_RESULT = record(
    {"source": STRING, "title": STRING, "content": array(record({"text": STRING}, _CACHED))},
    {**_CACHED, "citations": _uncited},
)
_SHOWN = {"text": _TEXT, "image": _IMAGE, "document": _DOCUMENT, "search_result": _SEARCH_RESULT}
_RESULT_PART = tagged({**_SHOWN, "tool_reference": record({"tool_name": NAME}, _CACHED)})
_RESULT = record(
    {"tool_use_id": identifier},
    {
        **_CACHED,
        "content": either(STRING, array(_RESULT_PART)),
        "is_error": boolean,
        "toolset_name": STRING,
    },
)
_CALL = record(
    {"id": identifier, "name": NAME, "input": mapping},
    {**_CACHED, "caller": anything, "toolset_name": STRING, "server_name": STRING},
)
_SERVERS_RESULT = record(
    {"tool_use_id": identifier, "content": anything},
    {**_CACHED, "caller": anything, "is_error": boolean},
)
_SERVERS_CALLS = ("server_tool_use", "mcp_tool_use")
_SERVERS_RESULTS = (
    *("web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result", "mcp_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result"),
    "tool_search_tool_result",
)
"""What another server has called itself, and what came of it, in a history that it began."""

USER_BLOCK = tagged({**_SHOWN, "tool_result": _RESULT})
ASSISTANT_BLOCK = tagged(
    {
        "text": _TEXT,
        "thinking": record({"thinking": STRING, "signature": STRING}),
        "redacted_thinking": record({"data": STRING}),
        "tool_use": _CALL,
        **dict.fromkeys(_SERVERS_CALLS, _CALL),
        **dict.fromkeys(_SERVERS_RESULTS, _SERVERS_RESULT),
    }
)
SYSTEM_BLOCK = tagged({"text": _TEXT})
_BLOCKS: Mapping[str, Any] = {"user": USER_BLOCK, "assistant": ASSISTANT_BLOCK, "system": SYSTEM_BLOCK}
_ROLE = one_of("user", "assistant", "system")

# ------------------------------------------------------------------------------------------------------------
# Messages


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item came from: the path of its block, or of the first of them, and those of its parts."""

    path: str
    parts: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Conversation:
    """Items as they are read, oldest first, and where each came from. continues: the answer goes on with the
    last of them."""

    items: list[Item] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    continues: bool = False
    _open: dict[str, str] = field(default_factory=dict)  # calls without a result, and their paths
    _is_answered: bool = False  # a user's message came behind them
    _said: list[str] = field(default_factory=list)  # texts of the last item, while it is the assistant's

    # -- reading ---------------------------------------------------------------------------------------------

    def tell(self, system: Any, param: str = "system") -> None:
        """Read a system prompt: a text, or blocks of text."""
        blocks = _blocks_of(system, SYSTEM_BLOCK, param)
        said = [({"type": "input_text", "text": BILLING.sub("", each["text"])}, at) for each, at in blocks]
        if kept := [(part, at) for part, at in said if part["text"]]:
            self._say("system", kept)

    def read(self, messages: Any, param: str = "messages") -> None:
        """Read all messages. Raises ApiError 400 naming the path of what is wrong."""
        if not isinstance(messages, list):
            mistyped(param, "an array", messages)
        if not messages:
            check_length(param, 0, "array", least=1)
        check_number(messages, param)
        for index, message in enumerate(messages):
            path = f"{param}[{index}]"
            if not isinstance(message, dict):
                mistyped(path, "an object", message)
            unread(message, ("role", "content"), path)
            role = member(message, "role", _ROLE, path)
            if message.get("content") is None:
                missing(f"{path}.content")
            if role == "system":
                self.tell(message["content"], f"{path}.content")
                continue
            blocks = _blocks_of(message["content"], _BLOCKS[role], f"{path}.content")
            if role == "user":
                self._user(blocks)
            else:
                self._assistant(blocks)
        self._end_answer()
        self._require_results()
        if not self.items:
            refuse(param, f"Invalid '{param}': nothing is said in them.")
        if role == "assistant":
            self._go_on()

    def _go_on(self) -> None:
        """Have the answer go on with what the assistant has said last, if that is last of all."""
        last = self.items[-1]
        self.continues = last["type"] == "message" and last["role"] == "assistant"
        if not self.continues and last["type"] != "message":
            message = "An answer can go on with a text, but not with what the last message ends with."
            refuse(self.places[-1].path, message)

    def _user(self, blocks: Sequence[tuple[Json, str]]) -> None:
        self._is_answered = True
        said: list[tuple[Json, str]] = []
        for block, path in blocks:
            if block["type"] != "tool_result":
                said += _parts(block, path)
                continue
            if said:
                self._say("user", said)
                said = []
            self._result(block, path)
        if said:
            self._say("user", said)

    def _assistant(self, blocks: Sequence[tuple[Json, str]]) -> None:
        if self._is_answered:
            self._require_results()
        self._is_answered = False
        for block, path in blocks:
            kind = block["type"]
            if kind == "text":
                self._answer(block["text"], path)
            elif kind in ("thinking", "redacted_thinking"):
                self._thought(block, path)
            elif kind == "tool_use":
                self._open[block["id"]] = path
                self._call(block, path)
            elif kind in _SERVERS_CALLS:
                self._call(block, path)
            else:
                self._output(block["tool_use_id"], _without_secrets(block["content"]), Place(path))

    # -- items -----------------------------------------------------------------------------------------------

    def _add(self, item: Json, place: Place) -> None:
        self._end_answer()
        self.items.append(normalize_item(item, place.path, _unnamed))
        self.places.append(place)

    def _say(self, role: str, parts: Sequence[tuple[Json, str]]) -> None:
        """Parts of a message: of the one before, where that is of a user as well, because two turns of a user
        are one."""
        paths = [path for _, path in parts]
        content = [part for part, _ in parts]
        last = self.items[-1] if self.items else None
        if role == "user" and last is not None and last.get("role") == "user":
            said = normalize_item({"role": role, "content": content}, paths[0], _unnamed)
            last["content"] += said["content"]
            self.places[-1].parts.extend(paths)
            return
        self._add({"type": "message", "role": role, "content": content}, Place(paths[0], paths))

    def _answer(self, text: str, path: str) -> None:
        """A text of the assistant: one with the text before, because citations cut a text into blocks."""
        if not self._said:
            if not text:
                return
            self._add({"type": "message", "role": "assistant", "content": text}, Place(path, [path]))
        self._said.append(text)

    def _end_answer(self) -> None:
        """Join the texts of an answer: once, because each joining copies all that was said before."""
        if len(self._said) > 1:
            self.items[-1]["content"][0]["text"] = "".join(self._said)
        self._said = []

    def _thought(self, block: Json, path: str) -> None:
        thought = block.get("thinking")
        content = [{"type": "reasoning_text", "text": thought}] if thought else []
        field = "data" if thought is None else "signature"
        item = {"type": "reasoning", "content": content, "encrypted_content": block[field]}
        self._add(item, Place(f"{path}.{field}"))

    def _call(self, block: Json, path: str) -> None:
        call = {
            "call_id": block["id"],
            "name": block["name"],
            # As models write it, so that the prompt is the one that the call was made behind.
            "arguments": json.dumps(block["input"], ensure_ascii=False),
        }
        self._add({"type": "function_call", **call}, Place(path))

    def _result(self, block: Json, path: str) -> None:
        call_id = block["tool_use_id"]
        if self._open.pop(call_id, None) is None:
            message = (
                f"There is no call '{call_id}' that waits for a result: each 'tool_result' needs a "
                "'tool_use' in the assistant's message before, and each 'tool_use' has one result."
            )
            refuse(f"{path}.tool_use_id", message)
        content = block.get("content") or ""
        failed = "error: " if block.get("is_error") else ""
        if isinstance(content, str):
            self._output(call_id, failed + content if content else failed.strip(), Place(path))
            return
        parts = [
            each for index, part in enumerate(content) for each in _parts(part, f"{path}.content[{index}]")
        ]
        if failed and parts and parts[0][0]["type"] == "input_text":
            parts[0] = ({"type": "input_text", "text": failed + parts[0][0]["text"]}, parts[0][1])
        elif failed:
            parts.insert(0, ({"type": "input_text", "text": failed.strip()}, path))
        self._output(call_id, [part for part, _ in parts], Place(path, [at for _, at in parts]))

    def _output(self, call_id: str, output: Any, place: Place) -> None:
        self._add({"type": "function_call_output", "call_id": call_id, "output": output}, place)

    def _require_results(self) -> None:
        """Raise ApiError 400 for calls that have no result where they must."""
        if self._open:
            named = ", ".join(f"'{call_id}'" for call_id in list(self._open)[:8])
            message = (
                f"There is no result for the calls {named}: the user's message behind a 'tool_use' must have "
                "a 'tool_result' for each."
            )
            refuse(next(iter(self._open.values())), message)


def _unnamed(prefix: str) -> str:
    """Items of messages live for one prompt, so they need no names."""
    return prefix


def _blocks_of(content: Any, shape: Any, path: str) -> list[tuple[Json, str]]:
    """A content, a text or blocks, as blocks with their paths."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, path)]
    if not isinstance(content, list):
        mistyped(path, "a string or an array", content)
    paths = [f"{path}[{index}]" for index in range(len(content))]
    return [(shape(block, at), at) for block, at in zip(content, paths, strict=True)]


def _without_secrets(content: Any) -> str:
    """What another server's tool brought, as JSON without what only that server can read."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items() if not key.startswith("encrypted_")}
        return value

    return content if isinstance(content, str) else orjson.dumps(plain(content)).decode()


# ------------------------------------------------------------------------------------------------------------
# Parts


def _parts(block: Json, path: str) -> list[tuple[Json, str]]:
    """What a block shows the model, as parts of an item, with their paths."""
    match block["type"]:
        case "text":
            return [({"type": "input_text", "text": block["text"]}, path)]
        case "image":
            return [(_image(block["source"]), path)]
        case "document":
            return [(part, path) for part in _document(block)]
        case "search_result":
            texts = "\n".join(each["text"] for each in block["content"])
            shown = f"[search result: {block['title']}]\n{block['source']}\n{texts}"
            return [({"type": "input_text", "text": shown}, path)]
        case _:
            return [({"type": "input_text", "text": f"[tool: {block['tool_name']}]"}, path)]


def _image(source: Json) -> Json:
    match source["type"]:
        case "base64":
            return {
                "type": "input_image",
                "image_url": f"data:{source['media_type']};base64,{source['data']}",
            }
        case "url":
            return {"type": "input_image", "image_url": source["url"]}
        case _:
            return {"type": "input_image", "file_id": source["file_id"]}


_SUFFIXES: Mapping[str, str] = {"application/pdf": ".pdf", "text/plain": ".txt"}


def _document(block: Json) -> list[Json]:
    """The parts of a document: what is said of it, and the file, or the parts that it has itself."""
    source, title = block["source"], block.get("title")
    parts: list[Json] = []
    if context := block.get("context"):
        parts.append({"type": "input_text", "text": context})
    match source["type"]:
        case "file":
            parts.append({"type": "input_file", "file_id": source["file_id"]})
        case "url":
            parts.append({"type": "input_file", "file_url": source["url"]})
        case "content":
            content = source["content"]
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            if title:
                parts.append({"type": "input_text", "text": f"[document: {title}]"})
            parts += [part for each in content for part, _ in _parts(each, "")]
        case kind:
            media_type = source.get("media_type", "text/plain")
            data = source["data"]
            if kind == "text":
                media_type, data = "text/plain", base64.b64encode(data.encode()).decode()
            suffix = _SUFFIXES.get(media_type, "")
            stem = (title or UNNAMED).removesuffix(suffix)[: MAX_FILENAME - len(suffix)]
            named = {"filename": stem + suffix, "file_data": f"data:{media_type};base64,{data}"}
            parts.append({"type": "input_file", **named})
    return parts
