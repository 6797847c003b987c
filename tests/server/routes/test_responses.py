"""Creating responses: the four forms of a run, what a model may say, and how a turn may end."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import Fail, RequestFailed, Say, ScriptedEngine
from tests.support.running import http_client, running_app
from tests.support.talk import BUILTIN, TIME, WEATHER, Api, call, calls, prompts, saying, text


@pytest.fixture
def api(client: httpx.AsyncClient) -> Api:
    return Api(client)


# ------------------------------------------------------------------------------------------------------------
# Four forms of one run


async def test_a_plain_create_answers_with_the_whole_response(api: Api) -> None:
    response = await api.create("say hello")
    assert (response["status"], text(response)) == ("completed", "hello")
    assert response["usage"]["output_tokens"] == len("hello") + 1  # a token a byte, and the end of turn
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
    assert response["completed_at"] >= response["created_at"]
    [item] = response["output"]
    assert item["id"].startswith("msg_") and response["id"].startswith("resp_")


async def test_a_stored_response_is_read_back_byte_for_byte(api: Api) -> None:
    reply = await api.http.post("/v1/responses", json={"input": 'say "hé\u2028llo" \\u0000 🙂'})
    api.response(reply)
    assert (await api.http.get(f"/v1/responses/{reply.json()['id']}")).content == reply.content


async def test_a_stream_tells_what_a_get_tells(api: Api) -> None:
    stream = await api.stream("say one two three")
    assert stream.types == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert text(stream.response) == "one two three"
    stored = (await api.http.get(f"/v1/responses/{stream.response['id']}")).content
    assert b'"response":' + stored in stream.raw.split(b"event: response.completed\n")[1]


async def test_a_background_run_is_queued_and_polled(api: Api) -> None:
    begun = await api.create("say hello", background=True)
    assert (begun["status"], begun["output"], begun["background"]) == ("queued", [], True)
    assert begun["usage"] is None
    ended = await api.ended(begun["id"])
    assert (ended["status"], text(ended)) == ("completed", "hello")


async def test_a_background_stream_begins_with_queued(api: Api) -> None:
    stream = await api.stream("say hello", background=True)
    assert stream.types[:3] == ["created", "queued", "in_progress"]
    assert [e["response"]["status"] for e in stream.events[:3]] == ["queued", "queued", "in_progress"]
    assert text(stream.response) == "hello"


async def test_all_forms_make_the_same_response(api: Api) -> None:
    asked = "think let me see then call get_weather {}"
    forms = [{}, {"stream": True}, {"background": True}, {"background": True, "stream": True}]
    ended = []
    for form in forms:
        reply = await api.http.post("/v1/responses", json={"input": asked, "tools": [WEATHER], **form})
        begun = api.whole(reply).response if form.get("stream") else api.response(reply)
        ended.append(await api.ended(begun["id"]))
    told = [
        [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
        for response in ended
    ]
    assert [item["type"] for item in told[0]] == ["reasoning", "function_call"]
    assert all(output == told[0] for output in told)
    assert all(response["usage"] == ended[0]["usage"] for response in ended)
    ids = {item["id"] for response in ended for item in response["output"]}
    assert len(ids) == 8, "ids are the run's own"


async def test_a_stream_of_a_response_that_was_not_streamed(api: Api) -> None:
    """Sync and background leave the same log behind."""
    response = await api.create("say hello")
    assert (await api.ended(response["id"]))["id"] == response["id"]


# ------------------------------------------------------------------------------------------------------------
# What the model says


async def test_reasoning_is_an_item_of_its_own(api: Api) -> None:
    stream = await api.stream("think hm then say hello")
    reasoning, message = stream.response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (reasoning["summary"], reasoning["encrypted_content"]) == ([], None)
    assert message["content"][0]["text"] == "hello"
    usage = stream.response["usage"]
    assert 2 <= usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"] - 6
    at = stream.types.index("reasoning_text.delta")
    assert stream.types[at - 2 : at] == ["output_item.added", "content_part.added"]


async def test_a_thought_that_is_cut_short_stands_alone(api: Api) -> None:
    """Every token of it is one of reasoning, and no answer is made up for it."""
    asked = "think " + "hm " * 50 + "then say hello"
    for form in ({}, {"stream": True}):
        body = {"input": asked, "max_output_tokens": 30, **form}
        reply = await api.http.post("/v1/responses", json=body)
        response = api.whole(reply).response if form else api.response(reply)
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        [item] = response["output"]
        assert (item["type"], item["status"]) == ("reasoning", "incomplete")
        assert ("hm " * 50).startswith(item["content"][0]["text"]) and len(item["content"][0]["text"]) > 20
        usage = response["usage"]
        assert usage["output_tokens_details"]["reasoning_tokens"] == usage["output_tokens"] == 30


@pytest.mark.parametrize("summary", ["auto", "concise", "detailed"])
@pytest.mark.parametrize("name", ["summary", "generate_summary"])
async def test_a_summary_that_is_asked_for_is_not_made_up(api: Api, name: str, summary: str) -> None:
    stream = await api.stream("think hm then say hello", reasoning={name: summary, "effort": "high"})
    assert stream.response["reasoning"] == {"effort": "high", "summary": None, "context": None}
    assert stream.response["output"][0]["summary"] == []
    assert not [kind for kind in stream.types if "summary" in kind]


async def test_a_function_call(api: Api) -> None:
    stream = await api.stream(call(), tools=[WEATHER])
    [item] = stream.response["output"]
    assert stream.response["status"] == "completed"
    assert (item["type"], item["status"], item["name"]) == ("function_call", "completed", "get_weather")
    assert json.loads(item["arguments"]) == {"city": "Paris"}
    assert item["call_id"].startswith("call_") and item["call_id"] != item["id"]
    [done] = [e for e in stream.events if e["type"] == "response.function_call_arguments.done"]
    assert (done["name"], done["arguments"]) == ("get_weather", item["arguments"])


async def test_parallel_calls_each_have_an_index(api: Api) -> None:
    response = (await api.stream(f"{call()}\n{call('get_time')}", tools=[WEATHER, TIME])).response
    assert [item["name"] for item in calls(response)] == ["get_weather", "get_time"]
    assert len({item["call_id"] for item in calls(response)}) == 2


async def test_parallel_tool_calls_false_ends_after_the_first_call(api: Api) -> None:
    asked = f"{call()}\n{call('get_time')}"
    response = await api.create(asked, tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert [item["name"] for item in calls(response)] == ["get_weather"]
    assert (response["status"], response["parallel_tool_calls"]) == ("completed", False)


async def test_text_around_a_call(api: Api) -> None:
    stream = await api.stream(f"say Let me look.\n{call()}", tools=[WEATHER])
    assert [item["type"] for item in stream.response["output"]] == ["message", "function_call"]
    assert text(stream.response).strip() == "Let me look."


async def test_markup_is_text_where_no_tool_was_offered(api: Api) -> None:
    response = await api.create(call())
    assert calls(response) == []
    assert "<tool_call>" in text(response)


async def test_a_model_that_says_nothing_leaves_an_empty_message(tmp_path: Path) -> None:
    async with running_app(tmp_path, ScriptedEngine(saying(""))) as server, http_client(server) as client:
        stream = await Api(client).stream("hello")
    [item] = stream.response["output"]
    assert stream.response["status"] == "completed"
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


async def test_log_probabilities_come_where_they_are_included(api: Api) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    stream = await api.stream("say hé", **asked)
    part = stream.response["output"][0]["content"][0]
    assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]) == "hé".encode()
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    assert stream.response["top_logprobs"] == 2
    without = await api.create("say hé", top_logprobs=2)
    assert without["output"][0]["content"][0]["logprobs"] == []


# ------------------------------------------------------------------------------------------------------------
# What the model is made to do


async def test_tool_choice_none_hides_the_tools(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = await Api(client).create(call(), tools=[WEATHER], tool_choice="none")
        assert calls(response) == [] and (response["status"], text(response)) == ("completed", "")
        behind = await Api(client).create(f"say well\n{call()}", tools=[WEATHER], tool_choice="none")
        assert text(behind) == "well", "the answer ends where a call would begin"
        untold = await Api(client).create(call())
        assert "<tool_call>" in text(untold), "without tools there are no calls"
        assert not any("Weather of a city" in prompt for prompt in prompts(engine))
        assert response["tools"] == [WEATHER], "what was asked is echoed"


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_time"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]},
    ],
    ids=["required", "named", "allowed"],
)
async def test_a_forced_call_always_comes_and_fits(api: Api, choice: Any) -> None:
    stream = await api.stream("say I would rather not", tools=[WEATHER, TIME], tool_choice=choice)
    [item] = calls(stream.response)
    arguments = json.loads(item["arguments"])
    assert arguments.keys() == {"city"} and isinstance(arguments["city"], str)
    assert stream.response["tool_choice"] == choice
    if choice != "required":
        assert item["name"] == "get_time"


async def test_allowed_tools_narrow_what_may_be_called(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        allowed = {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "get_time"}],
        }
        await Api(client).create("say hi", tools=[WEATHER, TIME], tool_choice=allowed)
        assert "get_time" in prompts(engine)[-1] and "get_weather" not in prompts(engine)[-1]


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([], "required", "tool_choice"),
        ([WEATHER], {"type": "function", "name": "get_time"}, "tool_choice"),
        ([WEATHER], {"type": "web_search"}, "tool_choice"),
        ([WEATHER], {"type": "mcp", "server_label": "antiphon"}, "tool_choice"),
        ([WEATHER], {"type": "allowed_tools", "mode": "required", "tools": [{"type": "telepathy"}]},
         "tool_choice.tools[0].type"),
        ([WEATHER], {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "no"}]},
         "tool_choice.tools"),
        ([WEATHER, WEATHER], "auto", "tools"),
    ],
)  # fmt: skip
async def test_a_choice_of_what_is_not_there_is_refused(
    api: Api, tools: list[Any], choice: Any, param: str
) -> None:
    error = await api.refused(400, "hi", tools=tools, tool_choice=choice)
    assert error["param"] == param


BY_PATH: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "say hi"},
    "/v1/responses/input_tokens": {"input": "say hi"},
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "say hi"}]}
BY_PATH |= {"/v1/chat/completions": CHAT, "/tokenize": CHAT}


# One is known to none, the others lack their provider.
@pytest.mark.parametrize("kind", ["code_interpreter", "image_generation", "web_search"])
@pytest.mark.parametrize("path", BY_PATH)
async def test_tools_that_nobody_runs_here_are_refused_or_left_out(
    path: str, kind: str, tmp_path: Path
) -> None:
    container = {"container": {"type": "auto"}} if kind == "code_interpreter" else {}
    body = {**BY_PATH[path], "tools": [{"type": kind, **container}, WEATHER]}
    forced = {**body, "tool_choice": {"type": kind}}
    async with running_app(tmp_path / "refuses") as server, http_client(server) as client:
        error = (await client.post(path, json=body)).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_tool", "tools[0].type")
    ignoring = running_app(tmp_path / "ignores", unsupported_tools="ignore")
    async with ignoring as server, http_client(server) as client:
        reply = await client.post(path, json=body)
        assert (reply.status_code, reply.headers["x-antiphon-ignored"]) == (200, "tools[0]")
        if path == "/v1/responses":
            assert [tool["type"] for tool in reply.json()["tools"]] == [kind, "function"]
        refused = await client.post(path, json=forced)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


async def test_a_response_with_tools_left_out_goes_on_after_the_setting_has_changed(tmp_path: Path) -> None:
    ignoring = running_app(tmp_path, unsupported_tools="ignore")
    async with ignoring as server, http_client(server) as client:
        body = {"input": call(), "tools": [{"type": "web_search"}, WEATHER]}
        first = (await client.post("/v1/responses", json=body)).json()
    async with running_app(tmp_path) as server, http_client(server) as client:
        output = {"tool_call_id": calls(first)[0]["call_id"], "output": "sunny"}
        reply = await client.post(f"/v1/responses/{first['id']}/tool_outputs", json=output)
    assert (reply.status_code, reply.json()["status"]) == (200, "completed")


# ------------------------------------------------------------------------------------------------------------
# How a turn ends


async def test_max_output_tokens_end_a_response_incomplete(api: Api) -> None:
    stream = await api.stream("count 100", max_output_tokens=16)
    response = stream.response
    assert (response["status"], stream.types[-1]) == ("incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == 16
    assert len(text(response)) == 16
    assert (await api.create("count 100", max_output_tokens=16))["status"] == "incomplete"


async def test_a_call_that_is_cut_off_never_looks_whole(api: Api) -> None:
    response = (await api.stream(call(), tools=[WEATHER], max_output_tokens=40)).response
    [item] = calls(response)
    assert (response["status"], item["status"]) == ("incomplete", "incomplete")
    with pytest.raises(ValueError):
        json.loads(item["arguments"])


async def test_a_stop_string_ends_the_turn_and_is_no_part_of_it(api: Api) -> None:
    response = await api.create("count 9", stop=[" 4"])
    assert (response["status"], text(response)) == ("completed", "1 2 3")
    assert response["usage"]["output_tokens"] == len("1 2 3 4"), (
        "the stop's own tokens count, later ones do not"
    )


async def test_a_request_that_fails_in_the_engine_ends_failed(tmp_path: Path) -> None:
    def script(request: Any, prompt: str) -> Any:
        yield Say("one two")
        yield Fail(RequestFailed("device 7 said no"))

    async with running_app(tmp_path, ScriptedEngine(script)) as server, http_client(server) as client:
        api = Api(client)
        stream = await api.stream("hi")
        assert (stream.response["status"], stream.types[-1]) == ("failed", "failed")
        assert stream.response["error"]["code"] == "server_error"
        assert "device 7" not in stream.response["error"]["message"], "what is inside stays inside"
        assert text(stream.response) == "one two"
        assert stream.response["output"][0]["status"] == "incomplete"
        assert stream.response["usage"]["output_tokens"] == len("one two")
        sync = await api.create("hi")
        assert (sync["status"], text(sync)) == ("failed", "one two")


async def test_a_prompt_beyond_the_context_is_refused_with_exact_counts(tmp_path: Path) -> None:
    async with (
        running_app(tmp_path, ScriptedEngine(max_model_len=200)) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        long = "x" * 300
        num_tokens = (await client.post("/v1/responses/input_tokens", json={"input": long})).json()[
            "input_tokens"
        ]
        error = await api.refused(400, long)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
        assert f"{num_tokens} tokens" in error["message"] and "200 tokens" in error["message"]
        assert (await api.page("/v1/responses"))["data"] == [], "nothing was stored"


async def test_truncation_auto_drops_from_the_beginning(tmp_path: Path) -> None:
    engine = ScriptedEngine(max_model_len=400)
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        items = [{"role": "user", "content": f"message {n} {'x' * 40}"} for n in range(12)]
        response = await api.create([*items, {"role": "user", "content": "say ok"}], truncation="auto")
        assert text(response) == "ok"
        shown = prompts(engine)[-1]
        kept = [n for n in range(12) if f"message {n} " in shown]
        assert kept == list(range(kept[0], 12)) and kept[0] > 0, "the newest stay, the oldest go"
        assert response["usage"]["input_tokens"] == len(engine.requests[-1].prompt_ids) <= 350
        listed = await api.input_items(response["id"], order="asc")
        assert len(listed["data"]) == 13, "what was sent is kept"
        assert (await api.refused(400, [*items, *items]))["code"] == "context_length_exceeded"


async def test_truncation_auto_keeps_an_output_with_its_call(tmp_path: Path) -> None:
    engine = ScriptedEngine(max_model_len=800)
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        calls = [
            {"type": "function_call", "call_id": id, "name": "get_weather", "arguments": "{}"} for id in "ab"
        ]
        outputs = [{"type": "function_call_output", "call_id": id, "output": f"out {id}"} for id in "ab"]
        history = [{"role": "user", "content": "x" * 2000}, *calls, *outputs]
        response = await api.create(history, tools=[WEATHER], truncation="auto")
        assert (response["status"], "xx" in prompts(engine)[-1]) == ("completed", False)
        assert "out a" in prompts(engine)[-1] and "out b" in prompts(engine)[-1]
        outputs[1]["output"] = "y" * 2000
        error = await api.refused(400, history, tools=[WEATHER], truncation="auto")
        assert error["code"] == "context_length_exceeded"


# ------------------------------------------------------------------------------------------------------------
# What is asked and echoed


async def test_the_echo_holds_what_was_asked(api: Api) -> None:
    asked = {
        "metadata": {"a": "1"},
        "instructions": "Be brief.",
        "temperature": 0.5,
        "top_p": 0.25,
        "max_output_tokens": 50,
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "truncation": "auto",
        "text": {"format": {"type": "text"}, "verbosity": "low"},
    }
    stream = await api.stream("say hi", **asked)
    for event in stream.events:
        if "response" in event:
            assert {name: event["response"][name] for name in asked} == asked
    assert stream.response["store"] is True


async def test_input_tokens_are_what_the_run_uses(api: Api) -> None:
    for body in (
        {"input": "say hi"},
        {"input": "say hi", "instructions": "Be brief."},
        {"input": [{"role": "developer", "content": "x"}, {"role": "user", "content": "say hi"}]},
        {"input": "say hi", "tools": [WEATHER, BUILTIN]},
        {"input": "say hi", "tools": [WEATHER], "tool_choice": "none"},
    ):
        counted = (await api.http.post("/v1/responses/input_tokens", json=body)).json()
        assert counted["object"] == "response.input_tokens"
        assert counted["input_tokens"] == (await api.create(**body))["usage"]["input_tokens"]
    first = await api.create("say hi")
    chained = {"previous_response_id": first["id"], "input": "say ho"}
    counted = (await api.http.post("/v1/responses/input_tokens", json=chained)).json()
    assert counted["input_tokens"] == (await api.create(**chained))["usage"]["input_tokens"]


async def test_instructions_and_roles_reach_the_model(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        items = [
            {"role": "developer", "content": "as a developer"},
            {"role": "system", "content": [{"type": "input_text", "text": "as a system"}]},
            {"type": "message", "role": "user", "content": "say hi"},
        ]
        await Api(client).create(items, instructions="be instructed")
        shown = prompts(engine)[-1]
        places = [shown.index(said) for said in ("be instructed", "as a developer", "as a system", "say hi")]
        assert places == sorted(places)
        assert shown.count("<|im_start|>system") >= 1 and "<|im_start|>developer" not in shown


async def test_bad_requests_are_refused_before_anything_is_stored(api: Api) -> None:
    unknown = await api.refused(404, "hi", model="nobody")
    assert unknown["code"] == "model_not_found" and "'antiphon-scripted'" in unknown["message"]
    assert (await api.refused(400))["param"] == "input"
    assert (await api.refused(400, "hi", await_tool_outputs=True))["param"] == "await_tool_outputs"
    assert (await api.refused(400, "hi", background=True, store=False))["param"] == "background"
    assert (await api.refused(400, "hi", max_output_tokens=15))["param"] == "max_output_tokens"
    image = {"type": "input_image", "image_url": "data:,"}
    error = await api.refused(400, [{"role": "user", "content": [image]}])
    assert (error["code"], error["param"]) == ("unsupported_content", "input[0].content[0]")
    assert (await api.page("/v1/responses"))["data"] == []


async def test_every_output_item_is_taken_back_unchanged(api: Api) -> None:
    first = await api.create("think hm then say hello")
    second = await api.create(call("calculator").replace("city", "expression"), tools=[BUILTIN])
    items = [*first["output"], *second["output"]]
    assert {item["type"] for item in items} == {"reasoning", "message", "mcp_list_tools", "mcp_call"}
    again = await api.create([*items, {"role": "user", "content": "say ok"}])
    listed = (await api.input_items(again["id"], order="asc"))["data"]
    assert listed[: len(items)] == items


async def test_the_log_tells_persons_apart(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "antiphon.runs")
    for body in ({"safety_identifier": "a"}, {"user": "a"}, {"safety_identifier": "b"}, {}):
        await api.create("say hi", **body)
    said = [vars(record) for record in caplog.records]
    told = [each["safety_identifier"] for each in said if "safety_identifier" in each]
    assert len(told) == 4
    assert told[0] == told[1] != told[2] and told[3] is None
    assert "a" not in told
