"""Tools that the server runs itself, in the official MCP form: items, events, limits, errors."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import tools
from engine import GenerateRequest, Say, ScriptedEngine
from engine.backends.script import Step
from server.config import Config
from server.model_registry import build_engine
from server.runs.planning import steps
from tests.support.running import http_client, live_app, running_app
from tests.support.talk import BUILTIN, WEATHER, Api, Gate, call, calls, loose, prompts, saying, text, wrote
from tests.support.wire import Json
from tools.runtime import MAX_OUTPUT

SUM = 'call calculator {"expression": "2+3"}'
MARKUP = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+3"}}\n</tool_call>'


@pytest.fixture
def api(client: httpx.AsyncClient) -> Api:
    return Api(client)


def kinds(response: Json) -> list[str]:
    return [item["type"] for item in response["output"]]


async def test_a_server_tool_is_listed_called_and_answered(api: Api) -> None:
    stream = await api.stream(SUM, tools=[BUILTIN])
    listing, made, message = stream.response["output"]
    assert (listing["type"], listing["server_label"]) == ("mcp_list_tools", "antiphon")
    assert {tool["name"] for tool in listing["tools"]} == set(tools.BUILTIN)
    assert all(tool["input_schema"]["type"] == "object" for tool in listing["tools"])
    assert (made["type"], made["status"], made["name"]) == ("mcp_call", "completed", "calculator")
    assert (json.loads(made["arguments"]), made["output"], made["error"]) == (
        {"expression": "2+3"},
        "5",
        None,
    )
    assert message["content"][0]["text"] == "The tool said: 5"
    assert [t for t in stream.types if t.startswith("mcp_")] == [
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "mcp_call.in_progress",
        *[t for t in stream.types if t == "mcp_call_arguments.delta"],
        "mcp_call_arguments.done",
        "mcp_call.completed",
    ]
    assert await api.ended(stream.response["id"]) == stream.response


async def test_tools_are_listed_once_per_chain(api: Api) -> None:
    first = await api.create("say hi", tools=[BUILTIN])
    assert kinds(first) == ["mcp_list_tools", "message"]
    second = await api.create(SUM, tools=[BUILTIN], previous_response_id=first["id"])
    assert kinds(second) == ["mcp_call", "message"]
    relabelled = {**BUILTIN, "server_label": "other"}
    third = await api.create("say hi", tools=[relabelled], previous_response_id=second["id"])
    assert third["output"][0]["server_label"] == "other"
    sent_back = [*second["output"], {"role": "user", "content": SUM}]
    assert kinds(await api.create(sent_back, tools=[BUILTIN])) == ["mcp_list_tools", "mcp_call", "message"]


async def test_tools_are_listed_once_per_conversation(api: Api) -> None:
    conversation = await api.conversation()
    await api.create("say hi", tools=[BUILTIN], conversation=conversation)
    second = await api.create(SUM, tools=[BUILTIN], conversation=conversation)
    assert kinds(second) == ["mcp_call", "message"]


@pytest.mark.parametrize("is_last", [False, True])
async def test_names_that_collide_are_told_apart(tmp_path: Path, is_last: bool) -> None:
    """A client's function keeps its name wherever it stands; the server's own tool has its label in front,
    and so has one that a second label offers too."""
    mine, other = {**WEATHER, "name": "save_note"}, {**BUILTIN, "server_label": "my own"}
    offered = [BUILTIN, {**other, "allowed_tools": ["calculator"]}]
    offered.insert(2 * is_last, mine)
    asked = (
        f'call antiphon__save_note {{"note": "five"}}\n{SUM}\ncall my_own__calculator {{"expression": "3+3"}}'
    )
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        first = await Api(client).create(asked, tools=offered)
        chosen = {"type": "mcp", "server_label": "antiphon", "name": "save_note"}
        kept: Json = {"tools": offered, "previous_response_id": first["id"]}
        second = await Api(client).create(
            'call antiphon__save_note {"note": "six"}', tool_choice=chosen, **kept
        )
        third = await Api(client).create('call save_note {"city": "Bonn"}', **kept)
    listed = [
        {item["server_label"]: [tool["name"] for tool in item["tools"]]}
        for item in first["output"]
        if item["type"] == "mcp_list_tools"
    ]
    assert listed == [{"antiphon": [*tools.BUILTIN]}, {"my own": ["calculator"]}]
    made = [(item["server_label"], item["name"], item["output"]) for item in first["output"][2:5]]
    assert made == [
        ("antiphon", "save_note", "Noted: five"),
        ("antiphon", "calculator", "5"),
        ("my own", "calculator", "6"),
    ]
    assert '<tool_call>\n{"name": "antiphon__save_note"' in prompts(engine)[-1], "as the model has called it"
    assert second["output"][0]["output"] == "Noted: six"
    assert [(item["type"], item["name"]) for item in third["output"]] == [("function_call", "save_note")]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"expression": "1/0"}', "cannot compute"),
        ('{"expr": "1"}', "'expression' is a required property"),
        ("{}", "'expression' is a required property"),
    ],
)
async def test_errors_are_told_to_the_model(tmp_path: Path, arguments: str, told: str) -> None:
    engine = loose()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        stream = await Api(client).stream(f"call calculator {arguments}", tools=[BUILTIN])
        made = stream.response["output"][1]
        assert (made["status"], made["output"]) == ("failed", None)
        assert made["error"]["type"] == "mcp_tool_execution_error"
        assert told in made["error"]["content"][0]["text"]
        assert "mcp_call.failed" in stream.types and stream.response["status"] == "completed"
        assert told in prompts(engine)[-1]


async def test_arguments_that_are_no_json_are_told_to_the_model(api: Api) -> None:
    response = await api.create("call calculator {not json", tools=[BUILTIN])
    made = [item for item in response["output"] if item["type"] == "mcp_call"]
    assert response["status"] == "completed"
    assert made == [] or made[0]["status"] in ("failed", "incomplete")


def with_calculator(**changed: Any) -> tools.Registry:
    """The tools that come with the server, with another calculator."""
    return {**tools.BUILTIN, "calculator": replace(tools.BUILTIN["calculator"], **changed)}


async def test_a_tool_that_crashes_does_not_crash_the_run(tmp_path: Path) -> None:
    async def crash(expression: str) -> str:
        raise ZeroDivisionError(expression)

    broken = with_calculator(run=crash)
    async with running_app(tmp_path, registry=broken) as server, http_client(server) as client:
        response = await Api(client).create(SUM, tools=[BUILTIN])
    assert response["status"] == "completed"
    assert response["output"][1]["error"]["content"][0]["text"] == "calculator failed: ZeroDivisionError"


async def test_several_calls_of_one_generation(api: Api) -> None:
    response = await api.create(f'{SUM}\ncall save_note {{"note": "five"}}', tools=[BUILTIN])
    assert [item.get("output") for item in response["output"][1:3]] == ["5", "Noted: five"]
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]


async def test_calls_of_one_generation_are_made_side_by_side(tmp_path: Path) -> None:
    meeting = asyncio.Barrier(2)

    async def meet(expression: str) -> str:
        await meeting.wait()
        return f"met for {expression}"

    asked = 'call calculator {"expression": "1"}\ncall calculator {"expression": "2"}'
    async with (
        running_app(tmp_path, registry=with_calculator(run=meet, timeout_s=5.0)) as server,
        http_client(server) as client,
    ):
        response = await Api(client).create(asked, tools=[BUILTIN])
    assert [item["output"] for item in response["output"][1:3]] == ["met for 1", "met for 2"]


TWO = [wrote("calculator", expression="1+1"), wrote("calculator", expression="2+2")]
TOGETHER = "\n".join(TWO)


def turns(shown: str) -> list[str]:
    """The assistant's turns of a prompt, without what goes on."""
    found = shown.split("<|im_start|>assistant\n")[1:-1]
    return [turn.split("<|im_end|>")[0].strip() for turn in found]


