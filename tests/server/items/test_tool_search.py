"""Searches for tools: what is deferred is shown once a search has loaded it, and is offered from then on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from engine import ScriptedEngine
from tests.server.runs.execution.test_mcp_servers import DESK, kinds, settings
from tests.support.mcp_servers import large_server, serving
from tests.support.running import http_client, live_app, running_app
from tests.support.talk import WEATHER, Api, Gate, answer, loose, prompts, saying, text, wrote
from tests.support.wire import Json
from tools import BUILTIN, best_matches


def function(name: str, about: str, *arguments: str, **more: Any) -> Json:
    """A function that takes texts."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"} for argument in arguments},
        "required": [*arguments],
        "additionalProperties": False,
    }
    told = {"name": name, "description": about, "parameters": parameters}
    return {"type": "function", **told, "strict": True, **more}


SEARCH: Json = {"type": "tool_search"}
ORDERS = function(
    "list_open_orders", "List open orders for a customer ID.", "customer_id", defer_loading=True
)
PROFILE = function("get_customer_profile", "Fetch a customer profile.", "profile_id")
CRM: Json = {
    "type": "namespace",
    "name": "crm",
    "description": "CRM tools for customer lookup and order management.",
    "tools": [PROFILE, ORDERS],
}
SHIPPING = function("get_shipping_eta", "When an order arrives.", "order_id", defer_loading=True)


FIND = wrote("tool_search", query="open orders of a customer")
LIST = wrote("crm__list_open_orders", customer_id="CUST-12345")


# ------------------------------------------------------------------------------------------------------------
# Searches of the server


async def test_a_search_loads_what_it_finds(tmp_path: Path) -> None:
    """The official example, item for item."""
    engine = ScriptedEngine(saying(FIND, LIST))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        stream = await api.stream("List the open orders of CUST-12345.", tools=[CRM, SEARCH, WEATHER])
        assert await api.ended(stream.response["id"]) == stream.response
    search, found, made = stream.response["output"]
    assert {key: search[key] for key in ("type", "execution", "call_id", "status", "arguments")} == {
        "type": "tool_search_call",
        "execution": "server",
        "call_id": None,
        "status": "completed",
        "arguments": {"query": "open orders of a customer"},
    }
    assert {key: found[key] for key in ("type", "execution", "call_id", "status", "tools")} == {
        "type": "tool_search_output",
        "execution": "server",
        "call_id": None,
        "status": "completed",
        "tools": [{**CRM, "tools": [ORDERS]}],
    }
    assert (made["type"], made["name"], made["namespace"]) == ("function_call", "list_open_orders", "crm")
    assert json.loads(made["arguments"]) == {"customer_id": "CUST-12345"}
    done = [event for event in stream.events if event["type"].endswith("function_call_arguments.done")]
    assert done[0]["name"] == "list_open_orders"
    first, second = prompts(engine)
    assert "profile_id" in first and "customer_id" not in first
    assert "- crm (1 tool): CRM tools for customer lookup" in first.replace("\\n", "\n")
    assert "customer_id" in second and "These tools can be called now: crm__list_open_orders." in second
    shapes = [{shape.name for shape in request.reader.tools} for request in engine.requests]
    assert shapes[1] - shapes[0] == {"crm__list_open_orders"}
    assert engine.requests[1].constraint is not None, "a loaded function is as strict as any"
    assert "crm__list_open_orders" in {shape.name for shape in engine.requests[1].constraint.tools}


async def test_what_was_loaded_stays_loaded(tmp_path: Path) -> None:
    """In a chain and in a conversation, and also where later requests do not have the tool any more; a client
    that sends all items itself has the same prompt."""
    engine = ScriptedEngine(saying(FIND, LIST))
    again = ScriptedEngine(saying(LIST))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        conversation = await api.conversation()
        made = await api.create("Go.", tools=[CRM, SEARCH])
        await api.create("Go.", tools=[CRM, SEARCH], conversation=conversation)
    output = answer(made["output"][-1]["call_id"], "none")
    async with running_app(tmp_path, again) as server, http_client(server) as client:
        api = Api(client)
        chained = await api.create([output], tools=[CRM, SEARCH], previous_response_id=made["id"])
        sent = [{"role": "user", "content": "Go."}, *made["output"], output]
        resent = await api.create(sent, tools=[CRM, SEARCH], store=False)
        without = await api.create([output], previous_response_id=made["id"])
        items = (await client.get(f"/v1/conversations/{conversation}/items?order=asc")).json()["data"]
        assert [item["type"] for item in items][1:3] == ["tool_search_call", "tool_search_output"]
    for response in (chained, resent, without):
        assert response["output"][0]["name"] == "list_open_orders"
    assert again.requests[0].prompt_ids == again.requests[1].prompt_ids
    assert "profile_id" not in prompts(again)[2] and "customer_id" in prompts(again)[2]


