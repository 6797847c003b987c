"""No member of any body passes in silence: one that nobody has heard of, at every object of every body, is
named by its path, and refused where it may have been a filter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import pytest

from server.errors import ApiError
from server.ignored import collecting
from server.items import ITEM_TYPES
from server.schema.anthropic import parse_count, parse_messages
from server.schema.chat import parse_chat
from server.schema.completions import parse_completion
from server.schema.items import normalize_input
from server.schema.responses import parse_create, parse_input_tokens, parse_tool_outputs
from tests.server.schema.test_responses import TOOLS
from tests.support.item_samples import SAMPLES

Json = dict[str, Any]
Step = str | int
Path = tuple[Step, ...]

UNHEARD = "unheard_of"

CLIENTS_OWN = {
    *("metadata", "logit_bias", "chat_template_kwargs", "parameters", "output_schema", "schema"),
    *("input_schema", "env", "headers", "attributes", "arguments"),
}
"""Objects whose keys are the client's own, or those of JSON Schema."""

UNREAD_AS_A_WHOLE = {
    *("filters", "ranking_options", "container", "environment", "prediction"),
    *("prompt_cache_options", "client_metadata", "annotations", "cache_control"),
}
"""Objects of fields and tools that are named themselves, because nothing in them changes anything; and what
an MCP server said of its tools, which is kept as it was."""

KEPT = {
    ("configuration_update", "reasoning"),
    ("configuration_update", "text"),
    *((kind, "input") for kind in ("tool_use", "server_tool_use")),  # arguments of a function
    ("json_schema", "json_schema"),  # of a structural tag: a JSON Schema
}
"""(type, member) of what is not looked into."""


def written(path: Path) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def objects(value: Any, path: Path = ()) -> Iterator[Path]:
    """The paths of all objects of a body whose members are this server's to know."""
    if isinstance(value, dict):
        yield path
        for key, element in value.items():
            if key not in CLIENTS_OWN | UNREAD_AS_A_WHOLE and (value.get("type"), key) not in KEPT:
                yield from objects(element, (*path, key))
    elif isinstance(value, list):
        for index, element in enumerate(value):
            yield from objects(element, (*path, index))


CLOSED = {
    *("file_search", "mcp", "web_search", "web_search_2025_08_26"),
    *("web_search_preview", "web_search_preview_2025_03_11"),
}
"""Tools of which a misspelt member would have a model see or do more than was meant: it is refused."""


def is_closed(body: Json, path: Path) -> bool:
    at: Any = body
    for step in path:
        at = at[step]
    offered = len(path) > 1 and path[-2] == "tools" and path[0] != "tool_choice"
    return offered and at.get("type") in CLOSED


def with_unheard(body: Json, path: Path) -> Json:
    changed = deepcopy(body)
    at: Any = changed
    for step in path:
        at = at[step]
    at[UNHEARD] = 1
    return changed


def create(body: Mapping[str, Any]) -> Any:
    request = parse_create(body, unsupported_tools="ignore")
    return normalize_input(request.input, new_id=lambda prefix: prefix) if request.input else None


def tool_outputs(body: Mapping[str, Any]) -> Any:
    return parse_tool_outputs(body, new_id=lambda prefix: prefix)


FUNCTION: Json = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
GRAMMAR: Json = {"syntax": "lark", "definition": "start: 'a'"}
NESTED_TOOLS: list[Json] = [
    {"type": "function", "function": FUNCTION},
    {"type": "custom", "custom": {"name": "c", "format": {"type": "grammar", "grammar": GRAMMAR}}},
]
SCHEMA: Json = {"name": "s", "schema": {"type": "object"}, "strict": True, "description": "d"}
MESSAGES: list[Json] = [
    {"role": "system", "content": "s"},
    {"role": "developer", "content": [{"type": "text", "text": "d"}]},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "x"},
            {"type": "image_url", "image_url": {"url": "u", "detail": "low"}},
            {"type": "image_url", "image_url": "u"},
            {"type": "file", "file": {"file_id": "f"}},
            {"type": "input_audio", "input_audio": {"data": "d", "format": "wav"}},
        ],
    },
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "y"}, {"type": "refusal", "refusal": "r"}],
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "b", "type": "custom", "custom": {"name": "c", "input": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "z"}]},
    {"role": "tool", "tool_call_id": "b", "content": "z"},
]

