"""The hosted tool `shell`: commands in a container, what is shown of them, and the same files as code has."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import ScriptedEngine
from server.items import ITEM_TYPES
from server.runs.events.assembler import fold
from tests.server.items.test_code_interpreter import CODE, OUTPUTS, coding, made, python, turns
from tests.support.talk import loose, prompts, wrote
from tests.support.wire import Json

SHELL: Json = {"type": "shell", "environment": {"type": "container_auto"}}


def shell(*commands: str, **asked: int) -> str:
    return wrote("shell", commands=[*commands], **asked)


async def test_commands_run_in_the_container_and_are_told(tmp_path: Path) -> None:
    engine = ScriptedEngine(
        turns(
            shell("echo hello > a.txt; cat a.txt", "echo oops >&2; exit 3", max_output_length=1000),
            "It is sandbox:/mnt/data/a.txt",
            python("x = 5\nprint(open('a.txt').read())"),
            "done",
            shell("sleep 30", "echo never", timeout_ms=300),
            "slow",
            shell("seq 100000", max_output_length=9),
            "long",
        )
    )
    async with coding(tmp_path, engine, "bubblewrap") as (_, api):
        stream = await api.stream("one", tools=[SHELL])
        call, output, message = stream.response["output"]
        assert call["status"] == output["status"] == "completed" and call["call_id"] == output["call_id"]
        assert call["environment"]["type"] == "container_reference"
        assert [(one["stdout"], one["stderr"], one["outcome"]) for one in output["output"]] == [
            ("hello\n", "", {"type": "exit", "exit_code": 0}),
            ("", "oops\n", {"type": "exit", "exit_code": 3}),
        ]
        own = [kind for kind in stream.types if "shell" in kind or kind.startswith("output_item")]
        command = [f"shell_call_command.{kind}" for kind in ("added", "delta", "done")]
        content = [f"shell_call_output_content.{kind}" for kind in ("delta", "done")]
        assert own == [
            *("output_item.added", *command, *command, "output_item.done"),
            *("output_item.added", *content, *content, "output_item.done"),
            *("output_item.added", "output_item.done"),
        ]
        [cited] = message["content"][0]["annotations"]
        assert (cited["type"], cited["filename"]) == ("container_file_citation", "a.txt")
        id = call["environment"]["container_id"]
        file = await api.http.get(f"/v1/containers/{id}/files/{cited['file_id']}/content")
        assert file.content == b"hello\n"
        offered, told = prompts(engine)[:2]
        assert "in a container" in offered and "hello\n[exit code 0]\n\noops\n[exit code 3]" in told
        stored = (await api.http.get(f"/v1/responses/{stream.response['id']}")).json()
        assert stored["output"] == stream.response["output"]
        assert stored["tools"] == [SHELL], "the tool as it was asked for"
        again = await api.http.get(f"/v1/responses/{stream.response['id']}", params={"stream": "true"})
        assert again.content == stream.raw

        previous = {"previous_response_id": stream.response["id"]}
        code = await api.create("two", tools=[SHELL, CODE], include=[OUTPUTS], **previous)
        assert made(code)[0]["container_id"] == id
        assert made(code)[0]["outputs"] == [{"type": "logs", "logs": "hello\n\n"}]
        # A client that keeps the items sends them back as they came.
        items = [{"role": "user", "content": "one"}, *stream.response["output"]]
        slow = await api.create([*items, {"role": "user", "content": "three"}], tools=[SHELL])
        assert [one["outcome"] for one in slow["output"][1]["output"]] == [{"type": "timeout"}] * 2
        long = await api.create("four", tools=[SHELL])
        assert (
            long["output"][1]["output"][0]["stdout"]
            == "1\n2\n3\n4\n5\n[cut: these are the first 9 characters]"
        )


async def test_calls_that_cannot_be_made_are_told(tmp_path: Path) -> None:
    broken = '<tool_call>\n{"name": "shell", "arguments": {"commands": ["ls"\n</tool_call>'
    engine = loose(turns(broken, shell("echo 1"), shell("echo 2"), "sorry"))
    async with coding(tmp_path, engine, "bubblewrap") as (_, api):
        response = await api.create("hi", tools=[SHELL], max_tool_calls=1)
        kinds = [(item["type"], item.get("status")) for item in response["output"]]
        assert kinds == [
            ("shell_call", "incomplete"),
            ("shell_call", "completed"), ("shell_call_output", "completed"),
            ("shell_call", "incomplete"), ("shell_call_output", "incomplete"),
            ("message", "completed"),
        ]  # fmt: skip
        assert "The call is not whole" in prompts(engine)[1]
        assert "no more than 1 tool call" in response["output"][4]["output"][0]["stderr"]


async def test_calls_that_failed_count_against_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OverflowError

    monkeypatch.setattr("server.containers.cells.Commands.outputs", fail)
    engine = ScriptedEngine(turns(shell("echo 1"), shell("echo 2"), "sorry"))
    async with coding(tmp_path, engine, "bubblewrap") as (_, api):
        response = await api.create("hi", tools=[SHELL], max_tool_calls=1)
    told = [item["output"][0]["stderr"] for item in response["output"] if "output" in item]
    assert "OverflowError" in told[0] and "no more than 1 tool call" in told[1]


async def test_monty_runs_no_commands_and_says_so(tmp_path: Path) -> None:
    async with coding(tmp_path) as (_, api):
        error = await api.refused(400, "hi", tools=[SHELL])
        assert error["code"] == "unsupported_tool" and "bubblewrap" in error["message"]
        assert "  " not in error["message"]


def test_a_call_that_a_crash_cut_short_has_its_commands() -> None:
    call = ITEM_TYPES["shell_call"].call
    assert call is not None and call.whole is not None
    fields = call.whole.read('{"commands": ["a", "b"], "timeout_ms": 5}')
    assert fields is not None
    environment = {"type": "container_reference", "container_id": "cntr_1"}
    item = {"type": "shell_call", "id": "sh_1", "status": "in_progress", "environment": environment, **fields}
    added = {
        "type": "response.output_item.added",
        "output_index": 0,
        "item": {**item, **call.whole.added(fields)},
    }
    events = [{**event, "output_index": 0} for event in call.whole.events(item)]
    assert fold([added, *events]) == ([item], {0})


async def test_a_fault_in_telling_a_call_leaves_its_container_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OverflowError

    engine = ScriptedEngine(turns(shell("echo 1"), "one", shell("echo 2"), "two"))
    async with coding(tmp_path, engine, "bubblewrap") as (_, api):
        with monkeypatch.context() as patched:
            patched.setattr("server.containers.cells.Commands.outputs", fail)
            first = await api.create("one", tools=[SHELL])
        again = await api.create("two", tools=[SHELL], previous_response_id=first["id"])
        assert again["output"][1]["output"][0]["stdout"] == "2\n"
