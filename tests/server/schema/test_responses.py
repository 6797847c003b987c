"""The bodies of the Responses API: rules between fields, tools, and an echo that the official schema
takes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import ApiError
from server.ignored import collecting
from server.items import is_offered
from server.schema.chat import parse_chat
from server.schema.responses import echo, parse_create, parse_include, parse_input_tokens, parse_tool_outputs
from server.schema.tools import parse_tool_choice, parse_tools, require_offered
from tests.support import wire

Json = dict[str, Any]

FUNCTION: Json = {"type": "function", "name": "f", "parameters": {"type": "object"}}

# What these clients send, as recorded: nothing of it may fail or be lost in silence on a server that leaves
# out the tools that it cannot run.
CODEX: Json = {
    "model": "m",
    "stream": True,
    "store": False,
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {
            "type": "message",
            "id": "msg_0b1c",
            "role": "user",
            "content": [{"type": "input_text", "text": "hi"}],
        },
    ],
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto"},
    "parallel_tool_calls": True,
    "prompt_cache_key": "k",
    "client_metadata": {"x": "y"},
    "tools": [
        {**FUNCTION, "strict": False},
        {"type": "namespace", "name": "n", "description": "d", "tools": [FUNCTION]},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
}
LLAMA_INDEX: Json = {
    "model": "m",
    "input": "x",
    "include": None,
    "instructions": None,
    "metadata": None,
    "previous_response_id": None,
    "user": None,
    "tools": [],
    "temperature": 0.1,
    "top_p": 1.0,
    "truncation": "disabled",
    "store": False,
}
VERCEL: Json = {
    "model": "m",
    "input": [{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "x"}],
    "tools": [
        {**FUNCTION, "strict": False, "parameters": {"$schema": "http://json-schema.org/draft-07/schema#"}},
    ],
    "stop": ["a", "b"],
}
AGENTS: Json = {
    "model": "m",
    "input": [{"content": "x", "role": "user"}],
    "include": [],
    "tools": [{**FUNCTION, "description": "", "strict": True}],
}


@pytest.mark.parametrize("body", [CODEX, LLAMA_INDEX, VERCEL, AGENTS])
def test_what_clients_send_passes(body: Json) -> None:
    with collecting() as ignored:
        request = parse_create(body, unsupported_tools="ignore")
    paths = set(filter(None, ignored.header().split(",")))
    unoffered = {f"tools[{i}]" for i, tool in enumerate(body.get("tools", [])) if tool["type"] != "function"}
    assert paths <= unoffered | {
        *("client_metadata", "text.verbosity"),
        *("reasoning.summary", "reasoning.context", "user", "safety_identifier"),
    }
    assert all(at(body, path) is not None for path in paths)
    check_echo(echo(request, model="m", temperature=1.0, top_p=1.0))


def at(body: Any, path: str) -> Any:
    """What stands at a path of a body, such as `tools[1].name`; KeyError or IndexError where nothing does."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        body = body[name] if name else body[int(index)]
    return body


def unoffered(tools: list[Json]) -> list[str]:
    with collecting() as ignored:
        require_offered(tools, None, "ignore")
    return ignored.header().split(",")


def check_echo(echoed: Json) -> None:
    head = {"id": "resp_1", "object": "response", "created_at": 1, "status": "in_progress"}
    head |= dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
    wire.validate_response({**head, **echoed, "output": []})