MESSAGE_TURNS: list[Json] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}},
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "x"}]}},
            {
                "type": "search_result",
                "source": "s",
                "title": "t",
                "content": [{"type": "text", "text": "x"}],
            },
        ],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "x", "signature": "s"},
            {"type": "redacted_thinking", "data": "d"},
            {"type": "text", "text": "y"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "tool_use", "id": "a", "name": "f", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "z"}]},
        ],
    },
    {"role": "system", "content": [{"type": "text", "text": "m"}]},
]
MESSAGE_FIELDS: Json = {
    "model": "claude",
    "messages": MESSAGE_TURNS,
    "system": [{"type": "text", "text": "s"}],
    "tools": [
        {"name": "f", "description": "d", "input_schema": {"type": "object"}},
        {"type": "bash_20250124", "name": "bash"},
    ],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
}

BODIES: Mapping[str, tuple[Callable[[Mapping[str, Any]], Any], Json]] = {
    "a response": (
        create,
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
            "conversation": {"id": "conv_1"},
            "tools": [*TOOLS, *NESTED_TOOLS],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", **SCHEMA}, "verbosity": "low"},
            "reasoning": {"effort": "low"},
            "stream": True,
            "stream_options": {"include_obfuscation": False},
            "metadata": {"a": "b"},
            "client_metadata": {"a": "b"},
        },
    ),
    "easy items": (
        create,
        {
            "input": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
                {"type": "item_reference", "id": "msg_1"},
                {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}},
                {"type": "message", "id": "m", "role": "user", "content": [{"type": "input_image"}]},
            ],
            "text": {"format": {"type": "json_schema", "json_schema": SCHEMA}},
            "tools": [{"type": "custom", "name": "c", "format": {"type": "grammar", **GRAMMAR}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
    "a server tool": (
        create,
        {
            "input": "x",
            "tools": [
                {
                    "type": "mcp",
                    "server_label": "s",
                    "server_url": "builtin:",
                    "allowed_tools": ["calculator"],
                }
            ],
            "tool_choice": {"type": "mcp", "server_label": "s"},
            "text": {"format": {"type": "text"}},
        },
    ),
    "allowed tools": (
        create,
        {
            "input": "x",
            "text": {"format": {"type": "json_object"}},
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [
                    {"type": "function", "name": "f"},
                    {"type": "function", "function": {"name": "f"}},
                    {"type": "mcp", "server_label": "s", "name": "n"},
                ],
            },
        },
    ),
    "input tokens": (
        parse_input_tokens,
        {"input": "x", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}},
    ),
    "tool outputs": (
        tool_outputs,
        {"tool_outputs": [{"call_id": "c", "output": [{"type": "input_text", "text": "x"}]}], "stream": True},
    ),
    "a tool output": (tool_outputs, {"tool_call_id": "c", "output": "x"}),
    "chat": (
        parse_chat,
        {
            "messages": MESSAGES,
            "tools": NESTED_TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": {"type": "json_schema", "json_schema": SCHEMA},
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "messages": (
        parse_messages,
        {
            **MESSAGE_FIELDS,
            "max_tokens": 10,
            "metadata": {"user_id": "u"},
            "stop_sequences": ["x"],
            "service_tier": "auto",
            "stream": True,
        },
    ),
    "tokens of messages": (parse_count, MESSAGE_FIELDS),
    "chat, allowed tools": (
        parse_chat,
        {
            "messages": MESSAGES[:1],
            "tools": NESTED_TOOLS,
            "response_format": {"type": "text"},
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "c"}}]},
            },
        },
    ),
    "chat, tools of the server": (
        parse_chat,
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": "x",
                    "server_tool_calls": [
                        {"index": 0, "type": "mcp_call", "server_label": "s", "name": "f", "arguments": "{}"}
                    ],
                },
                {"role": "user", "content": "x"},
            ],
            "tools": [{"type": "mcp", "server_label": "s", "server_url": "builtin:"}],
            "tool_choice": {"type": "mcp", "server_label": "s"},
            "web_search_options": {
                "search_context_size": "low",
                "user_location": {"type": "approximate", "approximate": {"city": "Oslo"}},
            },
        },
    ),
    "chat, tags": (
        parse_chat,
        {
            "messages": MESSAGES[:1],
            "response_format": {
                "type": "structural_tag",
                "format": {
                    "type": "sequence",
                    "elements": [
                        {"type": "const_string", "value": "a"},
                        {"type": "json_schema", "json_schema": {"type": "object"}},
                        {"type": "regex", "pattern": "a"},
                        {"type": "grammar", "grammar": "start: 'a'"},
                        {"type": "or", "elements": [{"type": "any_text", "excludes": ["b"]}]},
                        {
                            "type": "triggered_tags",
                            "triggers": ["<"],
                            "at_least_one": True,
                            "tags": [{"begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}],
                        },
                        {
                            "type": "tags_with_separator",
                            "separator": ",",
                            "tags": [
                                {"type": "tag", "begin": "<", "end": ">", "content": {"type": "any_text"}}
                            ],
                        },
                    ],
                },
            },
        },
    ),
    "chat, older tags": (
        parse_chat,
        {
            "messages": MESSAGES[:1],
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
                "triggers": ["<"],
            },
        },
    ),
    "a completion": (
        parse_completion,
        {
            "prompt": "x",
            "stream": True,
            "stream_options": {"include_usage": True},
            "structured_outputs": {
                "structural_tag": {
                    "format": {"type": "tag", "begin": "<", "end": ">", "content": {"type": "any_text"}}
                }
            },
        },
    ),
    **{
        f"item {kind} {number}": (
            create,
            {"input": [{"type": kind, **sample}, {"role": "user", "content": ""}]},
        )
        for kind, samples in SAMPLES.items()
        if ITEM_TYPES[kind].say is not None  # the others are refused whole
        for number, sample in enumerate(samples)
        if kind not in ("compaction", "compaction_trigger")  # sealed; and it may be the last item alone
    },
}


