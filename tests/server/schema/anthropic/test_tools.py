"""Tools of the Messages API are functions; what only Anthropic's servers run is refused, or left out."""

from __future__ import annotations

import re
from typing import Any

import pytest
from anthropic.types import beta
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from server.errors import ApiError
from server.ignored import collecting
from server.schema.anthropic.client_tools import CLIENT_TOOLS
from server.schema.anthropic.tools import read_choice, read_tools

Json = dict[str, Any]
CUSTOM: Json = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


def test_a_custom_tool_is_a_function() -> None:
    function = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
    assert read_tools([CUSTOM], "refuse") == [{**function, "strict": False}]
    assert read_tools([{**CUSTOM, "type": "custom", "strict": True}], "refuse") == [
        {**function, "strict": True}
    ]


def test_examples_are_told_with_the_description() -> None:
    [tool] = read_tools([{**CUSTOM, "input_examples": [{"a": "é"}, {}]}], "refuse")
    assert tool["description"] == 'd\nExamples of the input:\n{"a": "é"}\n{}'


def test_what_changes_nothing_is_named() -> None:
    callers = ["direct", "code_execution_20250825"]
    with collecting() as ignored:
        read_tools([{**CUSTOM, "defer_loading": True, "allowed_callers": callers, "x": 1}], "refuse")
    assert ignored.header() == "tools[0].x,tools[0].defer_loading,tools[0].allowed_callers"


@pytest.mark.parametrize("kind", CLIENT_TOOLS)
def test_tools_of_a_type_are_functions_with_a_schema(kind: str) -> None:
    known = CLIENT_TOOLS[kind]
    sizes = {"display_width_px": 800, "display_height_px": 600} if known.told else {}
    with collecting() as ignored:
        [tool] = read_tools([{"type": kind, "name": known.name, **sizes}], "refuse")
    assert (tool["type"], tool["name"], ignored.header()) == ("function", known.name, "")
    assert ("display_width_px: 800" in tool["description"]) == bool(sizes)
    Draft202012Validator.check_schema(tool["parameters"])
    with pytest.raises(ApiError) as caught:
        read_tools([{"type": kind, "name": "other"}], "refuse")
    assert caught.value.param == "tools[0].name"


def test_every_tool_of_the_sdk_that_clients_run_is_known() -> None:
    """Those of the newest kinds come as sets of tools, which are refused."""
    ours = r"Beta(?:ToolBash|ToolTextEditor|MemoryTool|ToolComputerUse)(\d{8})Param"
    dates = {found[1] for name in dir(beta) if (found := re.fullmatch(ours, name))}
    assert len(dates) > 4 and dates <= {kind[-8:] for kind in CLIENT_TOOLS}


@pytest.mark.parametrize(
    "kind",
    [
        "web_search_20250305",
        "web_fetch_20250910",
        "code_execution_20250825",
        "mcp_toolset",
        "advisor_20260301",
    ],
)
def test_tools_of_other_servers_are_refused_or_left_out(kind: str) -> None:
    tools = [{"type": kind, "name": "x"}, CUSTOM]
    with pytest.raises(ApiError) as caught:
        read_tools(tools, "refuse")
    assert (caught.value.code, caught.value.param) == ("unsupported_tool", "tools[0].type")
    with collecting() as ignored:
        assert [tool["type"] for tool in read_tools(tools, "ignore")] == [kind, "function"]
    assert ignored.header() == "tools[0]"


def test_a_search_for_tools_has_nothing_to_find() -> None:
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    with collecting() as ignored:
        tools = read_tools([search, {**CUSTOM, "defer_loading": True}], "refuse")
    assert tools[1]["name"] == "f" and ignored.header() == "tools[0],tools[1].defer_loading"


def test_a_tool_for_programs_alone_is_offered_to_nobody() -> None:
    tool = {**CUSTOM, "allowed_callers": ["code_execution_20250825"]}
    with pytest.raises(ApiError) as caught:
        read_tools([tool], "refuse")
    assert caught.value.code == "unsupported_tool"
    assert read_tools([tool], "ignore")[0]["type"] != "function"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("x", "tools"),
        ([1], "tools[0]"),
        ([{"type": 1}], "tools[0].type"),
        ([{"type": "function", "name": "f"}], "tools[0].type"),
        ([{"name": "f"}], "tools[0].input_schema"),
        ([{"input_schema": {}}], "tools[0].name"),
        ([{"name": "a b", "input_schema": {}}], "tools[0].name"),
        ([CUSTOM, CUSTOM], "tools[1].name"),
        ([{**CUSTOM, "strict": True, "input_schema": {"typ": "object"}}], "tools[0].input_schema.typ"),
        ([{**CUSTOM, "description": "x" * (1 << 20)}], "tools"),
    ],
)
def test_what_is_wrong_is_told_by_its_path(tools: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_tools(tools, "refuse")
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        ({"type": "auto"}, ("auto", True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False)),
        ({"type": "any"}, ("required", True)),
        ({"type": "none"}, ("none", True)),
        ({"type": "tool", "name": "f"}, ({"type": "function", "name": "f"}, True)),
    ],
)
def test_choices(choice: Any, read: Any) -> None:
    assert read_choice(choice) == read


@pytest.mark.parametrize("choice", ["auto", {"type": "function"}, {"type": "tool"}, {}])
def test_other_choices_are_refused(choice: Any) -> None:
    with pytest.raises(ApiError) as caught:
        read_choice(choice)
    assert (caught.value.param or "").startswith("tool_choice")
