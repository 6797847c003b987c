"""The OpenAI Agents SDK, unmodified: a loop of function tools in every way of keeping state."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agents import (
    Agent,
    CodeInterpreterTool,
    HostedMCPTool,
    ImageGenerationTool,
    MCPToolApprovalFunctionResult,
    MCPToolApprovalRequest,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    ShellTool,
    WebSearchTool,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from engine import ScriptedEngine
from server.config import Config
from server.images import ImagesSettings
from server.mcp_servers import read_mcp_settings
from server.process.tools_registry import read_registry
from server.web_settings import WebSettings
from tests.support.loopback_images import PNG, loopback_images
from tests.support.loopback_web import loopback_web
from tests.support.mcp_servers import Seen, mcp_server
from tests.support.running import live_app
from tests.support.sandboxes import require_sandbox
from tests.support.talk import call, prompts

MODEL = "antiphon-scripted"
ASKED = f"think hm then {call()}"
SAID = "The tool said: sunny in Paris"

set_tracing_disabled(True)  # it would go to another server


@function_tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


def agent(sdk: AsyncOpenAI, **settings: Any) -> Agent[None]:
    model = OpenAIResponsesModel(model=MODEL, openai_client=sdk)
    return Agent(
        name="Assistant",
        instructions="Be brief.",
        model=model,
        tools=[get_weather],
        model_settings=ModelSettings(**settings),
    )


async def test_run_with_the_history_resent(live_sdk: AsyncOpenAI) -> None:
    result = await Runner.run(agent(live_sdk), ASKED)
    assert result.final_output == SAID
    kinds = [item.type for item in result.new_items]
    assert kinds == ["reasoning_item", "tool_call_item", "tool_call_output_item", "message_output_item"]
    again = await Runner.run(
        agent(live_sdk), [*result.to_input_list(), {"role": "user", "content": "say on"}]
    )
    assert again.final_output == "on"


async def test_run_without_store(live_sdk: AsyncOpenAI) -> None:
    result = await Runner.run(agent(live_sdk, store=False), ASKED)
    assert result.final_output == SAID


async def test_run_streamed(live_sdk: AsyncOpenAI) -> None:
    result = Runner.run_streamed(agent(live_sdk), ASKED)
    said = ""
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            said += event.data.delta
    assert said == result.final_output == SAID


async def test_state_by_previous_response_id(live_sdk: AsyncOpenAI) -> None:
    first = await Runner.run(agent(live_sdk), ASKED, auto_previous_response_id=True)
    assert (first.final_output, first.last_response_id is not None) == (SAID, True)
    second = await Runner.run(agent(live_sdk), "say on", previous_response_id=first.last_response_id)
    assert second.final_output == "on"
    page = live_sdk.responses.input_items.list(
        str(second.last_response_id), order="asc", extra_query={"scope": "all"}
    )
    kinds = [item.type async for item in page]
    assert kinds == [
        "message", "reasoning", "function_call", "function_call_output", "message", "message"
    ]  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])
async def test_state_by_conversation(live_sdk: AsyncOpenAI, streamed: bool) -> None:
    conversation = await live_sdk.conversations.create()
    for asked, said in ((ASKED, SAID), ("say on", "on")):
        if streamed:
            stream = Runner.run_streamed(agent(live_sdk), asked, conversation_id=conversation.id)
            async for _ in stream.stream_events():
                pass
            assert stream.final_output == said
        else:
            result = await Runner.run(agent(live_sdk), asked, conversation_id=conversation.id)
            assert result.final_output == said
    items = [item.type async for item in live_sdk.conversations.items.list(conversation.id, order="asc")]
    assert items == [
        "message", "reasoning", "function_call", "function_call_output", "message", "message", "message"
    ]  # fmt: skip


async def test_a_conversations_session_of_many_items(live_sdk: AsyncOpenAI) -> None:
    session = OpenAIConversationsSession(openai_client=live_sdk)
    for turn in range(12):
        result = await Runner.run(agent(live_sdk), f"say turn {turn}", session=session)
        assert result.final_output == f"turn {turn}"
    result = await Runner.run(agent(live_sdk), ASKED, session=session)
    assert result.final_output == SAID
    items = await session.get_items()
    assert len(items) == 24 + 5
    newest = await session.get_items(limit=3)
    assert newest == items[-3:]
    popped = await session.pop_item()
    assert popped == items[-1]
    assert len(await session.get_items()) == 28
    await session.add_items([{"role": "user", "content": f"added {n}"} for n in range(45)])
    assert len(await session.get_items()) == 28 + 45
    await session.clear_session()
    assert (await Runner.run(agent(live_sdk), "say anew", session=session)).final_output == "anew"


@pytest.fixture
async def chat_agent(live_sdk: AsyncOpenAI) -> AsyncIterator[Agent[None]]:
    model = OpenAIChatCompletionsModel(model=MODEL, openai_client=live_sdk)
    yield Agent(name="Assistant", instructions="Be brief.", model=model, tools=[get_weather])


async def test_the_chat_completions_model(chat_agent: Agent[None]) -> None:
    result = await Runner.run(chat_agent, ASKED)
    assert result.final_output == SAID
    stream = Runner.run_streamed(chat_agent, ASKED)
    async for _ in stream.stream_events():
        pass
    assert stream.final_output == SAID


async def test_a_forced_tool(live_sdk: AsyncOpenAI) -> None:
    forced = agent(live_sdk, tool_choice="required")
    result = await Runner.run(forced, "say I would rather not")
    assert [item.type for item in result.new_items][:2] == ["tool_call_item", "tool_call_output_item"]


async def test_tools_of_an_mcp_server(tmp_path: Path) -> None:
    """The SDK hands the server on; Antiphon lists its tools and calls them, in one request."""
    seen = Seen()
    desk = HostedMCPTool(
        tool_config={
            "type": "mcp",
            "server_label": "desk",
            "server_url": "builtin:desk",
            "require_approval": "never",
        }
    )
    async with mcp_server(seen) as url:
        known = read_mcp_settings({"servers": {"desk": {"url": url}}}, {})
        async with (
            live_app(tmp_path, mcp=known) as server,
            AsyncOpenAI(api_key="unused", base_url=f"{server.base_url}/v1", max_retries=0) as sdk,
        ):
            model = OpenAIResponsesModel(model=MODEL, openai_client=sdk)
            desk_agent = Agent(name="Assistant", model=model, tools=[desk])
            result = await Runner.run(desk_agent, 'call look_up {"word": "home"}')
            again = await Runner.run(
                desk_agent,
                [*result.to_input_list(), {"role": "user", "content": 'call book {"room": 3}'}],
            )
    assert result.final_output == "The tool said: home means much"
    assert again.final_output == "The tool said: booked 3"
    assert (seen.called, len(seen.listings)) == (["look_up", "book"], 1)


def asking(tool_names: list[str] | None, approved: bool, asked: list[str]) -> HostedMCPTool:
    """The tools of a server, each call of which the SDK asks a function about. tool_names: of those that need
    no approval. asked: takes up what was asked about."""

    def decide(request: MCPToolApprovalRequest) -> MCPToolApprovalFunctionResult:
        asked.append(request.data.name)
        return {"approve": True} if approved else {"approve": False, "reason": "not today"}

    config: Any = {"type": "mcp", "server_label": "desk", "server_url": "builtin:desk"}
    config["require_approval"] = "always" if tool_names is None else {"never": {"tool_names": tool_names}}
    return HostedMCPTool(tool_config=config, on_approval_request=decide)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("chained", [False, True], ids=["history resent", "previous_response_id"])
async def test_approvals_of_an_mcp_servers_calls(tmp_path: Path, chained: bool, streamed: bool) -> None:
    seen, asked = Seen(), list[str]()
    async with mcp_server(seen) as url:
        known = read_mcp_settings({"servers": {"desk": {"url": url}}}, {})
        async with (
            live_app(tmp_path, mcp=known) as server,
            AsyncOpenAI(api_key="unused", base_url=f"{server.base_url}/v1", max_retries=0) as sdk,
        ):

            async def said(directive: str, tool: HostedMCPTool) -> str:
                model = OpenAIResponsesModel(model=MODEL, openai_client=sdk)
                one = Agent(name="Assistant", model=model, tools=[tool])
                if not streamed:
                    result = await Runner.run(one, directive, auto_previous_response_id=chained)
                    return str(result.final_output)
                stream = Runner.run_streamed(one, directive, auto_previous_response_id=chained)
                async for _ in stream.stream_events():
                    pass
                return str(stream.final_output)

            booked = await said('call book {"room": 3}', asking(None, True, asked))
            refused = await said('call book {"room": 4}', asking(["look_up"], False, asked))
            looked = await said('call look_up {"word": "home"}', asking(["look_up"], False, asked))
    assert booked == "The tool said: booked 3"
    assert refused.endswith("the user declined it. The reason: not today")
    assert looked == "The tool said: home means much"
    assert (asked, seen.called) == (["book", "book"], ["book", "look_up"])


async def test_a_hosted_web_search_and_what_its_answer_cites(tmp_path: Path) -> None:
    async with loopback_web() as web:
        table = WebSettings(provider="searxng", url=web.url(""))
        async with live_app(tmp_path, registry=read_registry(Config(web=table))) as running:
            sdk = AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="unused", max_retries=0)
            searching = Agent(
                name="Assistant",
                model=OpenAIResponsesModel(model=MODEL, openai_client=sdk),
                tools=[WebSearchTool(user_location={"type": "approximate", "city": "Brest"})],
                model_settings=ModelSettings(response_include=["web_search_call.action.sources"]),
            )
            result = await Runner.run(searching, 'call web_search {"queries": ["spring tide"]}')
            search, answer = [item.model_dump() for item in result.raw_responses[-1].output]
            assert (search["type"], search["status"]) == ("web_search_call", "completed")
            (note,) = answer["content"][0]["annotations"]
            assert (note["type"], note["url"]) == ("url_citation", web.url("/p/tides.html"))
            again = await Runner.run(
                searching, [*result.to_input_list(), {"role": "user", "content": "say on"}]
            )
            assert (again.final_output, len(web.asked)) == ("on", 1)
            await sdk.close()


async def test_code_is_run_here(tmp_path: Path) -> None:
    async with (
        live_app(tmp_path, registry=None, sandbox="monty") as running,
        AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="unused", max_retries=0) as sdk,
    ):
        coding = Agent(
            name="Assistant",
            model=OpenAIResponsesModel(model=MODEL, openai_client=sdk),
            tools=[CodeInterpreterTool({"type": "code_interpreter", "container": {"type": "auto"}})],
            model_settings=ModelSettings(response_include=["code_interpreter_call.outputs"]),
        )
        result = await Runner.run(coding, 'call python {"code": "print(6 * 7)"}')
        ran = result.raw_responses[-1].output[0].model_dump()
        assert (ran["type"], ran["outputs"]) == (
            "code_interpreter_call",
            [{"type": "logs", "logs": "42\n"}],
        )
        assert result.final_output == "The tool said: 42"
        again = await Runner.run(coding, [*result.to_input_list(), {"role": "user", "content": "say on"}])
        assert again.final_output == "on"


async def test_commands_that_the_server_runs(tmp_path: Path) -> None:
    await require_sandbox("bubblewrap")
    async with (
        live_app(tmp_path, ScriptedEngine(), registry=None, sandbox="bubblewrap") as running,
        AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="unused", max_retries=0) as sdk,
    ):
        working = Agent(
            name="Assistant",
            model=OpenAIResponsesModel(model=MODEL, openai_client=sdk),
            tools=[ShellTool(environment={"type": "container_auto"})],
            model_settings=ModelSettings(store=False),
        )
        result = await Runner.run(working, 'call shell {"commands": ["echo hello > a.txt"]}')
        kinds = [item.type for item in result.raw_responses[-1].output]
        assert kinds == ["shell_call", "shell_call_output", "message"]
        asked: Any = {"role": "user", "content": 'call shell {"commands": ["cat a.txt"]}'}
        again = await Runner.run(working, [*result.to_input_list(), asked])
        assert again.final_output.startswith("The tool said: hello")


async def test_a_search_and_an_image_that_only_the_client_keeps(tmp_path: Path) -> None:
    """With what the model was shown sealed among its items, which the SDK sends back as they came."""
    engine = ScriptedEngine()
    async with loopback_web() as web, loopback_images() as images:
        config = Config(
            web=WebSettings(provider="searxng", url=web.url("")), images=ImagesSettings(url=images.url)
        )
        async with live_app(tmp_path, engine, registry=read_registry(config)) as running:
            sdk = AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="unused", max_retries=0)
            keeping = Agent(
                name="Assistant",
                model=OpenAIResponsesModel(model=MODEL, openai_client=sdk),
                tools=[WebSearchTool(), ImageGenerationTool(tool_config={"type": "image_generation"})],
                model_settings=ModelSettings(store=False, response_include=["reasoning.encrypted_content"]),
            )
            searched = await Runner.run(keeping, 'call web_search {"queries": ["spring tide"]}')
            asked: Any = {"role": "user", "content": 'call image_generation {"prompt": "the tide"}'}
            painted = await Runner.run(keeping, [*searched.to_input_list(), asked])
            image = painted.raw_responses[-1].output[0].model_dump()
            assert (image["type"], image["result"], image["status"]) == (
                "image_generation_call",
                PNG,
                "completed",
            )
            assert "【1】 /p/tides.html" in prompts(engine)[-1]
            said = await Runner.run(
                keeping, [*painted.to_input_list(), {"role": "user", "content": "say on"}]
            )
            shown = prompts(engine)[-1]
            assert said.final_output == "on" and len(images.asked) == len(web.asked) == 1
            assert "【1】 /p/tides.html" in shown and "The image was made, and the user sees it" in shown
            assert PNG not in shown
            await sdk.close()