@pytest.mark.parametrize("name", BODIES)
def test_an_unheard_of_member_anywhere_is_named_by_its_path(name: str) -> None:
    parse, body = BODIES[name]
    with collecting() as usual:
        parse(body)
    for path in objects(body):
        if path == ("structured_outputs",):
            continue  # refused, as a grammar of another server might be
        expected = written((*path, UNHEARD))
        if is_closed(body, path):
            with pytest.raises(ApiError) as refusal:
                parse(with_unheard(body, path))
            assert (refusal.value.code, refusal.value.param) == ("unknown_parameter", expected)
            continue
        with collecting() as found:
            parse(with_unheard(body, path))
        named = found.header().split(",")
        assert expected in named, f"{expected} is not among {named}"
        assert set(named) - set(usual.header().split(",")) == {expected}, "and nothing else is, because of it"


@pytest.mark.parametrize(
    ("parse", "fields", "param", "meant"),
    [
        (create, {"temprature": 0}, "temprature", "temperature"),
        (create, {"stor": False}, "stor", "store"),
        (create, {"tool": []}, "tool", "tools"),
        (create, {"steram": True}, "steram", "stream"),
        (create, {"top_pp": 1}, "top_pp", "top_p"),
        (parse_chat, {"stpo": "x"}, "stpo", "stop"),
        (create, {"max_ouput_tokens": 20}, "max_ouput_tokens", "max_output_tokens"),
        (create, {"text": {"formt": {"type": "text"}}}, "text.formt", "format"),
        (create, {"reasoning": {"efort": "low"}}, "reasoning.efort", "effort"),
        (parse_chat, {"respose_format": {"type": "text"}}, "respose_format", "response_format"),
        (
            create,
            {"tools": [{"type": "file_search", "vector_store_ids": ["vs_1"], "filter": {}}]},
            "tools[0].filter",
            "filters",
        ),
        (
            create,
            {"tools": [{"type": "mcp", "server_label": "s", "server_url": "builtin:", "allowed_tool": []}]},
            "tools[0].allowed_tool",
            "allowed_tools",
        ),
    ],
)
def test_a_misspelt_member_is_refused_with_what_was_meant(
    parse: Callable[[Mapping[str, Any]], Any], fields: Json, param: str, meant: str
) -> None:
    said = {"input": "x"} if parse is create else {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(ApiError) as refusal:
        parse({**said, **fields})
    assert (refusal.value.code, refusal.value.param) == ("unknown_parameter", param)
    assert f"Did you mean '{meant}'?" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "meant"), [("conversation_id", "conversation"), ("previous_id", "previous_response_id")]
)
def test_a_guessed_name_of_what_a_turn_continues_is_refused(name: str, meant: str) -> None:
    with pytest.raises(ApiError) as refusal:
        create({"input": "x", name: "resp_1"})
    assert refusal.value.param == name and f"'{meant}'" in str(refusal.value)


@pytest.mark.parametrize("name", ["models", "session_id", "top_a", "speed", "x" * 500, "temprature" * 9])
def test_what_another_server_may_know_is_no_misspelling(name: str) -> None:
    with collecting() as found:
        create({"input": "x", name: 1})
    assert found.header().startswith(name[:40])


@pytest.mark.parametrize("name", BODIES)
def test_null_is_absent_and_not_named(name: str) -> None:
    parse, body = BODIES[name]
    with collecting() as usual:
        parse(body)
    for path in objects(body):
        changed = with_unheard(body, path)
        at: Any = changed
        for step in path:
            at = at[step]
        at[UNHEARD] = None
        with collecting() as found:
            parse(changed)
        assert found.header() == usual.header()


FORMAT: Json = {"type": "json_schema", "name": "n"}
MISSPELT: Json = {"type": "object", "properties": {"a": {"typ": "string"}}}

