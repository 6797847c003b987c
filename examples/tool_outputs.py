"""Two ways to answer the calls of a model: `python examples/tool_outputs.py`.

It needs the OpenAI SDK (`pip install openai`), and a server (`make serve`). In the way of the OpenAI API
the response completes with its call, and a new request carries the output. In the waiting way, an
extension, the response stays open, and the output goes into the same stream.
"""

import os
from typing import Any

import httpx
from openai import OpenAI
from openai.types.responses import FunctionToolParam

URL = os.environ.get("ANTIPHON_URL", "http://127.0.0.1:8000").removesuffix("/v1") + "/v1"
client = OpenAI(base_url=URL, api_key="unused")
MODEL = "antiphon-tiny"
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
QUESTION = "What is the weather in Paris?"


def official() -> str:
    """Two requests, chained by `previous_response_id`."""
    first = client.responses.create(model=MODEL, input=QUESTION, tools=[WEATHER])
    call = next(item for item in first.output if item.type == "function_call")
    print(call.name, call.arguments)
    answer = client.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
        tools=[WEATHER],
    )
    return answer.output_text


def waiting() -> str:
    """One response and one stream; the output is fed while it waits."""
    text = ""
    extra: dict[str, Any] = {"await_tool_outputs": True}
    stream = client.responses.create(
        model=MODEL, input=QUESTION, tools=[WEATHER], stream=True, extra_body=extra
    )
    response_id = ""
    for event in stream:
        if event.type == "response.created":
            response_id = event.response.id
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type == "response.output_item.done" and event.item.type == "function_call":
            body = {"tool_outputs": [{"call_id": event.item.call_id, "output": "sunny"}]}
            httpx.post(f"{URL}/responses/{response_id}/tool_outputs", json=body).raise_for_status()
    return text


if __name__ == "__main__":
    print("official:", official())
    print("waiting:", waiting())