async def test_a_function_alone_is_deferred_too(tmp_path: Path) -> None:
    """Its name and description are told before, and its calls have its name as their namespace, as in the
    official API."""
    engine = ScriptedEngine(
        saying(wrote("tool_search", query="shipping"), wrote("get_shipping_eta", order_id="7"))
    )
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = await Api(client).create("Go.", tools=[SHIPPING, SEARCH])
        made = response["output"][-1]
        await Api(client).create([answer(made["call_id"])], tools=[], previous_response_id=response["id"])
    assert (made["name"], made["namespace"]) == ("get_shipping_eta", "get_shipping_eta")
    assert response["output"][1]["tools"] == [SHIPPING]
    first, second, third = prompts(engine)
    assert "- get_shipping_eta: When an order arrives." in first and "order_id" not in first
    assert "order_id" in second
    assert '"name": "get_shipping_eta", "arguments"' in third, "the model reads the call as it has written it"


async def test_a_custom_tool_is_deferred_too(tmp_path: Path) -> None:
    paint: Json = {"type": "custom", "name": "paint", "description": "Paint a wall.", "defer_loading": True}
    engine = ScriptedEngine(saying(wrote("tool_search", query="paint"), wrote("paint", input="red")))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = await Api(client).create("Go.", tools=[paint, SEARCH])
    made = response["output"][-1]
    assert (made["type"], made["input"]) == ("custom_tool_call", "red")


async def test_a_search_that_finds_nothing_is_told_and_the_model_goes_on(tmp_path: Path) -> None:
    engine = ScriptedEngine(saying(wrote("tool_search", query="weather"), FIND, "done"))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = await Api(client).create("Go.", tools=[CRM, SEARCH])
    assert kinds(response) == ["tool_search_call", "tool_search_output"] * 2 + ["message"]
    assert (response["output"][1]["tools"], len(response["output"][3]["tools"])) == ([], 1)
    assert "Nothing was found." in prompts(engine)[1]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (r'{"query": "open orders \ud800"}', {"query": "open orders ?"}),
        ('{"query": "open orders", "n": 123456789012345678901234567890}', None),
        ('{"query": ["open orders"]}', {"query": ["open orders"]}),
        ('{"words": "open orders"}', {"words": "open orders"}),
    ],
)
async def test_arguments_of_any_sort(tmp_path: Path, arguments: str, read: Json | None) -> None:
    """Where no grammar holds the model to the schema, a search is made with what it wrote."""
    said = f'<tool_call>\n{{"name": "tool_search", "arguments": {arguments}}}\n</tool_call>'
    engine = loose(saying(said, "done"))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = await Api(client).create("Go.", tools=[CRM, SEARCH])
    search, found, _ = response["output"]
    assert read is None or search["arguments"] == read
    assert [tool["name"] for tool in found["tools"]] == ["crm"]


async def test_calls_side_by_side_are_answered_in_their_order(tmp_path: Path) -> None:
    both = f"{wrote('tool_search', query='orders')}\n{wrote('tool_search', query='shipping')}"
    engine = ScriptedEngine(saying(both, "done"))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = await Api(client).create("Go.", tools=[CRM, SHIPPING, SEARCH])
    assert kinds(response)[:4] == ["tool_search_call", "tool_search_call", *["tool_search_output"] * 2]
    told = prompts(engine)[1]
    assert told.index("called now: crm__list_open_orders") < told.index("called now: get_shipping_eta")