HINTS: list[tuple[Callable[[Mapping[str, Any]], Any], Json, str]] = [
    (create, {"prompt_cache_retention": "24h"}, ""),
    (create, {"safety_identifier": "s"}, ""),
    (create, {"user": "u"}, ""),
    (create, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (create, {"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    (create, {"service_tier": "scale"}, "service_tier"),
    (create, {"service_tier": "flex"}, ""),
    (create, {"metadata": {"a": "b"}}, ""),
    (
        create,
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "",
    ),
    (create, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}, ""),
    (create, {"top_logprobs": 2}, "top_logprobs"),
    (create, {"tool_timeout_s": 3}, "tool_timeout_s"),
    (
        parse_chat,
        {"tools": [{"type": "function", "function": {"name": "f", "defer_loading": True}}]},
        "tools[0].function.defer_loading",
    ),
    (parse_input_tokens, {"truncation": "auto"}, "truncation"),
    (parse_chat, {"user": "u", "metadata": {"a": "b"}}, "metadata"),
    (parse_chat, {"verbosity": "low"}, "verbosity"),
    (parse_chat, {"prediction": {"type": "content", "content": "x"}}, "prediction"),
    (parse_chat, {"service_tier": "scale"}, "service_tier"),
    (parse_chat, {"reasoning_effort": "low"}, ""),
    (parse_chat, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    (parse_completion, {"user": "u"}, ""),
    (parse_completion, {"guided_json": {"oneof": []}}, "guided_json.oneof"),
    (create, {"guided_json": '{"items": [{"typ": 1}], "title": "t"}'}, "guided_json.items[0].typ"),
    (create, {"structured_outputs": {"json": {"maximun": 3}}}, "structured_outputs.json.maximun"),
    (create, {"text": {"format": {**FORMAT, "schema": MISSPELT}}}, "text.format.schema.properties.a.typ"),
    (create, {"text": {"format": {**FORMAT, "schema": {"format": "ipv5"}, "strict": True}}},
     "text.format.schema.format"),
    (create, {"tools": [{"type": "function", "name": "f", "parameters": MISSPELT}]},
     "tools[0].parameters.properties.a.typ"),
    (create, {"text": {"format": {"type": "structural_tag", "triggers": ["<"],
                                  "structures": [{"begin": "<a>", "schema": {"typ": 1}, "end": "</a>"}]}}},
     "text.format.structures[0].schema.typ"),
    (parse_chat, {"response_format": {"type": "json_schema",
                                      "json_schema": {"name": "n", "schema": MISSPELT}}},
     "response_format.json_schema.schema.properties.a.typ"),
    (parse_chat, {"tools": [{"type": "function", "function": {"name": "f", "parameters": MISSPELT}}]},
     "tools[0].function.parameters.properties.a.typ"),
]  # fmt: skip


@pytest.mark.parametrize(("parse", "fields", "named"), HINTS)
def test_a_hint_without_effect_is_named(
    parse: Callable[[Mapping[str, Any]], Any], fields: Json, named: str
) -> None:
    said: dict[Any, Json] = {
        create: {"input": "x"},
        parse_input_tokens: {"input": "x"},
        parse_completion: {"prompt": "x"},
    }
    body = said.get(parse, {"messages": [{"role": "user", "content": "x"}]})
    with collecting() as found:
        parse({**body, **fields})
    assert found.header() == named


def test_what_an_assistant_message_says_twice_is_named_where_it_differs() -> None:
    message: Json = {
        "role": "assistant",
        "content": "x",
        "reasoning": "a",
        "reasoning_content": "b",
    }
    with collecting() as found:
        parse_chat({"messages": [message]})
    assert found.header() == "messages[0].reasoning"
    with collecting() as found:
        parse_chat({"messages": [{**message, "reasoning": "b"}]})
    assert found.header() == ""


@pytest.mark.parametrize(
    ("parse", "body", "param"),
    [
        (
            create,
            {"input": "x", "text": {"format": {**FORMAT, "schema": {"propertys": {}}, "strict": True}}},
            "text.format.schema.propertys",
        ),
        (
            create,
            {
                "input": "x",
                "tools": [{"type": "function", "name": "f", "parameters": {"propertys": {}}, "strict": True}],
            },
            "tools[0].parameters.propertys",
        ),
        (
            parse_chat,
            {
                "messages": [{"role": "user", "content": "x"}],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"propertys": {}}, "strict": True},
                },
            },
            "response_format.json_schema.schema.propertys",
        ),
    ],
)
def test_a_strict_schema_with_a_misspelt_keyword_is_refused(
    parse: Callable[[Mapping[str, Any]], Any], body: Json, param: str
) -> None:
    with pytest.raises(ApiError) as refused:
        parse(body)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "invalid_schema", param)
    assert "Did you mean 'properties'?" in refused.value.message