def test_the_echo_has_everything_at_its_effective_value() -> None:
    body = {
        "input": "x",
        "conversation": "conv_1",
        "metadata": {"a": "b"},
        "reasoning": {"effort": "high", "summary": "auto", "unheard": 1},
        "service_tier": "flex",
        "frequency_penalty": 0.5,
        "max_output_tokens": 16,
        "max_tool_calls": 2,
        "user": "u",
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"verbosity": "low"},
    }
    with collecting() as ignored:
        request = parse_create(body)
    echoed = echo(request, model="resolved", temperature=0.5, top_p=0.9)
    check_echo(echoed)
    assert ignored.header() == "text.verbosity,reasoning.summary,reasoning.unheard"
    assert echoed["conversation"] == {"id": "conv_1"}
    assert echoed["service_tier"] == "flex"
    assert echoed["reasoning"]["effort"] == "high" and echoed["reasoning"]["summary"] is None
    assert echoed["tools"] == [{**FUNCTION, "description": None, "strict": True}]
    assert (echoed["model"], echoed["temperature"], echoed["top_p"]) == ("resolved", 0.5, 0.9)
    assert (echoed["frequency_penalty"], echoed["presence_penalty"]) == (0.5, 0.0)
    assert (echoed["user"], echoed["text"]["verbosity"]) == ("u", "low")
    plain = parse_create({"input": "x"})
    assert "user" not in echo(plain, model="m", temperature=1.0, top_p=1.0)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": "x", "conversation": "c", "previous_response_id": "r"}, "previous_response_id", None),
        ({"input": "x", "background": True, "store": False}, "background", "invalid_value"),
        ({"input": "x", "stream_options": {}}, "stream_options", "invalid_value"),
        ({"input": "x", "await_tool_outputs": True}, "await_tool_outputs", "invalid_value"),
        ({"input": "x", "max_output_tokens": 15}, "max_output_tokens", "integer_below_min_value"),
        (
            {"input": "x", "metadata": {str(n): "" for n in range(17)}},
            "metadata",
            "object_above_max_properties",
        ),
        ({"input": "x", "metadata": {"k" * 65: ""}}, None, "string_above_max_length"),
        ({"input": "x", "metadata": {"k": "v" * 513}}, "metadata.k", "string_above_max_length"),
        ({"input": "x", "seed": 2**64}, "seed", "integer_above_max_value"),
        ({"input": "x", "seed": float(2**64)}, "seed", "integer_above_max_value"),
        ({"input": "x", "seed": 0.5}, "seed", "invalid_type"),
        ({"input": "x", "temperature": -1}, "temperature", "decimal_below_min_value"),
        ({"input": "x", "stop": ["a"] * 17}, "stop", "array_above_max_length"),
        ({"input": "x", "model": ""}, "model", "empty_string"),
        ({"input": "x", "prompt_cache_key": ""}, "prompt_cache_key", "empty_string"),
        (
            {"input": "x", "tools": [{"type": "function", "name": "f"}] * 129},
            "tools",
            "array_above_max_length",
        ),
        ({"input": []}, "input", "empty_array"),
        ({"input": "x", "metadata": {"k": 1}}, "metadata.k", "invalid_type"),
        ({"input": "x", "include": ["nothing"]}, "include[0]", "invalid_value"),
        ({"input": "x", "include": "x"}, "include", "invalid_type"),
        (
            {"input": "x", "text": {"format": {"type": "json_schema"}}},
            "text.format.name",
            "missing_required_parameter",
        ),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
        ({"input": "x", "guided_json": 5}, "guided_json", "invalid_type"),
        ({"input": "x", "conversation": {"id": 1}}, "conversation.id", "invalid_type"),
        ({"input": "x", "conversation": 1}, "conversation", "invalid_type"),
        ({"input": "x", "previous_response_id": "a\x00"}, "previous_response_id", "invalid_value"),
        ({"input": "x", "store": "yes"}, "store", "invalid_type"),
        ({"input": "x", "truncation": "some"}, "truncation", "invalid_value"),
        ({"input": "x", "tools": {}}, "tools", "invalid_type"),
        ({"input": "x", "tool_choice": "maybe"}, "tool_choice", "invalid_value"),
        ({"input": "x", "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", None),
        ({"input": "x", "tool_timeout_s": 0}, "tool_timeout_s", "invalid_value"),
        ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
    ],
)
def test_rules(body: Json, param: str | None, code: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        parse_create(body)
    assert caught.value.status == 400
    assert param is None or caught.value.param == param
    assert code is None or caught.value.code == code


def test_what_may_stand_without_input() -> None:
    assert parse_create({"previous_response_id": "resp_1"}).input is None
    assert parse_create({"conversation": {"id": "conv_1"}}).conversation_id == "conv_1"
    assert parse_input_tokens({}).input is None
    assert parse_input_tokens({"model": None, "input": "x", "tools": None}).tools == ()


def test_include_is_the_official_list() -> None:
    enum = wire.schema("IncludeEnum")["enum"]
    assert parse_include(list(enum)) == tuple(enum)


# ------------------------------------------------------------------------------------------------------------
# Tools

TOOLS: list[Json] = [
    FUNCTION,
    {"type": "custom", "name": "c", "format": {"type": "text"}},
    {"type": "namespace", "name": "n", "description": "d", "tools": [{**FUNCTION}]},
    {"type": "tool_search", "execution": "client"},
    {"type": "web_search", "filters": None, "user_location": None, "search_context_size": "low"},
    {"type": "web_search_2025_08_26"},
    {"type": "web_search_preview"},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "file_search", "vector_store_ids": ["vs_1"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation"},
    {"type": "mcp", "server_label": "s", "server_url": "https://example.org/mcp"},
    {"type": "computer"},
    {"type": "computer_use_preview", "environment": "linux", "display_width": 1, "display_height": 1},
    {"type": "shell"},
    {"type": "local_shell"},
    {"type": "apply_patch"},
    {"type": "programmatic_tool_calling"},
]


def test_every_official_tool_is_taken_and_echoed() -> None:
    official = set().union(*(wire.tags(part, "type") for part in wire.schema("Tool")["oneOf"]))
    assert official == {tool["type"] for tool in TOOLS}
    tools = parse_tools(TOOLS)
    for tool in tools:
        wire.validate("Tool", tool)
    assert parse_tools(tools) == tools
    # Whether the web can be searched, images made or seen, or code run, is for the server to say that has a
    # provider, or none.
    offered = (
        *("function", "custom", "namespace", "tool_search", "mcp", "shell", "local_shell", "apply_patch"),
        *("web_search", "image_generation", "file_search", "code_interpreter", "computer"),
    )
    unheard = [index for index, tool in enumerate(TOOLS) if not tool["type"].startswith(offered)]
    assert unoffered(tools) == [f"tools[{index}]" for index in unheard]


def test_functions_are_flat_and_strict_unless_told() -> None:
    nested = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    flat = {**FUNCTION, "description": None}
    assert parse_tools([nested, FUNCTION, {**FUNCTION, "strict": None}]) == [{**flat, "strict": True}] * 3
    assert parse_tools([nested], strict=False) == [{**flat, "strict": False}]
    (kept,) = parse_tools([{**FUNCTION, "strict": False, "defer_loading": True, "async": True}])
    assert (kept["strict"], kept["defer_loading"], kept["async"]) == (False, True, True)


@pytest.mark.parametrize("kind", ["fucntion", "websearch", "web_search_latest", "", "computer_use"])
def test_a_kind_of_tool_that_is_not_official_is_refused_with_those_that_are(kind: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_create({"input": "x", "tools": [FUNCTION, {"type": kind, "name": "f"}]})
    assert (caught.value.status, caught.value.code, caught.value.param) == (
        400,
        "invalid_value",
        "tools[1].type",
    )
    assert f"'{kind}'" in str(caught.value) and "'function', " in str(caught.value)


@pytest.mark.parametrize("parse", [parse_create, parse_input_tokens, parse_chat])
def test_a_kind_that_is_not_official_is_left_out_where_the_operator_wants_that(
    parse: Callable[..., Any],
) -> None:
    """It is kept by its kind alone: what else it says might be a credential."""
    asked = {"messages": [{"role": "user", "content": "x"}]} if parse is parse_chat else {"input": "x"}
    tool = {"type": "teleport", "authorization": "s3cret"}
    with collecting() as ignored:
        request = parse({**asked, "tools": [FUNCTION, tool]}, unsupported_tools="ignore")
    assert ignored.header() == "tools[1]"
    assert request.tools[1] == {"type": "teleport"}
    with pytest.raises(ApiError) as caught:
        parse({**asked, "tool_choice": {"type": "teleport"}}, unsupported_tools="ignore")
    assert caught.value.param == "tool_choice.type"


@pytest.mark.parametrize("asked", [{"tools": [{"type": "bogus"}]}, {"tool_choice": {"type": "bogus"}}])
@pytest.mark.parametrize("parse", [parse_create, parse_chat])
def test_the_kinds_that_are_told_are_those_that_work_there(parse: Callable[..., Any], asked: Json) -> None:
    on_chat = parse is parse_chat
    said: Json = {"messages": [{"role": "user", "content": "x"}]} if on_chat else {"input": "x"}
    with pytest.raises(ApiError) as caught:
        parse({**said, **asked})
    told = {word.strip("'., ") for word in str(caught.value).partition("are:")[2].split()}
    assert {"function", "custom", "mcp", "web_search", "file_search"} <= told
    assert "computer_use" not in told
    assert told.isdisjoint({"shell", "namespace", "tool_search", "computer"}) is on_chat


def test_another_version_of_a_known_tool_passes_and_is_named() -> None:
    later = {"type": "code_interpreter_2027_01_31", "depth": 3}
    assert parse_tools([FUNCTION, later])[1] == later
    assert unoffered([FUNCTION, later]) == ["tools[1]"]


def test_another_version_of_a_known_tool_is_kept_without_its_credentials() -> None:
    later = {"type": "mcp_2027_01_31", "server_label": "x", "authorization": "hush", "headers": {"k": "hush"}}
    assert parse_tools([later]) == [{"type": "mcp_2027_01_31", "server_label": "x"}]


UNOFFERED = [
    *((tool, "") for tool in TOOLS if not is_offered(tool)),
    ({"type": "file_search_2027_01_31"}, "It has one of type 'file_search'."),
    ({"type": "code_interpreter_2027_01_31"}, "It has one of type 'code_interpreter'."),
    ({"type": "function_2027_01_31"}, "It has one of type 'function'."),
]


@pytest.mark.parametrize(("tool", "advice"), UNOFFERED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("parse", [parse_create, parse_input_tokens, parse_chat])
def test_a_tool_that_nobody_can_run_is_refused_with_what_could_stand_in(
    parse: Callable[..., Any], tool: Json, advice: str
) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}]} if parse is parse_chat else {"input": "x"}
    with pytest.raises(ApiError) as caught:
        parse({**asked, "tools": [FUNCTION, tool]})
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "unsupported_tool", "tools[1].type")
    assert f"no tool of type '{tool['type']}'" in error.message and advice in error.message
    assert "--unsupported-tools ignore" in error.message and "  " not in error.message
    with collecting() as ignored:
        parse({**asked, "tools": [FUNCTION, tool]}, unsupported_tools="ignore")
    assert ignored.header() == "tools[1]"


