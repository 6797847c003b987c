"""Chat messages become the items that Responses would have; no body whatever is anything but read or a
400."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import ApiError
from server.schema.chat import parse_chat
from server.schema.completions import parse_completion
from server.schema.messages import file_paths, to_items, unsupported_in
from tests.support import wire

Json = dict[str, Any]


def items(*messages: Json) -> list[Json]:
    found = to_items(list(messages), new_id=lambda prefix: f"{prefix}1")
    for item in found:
        wire.validate_item(item, "ItemResource")
    return found


def test_an_assistant_turn_is_an_item_for_each_thing_it_did() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    found = items({"role": "assistant", "reasoning": "hm", "content": "well", "tool_calls": [call, call]})
    assert [item["type"] for item in found] == ["reasoning", "message", "function_call", "function_call"]
    assert found[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (found[2]["call_id"], found[2]["name"]) == ("call_1", "f")
    for content in (None, ""):
        only = items({"role": "assistant", "content": content, "tool_calls": [call]})
        assert [item["type"] for item in only] == ["function_call"]
    custom = {"id": "call_1", "type": "custom", "custom": {"name": "f", "input": "x"}}
    assert items({"role": "assistant", "tool_calls": [custom]})[0]["type"] == "custom_tool_call"


def test_messages_keep_their_roles_and_parts() -> None:
    for role in ("system", "developer", "user"):
        (item,) = items({"role": role, "content": [{"type": "text", "text": "x"}]})
        assert (item["role"], item["content"]) == (role, [{"type": "input_text", "text": "x"}])
    (refusal,) = items({"role": "assistant", "content": None, "refusal": "no"})
    no = {"type": "refusal", "refusal": "no"}
    assert refusal["content"] == [no]
    said = {"type": "output_text", "text": "x", "annotations": [], "logprobs": []}
    for content, parts in (
        ("", [no]),  # what some clients make of null
        ([], [no]),
        ([no], [no, no]),
        ("x", [said, no]),
        ([{"type": "text", "text": "x"}], [said, no]),
    ):
        (both,) = items({"role": "assistant", "content": content, "refusal": "no"})
        assert both["content"] == parts
    (plain,) = items({"role": "assistant", "content": "x", "refusal": ""})
    assert plain["content"] == [said]
    with pytest.raises(ApiError, match="expected a string or an array"):
        items({"role": "assistant", "content": 3, "refusal": "no"})
    (output,) = items({"role": "tool", "tool_call_id": "c", "content": "sunny"})
    assert (output["type"], output["output"]) == ("function_call_output", "sunny")
    (empty,) = items({"role": "assistant", "content": ""})
    assert empty["content"][0]["text"] == ""


def test_parts_that_are_not_text_are_found_where_they_stand() -> None:
    parts: list[Json] = [
        {"type": "text", "text": "x"},
        {"type": "image_url", "image_url": {"url": "u", "detail": "low"}},
        {"type": "file", "file": {"file_id": "f"}},
    ]
    output = {"role": "tool", "tool_call_id": "c", "content": parts[2:]}
    messages: list[Json] = [{"role": "user", "content": "x"}, {"role": "user", "content": parts}, output]
    assert [part["type"] for part in items(*messages)[1]["content"]] == [
        "input_text",
        "input_image",
        "input_file",
    ]
    found = unsupported_in(messages, modalities=frozenset({"text"}))
    assert found == [("messages[1].content[1]", "image")], "files are read"
    assert file_paths(messages) == ["messages[1].content[2].file", "messages[2].content[0].file"]
    assert unsupported_in(messages, modalities=frozenset({"text", "image", "file"})) == []


@pytest.mark.parametrize(
    ("message", "param", "code", "told"),
    [
        ({"content": "x"}, "role", "missing_required_parameter", "Missing required parameter"),
        ({"role": None, "content": "x"}, "role", "missing_required_parameter", "Missing required parameter"),
        ({"role": 5, "content": "x"}, "role", "invalid_type", "a string, but got an integer"),
        (
            {"role": "assistant", "server_tool_calls": [{}]},
            "server_tool_calls[0].type",
            "missing_required_parameter",
            "Missing required parameter",
        ),
    ],
)
def test_what_a_message_lacks_is_told_as_missing(message: Json, param: str, code: str, told: str) -> None:
    with pytest.raises(ApiError) as caught:
        items(message)
    assert (caught.value.code, caught.value.param) == (code, f"messages[0].{param}")
    assert f"'messages[0].{param}'" in caught.value.message and told in caught.value.message


@pytest.mark.parametrize(
    ("message", "kind", "kinds"),
    [
        ({"role": "user"}, "movie_url", "'text', 'image_url', 'file', 'input_audio'"),
        ({"role": "system"}, "audio", "'text', 'image_url', 'file', 'input_audio'"),
        ({"role": "tool", "tool_call_id": "c"}, "input_audio", "'text', 'image_url', 'file'"),
        ({"role": "assistant"}, "image_url", "'text', 'refusal'"),
    ],
)
def test_a_part_of_another_kind_is_told_with_the_kinds_of_chat(message: Json, kind: str, kinds: str) -> None:
    with pytest.raises(ApiError) as caught:
        items({**message, "content": [{"type": kind}]})
    assert caught.value.param == "messages[0].content[0].type"
    assert caught.value.message == f"Invalid value: '{kind}'. Supported values are: {kinds}."


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "tool", "tool_call_id": "c"}])
def test_a_video_is_content_that_no_model_reads(message: Json) -> None:
    part = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}
    with pytest.raises(ApiError) as caught:
        items({**message, "content": [{"type": "text", "text": "What is it?"}, part]})
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "unsupported_content", "messages[0].content[1]")


def tool_turn(*call_ids: str) -> Json:
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": each, "type": "function", "function": function} for each in call_ids]
    return {"role": "assistant", "tool_calls": calls}


def output(call_id: str) -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": "x"}


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "param", "named"),
    [
        ([output("a")], "messages[0].tool_call_id", "'a'"),
        ([USER, tool_turn("a"), output("b")], "messages[2].tool_call_id", "'b'"),
        ([tool_turn("a"), output("a"), USER, output("a")], "messages[3].tool_call_id", "'a'"),
        ([USER, tool_turn("a", "b"), output("b")], "messages[1].tool_calls", "'a'"),
        ([tool_turn("b", "a"), USER], "messages[0].tool_calls", "'a', 'b'"),
        ([tool_turn("a"), tool_turn("b"), output("a"), output("b")], "messages[0].tool_calls", "'a'"),
    ],
)
def test_calls_and_answers_that_do_not_belong_together_are_refused(
    messages: list[Json], param: str, named: str
) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat({"messages": messages})
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_value", param)
    assert named in caught.value.message
    parse_chat({"messages": messages}, on="tokens")  # any part of a chat may be counted


def test_each_call_is_answered_before_the_next_turn() -> None:
    for messages in (
        [tool_turn("a", "b"), output("b"), output("a")],
        [tool_turn("a"), output("a"), tool_turn("a"), output("a"), USER],  # ids of a model that counts anew
        [tool_turn("a", "a"), output("a"), output("a")],
        [USER, {**tool_turn(), "content": "x"}, USER],
    ):
        parse_chat({"messages": messages})


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "Missing"),
        ({"tools": [{"type": "function", "function": "f"}]}, "tools[0].function", "expected an object"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "Missing"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom", "Missing"),
        (
            {"tools": [NAMED, {"type": "custom", "custom": {"name": "f"}}]},
            "tools[1]",
            "Two tools are named 'f'",
        ),
        ({"tools": [NAMED], "tool_choice": {"type": "function"}}, "tool_choice.function", "Missing"),
        ({"tools": [NAMED], "tool_choice": {"function": {"name": "f"}}}, "tool_choice.type", "Missing"),
        (
            {"tools": [NAMED], "tool_choice": {"type": "allowed_tools"}},
            "tool_choice.allowed_tools",
            "Missing",
        ),
        (
            {
                "tools": [NAMED],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function"}]},
                },
            },
            "tool_choice.allowed_tools.tools[0].function",
            "Missing",
        ),
    ],
)
def test_what_is_wrong_with_a_tool_is_told_by_its_place_on_chat(fields: Json, param: str, told: str) -> None:
    with pytest.raises(ApiError, match=told) as caught:
        parse_chat({"messages": [{"role": "user", "content": "x"}], **fields})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_tool_in_the_flat_form_of_responses_is_taken_on_chat() -> None:
    flat = {"type": "function", "name": "f"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [flat]}
    request = parse_chat(
        {"messages": [{"role": "user", "content": "x"}], "tools": [flat], "tool_choice": choice}
    )
    assert (request.tools[0]["name"], request.tool_choice) == ("f", choice)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(10**400)
WORDS = [
    "user",
    "assistant",
    "tool",
    "function",
    "text",
    "image_url",
    "file",
    "custom",
    "input_audio",
    "refusal",
    "allowed_tools",
]
KEYS = [
    "role",
    "content",
    "type",
    "text",
    "image_url",
    "url",
    "file",
    "tool_calls",
    "id",
    "function",
    "name",
    "arguments",
    "tool_call_id",
    "refusal",
    "reasoning",
    "custom",
    "input",
    "mode",
    "tools",
    "allowed_tools",
]
JSON: st.SearchStrategy[Any] = st.recursive(
    LEAVES | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=15,
)
MESSAGE = st.builds(
    lambda role, rest: {**rest, "role": role},
    st.sampled_from(["user", "assistant", "tool"]),
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4),
)
FIELDS = sorted(wire.properties(wire.schema("CreateChatCompletionRequest")))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(MESSAGE, min_size=1, max_size=2) | JSON,
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
)
def test_no_body_whatever_raises_anything_but_a_400(messages: Any, fields: Json) -> None:
    for attempt in (
        lambda: parse_chat({**fields, "messages": messages}),
        lambda: parse_chat({**fields, "messages": [{"role": "user", "content": "x"}]}),
        lambda: parse_completion({**fields, "prompt": messages}),
        lambda: parse_completion({"prompt": "x", **fields}),
    ):
        try:
            attempt()
        except ApiError as error:
            assert error.status == 400
            wire.validate_error({"error": error.error()})
