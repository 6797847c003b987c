"""The OpenAI Agents SDK, unmodified: its shells and its patches, carried out where the agent runs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import (
    Agent,
    ApplyPatchTool,
    FunctionTool,
    LocalShellCommandRequest,
    LocalShellTool,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    ShellCallOutcome,
    ShellCommandOutput,
    ShellCommandRequest,
    ShellResult,
    ShellTool,
    Tool,
    ToolSearchTool,
    apply_diff,
    set_tracing_disabled,
    tool_namespace,
)
from agents.editor import ApplyPatchOperation, ApplyPatchResult
from openai import AsyncOpenAI

from engine import GenerateRequest, Say, ScriptedEngine
from engine.backends.script import Step
from tests.support.running import live_app

set_tracing_disabled(True)  # it would go to another server


def agent(sdk: AsyncOpenAI, tool: Tool, **settings: Any) -> Agent[None]:
    model = OpenAIResponsesModel(model="antiphon-scripted", openai_client=sdk)
    return Agent(name="Assistant", model=model, tools=[tool], model_settings=ModelSettings(**settings))


async def run(made: Agent[None], asked: Any, way: str) -> tuple[str, list[Any]]:
    """A loop of an agent: its last words, and the items of the conversation."""
    if way == "streamed":
        stream = Runner.run_streamed(made, asked)
        async for _ in stream.stream_events():
            pass
        return stream.final_output, stream.to_input_list()
    if way == "chained":
        result = await Runner.run(made, asked, auto_previous_response_id=True)
    else:
        result = await Runner.run(made, asked)
    return result.final_output, result.to_input_list()


def in_a_shell(request: ShellCommandRequest) -> ShellResult:
    """Runs the commands of a call on this machine."""
    outputs = []
    for command in request.data.action.commands:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30)
        outcome = ShellCallOutcome("exit", done.returncode)
        outputs.append(ShellCommandOutput(done.stdout, done.stderr, outcome))
    return ShellResult(outputs, max_output_length=request.data.action.max_output_length)


@pytest.mark.parametrize("way", ["resent", "chained", "streamed"])
async def test_a_shell(live_sdk: AsyncOpenAI, way: str) -> None:
    made = agent(live_sdk, ShellTool(executor=in_a_shell))
    asked = 'call shell {"commands": ["echo one", "echo two >&2; exit 3"], "max_output_length": 100}'
    said, items = await run(made, asked, way)
    assert said == "The tool said: one\n[exit code 0]\n\ntwo\n[exit code 3]"
    again, _ = await run(made, [*items, {"role": "user", "content": "say on"}], "resent")
    assert again == "on"


async def test_a_shell_without_a_store(live_sdk: AsyncOpenAI) -> None:
    made = agent(live_sdk, ShellTool(executor=in_a_shell), store=False)
    said, _ = await run(made, 'call shell {"commands": ["echo one"]}', "resent")
    assert said == "The tool said: one\n[exit code 0]"


async def test_a_local_shell(live_sdk: AsyncOpenAI) -> None:
    def execute(request: LocalShellCommandRequest) -> str:
        return subprocess.run(request.data.action.command, capture_output=True, text=True, timeout=30).stdout

    made = agent(live_sdk, LocalShellTool(executor=execute))
    said, items = await run(made, 'call local_shell {"command": ["echo", "one"]}', "resent")
    assert said == "The tool said: one\n"
    again, _ = await run(made, [*items, {"role": "user", "content": "say on"}], "resent")
    assert again == "on"


class Editor:
    """Applies patches to the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        (self._folder / operation.path).write_text(apply_diff("", operation.diff or "", mode="create"))
        return ApplyPatchResult("completed", f"created {operation.path}")

    def update_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        file = self._folder / operation.path
        file.write_text(apply_diff(file.read_text(), operation.diff or ""))
        return ApplyPatchResult("completed", f"changed {operation.path}")

    def delete_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        (self._folder / operation.path).unlink()
        return ApplyPatchResult("completed", f"deleted {operation.path}")


async def test_patches_of_files(live_sdk: AsyncOpenAI, tmp_path: Path) -> None:
    made = agent(live_sdk, ApplyPatchTool(editor=Editor(tmp_path)))
    file, items = tmp_path / "a.py", list[Any]()

    async def patch(way: str, **operation: str) -> str:
        nonlocal items
        asked = f"call apply_patch {json.dumps(operation)}"
        if way == "chained":
            said, _ = await run(made, asked, way)
        else:
            said, items = await run(made, [*items, {"role": "user", "content": asked}], way)
        return said

    created = await patch("resent", type="create_file", path="a.py", diff="+def f():\n+    return 1\n")
    assert (created, file.read_text()) == ("The tool said: created a.py", "def f():\n    return 1")
    diff = "@@ def f():\n-    return 1\n+    return 2\n"
    changed = await patch("streamed", type="update_file", path="a.py", diff=diff)
    assert (changed, file.read_text()) == ("The tool said: changed a.py", "def f():\n    return 2")
    failed = await patch("resent", type="update_file", path="a.py", diff=diff)
    assert failed.startswith("The tool said: error: ") and file.read_text().endswith("return 2")
    deleted = await patch("chained", type="delete_file", path="a.py")
    assert (deleted, file.exists()) == ("The tool said: deleted a.py", False)


@pytest.mark.parametrize("way", ["whole", "chained", "streamed"])
async def test_an_agent_searches_for_its_tools(tmp_path: Path, way: str) -> None:
    """A function in a namespace, and one that is deferred alone; both are loaded by one search."""
    ran: list[str] = []

    def named(name: str) -> FunctionTool:
        async def run_it(_context: Any, arguments: str) -> str:
            ran.append(f"{name} {json.loads(arguments)['order']}")
            return "today"

        schema = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
        schema["additionalProperties"] = False
        return FunctionTool(
            name, f"Tell {name} of an order.", schema, run_it, strict_json_schema=True, defer_loading=True
        )

    def wrote(name: str, **arguments: str) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    said = [
        wrote("tool_search", query="eta and weight of an order"),
        wrote("eta", order="7"),
        wrote("crm__weight", order="8"),
        "done",
    ]

    def script(request: GenerateRequest, prompt: str) -> Iterator[Step]:
        yield Say(said.pop(0))

    tools = [named("eta"), *tool_namespace(name="crm", description="Orders.", tools=[named("weight")])]
    async with (
        live_app(tmp_path, ScriptedEngine(script)) as server,
        AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="unused") as sdk,
    ):
        model = OpenAIResponsesModel(model="antiphon-scripted", openai_client=sdk)
        made = Agent(name="Assistant", model=model, tools=[*tools, ToolSearchTool()])
        words, items = await run(made, "When, and how heavy?", way)
    assert (words, ran) == ("done", ["eta 7", "weight 8"])
    assert [item["type"] for item in items if "search" in item.get("type", "")] == [
        "tool_search_call",
        "tool_search_output",
    ]