def test_a_list_of_allowed_tools_names_none_that_nobody_can_run() -> None:
    choice: Json = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    choice["tools"].append({"type": "programmatic_tool_calling"})
    body = {"input": "x", "tools": [FUNCTION], "tool_choice": choice}
    with pytest.raises(ApiError) as caught:
        parse_create(body)
    assert (caught.value.code, caught.value.param) == ("unsupported_tool", "tool_choice.tools[1].type")
    with collecting() as ignored:
        parse_create(body, unsupported_tools="ignore")
    assert ignored.header() == "tool_choice.tools[1]"
    choice["tools"][1] = {"type": "websearch"}
    with pytest.raises(ApiError, match="Supported values are") as caught:
        parse_create(body)
    assert caught.value.param == "tool_choice.tools[1].type"
    for kind in (1, None):
        choice["tools"][1] = {"type": kind}
        with pytest.raises(ApiError) as caught:
            parse_create(body, unsupported_tools="ignore")
        assert caught.value.param == "tool_choice.tools[1].type"


def test_chat_has_no_tools_whose_calls_only_responses_can_show() -> None:
    with pytest.raises(ApiError, match="others are offered on /v1/responses") as caught:
        parse_chat({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "apply_patch"}]})
    assert (caught.value.code, caught.value.param) == ("unsupported_tool", "tools[0].type")


