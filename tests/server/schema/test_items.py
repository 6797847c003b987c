"""Input items: whatever clients send becomes the official resource form, or a 400 that says where it is
wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.errors import ApiError
from server.schema.items import normalize_input, unsupported_parts
from server.schema.kinds import KINDS, PREFIXES
from tests.support import wire

Json = dict[str, Any]


def counter() -> Callable[[str], str]:
    numbers = itertools.count(1)
    return lambda prefix: f"{prefix}{next(numbers)}"


def normalize(value: Any) -> list[Json]:
    return normalize_input(value, new_id=counter())


CALLER = {"caller": {"type": "direct"}}
SAMPLES: dict[str, list[Json]] = {
    "function_call": [
        {"call_id": "c", "name": "f", "arguments": "{}"},
        {"call_id": "c", "name": "f", "arguments": "", "status": "incomplete", "namespace": "n", **CALLER},
    ],
    "function_call_output": [
        {"call_id": "c", "output": "sunny"},
        {
            "call_id": "c",
            "output": [{"type": "input_text", "text": "a"}, {"type": "input_image", "file_id": "f"}],
        },
    ],
    "custom_tool_call": [{"call_id": "c", "name": "f", "input": "free"}],
    "custom_tool_call_output": [{"call_id": "c", "output": "x"}],
    "reasoning": [
        {"summary": []},
        {
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "t"}],
            "encrypted_content": None,
        },
    ],
    "web_search_call": [
        {
            "action": {
                "type": "search",
                "query": "q",
                "queries": ["q"],
                "sources": [{"type": "url", "url": "u"}],
            }
        },
        {"action": {"type": "open_page", "url": "u"}, "status": "searching"},
        {"action": {"type": "find_in_page", "url": "u", "pattern": "p"}},
        {},
    ],
    "file_search_call": [{"queries": ["q"]}, {"queries": [], "results": [{"file_id": "f", "score": 0.5}]}],
    "code_interpreter_call": [
        {"container_id": "c", "code": "1", "outputs": [{"type": "logs", "logs": "l"}]},
        {"container_id": "c", "code": None, "outputs": None},
    ],
    "image_generation_call": [{"result": "aGk="}, {"result": None, "status": "generating"}],
    "computer_call": [
        {"call_id": "c", "action": {"type": "click", "button": "left", "x": 1, "y": 2}},
        {
            "call_id": "c",
            "actions": [
                {"type": "double_click", "x": 1, "y": 2, "keys": None},
                {"type": "drag", "path": [{"x": 1, "y": 2}]},
                {"type": "keypress", "keys": ["a"]},
                {"type": "move", "x": 1, "y": 2},
                {"type": "screenshot"},
                {"type": "scroll", "x": 1, "y": 2, "scroll_x": 0, "scroll_y": 3},
                {"type": "type", "text": "t"},
                {"type": "wait"},
            ],
            "pending_safety_checks": [{"id": "s", "code": "c", "message": "m"}],
        },
    ],
    "computer_call_output": [{"call_id": "c", "output": {"type": "computer_screenshot", "image_url": "u"}}],
    "local_shell_call": [{"call_id": "c", "action": {"type": "exec", "command": ["ls"], "env": {}}}],
    "local_shell_call_output": [{"id": "lsho_1", "output": "o"}],
    "shell_call": [
        {"call_id": "c", "action": {"commands": ["ls"]}},
        {
            "call_id": "c",
            "action": {"commands": [], "timeout_ms": 5},
            "environment": {"type": "local"},
            **CALLER,
        },
    ],
    "shell_call_output": [
        {
            "call_id": "c",
            "output": [
                {"stdout": "", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
            ],
        }
    ],
    "apply_patch_call": [
        {"call_id": "c", "operation": {"type": "create_file", "path": "p", "diff": "d"}},
        {"call_id": "c", "operation": {"type": "delete_file", "path": "p"}, "status": "in_progress"},
        {"call_id": "c", "operation": {"type": "update_file", "path": "p", "diff": "d"}},
    ],
    "apply_patch_call_output": [{"call_id": "c", "status": "failed", "output": "o"}],
    "mcp_list_tools": [{"server_label": "s", "tools": [{"name": "t", "input_schema": {}}]}],
    "mcp_call": [
        {"server_label": "s", "name": "t", "arguments": "{}", "output": "o"},
        {
            "server_label": "s",
            "name": "t",
            "arguments": "{}",
            "error": {"type": "http_error", "code": 500, "message": "m"},
            "status": "failed",
        },
    ],
    "mcp_approval_request": [{"server_label": "s", "name": "t", "arguments": "{}"}],
    "mcp_approval_response": [{"approval_request_id": "mcpr_1", "approve": True, "reason": None}],
    "compaction": [{"encrypted_content": "e"}],
    "tool_search_call": [{"arguments": {}}],
    "tool_search_output": [{"tools": [{"type": "function", "name": "f", "parameters": {}}]}],
    "additional_tools": [{"role": "developer", "tools": [{"type": "web_search"}]}],
    "program": [{"id": "prog_1", "call_id": "c", "code": "x", "fingerprint": "f"}],
    "program_output": [{"id": "po_1", "call_id": "c", "result": "r", "status": "completed"}],
    "compaction_trigger": [{}],
    "configuration_update": [{"reasoning": {"effort": "low"}}],
}

OUTSIDE_THE_UNIONS = ("compaction_trigger", "configuration_update")


def test_there_is_a_sample_of_every_kind() -> None:
    assert set(SAMPLES) == set(KINDS)


def test_every_official_input_type_is_known() -> None:
    item = wire.resolve(wire.schema("Item"))
    tags = set().union(*(wire.tags(part, "type") for part in item["oneOf"]))
    tags |= set().union(*(wire.tags(part, "type") for part in wire.schema("InputItem")["oneOf"]))
    assert tags - {"item_reference"} <= set(PREFIXES)


@pytest.mark.parametrize("kind", SAMPLES)
def test_an_item_of_every_kind_comes_out_as_an_official_resource(kind: str) -> None:
    for sample in SAMPLES[kind]:
        (item,) = normalize([{"type": kind, **sample}])
        assert item["id"].startswith(KINDS[kind].prefix)
        assert item | {k: v for k, v in sample.items() if v is not None and k != "tools"} == item or kind in (
            "local_shell_call",
            "shell_call",
            "function_call_output",
        )
        if kind not in OUTSIDE_THE_UNIONS:
            wire.validate_item(item, "ItemResource")
            if kind != "function_call_output":
                wire.validate_item(item, "OutputItem")


@pytest.mark.parametrize("kind", SAMPLES)
def test_what_we_return_is_accepted_back_unchanged(kind: str) -> None:
    for sample in SAMPLES[kind]:
        (item,) = normalize([{"type": kind, **sample}])
        again = normalize([{**item, "created_by": "somebody"}])
        assert again == normalize([{**item, "created_by": "somebody"}])
        assert normalize([item]) == [item] or kind in ("computer_call", "code_interpreter_call")
        assert {k: v for k, v in again[0].items() if k != "created_by"} == normalize([item])[0]


@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant"])
def test_easy_messages_become_resources(role: str) -> None:
    part = "output_text" if role == "assistant" else "input_text"
    (easy,) = normalize([{"role": role, "content": "hi"}])
    (whole,) = normalize([{"type": "message", "role": role, "content": [{"type": part, "text": "hi"}]}])
    (lenient,) = normalize([{"role": role, "content": [{"type": "text", "text": "hi"}]}])
    assert easy == whole == lenient
    assert (easy["id"], easy["status"], easy["content"][0]["type"]) == ("msg_1", "completed", part)
    wire.validate_item(easy, "ItemResource")
    wire.validate_item(easy, "ConversationItem")
    assert normalize([easy]) == [easy]


def test_a_string_is_one_user_message() -> None:
    assert normalize("hi") == normalize([{"role": "user", "content": "hi"}])


def test_parts_of_messages() -> None:
    logprob = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}
    annotation = {"type": "url_citation", "url": "u", "start_index": 0, "end_index": 1, "title": "t"}
    (item,) = normalize(
        [
            {
                "role": "assistant",
                "phase": "final_answer",
                "status": "incomplete",
                "id": "msg_x",
                "content": [
                    {"type": "output_text", "text": "a", "annotations": [annotation], "logprobs": [logprob]},
                    {"type": "refusal", "refusal": "no"},
                ],
            }
        ]
    )
    assert (item["phase"], item["status"], item["id"]) == ("final_answer", "incomplete", "msg_x")
    assert item["content"][0]["annotations"] == [annotation]
    wire.validate_item(item, "OutputItem")


def test_references_and_ids() -> None:
    assert normalize(
        [{"id": "msg_9"}, {"type": "item_reference", "id": "rs_9"}, {"id": "x", "type": None}]
    ) == [
        {"type": "item_reference", "id": "msg_9"},
        {"type": "item_reference", "id": "rs_9"},
        {"type": "item_reference", "id": "x"},
    ]
    for nothing in ("", None, "__fake_id__"):
        (item,) = normalize([{"role": "user", "content": "", "id": nothing}])
        assert item["id"] == "msg_1"


def test_calls_in_the_form_of_chat_are_unwrapped() -> None:
    nested = {"type": "function", "id": "call_1", "function": {"name": "f", "arguments": "{}"}}
    (item,) = normalize([nested])
    assert item == {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "f",
        "arguments": "{}",
        "status": "completed",
    }


def test_unknown_fields_of_an_item_are_kept_and_nulls_dropped() -> None:
    (item,) = normalize(
        [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "", "async": True, "x": None}]
    )
    assert item["async"] is True and "x" not in item


def test_what_a_text_model_cannot_read_is_named() -> None:
    items = normalize(
        [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "file_id": "f"}],
            },
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_file", "file_id": "f"}],
            },
            {
                "role": "user",
                "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
            },
            {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
        ]
    )
    assert unsupported_parts(items) == [
        ("input[0].content[1]", "image"),
        ("input[1].output[0]", "file"),
        ("input[2].content[0]", "audio"),
        ("input[3].output", "image"),
    ]
    assert unsupported_parts(items, modalities=frozenset({"image", "file", "audio"})) == []


MISSING, TYPE, VALUE = "missing_required_parameter", "invalid_type", "invalid_value"
OUTPUT = {"type": "function_call_output", "output": ""}


def user(content: Any, **more: Any) -> list[Json]:
    return [{"role": "user", "content": content, **more}]


@pytest.mark.parametrize(
    ("value", "param", "code"),
    [
        (1, "input", TYPE),
        ({"role": "user"}, "input", TYPE),
        ([1], "input[0]", TYPE),
        (["a"], "input[0]", TYPE),
        ([{}], "input[0].type", MISSING),
        ([{"type": 1}], "input[0].type", TYPE),
        ([{"type": "no_such_item"}], "input[0].type", VALUE),
        ([{"role": "user"}], "input[0].content", MISSING),
        ([{"role": "king", "content": ""}], "input[0].role", VALUE),
        (user(1), "input[0].content", TYPE),
        (user([{}]), "input[0].content[0].type", MISSING),
        (user([{"type": "x"}]), "input[0].content[0].type", VALUE),
        (user([{"type": "input_text"}]), "input[0].content[0].text", MISSING),
        (user([{"type": "input_text", "text": 1}]), "input[0].content[0].text", TYPE),
        ([OUTPUT], "input[0].call_id", MISSING),
        ([{**OUTPUT, "call_id": ""}], "input[0].call_id", VALUE),
        ([{**OUTPUT, "call_id": "a\x00"}], "input[0].call_id", VALUE),
        (user("", id="x" * 513), "input[0].id", VALUE),
        (user("", status="done"), "input[0].status", VALUE),
        ([{"type": "program", "call_id": "c", "code": "", "fingerprint": ""}], "input[0].id", MISSING),
        ([{"type": "compaction_trigger"}, *user("")], "input[0]", VALUE),
    ],
)
def test_what_is_wrong_is_named_by_its_path(value: Any, param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        normalize(value)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


KEYS = sorted(
    {"type", "role", "content", "id", "output", "call_id", "status", "function", "action", "error", "tools"}
    | {key for samples in SAMPLES.values() for sample in samples for key in sample}
)
WORDS = [
    *PREFIXES,
    "user",
    "assistant",
    "input_text",
    "output_text",
    "input_image",
    "function",
    "item_reference",
]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(WORDS)
    | st.just(10**400)
)
JSON: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=6)
    ),
    max_leaves=30,
)
TYPED = st.builds(
    lambda kind, rest: {**rest, "type": kind},
    st.sampled_from(WORDS),
    st.dictionaries(st.sampled_from(KEYS), JSON),
)


@settings(max_examples=150, deadline=None)
@given(JSON | st.lists(TYPED, max_size=3))
@example([{"type": "message", "role": "user", "content": float("nan")}])
def test_no_json_whatever_raises_anything_but_a_400(value: Any) -> None:
    try:
        items = normalize(value)
    except ApiError as error:
        assert error.status == 400
        assert error.param is not None and error.param.startswith("input")
        wire.validate_error({"error": error.error()})
    else:
        for item in items:
            assert item["id"] and item["type"]
            if item["type"] not in ("item_reference", *OUTSIDE_THE_UNIONS):
                unsupported_parts([item])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_is_taken_is_an_official_resource(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([kind for kind in KINDS if kind not in OUTSIDE_THE_UNIONS]))
    sample = data.draw(st.sampled_from(SAMPLES[kind]))
    damage = data.draw(st.dictionaries(st.sampled_from(sorted(sample) or ["status"]), JSON, max_size=2))
    try:
        (item,) = normalize([{**sample, **damage, "type": kind}])
    except ApiError as error:
        assert error.status == 400
    else:
        if kind not in ("tool_search_output", "additional_tools"):  # unknown tool kinds are kept
            wire.validate_item(item, "ItemResource")