async def test_a_limit_of_tool_calls_counts_searches(tmp_path: Path) -> None:
    engine = ScriptedEngine(saying(FIND, wrote("tool_search", query="shipping"), "done"))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        tools = [CRM, SHIPPING, SEARCH]
        response = await Api(client).create("Go.", tools=tools, max_tool_calls=1)
    assert kinds(response) == ["tool_search_call", "tool_search_output", "tool_search_call", "message"]
    assert response["output"][2]["status"] == "incomplete"
    assert "no more than 1 tool call." in prompts(engine)[2]


async def test_one_call_in_a_turn(tmp_path: Path) -> None:
    both = f"{FIND}\n{wrote('crm__get_customer_profile', profile_id='7')}"
    engine = ScriptedEngine(saying(both, "done"))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        tools = [CRM, SEARCH]
        response = await Api(client).create("Go.", tools=tools, parallel_tool_calls=False)
    assert kinds(response) == ["tool_search_call", "tool_search_output", "message"]


async def test_a_call_of_what_is_not_loaded_is_told_to_be_none(tmp_path: Path) -> None:
    """Where no grammar keeps the model from it."""
    engine = loose(saying(LIST, FIND, LIST))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = await Api(client).create("Go.", tools=[CRM, SEARCH])
    statuses = [(item["type"], item["status"]) for item in response["output"]]
    assert statuses[0] == ("tool_search_call", "incomplete")
    assert statuses[-1] == ("function_call", "completed")
    assert "There is no tool named" in prompts(engine)[1]


# ------------------------------------------------------------------------------------------------------------
# MCP servers


async def test_a_server_of_a_hundred_tools_costs_a_prompt_what_is_used_of_it(tmp_path: Path) -> None:
    called: list[str] = []
    engine = ScriptedEngine(
        saying(
            wrote("tool_search", query="archive a parcel"), wrote("archive_parcel", identifier="7"), "done"
        )
    )
    plain = ScriptedEngine(saying("done"))
    deferred = {**DESK, "defer_loading": True, "server_description": "The archive of the house."}
    async with serving(large_server(called).streamable_http_app()) as url:
        known = settings(desk={"url": f"{url}/mcp"})
        async with running_app(tmp_path / "a", engine, **known) as server, http_client(server) as client:
            response = await Api(client).create("Go.", tools=[deferred, SEARCH])
        async with running_app(tmp_path / "b", plain, **known) as server, http_client(server) as client:
            whole = await Api(client).create("Go.", tools=[DESK])
    listing, _, found, made, _ = response["output"]
    assert (len(listing["tools"]), made["name"], made["output"]) == (
        100,
        "archive_parcel",
        "archive_parcel of 7",
    )
    (loaded,) = found["tools"]
    assert (loaded["type"], loaded["allowed_tools"][0]) == ("mcp", "archive_parcel")
    assert "- desk (100 tools): The archive of the house." in prompts(engine)[0]
    turns = response["usage"]["input_tokens_per_turn"]
    assert turns[0] * 10 < turns[1] * 5 < whole["usage"]["input_tokens"], "measured: 1.2 %, 7 %, 100 %"


async def test_the_tools_of_this_server_are_deferred_too(tmp_path: Path) -> None:
    own: Json = {"type": "mcp", "server_label": "own", "server_url": "builtin:", "defer_loading": True}
    engine = ScriptedEngine(
        saying(wrote("tool_search", query="multiply numbers"), wrote("calculator", expression="6*7"), "done")
    )
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = await Api(client).create("Go.", tools=[own, SEARCH])
    listing, _, found, made, _ = response["output"]
    assert {tool["name"] for tool in listing["tools"]} == set(BUILTIN)
    assert found["tools"] == [{**own, "allowed_tools": ["calculator"]}]
    assert made["output"] == "42"


async def test_a_deferred_tool_of_this_server_gives_way_to_a_function(tmp_path: Path) -> None:
    own: Json = {"type": "mcp", "server_label": "own", "server_url": "builtin:", "defer_loading": True}
    script = saying(
        wrote("tool_search", query="multiply"), wrote("own__calculator", expression="6*7"), "done"
    )
    engine = ScriptedEngine(script)
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        mine = function("calculator", "Mine.", "sum")
        response = await Api(client).create("Go.", tools=[own, mine, SEARCH])
    listing, _, found, made, _ = response["output"]
    assert {tool["name"] for tool in listing["tools"]} == set(BUILTIN)
    assert found["tools"] == [{**own, "allowed_tools": ["calculator"]}]
    assert (made["name"], made["output"]) == ("calculator", "42")
    assert "These tools can be called now: own__calculator." in prompts(engine)[1]


