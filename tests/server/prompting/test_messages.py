"""What the model is shown and how it may answer: the one way from items, tools and fields."""

from __future__ import annotations

import json
import time
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Constraint, ModelInfo, Picture, PromptTooLong, SamplingDefaults, closed_schema
from server.errors import ApiError
from server.items import BESIDE, KeptPicture, text_of, with_pictures, with_private
from server.prompting.messages import NOTHING_TOLD, Told, sampling, to_messages
from server.prompting.tool_offer import offer
from server.schema.fields import SamplingFields
from tests.support.wire import Json


def said(role: str, *texts: str) -> Json:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


def call(call_id: str, name: str = "f", arguments: str = "{}") -> Json:
    return {"type": "function_call", "id": call_id, "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str, value: Any) -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": value}


def thought(text: str) -> Json:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


# ------------------------------------------------------------------------------------------------------------
# Items to messages


def test_roles_and_parts() -> None:
    items = [said("developer", "a"), said("system", "b"), said("user", "c", "d")]
    assert to_messages(items, "be brief") == [
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "c\nd"},
    ]


def made(id: str, beside: str | None = None, *, output: str = "out") -> Json:
    """A call that the server has made, and beside which other one the model wrote it."""
    item: Json = {"type": "mcp_call", "id": id, "server_label": "s", "name": "f", "arguments": "{}"}
    item |= {"status": "completed", "output": f"{output} of {id}", "error": None}
    return with_private(item, None if beside is None else {BESIDE: beside})


def shape(messages: list[dict[str, Any]]) -> list[Any]:
    """Messages in short: the calls of an assistant's, whose output a tool's is, any other's role."""
    return [
        [each["id"] for each in message["tool_calls"]]
        if message.get("tool_calls")
        else message.get("tool_call_id", message["role"])
        for message in messages
    ]


def test_calls_that_the_server_has_made_are_one_turn_where_the_model_wrote_them_together() -> None:
    items = [said("user", "q"), made("a"), made("b", "a"), made("c", "a"), made("d"), made("e", "d")]
    assert shape(to_messages(items)) == ["user", ["a", "b", "c"], "a", "b", "c", ["d", "e"], "d", "e"]
    assert [message["content"] for message in to_messages(items) if message["role"] == "tool"][:2] == [
        "out of a",
        "out of b",
    ]


def test_a_clients_call_joins_the_calls_that_the_server_has_made_beside_it() -> None:
    asked = with_private(call("c"), {BESIDE: "a"})
    assert shape(to_messages([made("a"), asked, output("c", "x")])) == [["a", "c"], "a", "c"]
    assert shape(to_messages([made("a"), asked, made("b", "a"), output("c", "x")])) == [
        ["a", "c", "b"],
        "a",
        "c",
        "b",
    ]


@pytest.mark.parametrize(
    "between",
    [[], [said("user", "well")], [said("assistant", "well")], [made("x")], [output("y", "late")]],
    ids=["nothing", "a question", "an answer", "another turn", "a late output"],
)
def test_a_call_whose_turn_is_gone_joins_no_other(between: list[Json]) -> None:
    """The call that it was written beside may have been deleted."""
    messages = to_messages([made("z"), *between, made("b", "a")])
    assert messages[-2]["tool_calls"][0]["id"] == "b" and len(messages[-2]["tool_calls"]) == 1


def test_a_beginning_that_is_remembered_stays_as_it_was_when_a_call_joins_its_last_turn() -> None:
    items = [said("user", "q"), made("a"), made("b", "a")]
    first = NOTHING_TOLD.and_then(items[:2], "input")
    before = deepcopy(first.transcript.messages)
    assert first.and_then(items[2:], "input").transcript.messages == to_messages(items)
    assert first.transcript.messages == before == to_messages(items[:2])


def test_one_assistant_turn_is_one_message() -> None:
    items = [said("user", "q"), thought("hm"), said("assistant", "text"), call("c1"), call("c2")]
    [_, turn] = to_messages(items)
    assert (turn["role"], turn["reasoning_content"], turn["content"]) == ("assistant", "hm", "text")
    assert [made["id"] for made in turn["tool_calls"]] == ["c1", "c2"]
    assert turn["tool_calls"][0] == {
        "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}
    }  # fmt: skip