def test_mcp_keeps_no_credentials() -> None:
    builtin = {"type": "mcp", "server_label": "antiphon", "server_url": "builtin:"}
    remote = {"type": "mcp", "server_label": "s", "server_url": "https://x", "authorization": "secret"}
    given = [builtin, {**remote, "headers": {"x-key": "secret"}}]
    tools = parse_tools(given)
    assert [is_offered(tool) for tool in tools] == [True, True]
    assert "secret" not in str(tools)
    request = parse_create({"input": "x", "tools": given})
    assert '"secret"' not in repr(request) and "'secret'" not in repr(request)
    assert request.secrets == {"tools[1]": {"authorization": "secret", "headers": {"x-key": "secret"}}}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([1], "tools[0]"),
        ([{}], "tools[0].type"),
        ([{"type": 1}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].name"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ([{"type": "function", "name": ""}], "tools[0].name"),
        ([{"type": "function", "name": "f", "parameters": []}], "tools[0].parameters"),
        ([{"type": "function", "name": "f", "strict": 1}], "tools[0].strict"),
        ([{"type": "file_search"}], "tools[0].vector_store_ids"),
        ([{"type": "custom", "name": "c", "format": {"type": "grammar"}}], "tools[0].format.syntax"),
        ([{"type": "mcp", "server_label": "s"}], "tools[0].server_url"),
        ([{"type": "mcp", "server_label": "s", "server_url": "mcp.example.com"}], "tools[0].server_url"),
        ([FUNCTION] * 129, "tools"),
        ([{**FUNCTION, "description": "x" * (1 << 20)}], "tools"),
        ([{**FUNCTION, "parameters": {"maximum": 10**400}}], "tools"),
    ],
)
def test_wrong_tools_are_400(tools: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_tools(tools)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("url", ["builtin", "Builtin:", "ftp://x/y"])
def test_the_server_of_builtin_tools_has_one_spelling(url: str) -> None:
    with pytest.raises(ApiError, match="'builtin:' \\(with its colon\\) for this server's own tools"):
        parse_tools([{"type": "mcp", "server_label": "s", "server_url": url}])


def test_an_mcp_tool_names_one_place() -> None:
    two = {"server_url": "https://x", "connector_id": "connector_gmail"}
    with pytest.raises(ApiError) as caught:
        parse_tools([{"type": "mcp", "server_label": "s", **two}])
    assert caught.value.code == "mutually_exclusive_parameters"


@pytest.mark.parametrize(
    ("choice", "flat"),
    [
        ("none", "none"),
        ("auto", "auto"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, {"type": "function", "name": "f"}),
        ({"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}),
        ({"type": "custom", "name": "c"}, {"type": "custom", "name": "c"}),
        ({"type": "mcp", "server_label": "s", "name": None}, {"type": "mcp", "server_label": "s"}),
        ({"type": "web_search"}, {"type": "web_search"}),
        ({"type": "shell"}, {"type": "shell"}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "f"}}, {"type": "image_generation"}],
                },
            },
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "f"}, {"type": "image_generation"}],
            },
        ),
    ],
)
def test_tool_choices(choice: Any, flat: Any) -> None:
    assert parse_tool_choice(choice) == flat
    assert parse_tool_choice(flat) == flat
    if choice not in ({"type": "web_search"},):  # clients send it, the schema has no name for it
        wire.validate("ToolChoiceParam", flat)


