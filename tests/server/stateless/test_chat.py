"""Chat completions: what is asked, what comes back, whole and in chunks."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError

from engine import Chunk, Done, GenerateRequest, ScriptedEngine, Text
from server.stateless.chat import ChatWriter
from tests.support import wire
from tests.support.running import Running

Json = dict[str, Any]

FUNCTION: Json = {
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOL: Json = {"type": "function", "function": FUNCTION}
CALL = 'call look_up {"city": "Oslo"}'


def asking(content: Any, **fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": content}], **fields}


async def whole(client: httpx.AsyncClient, body: Json) -> Json:
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    wire.validate_chat(reply.json())
    return dict(reply.json())


async def streamed(client: httpx.AsyncClient, body: Json) -> tuple[list[Json], Json | None]:
    """The folded choices of a stream, and its usage."""
    include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    reply = await client.post("/v1/chat/completions", json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    chunks = wire.chunks(reply.content)
    choices = wire.check_chunks(chunks, "CreateChatCompletionStreamResponse", include_usage=include_usage)
    return choices, chunks[-1]["usage"] if include_usage else None


async def refused(client: httpx.AsyncClient, body: Json, status: int = 400) -> Json:
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == status, reply.text
    return wire.validate_error(reply.json())


def latest(running: Running) -> GenerateRequest:
    engine = running.context.models.get(None).engine
    assert isinstance(engine, ScriptedEngine)
    return engine.requests[-1]


def prompt(running: Running) -> str:
    engine = running.context.models.get(None).engine
    assert isinstance(engine, ScriptedEngine)
    return engine.tokenizer.decode(latest(running).prompt_ids)


# ------------------------------------------------------------------------------------------------------------
# Whole and in chunks


CASES: dict[str, Json] = {
    "text": asking("say hello there"),
    "reasoning": asking("think let me see then say hello"),
    "call": asking(CALL, tools=[TOOL]),
    "calls": asking(f"{CALL}\n{CALL}", tools=[TOOL]),
    "reasoning left out": asking("think let me see then say hello", include_reasoning=False),
    "reasoning alone": asking("think let me see then say hello", max_tokens=8),
    "think and call": asking(f"think hm then {CALL}", tools=[TOOL]),
    "text and call": asking(f"say one moment\n{CALL}", tools=[TOOL]),
    "one call": asking(f"{CALL}\n{CALL}", tools=[TOOL], parallel_tool_calls=False),
    "forced": asking("say something", tools=[TOOL], tool_choice="required"),
    "named": asking(
        "say no", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "look_up"}}
    ),
    "none": asking(CALL, tools=[TOOL], tool_choice="none"),
    "length": asking("count 50", max_tokens=10),
    "length in a call": asking(CALL, tools=[TOOL], max_completion_tokens=50),
    "torn call behind another": asking(f'{CALL}\ncall look_up {{"q": "x<|im_end|>y"}}', tools=[TOOL]),
    "stop": asking("say one two three four", stop="three"),
    "choices": asking("random 5", n=3, seed=7),
    "logprobs": asking("say hi", logprobs=True, top_logprobs=2),
    "bare logprobs": asking("say hi", logprobs=True),
    "logprobs of choices": asking("say hi", logprobs=True, n=2),
    "empty": asking("say  "),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_folds_to_the_whole(client: httpx.AsyncClient, name: str) -> None:
    body = {**CASES[name], "seed": 1}
    full = await whole(client, body)
    choices, usage = await streamed(client, {**body, "stream_options": {"include_usage": True}})
    assert usage == full["usage"]
    for choice, folded in zip(full["choices"], choices, strict=True):
        for message in (choice["message"], folded["message"]):
            for call in message.get("tool_calls", ()):
                assert call.pop("id").startswith("call_")
        extra = {k: choice["message"].pop(k) for k in ("refusal", "annotations")}
        assert extra == {"refusal": None, "annotations": []}
        for message in (choice["message"], folded["message"]):
            message["content"] = message["content"] or ""
        if choice["logprobs"] is not None:
            folded["logprobs"] = folded["logprobs"] or {"content": [], "refusal": None}
        assert folded == choice


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("text", []),
        ("text and call", []),
        ("reasoning left out", []),
        ("choices", []),
        ("logprobs of choices", []),
        ("empty", []),
        ("call", ["tool_calls"]),
        ("forced", ["tool_calls"]),
        ("reasoning", ["reasoning", "reasoning_content"]),
        ("think and call", ["reasoning", "reasoning_content"]),
    ],
)
async def test_only_what_begins_with_text_opens_a_text(
    client: httpx.AsyncClient, name: str, keys: list[str]
) -> None:
    """Clients keep an empty text where the first chunk has one."""
    reply = await client.post("/v1/chat/completions", json={**CASES[name], "stream": True})
    choices = [choice for chunk in wire.chunks(reply.content) for choice in chunk["choices"]]
    for index in range(CASES[name].get("n", 1)):
        first, then, *_ = (choice["delta"] for choice in choices if choice["index"] == index)
        content = None if keys else ""
        assert first == {"role": "assistant", "content": content, **{key: first[key] for key in keys}}
        assert keys or then.keys() <= {"content"}


async def test_the_usage_chunk_comes_only_when_asked_for(client: httpx.AsyncClient) -> None:
    await streamed(client, asking("say hi"))
    await streamed(client, asking("say hi", stream_options={"include_usage": False}))
    error = await refused(client, asking("say hi", stream_options={"include_usage": True}))
    assert error["param"] == "stream_options"


async def test_a_reply_says_who_made_it(client: httpx.AsyncClient, server_app: Running) -> None:
    full = await whole(client, asking("say hi", model="antiphon-scripted"))
    info = server_app.context.models.get(None).info
    assert full["id"].startswith("chatcmpl-") and full["model"] == info.name
    assert full["system_fingerprint"] == info.fingerprint
    assert full["usage"]["completion_tokens"] == len("hi") + 1  # a byte a token, and the end
    assert full["usage"]["prompt_tokens"] == len(latest(server_app).prompt_ids)


async def test_thoughts_have_both_names_and_are_counted(client: httpx.AsyncClient) -> None:
    full = await whole(client, asking("think let me see then say hello"))
    message = full["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "let me see"
    assert message["content"] == "hello"
    assert full["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_thoughts_may_be_left_out_and_are_counted_all_the_same(client: httpx.AsyncClient) -> None:
    shown = await whole(client, CASES["reasoning"])
    hidden = await whole(client, CASES["reasoning left out"])
    assert hidden["choices"][0]["message"].keys() == {"role", "content", "refusal", "annotations"}
    assert hidden["choices"][0]["message"]["content"] == "hello"
    assert hidden["usage"] == shown["usage"]
    [choice], _ = await streamed(client, CASES["reasoning left out"])
    assert choice["message"].keys() == {"role", "content"}
    error = await refused(client, asking("say hi", include_reasoning="no"))
    assert error["param"] == "include_reasoning"


async def test_a_thought_that_is_cut_short_is_all_reasoning(client: httpx.AsyncClient) -> None:
    full = await whole(client, CASES["reasoning alone"])
    [choice] = full["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert full["usage"]["completion_tokens_details"]["reasoning_tokens"] == 8


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_thoughts_are_taken_back_by_either_name(
    client: httpx.AsyncClient, server_app: Running, name: str
) -> None:
    first = asking("think let me see then say hello")["messages"]
    message = (await whole(client, {"messages": first}))["choices"][0]["message"]
    begun = latest(server_app).prompt_ids
    kept = {key: value for key, value in message.items() if key in ("role", "content", name)}
    await whole(client, {"messages": [*first, kept, {"role": "user", "content": "say done"}]})
    engine = server_app.context.models.get(None).engine
    assert isinstance(engine, ScriptedEngine)
    said = engine.tokenizer.encode("<think>\nlet me see\n</think>\n\nhello")
    assert [*latest(server_app).prompt_ids][: len(begun) + len(said)] == [*begun, *said]


async def test_an_empty_thought_is_none(client: httpx.AsyncClient, server_app: Running) -> None:
    """Clients keep both fields and leave them empty; what the other one says still counts."""
    first = {"role": "user", "content": "say hello"}
    last = {"role": "user", "content": "say done"}
    prompts = []
    for thoughts in ({}, {"reasoning_content": ""}, {"reasoning_content": "", "reasoning": "hm"}):
        said = {"role": "assistant", "content": "hello", **thoughts}
        await whole(client, {"messages": [first, said, last]})
        prompts.append(prompt(server_app))
    assert prompts[0] == prompts[1] and "<think>\nhm\n</think>" in prompts[2]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("text", "stop"),
        ("call", "tool_calls"),
        ("text and call", "tool_calls"),
        ("forced", "tool_calls"),
        ("none", "stop"),
        ("length", "length"),
        ("length in a call", "length"),
        ("torn call behind another", "tool_calls"),
        ("stop", "stop"),
    ],
)
async def test_finish_reasons(client: httpx.AsyncClient, name: str, reason: str) -> None:
    full = await whole(client, CASES[name])
    assert full["choices"][0]["finish_reason"] == reason


async def test_calls_are_whole_and_apart(client: httpx.AsyncClient) -> None:
    (choice,) = (await whole(client, CASES["calls"]))["choices"]
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "look_up", "arguments": '{"city": "Oslo"}'}] * 2
    assert len({call["id"] for call in calls}) == 2
    assert choice["message"]["content"] is None
    (alone,) = (await whole(client, CASES["one call"]))["choices"]
    assert len(alone["message"]["tool_calls"]) == 1


async def test_choices_share_a_prompt_and_differ(client: httpx.AsyncClient, server_app: Running) -> None:
    full = await whole(client, asking("random 6", n=16, seed=3))
    assert len({choice["message"]["content"] for choice in full["choices"]}) > 1
    assert full["usage"]["prompt_tokens"] == len(latest(server_app).prompt_ids)
    again = await whole(client, asking("random 6", n=16, seed=3))
    assert [c["message"] for c in again["choices"]] == [c["message"] for c in full["choices"]]
    unseeded = [await whole(client, asking("random 6")) for _ in range(2)]
    assert unseeded[0]["choices"][0]["message"] != unseeded[1]["choices"][0]["message"]


async def test_log_probabilities_are_those_of_the_text(client: httpx.AsyncClient) -> None:
    full = await whole(client, asking("think no then say hi", logprobs=True, top_logprobs=2))
    content = full["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content).strip() == "hi"
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


async def test_sampling_fields_reach_the_engine(client: httpx.AsyncClient, server_app: Running) -> None:
    fields: Json = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.2, "seed": 11,
        "frequency_penalty": 0.3, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
    }  # fmt: skip
    more = {"logit_bias": {"65": -1}, "stop": ["x"], "stop_token_ids": [66], "max_completion_tokens": 4}
    await whole(client, asking("say hi", max_tokens=9, cache_salt="s", **fields, **more))
    request = latest(server_app)
    assert {name: getattr(request.sampling, name) for name in fields} == fields
    assert request.sampling.logit_bias == ((65, -1.0),)
    assert (request.sampling.stop, request.sampling.stop_token_ids) == (("x",), (66,))
    assert (request.sampling.max_tokens, request.cache_salt) == (4, "s")
    assert request.owner


# ------------------------------------------------------------------------------------------------------------
# Messages


async def test_a_history_with_tools_becomes_one_prompt(
    client: httpx.AsyncClient, server_app: Running
) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "look_up", "arguments": '{"city": "Oslo"}'},
    }
    full = await whole(
        client,
        {
            "tools": [TOOL],
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "weather?"}], "name": "Mark"},
                {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
            ],
        },
    )
    assert full["choices"][0]["message"]["content"] == "The tool said: sunny"
    text = prompt(server_app)
    assert "Be brief." in text and "weather?" in text and "sunny" in text and '"Oslo"' in text


async def test_what_we_answer_is_accepted_back(client: httpx.AsyncClient) -> None:
    for name in ("text", "reasoning", "calls", "text and call", "empty"):
        message = (await whole(client, CASES[name]))["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
            for call in message.get("tool_calls", ())
        ]
        turns = [*CASES[name]["messages"], message, *results, {"role": "user", "content": "say done"}]
        await whole(client, {"messages": turns, "tools": [TOOL]})


async def test_responses_and_chat_share_a_prompt(client: httpx.AsyncClient, server_app: Running) -> None:
    history = [{"role": "system", "content": "s"}, {"role": "user", "content": "say hi"}]
    await whole(client, {"messages": history})
    chat = latest(server_app).prompt_ids
    await client.post("/v1/responses", json={"input": history})
    assert latest(server_app).prompt_ids == chat


async def test_the_final_message_can_be_continued(client: httpx.AsyncClient, server_app: Running) -> None:
    turns = [{"role": "user", "content": "say x"}, {"role": "assistant", "content": "Once upon"}]
    await whole(client, {"messages": turns, "continue_final_message": True, "add_generation_prompt": False})
    assert prompt(server_app).endswith("Once upon")
    await whole(client, {"messages": turns, "continue_final_message": True})
    assert prompt(server_app).endswith("Once upon")
    await whole(client, {"messages": turns})
    assert not prompt(server_app).endswith("Once upon")


async def test_what_nobody_reads_is_named(client: httpx.AsyncClient) -> None:
    body = asking("say hi", frobnicate=1, user="u", metadata={"a": "b"})
    body["messages"][0]["name"] = "Mark"
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.headers["x-antiphon-ignored"] == "frobnicate,metadata,messages[0].name"
    streamed_reply = await client.post("/v1/chat/completions", json={**body, "stream": True})
    assert streamed_reply.headers["x-antiphon-ignored"] == reply.headers["x-antiphon-ignored"]
    plain = await client.post("/v1/chat/completions", json=asking("say hi"))
    assert "x-antiphon-ignored" not in plain.headers


# ------------------------------------------------------------------------------------------------------------
# What is refused

MISSING, TYPE, VALUE = "missing_required_parameter", "invalid_type", "invalid_value"
UNSUPPORTED = "unsupported_parameter"
NAMED_G = {"type": "function", "function": {"name": "g"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "messages", MISSING),
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": "hi"}, "messages", TYPE),
        ({"messages": [1]}, "messages[0]", TYPE),
        ({"messages": [{"role": "user"}]}, "messages[0].content", MISSING),
        ({"messages": [{"role": "a king", "content": ""}]}, "messages[0].role", VALUE),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].tool_call_id", MISSING),
        ({"messages": [{"role": "function", "content": ""}]}, "messages[0]", UNSUPPORTED),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content", MISSING),
        (asking([{"type": "text"}]), "messages[0].content[0].text", MISSING),
        (asking([{"type": "text", "text": "a"}, IMAGE]), "messages[0].content[1]", "unsupported_content"),
        (asking("x", n=129), "n", "integer_above_max_value"),
        (asking("x", n=17, logprobs=True), "n", "invalid_value"),
        (asking("x", n=0), "n", "integer_below_min_value"),
        (asking("x", max_tokens=0), "max_tokens", "integer_below_min_value"),
        (asking("x", temperature=3), "temperature", "decimal_above_max_value"),
        (asking("x", logprobs=2), "logprobs", TYPE),
        (asking("x", top_logprobs=2), "top_logprobs", VALUE),
        (asking("x", logprobs=True, top_logprobs=21), "top_logprobs", "integer_above_max_value"),
        (asking("x", store=1), "store", TYPE),
        (asking("x", functions=[FUNCTION]), "functions", UNSUPPORTED),
        (asking("x", modalities=["text", "audio"]), "modalities", UNSUPPORTED),
        (asking("x", response_format={"type": "yaml"}), "response_format.type", VALUE),
        (
            asking("x", response_format={"type": "json_schema", "name": "flat", "schema": {}}),
            "response_format.json_schema",
            MISSING,
        ),
        (asking("x", tools=[{"type": "custom", "custom": {"name": "c!"}}]), "tools[0].custom.name", VALUE),
        (asking("x", tool_choice="required"), "tool_choice", None),
        (asking("x", tools=[TOOL], tool_choice=NAMED_G), "tool_choice", None),
        (asking("x", continue_final_message=True), "messages[0]", VALUE),
        (asking("x", chat_template="{{ 1 }}"), "chat_template", UNSUPPORTED),
        (asking("x", chat_template_kwargs={"messages": []}), "chat_template_kwargs.messages", VALUE),
    ],
)
async def test_what_is_wrong_is_named(
    client: httpx.AsyncClient, body: Json, param: str, code: str | None
) -> None:
    for stream in (False, True):
        error = await refused(client, {**body, "stream": stream})
        assert error["param"] == param
        assert code is None or error["code"] == code


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"], "stream": False},
        {"n": None, "stop": None, "tools": None, "logprobs": None, "seed": None, "temperature": None},
        {"reasoning_effort": "low", "service_tier": "auto"},
        {"best_of": 1, "functions": [], "use_beam_search": False, "skip_special_tokens": True},
    ],
)
async def test_what_asks_for_the_default_passes(client: httpx.AsyncClient, fields: Json) -> None:
    reply = await client.post("/v1/chat/completions", json=asking("say hi", **fields))
    assert reply.status_code == 200, reply.text
    assert "x-antiphon-ignored" not in reply.headers


async def test_effort_reaches_a_template_that_knows_it(client: httpx.AsyncClient) -> None:
    """The scripted model's template opens and closes a thought where thinking is off."""

    async def count(**fields: Any) -> int:
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        return int((await client.post("/tokenize", json=body)).json()["count"])

    async def count_input(**fields: Any) -> int:
        reply = await client.post("/v1/responses/input_tokens", json={"input": "hi", **fields})
        return int(reply.json()["input_tokens"])

    usual = await count()
    assert await count(reasoning_effort="high") == usual < await count(reasoning_effort="none")
    assert await count(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}) == usual
    assert await count_input(reasoning={"effort": "high"}) == usual
    assert await count_input(reasoning={"effort": "none"}) == await count(reasoning_effort="none")
    error = await refused(client, asking("x", reasoning_effort="enormous"))
    assert error["param"] == "reasoning_effort"