@pytest.mark.parametrize("kept", ["chain", "conversation"])
async def test_calls_that_the_model_wrote_together_are_shown_to_it_as_one_turn(
    tmp_path: Path, kept: str
) -> None:
    engine = loose(saying(TOGETHER, MARKUP, "Four and five."))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        within = {"conversation": await api.conversation()} if kept == "conversation" else {}
        first = await api.create("sum", tools=[BUILTIN], **within)
        await api.create("so?", tools=[BUILTIN], **(within or {"previous_response_id": first["id"]}))
    assert kinds(first) == ["mcp_list_tools", "mcp_call", "mcp_call", "mcp_call", "message"]
    assert turns(prompts(engine)[1]) == [TOGETHER]
    assert turns(prompts(engine)[2]) == [TOGETHER, MARKUP]
    assert turns(prompts(engine)[3]) == [TOGETHER, MARKUP, "Four and five."]


async def test_a_client_that_keeps_such_calls_sends_them_back_without_a_seal(tmp_path: Path) -> None:
    """It need not know its ids, nor outlive a key, for the sake of how calls were written."""
    engine = loose(saying(TOGETHER, "Two and four."))
    asked: Json = {"tools": [BUILTIN], "store": False, "include": ["reasoning.encrypted_content"]}
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        first = await Api(client).create("sum", **asked)
        kept = [{name: said for name, said in item.items() if name != "id"} for item in first["output"]]
        await Api(client).create([*kept, {"role": "user", "content": "so?"}], **asked)
    assert not any("antiphon_sealed" in item for item in first["output"])
    assert turns(prompts(engine)[1]) == [TOGETHER]
    assert turns(prompts(engine)[2]) == [*TWO, "Two and four."]