# ------------------------------------------------------------------------------------------------------------
# Searches of the client

CLIENTS: Json = {
    "type": "tool_search",
    "execution": "client",
    "description": "Find the project-specific tools needed to continue the task.",
    "parameters": {
        "type": "object",
        "properties": {"goal": {"type": "string"}},
        "required": ["goal"],
        "additionalProperties": False,
    },
}
ASKS = wrote("tool_search", goal="the shipping ETA of order_42")
USES = wrote("get_shipping_eta", order_id="order_42")


def loaded(call: Json, *tools: Json) -> Json:
    return {"type": "tool_search_output", "call_id": call["call_id"], "tools": [*tools]}


async def test_a_client_searches_itself(tmp_path: Path) -> None:
    """The official example: the second request has no tools of its own."""
    engine = ScriptedEngine(saying(ASKS))
    other = ScriptedEngine(saying(USES))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        first = await Api(client).create("Go.", tools=[CLIENTS], store=False)
    (call,) = first["output"]
    assert (call["execution"], call["status"]) == ("client", "completed")
    assert call["arguments"] == {"goal": "the shipping ETA of order_42"}
    assert engine.requests[0].constraint is not None, "the client's schema is held"
    async with running_app(tmp_path, other) as server, http_client(server) as client:
        sent = [{"role": "user", "content": "Go."}, call, {**loaded(call, SHIPPING), "execution": "client"}]
        second = await Api(client).create(sent)
    (made,) = second["output"]
    assert (made["type"], made["name"]) == ("function_call", "get_shipping_eta")
    assert "order_id" in prompts(other)[0]


async def test_what_a_client_loads_keeps_its_name(tmp_path: Path) -> None:
    own: Json = {"type": "mcp", "server_label": "own", "server_url": "builtin:"}
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        first = await api.create('call tool_search {"goal": "sums"}', tools=[own, CLIENTS])
        mine = function("calculator", "Mine.", "sum", defer_loading=True)
        asked = {"role": "user", "content": 'call own__calculator {"expression": "6*7"}'}
        sent = [loaded(first["output"][-1], mine), asked]
        second = await api.create(sent, tools=[own, CLIENTS], previous_response_id=first["id"])
    assert {"calculator", "own__calculator"} <= {shape.name for shape in engine.requests[1].reader.tools}
    assert second["output"][0]["output"] == "42"


async def test_a_run_waits_for_the_clients_search(tmp_path: Path) -> None:
    engine = ScriptedEngine(saying(ASKS, USES, "done"))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        begun = await Api(client).create("Go.", tools=[CLIENTS], background=True, await_tool_outputs=True)
        path = f"/v1/responses/{begun['id']}"
        waiting = (await client.get(path, params={"wait": "20"})).json()
        (pending,) = waiting["pending_tool_calls"]
        assert pending["name"] == "tool_search_call"
        text_instead = {"tool_outputs": [{"call_id": pending["call_id"], "output": "none"}]}
        refused = await client.post(f"{path}/tool_outputs", json=text_instead)
        assert refused.status_code == 400 and "tool_search_output" in refused.json()["error"]["message"]
        await client.post(f"{path}/tool_outputs", json={"tool_outputs": [loaded(pending, SHIPPING)]})
        waiting = (await client.get(path, params={"wait": "20"})).json()
        (pending,) = waiting["pending_tool_calls"]
        await Api(client).outputs(begun["id"], {pending["call_id"]: "today"})
        ended = await Api(client).ended(begun["id"])
    assert kinds(ended)[:4] == [
        "tool_search_call",
        "tool_search_output",
        "function_call",
        "function_call_output",
    ]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "input[2].tools[0].type"),
        ({"tools": [{"type": "function"}]}, "input[2].tools[0].name"),
        ({"tools": [SHIPPING], "call_id": "call_unknown"}, "input[2].call_id"),
        ({"tools": [SHIPPING], "execution": "client", "call_id": None}, "input[2].call_id"),
        ({"tools": [SHIPPING] * 129}, "input[2].tools"),
    ],
)
async def test_what_cannot_be_loaded_is_refused(tmp_path: Path, item: Json, param: str) -> None:
    call = {"type": "tool_search_call", "call_id": "call_1", "arguments": {"goal": "x"}}
    output = {"type": "tool_search_output", "call_id": "call_1", **item}
    async with running_app(tmp_path) as server, http_client(server) as client:
        error = await Api(client).refused(400, [{"role": "user", "content": "Go."}, call, output])
    assert error["param"] == param