def test_thoughts_of_one_turn_are_joined_once() -> None:
    long = "🙂" + "a" * (1 << 22)  # four bytes for each character
    items = [thought(long), *[thought("b"), said("assistant", "")] * 1000, said("assistant", "so")]
    began = time.thread_time()  # of the processor: other threads do not count
    told = NOTHING_TOLD.and_then(items, "input")
    assert time.thread_time() - began < 1
    assert to_messages([], told=told) == [
        {"role": "assistant", "content": "so", "reasoning_content": "\n\n".join([long, *["b"] * 1000])}
    ]
    again = to_messages([*items, thought("c"), thought("d")], told=told)
    assert [message.get("reasoning_content") for message in again[1:]] == ["c\n\nd"]


def test_texts_beside_an_image_are_joined_once() -> None:
    long = "🙂" + "a" * (1 << 22)  # four bytes for each character
    seen, unseen = ({"type": "input_image", "image_url": None} for _ in range(2))
    lines = [{"type": "input_text", "text": each} for each in (long, *["b"] * 1000)]
    item = {"type": "message", "role": "user", "content": [seen, *lines, unseen, seen, lines[-1]]}
    kept = KeptPicture("aGk=", "0a")
    item = with_pictures(item, {0: kept, len(lines) + 2: kept})
    began = time.thread_time()  # of the processor: other threads do not count
    [message] = to_messages([item], sees=True)
    assert time.thread_time() - began < 1
    image = {"type": "image", "image": Picture(b"hi", b"\n")}
    told = "\n".join([long, *["b"] * 1000, "[image 2, which you cannot see]"])
    assert message["content"] == [image, {"type": "text", "text": told}, image, {"type": "text", "text": "b"}]


def test_what_follows_an_output_is_another_turn() -> None:
    items = [call("c1", "look_up"), output("c1", "found"), said("assistant", "so"), said("assistant", "yes")]
    messages = to_messages(items)
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant", "assistant"]
    assert messages[1] == {"role": "tool", "tool_call_id": "c1", "name": "look_up", "content": "found"}


def test_outputs_stand_in_the_order_of_their_calls() -> None:
    def turn(ids: str) -> list[Json]:
        return [{"type": "function_call", "call_id": id, "name": id, "arguments": "{}"} for id in ids]

    def outputs(ids: str) -> list[Json]:
        return [{"type": "function_call_output", "call_id": id, "output": f"of {id}"} for id in ids]

    items = [*turn("abc"), *outputs("cab"), *turn("de"), *outputs("ed")]
    told = [message["content"] for message in to_messages(items) if message["role"] == "tool"]
    assert told == ["of a", "of b", "of c", "of d", "of e"]
    for cut in range(len(items)):  # behind what was worded before
        before = NOTHING_TOLD.and_then(items[:cut], "input")
        assert to_messages(items, told=before) == to_messages(items)


def test_an_output_of_parts_is_joined() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert to_messages([call("c1"), output("c1", parts)])[1]["content"] == "a\nb"


MCP_CALL: Json = {
    "type": "mcp_call",
    "id": "m",
    "server_label": "s",
    "name": "calc",
    "arguments": "{}",
    "output": "4",
    "error": None,
}


def test_a_server_call_is_a_call_and_its_answer() -> None:
    item = MCP_CALL
    turn, answer, after = to_messages([item, said("assistant", "four")])
    assert (turn["tool_calls"][0]["id"], answer["content"], after["content"]) == ("m", "4", "four")
    error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "no"}]}
    assert to_messages([{**item, "output": None, "error": error}])[1]["content"] == "error: no"


def test_a_call_that_is_not_whole_is_shown_with_its_answer_only() -> None:
    torn = {**call("c1", arguments='{"a'), "status": "incomplete"}
    assert to_messages([torn, said("user", "and?")]) == [{"role": "user", "content": "and?"}]
    assert [each["role"] for each in to_messages([torn, output("c1", "no JSON")])] == ["assistant", "tool"]