async def test_calls_of_one_turn_are_one_after_a_restart_between_them_and_their_outcomes(
    tmp_path: Path,
) -> None:
    reached = asyncio.Event()

    async def held(expression: str) -> str:
        reached.set()
        await asyncio.Event().wait()
        return ""

    async with (
        live_app(tmp_path, loose(saying(TOGETHER)), registry=with_calculator(run=held)) as server,
        http_client(server) as client,
    ):
        response = await Api(client).create("sum", tools=[BUILTIN], background=True)
        await asyncio.wait_for(reached.wait(), 20)
        await server.context.runs.drain(0.0)
    engine = loose(saying(TOGETHER, "Done."))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        ended = await Api(client).ended(response["id"])
    assert kinds(ended) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    assert turns(prompts(engine)[-1]) == [TOGETHER]


async def test_a_clients_call_beside_the_servers_is_one_turn_with_it(tmp_path: Path) -> None:
    both = f"{TWO[0]}\n{wrote('get_weather', city='Paris')}"
    engine = loose(saying(both, "Two, and sunny."))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        first = await api.create("both", tools=[BUILTIN, WEATHER])
        [asked] = calls(first)
        await api.create(
            [{"type": "function_call_output", "call_id": asked["call_id"], "output": "sunny"}],
            tools=[BUILTIN, WEATHER],
            previous_response_id=first["id"],
        )
    assert turns(prompts(engine)[-1]) == [both]


async def test_a_call_that_had_to_wait_is_made_after_a_restart(tmp_path: Path) -> None:
    """Of as many as are made at once nobody knows what came of them; those behind had not begun."""
    begun: list[str] = []
    full = asyncio.Event()

    async def held(expression: str) -> str:
        begun.append(expression)
        if len(begun) == steps.CALLS_AT_ONCE:
            full.set()
        await asyncio.Event().wait()
        return ""

    numbers = [str(number) for number in range(steps.CALLS_AT_ONCE + 2)]
    asked = "\n".join(f'call calculator {{"expression": "{number}"}}' for number in numbers)
    once = with_calculator(run=held, idempotent=False)
    async with live_app(tmp_path, registry=once) as server, http_client(server) as client:
        response = await Api(client).create(asked, tools=[BUILTIN], background=True)
        await asyncio.wait_for(full.wait(), 20)
        await server.context.runs.drain(0.0)
    assert begun == numbers[: steps.CALLS_AT_ONCE]
    again = with_calculator(idempotent=False)
    async with running_app(tmp_path, registry=again) as server, http_client(server) as client:
        ended = await Api(client).ended(response["id"])
    made = [item for item in ended["output"] if item["type"] == "mcp_call"]
    unknown = ["not known" in str(item["error"]) for item in made]
    assert unknown == [True] * steps.CALLS_AT_ONCE + [False, False]
    assert [item["output"] for item in made[-2:]] == numbers[-2:]