async def test_a_search_of_the_client_needs_its_output(tmp_path: Path) -> None:
    call = {"type": "tool_search_call", "call_id": "call_1", "arguments": {"goal": "x"}}
    async with running_app(tmp_path) as server, http_client(server) as client:
        error = await Api(client).refused(400, [call])
    assert error["message"].startswith("No tool output found for function call call_1. ")
    assert "send an item of type 'tool_search_output' with the call_id 'call_1' behind it" in error["message"]


# ------------------------------------------------------------------------------------------------------------
# Requests


@pytest.mark.parametrize(
    ("tools", "param", "told"),
    [
        ([SHIPPING], "tools[0].defer_loading", "require a tool of type 'tool_search'"),
        ([CRM], "tools[0].tools[1].defer_loading", "require a tool of type 'tool_search'"),
        ([WEATHER, SEARCH], "tools[1]", "requires at least one deferred tool"),
        ([CRM, SEARCH, SEARCH], "tools[2]", "one tool of type 'tool_search'"),
        ([{**CRM, "tools": [ORDERS] * 1001}, SEARCH], "tools[0].tools[1000]", "at most 1000 are taken"),
        ([CRM, CRM, SEARCH], "tools", "Two tools are named 'crm__get_customer_profile'"),
        ([SHIPPING, SEARCH, {**SHIPPING, "defer_loading": False}], "tools", "Two tools are named"),
        ([CRM, SEARCH, function("tool_search", "Mine.")], "tools", "Two tools are named 'tool_search'"),
        ([{**CRM, "name": "a b"}, SEARCH], "tools[0].name", "does not match"),
        ([{**CRM, "tools": [{"type": "web_search"}]}, SEARCH], "tools[0].tools[0].type", "Supported"),
        (
            [
                {
                    **CRM,
                    "tools": [
                        {
                            **ORDERS,
                            "parameters": {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}},
                        }
                    ],
                },
                SEARCH,
            ],
            "tools[0].tools[0].parameters",
            "Invalid schema for tool 'crm__list_open_orders'",
        ),
    ],
)
async def test_tools_that_do_not_go_together_are_refused(
    tmp_path: Path, tools: list[Json], param: str, told: str
) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        error = await Api(client).refused(400, "Go.", tools=tools)
    assert (error["param"], told in error["message"]) == (param, True), error


@pytest.mark.parametrize(
    ("choice", "offered"),
    [
        ({"type": "tool_search"}, {"tool_search"}),
        (
            {"type": "function", "name": "get_customer_profile", "namespace": "crm"},
            {"crm__get_customer_profile"},
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "crm"}]},
            {"crm__get_customer_profile"},
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "tool_search"}, {"type": "function", "name": "get_shipping_eta"}],
            },
            {"tool_search"},
        ),
        ("required", {"tool_search", "crm__get_customer_profile"}),
    ],
)
async def test_choices_among_what_is_loaded(tmp_path: Path, choice: Any, offered: set[str]) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        body = {"input": "say hi", "tools": [CRM, SHIPPING, SEARCH], "tool_choice": choice}
        await client.post("/v1/responses", json=body)
    constraint = engine.requests[0].constraint
    assert constraint is not None
    assert {shape.name for shape in constraint.tools} == offered