def test_an_item_without_words_is_refused_and_never_left_out() -> None:
    listing: Json = {"type": "mcp_list_tools", "id": "l", "server_label": "x", "tools": []}
    assert to_messages([said("user", "q"), listing]) == [{"role": "user", "content": "q"}]
    with pytest.raises(ApiError, match="'program'") as refused:
        to_messages([said("user", "q"), {"type": "program", "id": "p", "call_id": "c", "code": "x"}])
    assert (refused.value.status, refused.value.code) == (400, "unsupported_item")


def test_a_summary_stands_in_for_reasoning_that_is_hidden() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}
    assert to_messages([item, said("assistant", "a")])[0]["reasoning_content"] == "short"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        ([], ""),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{"text": "a"}, {}], "a\n"),
    ],
)
def test_text_of(content: Any, text: str) -> None:
    assert text_of(content) == text


# ------------------------------------------------------------------------------------------------------------
# Tools to an offer

TOOLS: list[Json] = [{"type": "function", "name": name, "parameters": None} for name in ("a", "b")]


def names(tools: Any) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def test_auto_offers_everything_and_enforces_nothing() -> None:
    offered = offer(TOOLS, "auto", True)
    assert (names(offered.tools), offered.constraint, len(offered.shapes), offered.max_calls) == (
        ["a", "b"], None, 2, None
    )  # fmt: skip
    assert offer(TOOLS, "auto", False).max_calls == 1
    assert offered.tools[0]["function"]["parameters"] == {"type": "object", "properties": {}}


