"""Messages of content blocks are read as items, and what is wrong with one is told by its path."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest

from server.errors import ApiError
from server.ignored import collecting
from server.prompting import to_messages
from server.schema.anthropic.blocks import Conversation

Json = dict[str, Any]
PNG: Json = {"type": "base64", "media_type": "image/png", "data": "aGk="}
BMP: Json = {**PNG, "media_type": "image/bmp"}
CALL: Json = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": [1, "é"]}}


def user(*content: Any) -> Json:
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else [*content]}


def assistant(*content: Any) -> Json:
    return {**user(*content), "role": "assistant"}


def text(said: str) -> Json:
    return {"type": "text", "text": said}


def result(content: Any = "sunny", call_id: str = "t1", **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def read(*messages: Json, system: Any = None) -> Conversation:
    conversation = Conversation()
    if system is not None:
        conversation.tell(system)
    conversation.read([*messages])
    return conversation


def told(*messages: Json, system: Any = None) -> list[tuple[str, str]]:
    """The messages that a chat template is given: roles, and contents or calls."""
    found = to_messages(read(*messages, system=system).items)
    return [
        (
            message["role"],
            message.get("reasoning_content", "")
            + message["content"]
            + "".join(call["function"]["arguments"] for call in message.get("tool_calls", ())),
        )
        for message in found
    ]


def test_texts_are_messages() -> None:
    assert told(user("a"), assistant("b"), user(text("c"), text("d"))) == [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c\nd"),
    ]


def test_turns_of_one_side_are_one() -> None:
    messages = (user("a"), user(text("b")), assistant(text("c"), text("d")), assistant("e"), user("f"))
    assert told(*messages) == [("user", "a\nb"), ("assistant", "cde"), ("user", "f")]


def test_a_turn_of_many_pieces_is_not_copied_for_each_of_them() -> None:
    long = "🙂" + "a" * (1 << 22)  # four bytes for each character
    messages = [user("q"), assistant(text(long), *[text("b")] * 1000, text(""))]
    began = time.thread_time()  # of the processor: other threads do not count
    found = read(*messages)
    assert time.thread_time() - began < 1
    assert found.items[1]["content"][0]["text"] == long + "b" * 1000
    asked = read(user("a"))
    places = asked.places[0].parts
    asked.read([user("b")])
    assert asked.places[0].parts is places and places == ["messages[0].content"] * 2


def test_a_system_prompt_is_a_text_or_blocks_and_stands_wherever_it_is_sent() -> None:
    assert told(user("a"), system="s") == [("system", "s"), ("user", "a")]
    assert told(user("a"), system=[text("s"), text("t")]) == [("system", "s\nt"), ("user", "a")]
    mid = {"role": "system", "content": [text("m")]}
    assert told(user("a"), mid, assistant("b"), user("c"))[1] == ("system", "m")


@pytest.mark.parametrize(
    "billing", ["x-anthropic-billing-header: v=1; cch=ab12;", "x-anthropic-billing-header:"]
)
def test_what_changes_with_each_request_is_in_no_prompt(billing: str) -> None:
    bare = told(user("a"), system="Be brief.")
    assert told(user("a"), system=[text(billing), text("Be brief.")]) == bare
    assert told(user("a"), system=f"{billing}\nBe brief.") == bare
    assert told(user("a"), system=[text(billing)]) == [("user", "a")]
    assert told(user(f"{billing} is what I found")) != [("user", " is what I found")]


def test_calls_and_results() -> None:
    messages = (
        user("x"),
        assistant(text("ok"), CALL),
        user(result(), text("and now?")),
        assistant("so"),
        user("y"),
    )
    assert told(*messages) == [
        ("user", "x"),
        ("assistant", 'ok{"a": [1, "é"]}'),
        ("tool", "sunny"),
        ("user", "and now?"),
        ("assistant", "so"),
        ("user", "y"),
    ]


@pytest.mark.parametrize(
    ("block", "output"),
    [
        (result(is_error=True), "error: sunny"),
        (result([text("a"), text("b")]), "a\nb"),
        (result([text("a")], is_error=True), "error: a"),
        (result([], is_error=True), "error:"),
        ({"type": "tool_result", "tool_use_id": "t1"}, ""),
        (result([{"type": "tool_reference", "tool_name": "look"}]), "[tool: look]"),
        (
            result([{"type": "search_result", "source": "http://x", "title": "T", "content": [text("a")]}]),
            "[search result: T]\nhttp://x\na",
        ),
    ],
)
def test_what_a_result_says(block: Json, output: str) -> None:
    assert told(user("x"), assistant(CALL), user(block))[-1] == ("tool", output)


def test_images_are_parts_that_know_their_places() -> None:
    image = {"type": "image", "source": PNG}
    by_url = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    by_id = {"type": "image", "source": {"type": "file", "file_id": "file-1"}}
    found = read(user(text("a"), image), assistant(CALL), user(result([text("b"), by_url]), by_id))
    asked, _, answered, more = found.items
    assert asked["content"][1]["image_url"] == "data:image/png;base64,aGk="
    assert answered["output"][1]["image_url"] == "https://x/y.png"
    assert more["content"][0]["file_id"] == "file-1"
    assert found.places[0].parts[1] == "messages[0].content[1]"
    assert found.places[2].parts[1] == "messages[2].content[0].content[1]"
    assert found.places[3].parts == ["messages[2].content[1]"]


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (
            {"type": "base64", "media_type": "application/pdf", "data": "aGk="},
            {"filename": "Notes.pdf", "file_data": "data:application/pdf;base64,aGk="},
        ),
        (
            {"type": "text", "media_type": "text/plain", "data": "hé"},
            {
                "filename": "Notes.txt",
                "file_data": "data:text/plain;base64," + base64.b64encode("hé".encode()).decode(),
            },
        ),
        ({"type": "url", "url": "https://x/y.pdf"}, {"file_url": "https://x/y.pdf"}),
        ({"type": "file", "file_id": "file-1"}, {"file_id": "file-1"}),
    ],
)
def test_documents_are_files(source: Json, part: Json) -> None:
    block = {"type": "document", "source": source, "title": "Notes", "context": "Read it."}
    with collecting() as ignored:
        [item] = read(user({**block, "citations": {"enabled": True}})).items
    assert item["content"][0] == {"type": "input_text", "text": "Read it."}
    found = {key: value for key, value in item["content"][1].items() if value is not None}
    assert {key: found[key] for key in part} == part and found["type"] == "input_file"
    assert ignored.header() == "messages[0].content[0].citations"


def test_a_document_of_parts_is_these() -> None:
    image = {"type": "image", "source": PNG}
    for content, parts in (("a", ["[document: T]", "a"]), ([text("a"), image], ["[document: T]", "a", None])):
        block = {"type": "document", "title": "T", "source": {"type": "content", "content": content}}
        [item] = read(user(block)).items
        assert [part.get("text") for part in item["content"]] == parts


def test_thoughts_are_sealed_reasoning() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    redacted = {"type": "redacted_thinking", "data": "d"}
    found = read(user("a"), assistant(thought, redacted, text("b")), user("c"))
    assert [item.get("encrypted_content") for item in found.items] == [None, "s", "d", None, None]
    assert found.places[1].path == "messages[1].content[0].signature"
    assert found.places[2].path == "messages[1].content[1].data"


def test_what_another_server_called_is_told_without_what_only_it_can_read() -> None:
    found = [{"type": "web_search_result", "url": "http://x", "encrypted_content": "zzz"}]
    turn = assistant(
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": found},
        text("so"),
    )
    assert told(user("a"), turn, user("b"))[1:4] == [
        ("assistant", '{"query": "q"}'),
        ("tool", '[{"type":"web_search_result","url":"http://x"}]'),
        ("assistant", "so"),
    ]


def test_an_answer_goes_on_with_what_the_assistant_has_said_last() -> None:
    assert read(user("a"), assistant("b")).continues
    assert not read(user("a"), assistant("")).continues
    assert not read(user("a"), assistant("b"), {"role": "system", "content": "c"}).continues
    assert not read(user("a")).continues


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("x", "messages"),
        ([1], "messages[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([user({"type": "video"})], "messages[0].content[0].type"),
        ([user({"type": "text"})], "messages[0].content[0].text"),
        ([user(CALL)], "messages[0].content[0].type"),
        ([assistant(result())], "messages[0].content[0].type"),
        ([user({"type": "image", "source": BMP})], "messages[0].content[0].source.media_type"),
        ([user(result())], "messages[0].content[0].tool_use_id"),
        ([user("x"), assistant(CALL), user(result(), result())], "messages[2].content[1].tool_use_id"),
        ([user("x"), assistant(CALL), user("y")], "messages[1].content[0]"),
        ([user("x"), assistant(CALL)], "messages[1].content[0]"),
        ([user("x"), assistant(CALL), user("y"), assistant("z"), user(result())], "messages[1].content[0]"),
        ([user("x"), assistant({"type": "thinking", "thinking": "hm"})], "messages[1].content[0].signature"),
        (
            [user("x"), assistant({"type": "thinking", "thinking": "hm", "signature": "s"})],
            "messages[1].content[0].signature",
        ),
        ([assistant("")], "messages"),
    ],
)
def test_what_is_wrong_is_told_by_its_path(messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        Conversation().read(messages)
    assert (caught.value.status, caught.value.param) == (400, param)
