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
from server.items import ITEM_TYPES
from server.schema.items import normalize_input, normalize_item, unsupported_parts
from tests.support import wire
from tests.support.item_samples import SAMPLES

Json = dict[str, Any]


def counter() -> Callable[[str], str]:
    numbers = itertools.count(1)
    return lambda prefix: f"{prefix}{next(numbers)}"


def normalize(value: Any) -> list[Json]:
    return normalize_input(value, new_id=counter())


def as_resource(kind: str, sample: Json) -> Json:
    """An item in its official form, whether or not a prompt has words for it."""
    return normalize_item({**sample, "type": kind}, "input[0]", counter())


OUTSIDE_THE_UNIONS = ("compaction_trigger", "configuration_update")


def test_there_is_a_sample_of_every_kind() -> None:
    assert {*SAMPLES, "message"} == set(ITEM_TYPES)


def test_every_official_input_type_is_known() -> None:
    item = wire.resolve(wire.schema("Item"))
    tags = set().union(*(wire.tags(part, "type") for part in item["oneOf"]))
    tags |= set().union(*(wire.tags(part, "type") for part in wire.schema("InputItem")["oneOf"]))
    assert tags - {"item_reference"} <= set(ITEM_TYPES)


@pytest.mark.parametrize("kind", SAMPLES)
def test_an_item_of_every_kind_comes_out_as_an_official_resource(kind: str) -> None:
    for sample in SAMPLES[kind]:
        item = as_resource(kind, sample)
        assert item["id"].startswith(ITEM_TYPES[kind].prefix)
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
        item = as_resource(kind, sample)
        again = as_resource(kind, {**item, "created_by": "somebody"})
        back = as_resource(kind, item)
        assert back == item or kind in ("computer_call", "code_interpreter_call")
        assert {k: v for k, v in again.items() if k != "created_by"} == back


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
    # nor one that no URL could name: it could be neither read nor deleted
    for nothing in ("", None, "__fake_id__", "a/b", ".", ".."):
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
                "output": [{"type": "input_file", "file_id": "f"}, {"type": "input_image", "file_id": "f"}],
            },
            {
                "role": "user",
                "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
            },
        ]
    )
    assert unsupported_parts(items) == [
        ("input[0].content[1]", "image"),
        ("input[1].output[1]", "image"),
        ("input[2].content[0]", "audio"),
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
        ([{**OUTPUT, "call_id": ""}], "input[0].call_id", "empty_string"),
        ([{**OUTPUT, "call_id": "a\x00"}], "input[0].call_id", VALUE),
        (user("", id="x" * 513), "input[0].id", "string_above_max_length"),
        (user("", status="done"), "input[0].status", VALUE),
        ([{"type": "program", "call_id": "c", "code": "", "fingerprint": ""}], "input[0].id", MISSING),
        ([*user(""), {"type": "compaction_trigger"}], "input[1]", "unsupported_item"),
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
    *ITEM_TYPES,
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
    kind = data.draw(st.sampled_from([kind for kind in SAMPLES if kind not in OUTSIDE_THE_UNIONS]))
    sample = data.draw(st.sampled_from(SAMPLES[kind]))
    damage = data.draw(st.dictionaries(st.sampled_from(sorted(sample) or ["status"]), JSON, max_size=2))
    try:
        item = as_resource(kind, {**sample, **damage})
    except ApiError as error:
        assert error.status == 400
    else:
        if kind != "additional_tools":  # unknown tool kinds are kept
            wire.validate_item(item, "ItemResource")