async def test_a_search_that_was_demanded_leaves_the_model_free_afterwards(tmp_path: Path) -> None:
    engine = ScriptedEngine(saying(FIND, LIST))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        body = {"input": "Go.", "tools": [CRM, WEATHER, SEARCH], "tool_choice": {"type": "tool_search"}}
        response = await client.post("/v1/responses", json=body)
    assert response.json()["output"][-1]["name"] == "list_open_orders"
    assert "get_weather" in {shape.name for shape in engine.requests[1].reader.tools}


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "get_shipping_eta"},
        {"type": "function", "name": "list_open_orders", "namespace": "crm"},
        {"type": "mcp", "server_label": "own"},
    ],
)
async def test_what_is_not_loaded_cannot_be_demanded(tmp_path: Path, choice: Json) -> None:
    own = {"type": "mcp", "server_label": "own", "server_url": "builtin:", "defer_loading": True}
    async with running_app(tmp_path) as server, http_client(server) as client:
        tools = [CRM, SHIPPING, own, SEARCH]
        error = await Api(client).refused(400, "Go.", tools=tools, tool_choice=choice)
    assert error["param"] == "tool_choice" and "is deferred" in error["message"]


async def test_a_namespace_needs_no_search(tmp_path: Path) -> None:
    """Two namespaces have a function of one name, and the model is told them apart."""
    engine = ScriptedEngine(saying(wrote("billing__get_customer_profile", profile_id="7")))
    tools = [{**CRM, "name": name, "tools": [PROFILE]} for name in ("crm", "billing")]
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        first = await api.create("Go.", tools=tools)
        (call,) = first["output"]
        assert (call["namespace"], call["name"]) == ("billing", "get_customer_profile")
        output = {**answer(call["call_id"]), "namespace": "billing", "name": "get_customer_profile"}
        await api.create([output], tools=tools, previous_response_id=first["id"])
    assert '"name": "billing__get_customer_profile", "arguments"' in prompts(engine)[1]


async def test_on_chat_a_deferred_function_is_offered_at_once(tmp_path: Path) -> None:
    nested = {"type": "function", "function": {"name": "f", "defer_loading": True}}
    async with running_app(tmp_path) as server, http_client(server) as client:
        body = {"messages": [{"role": "user", "content": "say hi"}], "tools": [nested]}
        reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200
    assert reply.headers["x-antiphon-ignored"] == "tools[0].function.defer_loading"


# ------------------------------------------------------------------------------------------------------------
# The end of the process


async def test_a_run_goes_on_with_what_it_had_loaded(tmp_path: Path) -> None:
    """In the generation behind a search: the prompt is the same after a restart."""
    gate = Gate()

    def script(request: Any, prompt: str) -> Any:
        if request.generation == 0:
            yield from saying(FIND)(request, prompt)
        else:
            yield from saying("one two ")(request, prompt)
            yield gate.wait()
            yield from saying("three")(request, prompt)

    engine, other = ScriptedEngine(script), ScriptedEngine(script)
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        begun = await Api(client).create("Go.", tools=[CRM, SHIPPING, SEARCH], background=True)
        await asyncio.wait_for(gate.reached.wait(), 20)
        await server.context.runs.drain(0)
    gate.release.set()
    async with running_app(tmp_path, other) as server, http_client(server) as client:
        ended = await Api(client).ended(begun["id"])
    assert (ended["status"], text(ended)) == ("completed", "one two three")
    assert other.requests[0].prompt_ids == engine.requests[1].prompt_ids
    assert "customer_id" in prompts(other)[0]


# ------------------------------------------------------------------------------------------------------------
# What is found

TOOLS = (
    ("list_open_orders", "List open orders for a customer."),
    ("getShippingEta", "When an order arrives."),
    ("files.delete", "Remove a file for ever."),
    ("notes_search", "Find a note."),
    ("café_menu", "What there is to eat."),
)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("order", [0, 1]),
        ("shipping", [1]),
        ("ETA", [1]),
        ("delete files", [2]),
        ("removing", [2]),
        ("CAFE", [4]),
        ("notes", [3]),
        ('" OR name:* --', []),
        ("", []),
        ("x" * 100_000, []),
    ],
)
def test_the_best_matches(query: str, found: list[int]) -> None:
    assert best_matches(query, TOOLS, 5) == found


def test_of_equals_the_first_comes_first_and_no_more_are_found_than_wanted() -> None:
    texts: list[tuple[str, str]] = [(f"tool{number}", "the same words") for number in range(20)]
    assert best_matches("same words", texts, 3) == [0, 1, 2]