def test_a_preamble_is_a_paragraph_of_the_one_message() -> None:
    writer = ChatWriter(0, logprobs=False)
    parts = writer.write(Chunk((1,), (Text("One moment.", preamble=True),)))
    parts += writer.write(Chunk((2,), (Text("Do"), Text("ne."), Done("stop"))))
    assert "".join(part["delta"].get("content", "") for part in parts) == "One moment.\n\nDone."


async def test_an_unknown_model_is_404(client: httpx.AsyncClient) -> None:
    error = await refused(client, asking("x", model="nobody"), 404)
    assert error["code"] == "model_not_found"


# ------------------------------------------------------------------------------------------------------------
# The official SDK


async def test_the_sdk_reads_it_whole_and_streamed(sdk: AsyncOpenAI) -> None:
    tools: Any = [TOOL]
    completion = await sdk.chat.completions.create(
        model="antiphon-scripted", messages=[{"role": "user", "content": CALL}], tools=tools
    )
    calls = completion.choices[0].message.tool_calls
    assert calls and calls[0].type == "function" and calls[0].function.name == "look_up"
    async with sdk.chat.completions.stream(
        model="antiphon-scripted",
        messages=[{"role": "user", "content": f"think hm then say a moment\n{CALL}\n{CALL}"}],
        tools=tools,
        stream_options={"include_usage": True},
    ) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "tool_calls.function.arguments.done"} <= kinds
    assert final.usage is not None and len(final.choices[0].message.tool_calls or ()) == 2


async def test_the_sdk_raises_what_it_should(sdk: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError):
        await sdk.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(BadRequestError) as caught:
        await sdk.chat.completions.create(model="antiphon-scripted", messages=[])
    assert caught.value.param == "messages"
    stream = await sdk.chat.completions.create(
        model="antiphon-scripted",
        messages=[{"role": "user", "content": "say one two\nfail on purpose"}],
        stream=True,
    )
    with pytest.raises(APIError, match="failed inside the engine"):
        async for _ in stream:
            pass
