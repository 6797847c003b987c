"""Every item type has words in a prompt, or is refused on every way in; and rows agree with each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from engine import ScriptedEngine
from server.access import LOCAL_OWNER
from server.items import ITEM_TYPES, ItemType, asks_approval, is_client_call, is_running
from server.prompting import to_messages
from server.schema import events as grammar
from server.schema import normalize_input
from storage import NewItem
from tests.support.item_samples import SAMPLES
from tests.support.running import http_client, running_app
from tests.support.talk import Api, prompts
from tests.support.wire import Json

# ------------------------------------------------------------------------------------------------------------
# Words


def called(name: str, **arguments: Any) -> Json:
    """What a prompt says of a call."""
    return {"call": name, "arguments": arguments}


ASKED: Json = {"server_label": "s", "name": "t", "arguments": '{"a": 1}'}

MADE = "The image was made, and the user sees it."
CLICK: Json = {"type": "click", "button": "left", "x": 1, "y": 2}
WORDS: dict[str, list[tuple[list[Json], list[Any]]]] = {
    "message": [([{"role": "developer", "content": "a"}], ["system: a"])],
    "reasoning": [([{"content": [{"type": "reasoning_text", "text": "hm"}]}], ["thought: hm"])],
    "function_call": [([{"call_id": "c", "name": "f", "arguments": '{"a": 1}'}], [called("f", a=1)])],
    "function_call_output": [
        (
            [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
            ],
            [called("f"), "f: x"],
        )
    ],
    "custom_tool_call": [([{"call_id": "c", "name": "f", "input": "free"}], [called("f", input="free")])],
    "custom_tool_call_output": [
        (
            [
                {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "free"},
                {"call_id": "c", "output": "x"},
            ],
            [called("f", input="free"), "f: x"],
        )
    ],
    "mcp_list_tools": [([{"server_label": "s", "tools": []}], [])],
    "mcp_call": [
        (
            [{"server_label": "s", "name": "t", "arguments": "{}", "output": "o"}],
            [called("t"), "t: o"],
        ),
        (
            [
                {
                    "server_label": "s",
                    "name": "t",
                    "arguments": "{}",
                    "error": {"type": "http_error", "code": 500, "message": "m"},
                }
            ],
            [called("t"), "t: error: m"],
        ),
    ],
    "mcp_approval_request": [
        (
            [{**ASKED, "id": "mcpr_1"}, *more],
            [called("t", a=1), f"t: {told}"],
        )
        for more, told in (
            (
                [],
                "error: The call was not made: it needs the user's approval, which the user has not given.",
            ),
            (
                [{"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": False}],
                "error: The call was not made: the user declined it.",
            ),
            (
                [
                    {
                        "type": "mcp_approval_response",
                        "approval_request_id": "mcpr_1",
                        "approve": False,
                        "reason": "too dear",
                    }
                ],
                "error: The call was not made: the user declined it. The reason: too dear",
            ),
            (
                [
                    {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
                    {**ASKED, "type": "mcp_call", "approval_request_id": "mcpr_1", "output": "o"},
                ],
                "o",
            ),
        )
    ],
    "mcp_approval_response": [
        (
            [
                {**ASKED, "type": "mcp_approval_request", "id": "mcpr_1"},
                {"approval_request_id": "mcpr_1", "approve": False},
            ],
            [called("t", a=1), "t: error: The call was not made: the user declined it."],
        )
    ],
    "web_search_call": [  # without its private half, which no client has, there is nothing to say
        ([{"action": {"type": "search", "query": "q", "sources": [{"type": "url", "url": "u"}]}}], []),
        ([{"action": {"type": "open_page", "url": "u"}, "status": "failed"}], []),
    ],
    "image_generation_call": [
        (
            [{"result": "aGk=", "revised_prompt": "a cat"}],
            [
                called("image_generation", prompt="a cat"),
                f"image_generation: {MADE} It is image 1 of the conversation.",
            ],
        ),
        (
            [{"status": "failed", "error": {"type": "t", "message": "no cats"}}],
            [called("image_generation", prompt=""), "image_generation: error: no cats"],
        ),
        (
            [{"status": "generating", "revised_prompt": "a dog"}],
            [called("image_generation", prompt="a dog"), "image_generation: error: The image was not made."],
        ),
    ],
    "file_search_call": [
        (
            [{"queries": ["q"], "results": [{"filename": "a.txt", "text": "x"}, {"file_id": "f"}]}],
            [called("file_search", query="q"), "file_search: a.txt:\nx\n\nf:\n"],
        ),
        (
            [{"queries": ["q"]}],
            [
                called("file_search", query="q"),
                "file_search: The search was made; its results were not kept.",
            ],
        ),
        (
            [{"queries": [], "results": []}],
            [called("file_search", query=""), "file_search: Nothing was found."],
        ),
        (
            [{"queries": [], "status": "failed"}],
            [called("file_search", query=""), "file_search: The search failed."],
        ),
    ],
    "code_interpreter_call": [
        (
            [
                {
                    "container_id": "c",
                    "code": "1",
                    "outputs": [{"type": "logs", "logs": "l"}, {"type": "image", "url": "u"}],
                }
            ],
            [
                called("python", code="1"),
                "python: l\n[an image that is not shown: u]",
            ],
        ),
        (
            [{"container_id": "c", "code": "1"}],
            [
                called("python", code="1"),
                "python: The code was run; its outputs were not kept.",
            ],
        ),
    ],
    "shell_call": [
        (
            [{"call_id": "c", "action": {"commands": ["ls"], "timeout_ms": 5}}],
            [called("shell", commands=["ls"], timeout_ms=5)],
        )
    ],
    "shell_call_output": [
        (
            [
                {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls", "top"]}},
                {
                    "call_id": "c",
                    "output": [
                        {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                        {"stdout": "", "stderr": "e", "outcome": {"type": "timeout"}},
                    ],
                },
            ],
            [called("shell", commands=["ls", "top"]), "shell: a\n[exit code 0]\n\ne\n[timed out]"],
        )
    ],
    "local_shell_call": [
        (
            [{"call_id": "c", "action": {"type": "exec", "command": ["ls"], "env": {}}}],
            [called("local_shell", command=["ls"])],
        )
    ],
    "local_shell_call_output": [
        (
            [
                {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
                {"id": "c", "output": "o"},
            ],
            [called("local_shell", command=["ls"]), "local_shell: o"],
        )
    ],
    "configuration_update": [([{"reasoning": {"effort": "low"}}], [])],
    "compaction": [([{"encrypted_content": "e"}], [])],  # what it says is sealed: see test_compaction.py
    "additional_tools": [([{"tools": [{"type": "function", "name": "f"}]}], [])],
    "tool_search_call": [
        ([{"arguments": {"query": "q"}}], [called("tool_search", query="q")]),
        (
            [{"arguments": {"query": "q"}, "status": "incomplete"}],
            [called("tool_search", query="q"), "tool_search: error: The search was not made."],
        ),
    ],
    "tool_search_output": [
        (
            [{"type": "tool_search_call", **call}, {"tools": tools, **call_id}],
            [called("tool_search", query="q"), f"tool_search: {told}"],
        )
        for call_id, call in (
            ({}, {"arguments": {"query": "q"}}),
            ({"call_id": "c"}, {"call_id": "c", "arguments": {"query": "q"}}),
        )
        for tools, told in (
            ([], "Nothing was found."),
            (
                [
                    {"type": "function", "name": "f"},
                    {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "g"}]},
                    {
                        "type": "mcp",
                        "server_label": "s",
                        "server_url": "builtin:",
                        "allowed_tools": ["a.b"],
                    },
                    {"type": "mcp", "server_label": "t", "server_url": "builtin:"},
                ],
                "These tools can be called now: f, n__g, a_b, all of t.",
            ),
        )
    ],
    "apply_patch_call": [
        (
            [{"call_id": "c", "operation": {"type": "delete_file", "path": "p"}}],
            [called("apply_patch", type="delete_file", path="p")],
        )
    ],
    "apply_patch_call_output": [
        (
            [
                {
                    "type": "apply_patch_call",
                    "call_id": "c",
                    "operation": {"type": "delete_file", "path": "p"},
                },
                {"call_id": "c", **more},
            ],
            [called("apply_patch", type="delete_file", path="p"), f"apply_patch: {told}"],
        )
        for more, told in (
            ({"status": "completed"}, "The patch was applied."),
            ({"status": "completed", "output": "done"}, "done"),
            ({"status": "failed", "output": "no file"}, "error: no file"),
            ({"status": "failed"}, "error: The patch could not be applied."),
        )
    ],
    "computer_call": [
        ([{"call_id": "c", **said}], [called(name, **said)])
        for name, said in (
            ("computer", {"actions": [CLICK, {"type": "wait"}]}),
            ("computer_use_preview", {"action": CLICK}),
        )
    ],
    "computer_call_output": [
        (
            [
                {"type": "computer_call", "call_id": "c", "action": CLICK},
                {"call_id": "c", "output": {"type": "computer_screenshot", "file_id": "f"}},
            ],
            [
                called("computer_use_preview", action=CLICK),
                "computer_use_preview: [a screenshot, which you cannot see]",
            ],
        )
    ],
}
SPOKEN = [(kind, *each) for kind, several in WORDS.items() for each in several]
REFUSED = [row.type for row in ITEM_TYPES.values() if row.say is None]


def test_every_type_has_words_or_is_refused() -> None:
    assert sorted([*WORDS, *REFUSED]) == sorted(ITEM_TYPES)
    assert set(REFUSED) == {
        "compaction_trigger", "program", "program_output",
    }  # fmt: skip


def spoken(messages: list[Json]) -> list[Any]:
    """Messages, short."""
    told: list[Any] = []
    for message in messages:
        if message["role"] == "assistant":
            thought = message.get("reasoning_content")
            told += [f"thought: {thought}"] if thought else []
            for call in message.get("tool_calls", ()):
                function = call["function"]
                told.append(called(function["name"], **orjson.loads(function["arguments"])))
        else:
            told.append(f"{message.get('name') or message['role']}: {message['content']}")
    return told


@pytest.mark.parametrize(("kind", "items", "told"), SPOKEN)
def test_the_words_of_an_item(kind: str, items: list[Json], told: list[Any]) -> None:
    sent = [{"type": kind, **item} for item in items]
    assert spoken(to_messages(normalize_input(sent, new_id=lambda prefix: f"{prefix}1"))) == told


def test_the_words_of_a_call_that_was_approved_and_never_made() -> None:
    answer = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}
    sent = [{**ASKED, "type": "mcp_approval_request", "id": "mcpr_1"}, answer]
    _, told = to_messages(normalize_input(sent, new_id=lambda prefix: f"{prefix}1"))
    assert "approved the call, but it was not made" in told["content"]


# A screen is refused where the model reads text.
READ = [each for each in SPOKEN if each[0] != "computer_call_output"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "items", "told"), READ)
async def test_an_item_with_words_is_in_the_prompt(
    tmp_path: Path, kind: str, items: list[Json], told: list[Any]
) -> None:
    """Calls that only wait for an output are the exception: there must be one."""
    if kind == "compaction":
        return  # this one is sealed by nobody
    engine = ScriptedEngine()
    sent: list[Json] = [{"type": kind, **item} for item in items]
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        (*_, last) = normalize_input(sent, new_id=str)
        if is_client_call(last) and not asks_approval({"type": kind}):
            error = await Api(client).refused(400, sent)
            assert error["message"].startswith("No tool output found for function call c. ")
            return
        await Api(client).create([*sent, {"role": "user", "content": "say hi"}])
    for said in told:
        what = said["call"] if isinstance(said, dict) else said.split(": ", 1)[1]
        assert what in prompts(engine)[0]


@pytest.mark.parametrize("kind", REFUSED)
async def test_an_item_without_words_is_refused_on_every_way_in(tmp_path: Path, kind: str) -> None:
    items = [{"role": "user", "content": "hi"}, {"type": kind, **SAMPLES[kind][0]}]
    async with running_app(tmp_path) as running, http_client(running) as client:
        api = Api(client)
        conversation = await api.conversation()
        for path, field in (
            *([] if kind == "compaction_trigger" else [("/v1/responses", "input")]),
            ("/v1/conversations", "items"),
            (f"/v1/conversations/{conversation}/items", "items"),
        ):
            error = await api.fails(400, "POST", path, json={field: items})
            assert (error["code"], error["param"]) == ("unsupported_item", f"{field}[1]")
            assert f"'{kind}'" in error["message"]
        assert await api.conversation_items(conversation) == []


async def test_an_item_without_words_that_is_stored_already_is_refused_where_it_is_used(
    tmp_path: Path,
) -> None:
    stored = orjson.dumps(
        {"type": "program", "id": "prog_1", "call_id": "c", "code": "x", "fingerprint": "f"}
    )
    async with running_app(tmp_path) as running, http_client(running) as client:
        api = Api(client)
        conversation = await api.conversation({"role": "user", "content": "hi"})
        old = [NewItem("prog_1", "program", stored)]
        await running.context.storage.add_conversation_items(LOCAL_OWNER, conversation, old)
        error = await api.refused(400, "hi", conversation=conversation)
        assert (error["code"], error["param"]) == ("unsupported_item", "conversation")
        error = await api.refused(400, [{"type": "item_reference", "id": "prog_1"}])
        assert (error["code"], error["param"]) == ("unsupported_item", "input[0]")
        body = {"items": [{"type": "item_reference", "id": "prog_1"}]}
        error = await api.fails(400, "POST", "/v1/conversations", json=body)
        assert (error["code"], error["param"]) == ("unsupported_item", "items[0]")


async def test_an_output_needs_its_call_whatever_its_type(tmp_path: Path) -> None:
    async with running_app(tmp_path) as running, http_client(running) as client:
        error = await Api(client).refused(
            400, [{"type": "apply_patch_call_output", "call_id": "c", "status": "completed"}]
        )
    assert error["param"] == "input[0].call_id"


# ------------------------------------------------------------------------------------------------------------
# Rows


@pytest.mark.parametrize("row", ITEM_TYPES.values(), ids=ITEM_TYPES)
def test_a_row_agrees_with_itself_and_with_others(row: ItemType) -> None:
    if row.answered_by is not None:
        assert ITEM_TYPES[row.answered_by].answers == row.type
    if row.answers is not None:
        assert ITEM_TYPES[row.answers].answered_by == row.type
    assert [other.type for other in ITEM_TYPES.values() if other.prefix == row.prefix] == [row.type]
    own = {name.removeprefix("response.") for name in row.events}
    parts = {"content_part.added", "content_part.done"}
    assert own <= set(re.findall(r"[a-z_.]+", grammar.order(row.type))) <= own | parts
    if row.call is not None:
        assert row.tools, "something offers it"
        emitted = [*row.call.opens, *(row.call.execution.starts if row.call.execution is not None else ())]
        emitted += [] if row.call.stream is None else [f"{row.call.stream.event}.done"]
        assert set(emitted) <= set(row.events)
        sides = (row.call.execution is not None, row.answered_by is not None)
        assert any(sides) and all(sides) is (row.ours is not None), "somebody carries it out"


def test_only_the_servers_own_calls_are_running() -> None:
    for kind in ("mcp_call", "function_call", "message", "of_another_version"):
        assert is_running({"type": kind, "status": "calling"}) is (kind == "mcp_call")
