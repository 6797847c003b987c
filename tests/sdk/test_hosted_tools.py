"""What clients, unmodified, make of the tools that the server runs: searches and what an answer cites, calls
of an MCP server's tools and their approvals. Vercel's AI SDK and Codex are in `tests/sdk/js`.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import agents
import httpx
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic import SecretStr

from server.config import Config
from server.process.tools_registry import read_registry
from tests.support.running import Running, live_app

agents.set_tracing_disabled(True)  # it would go to another server

MODEL = "antiphon-scripted"
SEARCH, SUM = 'call web_search {"queries": ["spring tide"]}', 'call calculator {"expression": "6 * 7"}'
URL = "https://demo.test/tides.md"
WEB = {"type": "web_search"}
MCP = {"type": "mcp", "server_label": "here", "server_url": "builtin:", "require_approval": "never"}
ASKING = {**MCP, "require_approval": "always"}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    """A server that searches a folder."""
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "tides.md").write_text("# Tides of the bay\n\nThe spring tide is highest after the full moon.\n")
    registry = await asyncio.to_thread(read_registry, Config(demo_web=notes))
    async with live_app(tmp_path / "data", registry=registry) as running:
        yield running


# ------------------------------------------------------------------------------------------------------------
# LangChain


async def langchain_answer(model: Any, history: list[Any], streamed: bool) -> Any:
    """The model's message, put together from its chunks if it is streamed; it is added to the history."""
    if streamed:
        chunks = [chunk async for chunk in model.astream(history)]
        message = functools.reduce(lambda whole, chunk: whole + chunk, chunks)
    else:
        message = await model.ainvoke(history)
    history.append(message)
    return message


def items_of(message: Any, kind: str) -> list[Any]:
    """The items of a type that a message holds, wherever its version of the format has them."""
    content = message.content if isinstance(message.content, list) else []
    found = [block.get("value", block) for block in content if isinstance(block, dict)]
    found += message.additional_kwargs.get("tool_outputs", [])
    return [item for item in found if item["type"] == kind]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("chained", [False, True], ids=["history resent", "previous_response_id"])
@pytest.mark.parametrize("version", ["v0", "responses/v1", "v1"])
async def test_langchain(server: Running, version: str, chained: bool, streamed: bool) -> None:
    async with httpx.AsyncClient() as http:  # its own clients are cached and never closed
        settings: dict[str, Any] = {
            "model": MODEL, "base_url": f"{server.base_url}/v1", "api_key": SecretStr("unused")
        }  # fmt: skip
        model = ChatOpenAI(
            use_responses_api=True,
            use_previous_response_id=chained,
            output_version=version,
            http_async_client=http,
            **settings,
        )
        searching, history = model.bind_tools([WEB]), [HumanMessage(SEARCH)]
        found = await langchain_answer(searching, history, streamed)
        (note,) = [note for block in found.content_blocks for note in block.get("annotations", [])]
        assert (note["type"], note["url"], note["title"]) == ("citation", URL, "Tides of the bay")
        kinds = [block["type"] for block in found.content_blocks]
        assert sorted(kinds) == ["server_tool_call", "server_tool_result", "text"]
        history.append(HumanMessage("say on"))
        assert (await langchain_answer(searching, history, streamed)).text == "on"

        calling, history = model.bind_tools([MCP]), [HumanMessage(SUM)]
        assert (await langchain_answer(calling, history, streamed)).text == "The tool said: 42"
        history.append(HumanMessage("say on"))
        assert (await langchain_answer(calling, history, streamed)).text == "on"

        asking, history = model.bind_tools([ASKING]), [HumanMessage(SUM)]
        (request,) = items_of(await langchain_answer(asking, history, streamed), "mcp_approval_request")
        answer = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
        history.append(HumanMessage([answer]))
        assert (await langchain_answer(asking, history, streamed)).text == "The tool said: 42"
        history.append(HumanMessage("say on"))
        assert (await langchain_answer(asking, history, streamed)).text == "on"