@pytest.mark.parametrize(
    "choice", [1, [], {}, {"type": "x"}, {"type": "function"}, {"type": "allowed_tools"}]
)
def test_wrong_tool_choices_are_400(choice: Any) -> None:
    with pytest.raises(ApiError) as caught:
        parse_tool_choice(choice)
    assert str(caught.value.param).startswith("tool_choice")


# ------------------------------------------------------------------------------------------------------------
# Tool outputs


def outputs(body: Json) -> list[Json]:
    numbers = itertools.count(1)
    parsed = parse_tool_outputs(body, new_id=lambda prefix: f"{prefix}{next(numbers)}")
    return list(parsed.items)


def test_both_forms_of_tool_outputs() -> None:
    listed = outputs(
        {"tool_outputs": [{"call_id": "c", "output": "x"}, {"tool_call_id": "d", "output": "y"}]}
    )
    assert [(item["call_id"], item["output"]) for item in listed] == [("c", "x"), ("d", "y")]
    single = outputs({"tool_call_id": "c", "output": [{"type": "output_text", "text": "x"}]})
    assert single[0]["output"] == [{"type": "input_text", "text": "x"}]
    for item in (*listed, *single):
        wire.validate_item(item, "ItemResource")
    with collecting() as ignored:
        parsed = parse_tool_outputs(
            {"tool_call_id": "c", "output": "", "stream": True, "more": 1}, new_id=lambda prefix: prefix
        )
    assert (parsed.stream, ignored.header()) == (True, "more")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tool_outputs"),
        ({"tool_outputs": []}, "tool_outputs"),
        ({"tool_outputs": {}}, "tool_outputs"),
        ({"tool_outputs": [1]}, "tool_outputs[0]"),
        ({"tool_outputs": [{"output": ""}]}, "tool_outputs[0].call_id"),
        ({"tool_outputs": [{"call_id": "c"}]}, "tool_outputs[0].output"),
        ({"tool_outputs": [{"call_id": "c", "output": 1}]}, "tool_outputs[0].output"),
        ({"tool_outputs": [{"call_id": "c", "output": ""}] * 2}, "tool_outputs[1].call_id"),
        ({"tool_call_id": "c", "output": "", "stream": 1}, "stream"),
    ],
)
def test_wrong_tool_outputs_are_400(body: Json, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        outputs(body)
    assert (caught.value.status, caught.value.param) == (400, param)


# ------------------------------------------------------------------------------------------------------------
# Anything at all

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(10**400)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
NAMES = sorted(wire.properties(wire.schema("CreateResponse")))
BODY = st.dictionaries(
    st.sampled_from([*NAMES, "seed", "stop", "logit_bias", "cache_salt"]), JSON, max_size=5
)
BAG = st.dictionaries(
    st.sampled_from(
        ["type", "name", "function", "tools", "mode", "allowed_tools", "format", "call_id", "output"]
    ),
    JSON | st.sampled_from(["function", "custom", "mcp", "allowed_tools", "f"]),
)


@settings(max_examples=150, deadline=None)
@given(BODY, st.lists(BAG, max_size=2), BAG)
def test_no_body_whatever_raises_anything_but_a_400(body: Json, tools: list[Json], bag: Json) -> None:
    for attempt in (
        lambda: parse_create({"input": "x", **body}),
        lambda: parse_create({"input": "x", "tools": tools, "tool_choice": bag}),
        lambda: parse_input_tokens(body),
        lambda: outputs({"tool_outputs": tools}),
        lambda: outputs(bag),
    ):
        try:
            attempt()
        except ApiError as error:
            assert error.status == 400
            wire.validate_error({"error": error.error()})
