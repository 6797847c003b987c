"""An agent of the OpenAI Agents SDK on this server: `python examples/agent.py`.

It needs `pip install openai-agents`, and a server (`make serve`).
"""

import asyncio
import os

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

URL = os.environ.get("ANTIPHON_URL", "http://127.0.0.1:8000").removesuffix("/v1") + "/v1"
set_tracing_disabled(True)  # tracing would go to another server


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return "sunny"


async def main() -> str:
    """Question, tool call, output, answer."""
    async with AsyncOpenAI(base_url=URL, api_key="unused") as client:
        model = OpenAIResponsesModel(model="antiphon-tiny", openai_client=client)
        agent = Agent(name="Assistant", model=model, tools=[get_weather])
        result = await Runner.run(agent, "What is the weather in Paris?")
    print(result.final_output)
    return str(result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