def test_values_are_read_by_the_client_s_types() -> None:
    """Strict or not: a call whose values are bare text needs them."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    for strict in (True, False):
        tool: Json = {"type": "function", "name": "f", "parameters": parameters, "strict": strict}
        reader = offer([tool], "auto", True).reader("text")
        assert reader.calls and [(each.name, json.loads(each.parameters)) for each in reader.tools] == [
            ("f", parameters)
        ]
    assert offer([tool], "none", True).reader("text").tools == ()


def test_none_and_no_tools_offer_nothing() -> None:
    for tools, choice in ((TOOLS, "none"), ([], "auto"), ([], "none"), ([], None)):
        offered = offer(tools, choice, True)
        assert (offered.tools, offered.constraint, offered.shapes) == ((), None, ())
        reader = offered.reader("text")  # marks of a call are text where there are no tools
        assert (reader.calls, reader.max_calls) == ((True, 0) if tools else (False, None))


def test_a_forced_call_shows_all_tools_and_allows_those_chosen() -> None:
    required = offer(TOOLS, "required", True)
    named = offer(TOOLS, {"type": "function", "name": "b"}, True)
    assert names(required.tools) == names(named.tools) == ["a", "b"]
    assert isinstance(required.constraint, Constraint) and isinstance(named.constraint, Constraint)
    assert [tool.name for tool in required.constraint.tools] == ["a", "b"]
    assert (required.constraint.max_calls, required.max_calls) == (None, None)
    assert ([tool.name for tool in named.constraint.tools], named.constraint.max_calls) == (["b"], 1)
    assert offer(TOOLS, "required", False).max_calls == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "c"}, {"type": "web_search"}])
def test_a_choice_of_nothing_is_refused(choice: Any) -> None:
    with pytest.raises(ApiError) as refused:
        offer([] if choice == "required" else TOOLS, choice, True)
    assert (refused.value.status, refused.value.param) == (400, "tool_choice")


def test_objects_that_list_properties_are_closed() -> None:
    """Under strict, listed properties keep their `required`; a schema is never refused for its shape."""
    schema = {
        "type": "object",
        "properties": {
            "at": {"type": "object", "properties": {"x": {"type": "number"}}},
            "tags": {"type": "array", "items": {"type": "object", "properties": {}}},
            "free": {"type": "object"},
            "enum": {"enum": [{"properties": 1}]},
            "open": {"type": "object", "properties": {}, "additionalProperties": True},
        },
        "required": ["at"],
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
    }
    closed = json.loads(closed_schema(schema))
    assert closed["additionalProperties"] is False and closed["required"] == ["at"]
    properties = closed["properties"]
    assert properties["at"]["additionalProperties"] is False
    assert properties["tags"]["items"]["additionalProperties"] is False
    assert "additionalProperties" not in properties["free"]
    assert properties["enum"] == {"enum": [{"properties": 1}]}
    assert properties["open"]["additionalProperties"] is True
    assert closed["$defs"]["node"]["additionalProperties"] is False
    assert "additionalProperties" not in schema, "the client's own is left alone"


def test_parts_that_add_to_each_other_are_left_open() -> None:
    part = {"type": "object", "properties": {"a": {"type": "string"}}}
    for schema in (
        {"allOf": [part, part]},
        {"properties": {"b": {}}, "anyOf": [part]},
        {"if": part, "then": part},
    ):
        closed = json.loads(closed_schema(schema))
        assert "additionalProperties" not in json.dumps(closed)
    choice = json.loads(closed_schema({"anyOf": [part, part]}))
    assert all(one["additionalProperties"] is False for one in choice["anyOf"])


# ------------------------------------------------------------------------------------------------------------
# Fields to sampling

INFO = ModelInfo(
    name="m",
    max_model_len=100,
    vocab_size=10,
    fingerprint="f",
    eos_token_ids=(0,),
    defaults=SamplingDefaults(temperature=0.6, top_k=20),
)


def test_a_field_is_the_requests_then_the_checkpoints_then_the_apis() -> None:
    unset = sampling(SamplingFields(), INFO, prompt_tokens=40, seed=5)
    assert (unset.temperature, unset.top_k, unset.top_p, unset.seed, unset.max_tokens) == (
        0.6,
        20,
        1.0,
        5,
        60,
    )
    fields = SamplingFields(temperature=0, top_k=0, seed=9, max_tokens=30, logit_bias={"7": -1, "3": 2})
    given = sampling(fields, INFO, prompt_tokens=40, seed=5)
    assert (given.temperature, given.top_k, given.seed, given.max_tokens) == (0, 0, 9, 30)
    assert given.logit_bias == ((3, 2.0), (7, -1.0))


def test_output_is_bounded_by_the_context() -> None:
    fields = SamplingFields(max_tokens=1000)
    assert sampling(fields, INFO, prompt_tokens=99, seed=1).max_tokens == 1
    short = replace(INFO, defaults=SamplingDefaults(max_new_tokens=16))
    for asked, found in ((None, 16), (30, 30), (1000, 60)):
        own = sampling(SamplingFields(max_tokens=asked), short, prompt_tokens=40, seed=1)
        assert own.max_tokens == found, "the checkpoint's limit is for those who name none"
    with pytest.raises(PromptTooLong) as long:
        sampling(fields, INFO, prompt_tokens=100, seed=1)
    assert (long.value.num_tokens, long.value.limit) == (100, 100)


@given(
    st.lists(st.sampled_from(["user", "say", "think", "call", "torn", "answer", "mcp"]), max_size=12),
    st.data(),
)
def test_what_was_worded_before_is_worded_the_same(kinds: list[str], data: st.DataObject) -> None:
    """In any two parts, under any names, and the first part is left as it was."""
    items: list[Json] = []
    for number, kind in enumerate(kinds):
        call_id = f"c{number // 3}"
        items.append(
            {
                "user": said("user", f"q{number}"),
                "say": said("assistant", f"a{number}"),
                "think": {"type": "reasoning", "summary": [{"type": "summary_text", "text": f"t{number}"}]},
                "call": call(call_id),
                "torn": {**call(call_id), "status": "incomplete"},
                "answer": output(call_id, f"o{number}"),
                "mcp": {**MCP_CALL, "id": f"m{number}"},
            }[kind]
        )
    first = data.draw(st.integers(0, len(items)))
    names = data.draw(st.sampled_from([None, {("s", "calc"): "s__calc"}]))
    told = Told().and_then(items[:first], "input")
    before = deepcopy(told.transcript.messages)
    for _ in range(2):
        assert to_messages(items, "be brief", names, told) == to_messages(items, "be brief", names)
    assert told.transcript.messages == before