async def test_the_model_sees_the_result_of_a_call_that_it_talked_on_after(tmp_path: Path) -> None:
    engine = loose(saying(f"{MARKUP}\nLet me compute.", "It is five."))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = (await Api(client).stream("hi", tools=[BUILTIN])).response
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "message", "message"]
    assert text(response).endswith("It is five.")
    assert len(engine.requests) == 2


async def test_server_and_client_calls_of_one_generation(api: Api) -> None:
    first = await api.create(f"{SUM}\n{call()}", tools=[BUILTIN, WEATHER])
    assert kinds(first) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert first["output"][1]["output"] == "5", "ours is done, the client's is pending"
    second = await api.outputs(first["id"], {calls(first)[0]["call_id"]: "rainy"})
    assert text(second) == "The tool said: 5; rainy"


async def test_usage_counts_every_generation_and_input_tokens_the_first(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = await Api(client).create(SUM, tools=[BUILTIN])
        assert len(engine.requests) == 2
        spent = sum(len(request.prompt_ids) for request in engine.requests)
        assert response["usage"]["input_tokens"] == spent


# ------------------------------------------------------------------------------------------------------------
# Limits


async def test_max_tool_calls_ends_the_calling(tmp_path: Path) -> None:
    engine = ScriptedEngine(saying(MARKUP, f"{MARKUP}\n{MARKUP}", "enough"))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = (await Api(client).stream("hi", tools=[BUILTIN], max_tool_calls=2)).response
    made = [item for item in response["output"] if item["type"] == "mcp_call"]
    assert [item["status"] for item in made] == ["completed", "completed", "failed"]
    assert "no more than 2" in made[2]["error"]["content"][0]["text"]
    assert (text(response), response["max_tool_calls"]) == ("enough", 2)


@pytest.mark.parametrize("max_model_len", [2048, 32_768])
async def test_a_result_that_is_longer_than_the_context(tmp_path: Path, max_model_len: int) -> None:
    """The model is shown as much as leaves room for an answer, later on as well, and after a restart."""
    length, gate = 300_000, Gate()

    async def big(expression: str) -> str:
        return "word " * (length // 5)

    def script(request: GenerateRequest, prompt: str) -> Iterator[Step]:
        if request.generation:
            yield Say("It is")
            yield gate.wait()
            yield Say(" long.")
        else:
            yield Say(MARKUP if "hi" in prompt.rsplit("<|im_start|>user", 1)[-1] else "Yes.")

    registry = with_calculator(run=big)
    engine = ScriptedEngine(script, max_model_len=max_model_len)
    async with live_app(tmp_path, engine, registry=registry) as server, http_client(server) as client:
        begun = await Api(client).create("hi", tools=[BUILTIN], background=True)
        await asyncio.wait_for(gate.reached.wait(), 30)
        await server.context.runs.drain(0.0)
    gate.release.set()
    engine = ScriptedEngine(script, max_model_len=max_model_len)
    async with running_app(tmp_path, engine, registry=registry) as server, http_client(server) as client:
        api = Api(client)
        first = await api.ended(begun["id"])
        second = await api.create("so?", tools=[BUILTIN], previous_response_id=first["id"])
    assert (first["status"], text(first)) == ("completed", "It is long.")
    assert len(first["output"][1]["output"]) > MAX_OUTPUT, "the item has all that is kept"
    assert (second["status"], text(second)) == ("completed", "Yes.")
    for prompt in prompts(engine):
        assert f"[cut: the output had {length} characters]" in prompt
    assert max_model_len // 4 < len(engine.requests[-1].prompt_ids) <= max_model_len - max_model_len // 8


async def test_a_loop_of_calls_ends_incomplete(tmp_path: Path) -> None:
    engine = ScriptedEngine(saying(MARKUP))
    async with running_app(tmp_path, engine, max_generations=5) as server, http_client(server) as client:
        response = (await Api(client).stream("hi", tools=[BUILTIN])).response
    assert (response["status"], len(engine.requests)) == ("incomplete", 5)
    assert "`max_generations`" in response["incomplete_details"]["message"], "it is no limit on tokens"
    assert kinds(response).count("mcp_call") == 5


async def test_calls_that_are_broken_again_and_again_end_incomplete(tmp_path: Path) -> None:
    torn = MARKUP.replace("}}", "")
    engine = loose(saying(MARKUP, torn))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = (await Api(client).stream("hi", tools=[BUILTIN])).response
        stored = (await client.get(f"/v1/responses/{response['id']}")).json()
    assert (response["status"], len(engine.requests)) == ("incomplete", 1 + steps.MAX_BROKEN_CALLS)
    made = [item for item in response["output"] if item["type"] == "mcp_call"]
    assert [item["status"] for item in made] == ["completed", *["incomplete"] * steps.MAX_BROKEN_CALLS]
    assert "not whole" in made[1]["error"]["content"][0]["text"]
    assert made[-1]["error"]["content"][0]["text"].endswith("number 3 of such calls in a row.")
    assert "number 2 of such calls in a row" in prompts(engine)[-1], "the model is told"
    assert stored["output"] == response["output"]


async def test_a_call_that_was_broken_may_be_mended(tmp_path: Path) -> None:
    torn = MARKUP.replace("}}", "")
    engine = loose(saying(f"{torn}\n" * 3, MARKUP, torn, torn, "enough"))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = (await Api(client).stream("hi", tools=[BUILTIN])).response
    assert (response["status"], text(response)) == ("completed", "enough")


async def test_the_log_tells_which_tool_has_failed_and_nothing_that_was_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-c", "import sys; print(sys.stdin.read(), file=sys.stderr); sys.exit(3)"]
    (tmp_path / "tools.toml").write_text(
        f'[tools.desk]\ndescription = "A desk."\ncommand = {json.dumps(command)}\n'
        "parameters = {type = 'object', properties = {word = {type = 'string'}}}\n"
    )
    engine = loose(saying(wrote("desk", word="hush"), wrote("calculator", expression="1/0"), "enough"))
    async with running_app(tmp_path, engine, registry=None) as server, http_client(server) as client:
        response = (await Api(client).stream("hi", tools=[BUILTIN])).response
    assert [item["status"] for item in response["output"][1:3]] == ["failed", "failed"]
    [line] = [record for record in caplog.records if record.levelname == "WARNING"]
    told = f"tool desk failed in run {response['id']}: the program failed with status 3"
    assert line.getMessage() == told and "hush" in str(response["output"][1]["error"])
    assert (line.__dict__["tool"], line.__dict__["response_id"]) == ("desk", response["id"])


UNKNOWN = MARKUP.replace("calculator", "productcreate_note")


async def test_a_call_of_a_tool_that_there_is_not_is_told_to_the_model(tmp_path: Path) -> None:
    engine = loose(saying(UNKNOWN, MARKUP, "It is 5."))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        response = (await api.stream("hi", tools=[BUILTIN, WEATHER])).response
        stored = (await client.get(f"/v1/responses/{response['id']}")).json()
        following = await api.create("and?", previous_response_id=response["id"])
    assert kinds(response)[1:] == ["mcp_call", "mcp_call", "message"] and text(response) == "It is 5."
    unknown, mended = response["output"][1:3]
    assert (unknown["name"], unknown["status"], unknown["output"]) == (
        "productcreate_note",
        "incomplete",
        None,
    )
    told = unknown["error"]["content"][0]["text"]
    known = ", ".join(sorted([*tools.BUILTIN, "get_weather"]))
    assert told == f"There is no tool named 'productcreate_note'. The tools are: {known}."
    assert told in prompts(engine)[1] and mended["output"] == "5"
    assert stored["output"] == response["output"] and following["status"] == "completed"


async def test_calls_of_no_tool_again_and_again_end_incomplete(tmp_path: Path) -> None:
    engine = loose(saying(UNKNOWN))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = (await Api(client).stream("hi", tools=[BUILTIN])).response
    assert (response["status"], len(engine.requests)) == ("incomplete", steps.MAX_BROKEN_CALLS)


@pytest.mark.parametrize("waits", [False, True])
async def test_a_call_of_a_tool_that_there_is_not_stops_no_chain(tmp_path: Path, waits: bool) -> None:
    engine = loose(saying(UNKNOWN))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        response = (await api.stream("hi", tools=[WEATHER], await_tool_outputs=waits)).response
        (unknown,) = calls(response)
        assert (unknown["name"], unknown["status"]) == ("productcreate_note", "incomplete")
        assert response["status"] == "completed"
        following = await api.create("and?", previous_response_id=response["id"])
        assert following["status"] == "completed"
        told = {"type": "function_call_output", "call_id": unknown["call_id"], "output": "no such tool"}
        answered = await api.create([told], previous_response_id=response["id"])
    assert answered["status"] == "completed" and "no such tool" in prompts(engine)[-1]


@pytest.mark.parametrize("parallel", [True, False])
async def test_a_forced_choice_holds_for_the_first_generation_only(tmp_path: Path, parallel: bool) -> None:
    engine = ScriptedEngine(saying(MARKUP, "It is 5."))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = await Api(client).create(
            "hi", tools=[BUILTIN], tool_choice="required", parallel_tool_calls=parallel
        )
    assert (response["status"], text(response), len(engine.requests)) == ("completed", "It is 5.", 2)


async def test_calls_of_server_tools_are_strict(tmp_path: Path) -> None:
    """Whatever the model would write, its name and arguments are those of a tool that there is."""
    engine = ScriptedEngine(saying(UNKNOWN.replace("expression", "sum"), "Done."))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = await Api(client).create("hi", tools=[BUILTIN])
    made = response["output"][1]
    fields = {"calculator": "expression", "save_note": "note"}
    assert made["type"] == "mcp_call" and list(json.loads(made["arguments"])) == [fields[made["name"]]]


async def test_the_shipped_model_answers_sums_by_the_calculator(tmp_path: Path) -> None:
    shipped = build_engine(Config(data=tmp_path, num_threads=1))
    signs = {"*": lambda a, b: a * b, "+": lambda a, b: a + b, "times": lambda a, b: a * b}
    asked = [(a, sign, b) for a, b in ((12, 34), (81, 62), (5, 61)) for sign in signs]
    asked += [(a, "+", b) for a, b in ((19, 99), (31, 15), (48, 55), (33, 85), (24, 67), (70, 41))]
    asked += [(a, "*", b) for a, b in ((99, 91), (42, 44), (65, 62), (96, 47), (14, 52))]
    assert len(asked) == 20
    async with running_app(tmp_path, shipped) as server, http_client(server) as client:
        api = Api(client)
        for seed, (a, sign, b) in enumerate(asked):
            response = await api.create(f"What is {a} {sign} {b}?", tools=[BUILTIN], seed=seed)
            made, result = response["output"][1], str(signs[sign](a, b))
            assert (made["type"], made["name"], made["output"]) == ("mcp_call", "calculator", result), made
            assert result in text(response) and response["status"] == "completed"
        forced = await api.create("What is 12 * 34?", tools=[BUILTIN], tool_choice="required", seed=1)
        assert forced["status"] == "completed" and "408" in text(forced)


async def test_max_output_tokens_count_over_all_generations(api: Api) -> None:
    response = await api.create(SUM, tools=[BUILTIN], max_output_tokens=64)
    assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", 64)
    assert kinds(response)[-1] == "message"


async def test_outputs_that_fill_the_context_end_the_run_incomplete(tmp_path: Path) -> None:
    long = json.dumps({"note": "x" * 600})
    markup = f'<tool_call>\n{{"name": "save_note", "arguments": {long}}}\n</tool_call>'
    body = {"input": "hi", "tools": [BUILTIN]}
    async with running_app(tmp_path / "counting") as server, http_client(server) as client:
        counted = (await client.post("/v1/responses/input_tokens", json=body)).json()["input_tokens"]
    engine = ScriptedEngine(saying(markup), max_model_len=counted + 800)
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = (await Api(client).stream(**body)).response
    assert (response["status"], kinds(response)[-1]) == ("incomplete", "mcp_call")
    assert response["output"][-1]["status"] == "completed"
    message = "What its tools returned fills the model's context."
    assert response["incomplete_details"] == {"reason": "max_output_tokens", "message": message}


async def test_parallel_tool_calls_false_makes_one_call_a_generation(api: Api) -> None:
    asked = f'{SUM}\ncall save_note {{"note": "five"}}'
    response = await api.create(asked, tools=[BUILTIN], parallel_tool_calls=False)
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "message"]


# ------------------------------------------------------------------------------------------------------------
# What is offered


async def test_allowed_tools_of_a_server(api: Api) -> None:
    for allowed in (["calculator"], {"tool_names": ["calculator"]}):
        response = await api.create("say hi", tools=[{**BUILTIN, "allowed_tools": allowed}])
        assert [tool["name"] for tool in response["output"][0]["tools"]] == ["calculator"]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "mcp", "server_label": "antiphon", "name": "calculator"},
        {"type": "function", "name": "calculator"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp", "server_label": "antiphon"}]},
        {"type": "mcp", "server_label": "antiphon"},
    ],
)
async def test_a_server_tool_can_be_forced(api: Api, choice: Json) -> None:
    response = await api.create("say hi", tools=[BUILTIN, WEATHER], tool_choice=choice)
    assert kinds(response)[:2] == ["mcp_list_tools", "mcp_call"]
    assert response["tool_choice"] == choice
    assert response["status"] == "completed", "forced once"