# ------------------------------------------------------------------------------------------------------------
# LiteLLM, which takes four seconds to import


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_litellm(server: Running, streamed: bool) -> None:
    import litellm

    settings: Any = {
        "model": f"openai/{MODEL}", "api_base": f"{server.base_url}/v1", "api_key": "unused"
    }  # fmt: skip

    async def respond(asked: Any, tool: Any, **body: Any) -> tuple[str, list[Any]]:
        response: Any = await litellm.aresponses(
            input=asked, tools=[tool], stream=streamed, **body, **settings
        )
        if streamed:
            response = [event async for event in response][-1].response
        return response.id, [json.loads(json.dumps(item, default=dict)) for item in response.output]

    try:
        _, (search, answer) = await respond(SEARCH, WEB)
        assert (search["type"], search["status"]) == ("web_search_call", "completed")
        assert [note["url"] for note in answer["content"][0]["annotations"]] == [URL]
        first, (_, request) = await respond(SUM, ASKING)
        approval = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
        _, (made, _) = await respond([approval], ASKING, previous_response_id=first)
        assert (made["type"], made["output"]) == ("mcp_call", "42")
    finally:
        await litellm.close_litellm_async_clients()  # type: ignore[attr-defined]


async def test_litellm_chat_over_responses(server: Running) -> None:
    """Its chat completions, sent as responses: what is cited comes along."""
    import litellm

    settings: Any = {"model": f"openai/responses/{MODEL}", "api_base": f"{server.base_url}/v1"}
    try:
        reply: Any = await litellm.acompletion(
            messages=[{"role": "user", "content": SEARCH}], tools=[WEB], api_key="unused", **settings
        )
        assert [note["url"] for note in reply.choices[0].message.annotations] == [URL]
    finally:
        await litellm.close_litellm_async_clients()  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------------
# The OpenAI Agents SDK


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("store", [True, False], ids=["stored", "unstored"])
async def test_an_agent_is_interrupted_and_taken_up_again(
    server: Running, store: bool, streamed: bool
) -> None:
    """Nothing decides about the call at once: the run is written down, and goes on from there."""
    async with AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="unused", max_retries=0) as sdk:
        agent: Any = agents.Agent(
            name="Assistant",
            model=agents.OpenAIResponsesModel(model=MODEL, openai_client=sdk),
            tools=[agents.HostedMCPTool(tool_config=ASKING)],  # type: ignore[arg-type]
            model_settings=agents.ModelSettings(store=store),
        )

        async def run(asked: Any) -> Any:
            if not streamed:
                return await agents.Runner.run(agent, asked)
            stream = agents.Runner.run_streamed(agent, asked)
            async for _ in stream.stream_events():
                pass
            return stream

        for approved in (True, False):
            written = (await run(SUM)).to_state().to_string()
            state = await agents.RunState.from_string(agent, written)
            (request,) = state.get_interruptions()
            if approved:
                state.approve(request)
            else:
                state.reject(request)
            done = await run(state)
            assert done.final_output.endswith("The tool said: 42" if approved else "the user declined it.")
        again = await run([*done.to_input_list(), {"role": "user", "content": "say on"}])
        assert again.final_output == "on"


async def test_a_session_of_many_tools(server: Running) -> None:
    def executed(_request: Any) -> agents.ShellResult:
        outcome = agents.ShellCallOutcome("exit", 0)
        return agents.ShellResult([agents.ShellCommandOutput("ran", "", outcome)])

    def approve(_request: Any) -> agents.MCPToolApprovalFunctionResult:
        return {"approve": True}

    async with AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="unused", max_retries=0) as sdk:
        tools = [
            agents.WebSearchTool(),
            agents.HostedMCPTool(tool_config=ASKING, on_approval_request=approve),  # type: ignore[arg-type]
            agents.ShellTool(executor=executed),
        ]
        model = agents.OpenAIResponsesModel(model=MODEL, openai_client=sdk)
        agent: Any = agents.Agent(name="Assistant", model=model, tools=tools)
        kept = [agents.SQLiteSession("one"), agents.OpenAIConversationsSession(openai_client=sdk)]
        for session in kept:
            for asked, said in (
                (SEARCH, "The tool said: ([demo.test]"),
                (SUM, "The tool said: 42"),
                ('call shell {"commands": ["ls"]}', "The tool said: ran"),
                ("say on", "on"),
            ):
                result = await agents.Runner.run(agent, asked, session=session)
                assert result.final_output.startswith(said)
            called = {"web_search_call", "mcp_call", "shell_call"}
            assert called <= {str(item.get("type")) for item in await session.get_items()}