async def test_allowed_tools_are_forced_once_and_allowed_throughout(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "mcp", "server_label": "antiphon"}],
    }
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = await Api(client).create("say hi", tools=[BUILTIN, WEATHER], tool_choice=allowed)
        first, second = prompts(engine)
        assert "get_weather" in first, "what is forced is enforced, not hidden"
        assert "calculator" in second and "get_weather" not in second
        assert response["status"] == "completed"


@pytest.mark.parametrize(
    ("offered", "param"),
    [
        ([BUILTIN, {**BUILTIN, "allowed_tools": ["calculator"]}], "tools"),
        (
            [{**BUILTIN, "require_approval": {"never": {"read_only": True}}}],
            "tools[0].require_approval.never.read_only",
        ),
        (
            [{**BUILTIN, "require_approval": {"always": {"tool_names": ["calculater"]}}}],
            "tools[0].require_approval.always",
        ),
        ([{**BUILTIN, "allowed_tools": {"read_only": True}}], "tools[0].allowed_tools.read_only"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(api: Api, offered: list[Json], param: str) -> None:
    error = await api.refused(400, "hi", tools=offered)
    assert error["param"] == param


async def test_approval_never_is_what_happens_anyway(api: Api) -> None:
    response = await api.create(SUM, tools=[{**BUILTIN, "require_approval": "never"}])
    assert text(response) == "The tool said: 5"


# ------------------------------------------------------------------------------------------------------------
# Calls that are interrupted


async def test_a_call_is_in_the_log_before_it_runs(tmp_path: Path) -> None:
    gate = Gate()

    async def held(expression: str) -> str:
        gate.reached.set()
        await gate.release.wait()
        return "5"

    slow = with_calculator(run=held)
    async with live_app(tmp_path, registry=slow) as server, http_client(server) as client:
        api = Api(client)
        begun = await api.create(SUM, tools=[BUILTIN], background=True)
        await gate.reached.wait()
        records = await server.context.storage.records(begun["id"], after=-1)
        assert b"response.mcp_call_arguments.done" in records[-1].events
        cancelled = await api.cancel(begun["id"])
        made = cancelled["output"][1]
        assert (made["status"], made["output"]) == ("failed", None)
        assert cancelled["status"] == "cancelled"
        await api.ended(begun["id"])


async def test_a_slow_tool_is_stopped(tmp_path: Path) -> None:
    async def never(expression: str) -> str:
        await asyncio.Event().wait()
        return ""

    slow = with_calculator(run=never, timeout_s=0.01)

    def script(request: Any, prompt: str) -> Any:
        yield Say(MARKUP if request.generation == 0 else "too slow")

    engine = ScriptedEngine(script)
    async with running_app(tmp_path, engine, registry=slow) as server, http_client(server) as client:
        response = await Api(client).create("hi", tools=[BUILTIN])
    assert "took longer" in response["output"][1]["error"]["content"][0]["text"]
    assert text(response) == "too slow"
