"""Compaction: by a threshold, by its trigger, and by its endpoint; what it leaves of a conversation."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import GenerateRequest, LocalEngine, Say, ScriptedEngine
from engine.backends.script import obey
from engine.tiny import CHECKPOINT
from server.runs.planning.compaction import ASK
from tests.support import wire
from tests.support.owners import two_owners
from tests.support.processes import server_process
from tests.support.running import http_client, live_app, running_app
from tests.support.talk import BUILTIN, WEATHER, Api, Gate, call, calls, prompts, text
from tests.support.wire import Json

TRIGGER: Json = {"type": "compaction_trigger"}
MANAGED: Json = [{"type": "compaction", "compact_threshold": 1000}]
SUMMARY = "The user is Mark, and wants a boat. " + "There is more of it. " * 6


def is_asked(prompt: str) -> bool:
    """Whether a prompt ends by asking for a summary."""
    return prompt.endswith(f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n")


def summarising(request: GenerateRequest, prompt: str) -> Iterator[Any]:
    """The default script, which summarises where it is asked to."""
    yield from [Say(f"<think>\nhm\n</think>\n\n{SUMMARY}")] if is_asked(prompt) else obey(request, prompt)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(summarising)


@pytest.fixture
async def api(tmp_path: Path, engine: ScriptedEngine) -> AsyncIterator[Api]:
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        yield Api(client)


def long(number: int) -> str:
    """Something to say of about 300 tokens, which the script says back."""
    return f"say {number}: " + "word " * 60


async def told(api: Api, *said: str, **body: Any) -> Json:
    """The last response of a chain of turns."""
    last: Json = {"id": None}
    for each in said:
        last = await api.create(each, previous_response_id=last["id"], **body)
    return last


def types(response: Json) -> list[str]:
    return [item["type"] for item in response["output"]]


# ------------------------------------------------------------------------------------------------------------
# The three doors


async def test_a_trigger_makes_one_item_and_is_not_kept(api: Api, engine: ScriptedEngine) -> None:
    first = await told(api, "My name is Mark.", "say a boat")
    stream = await api.stream([TRIGGER], previous_response_id=first["id"])
    assert types(stream.response) == ["compaction"]
    shown = [kind for kind in stream.types if kind == "compaction.compacting"]
    assert stream.types == [
        "created",
        "in_progress",
        "output_item.added",
        *shown,
        "output_item.done",
        "completed",
    ]
    assert shown, "each record of the summary has an event, and none shows its text"
    assert SUMMARY.strip() not in stream.raw.decode()
    usage = stream.response["usage"]
    assert usage["output_tokens"] > len(SUMMARY) and usage["input_tokens"] == len(
        engine.requests[-1].prompt_ids
    )
    assert (await api.input_items(stream.response["id"]))["data"] == []
    # The prompt is the old one and one message, so that what was computed of it is used again.
    *_, before, asked = prompts(engine)
    assert asked.startswith(before) and is_asked(asked)
    await api.create("What is my name?", previous_response_id=stream.response["id"])
    after = prompts(engine)[-1]
    assert after.count("<|im_start|>") == 3 and SUMMARY.strip() in after
    assert "- My name is Mark.\n- say a boat<|im_end|>" in after and "You said" not in after
    with_both = await api.create([{"role": "user", "content": "say more"}, TRIGGER])
    assert types(with_both) == ["compaction"]
    assert len((await api.input_items(with_both["id"]))["data"]) == 1


async def test_a_threshold_compacts_before_the_answer(api: Api, engine: ScriptedEngine) -> None:
    last = await told(api, long(0), "say a boat", context_management=MANAGED)
    assert types(last) == ["message"]
    count, question = len(engine.requests), f"say {'end ' * 100}"
    stream = await api.stream(question, previous_response_id=last["id"], context_management=MANAGED)
    assert types(stream.response) == ["compaction", "message"] and text(stream.response).startswith("end end")
    asked, answered = prompts(engine)[count:]
    assert is_asked(asked) and f"{question}<|im_end|>\n<|im_start|>user" in asked
    assert answered.endswith(f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    assert len(engine.requests[-1].prompt_ids) < len(engine.requests[-2].prompt_ids)
    assert "- say a boat<|im_end|>" in answered and "assistant\na boat" not in answered
    assert answered.count("end end") == question.count("end end"), "what has no answer yet stands there once"
    assert len(stream.response["usage"]["input_tokens_per_turn"]) == 2
    # Later turns build upon it, whether or not they ask for the same.
    again = await api.create("say on", previous_response_id=stream.response["id"])
    assert prompts(engine)[-1].startswith(answered) and types(again) == ["message"]
    plain = await api.create("say on", previous_response_id=last["id"])
    assert types(plain) == ["message"] and "assistant\na boat" in prompts(engine)[-1]


async def test_a_threshold_compacts_between_calls(api: Api, engine: ScriptedEngine) -> None:
    said = f'{long(0)}\ncall calculator {{"expression": "1+1"}}'
    body: Json = {"input": said, "tools": [BUILTIN]}
    count = (await api.http.post("/v1/responses/input_tokens", json=body)).json()["input_tokens"]
    managed = [{"type": "compaction", "compact_threshold": max(1000, count + 50)}]
    response = await api.create(**body, context_management=managed)
    assert types(response) == ["mcp_list_tools", "message", "mcp_call", "compaction", "message"]
    assert text(response).endswith("The tool said: 2")
    shown = prompts(engine)[-1]
    assert 0 < shown.index("Summary:") < shown.rindex("<tool_call>") < shown.index(">\n2\n<")


async def test_outputs_of_calls_go_on_with_the_threshold(api: Api, engine: ScriptedEngine) -> None:
    made = await api.create(call(), tools=[WEATHER], context_management=MANAGED)
    [asked] = calls(made)
    done = await api.outputs(made["id"], {asked["call_id"]: "rain " * 200})
    assert types(done) == ["compaction", "message"] and text(done).startswith("The tool said: rain rain")
    assert prompts(engine)[-1].index("<tool_call>") < prompts(engine)[-1].index("<tool_response>\nrain")


async def test_thoughts_go_first_and_may_be_enough(tmp_path: Path) -> None:
    def thinking(request: GenerateRequest, prompt: str) -> Iterator[Any]:
        yield Say(f"<think>\n{'deep ' * 200}\n</think>\n\nok")

    engine = ScriptedEngine(thinking)
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        last = await told(api, "My name is Mark.")
        count = len(engine.requests)
        response = await api.create("say hi", previous_response_id=last["id"], context_management=MANAGED)
        assert types(response) == ["compaction", "reasoning", "message"]
        assert len(engine.requests) == count + 1, "nothing had to be summarised"
        whole = "<|im_start|>user\nMy name is Mark.<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        assert prompts(engine)[-1].startswith(whole) and "<think>" not in prompts(engine)[-1]
        made = await api.http.post("/v1/responses/compact", json={"previous_response_id": last["id"]})
        assert [item["type"] for item in made.json()["output"]] == ["message", "compaction"]
        assert made.json()["usage"]["total_tokens"] == 0


async def test_a_history_longer_than_the_context_is_summarised_in_parts(tmp_path: Path) -> None:
    engine = ScriptedEngine(summarising, max_model_len=4000)
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        said = [
            {"role": role, "content": f"{n} " + "w " * 250}
            for n in range(9)
            for role in ("user", "assistant")
        ]
        final = {"role": "user", "content": "say end"}
        response = await api.create([*said, final], context_management=MANAGED)
        assert types(response) == ["compaction", "message"] and text(response) == "end"
        asked = [each for each in prompts(engine) if is_asked(each)]
        assert len(asked) > 2 and all(len(each.prompt_ids) < 4000 for each in engine.requests)
        assert all(SUMMARY.strip() in each for each in asked[1:]) and SUMMARY.strip() not in asked[0]
        assert "8 w w" in asked[-1] and "0 w w" in asked[0]
        item = (await api.input_items(response["id"]))["data"]
        assert len(item) == len(said) + 1
        one = await api.create([{"role": "user", "content": "x" * 9000}, TRIGGER])
        assert types(one) == ["compaction"] and "[cut: " in prompts(engine)[-1]


async def test_the_endpoint_keeps_what_users_said(api: Api, engine: ScriptedEngine) -> None:
    first = await told(api, "My name is Mark.", "say a boat", instructions="Be brief.")
    body = {"model": "antiphon-scripted", "previous_response_id": first["id"], "instructions": "Be calm."}
    reply = await api.http.post("/v1/responses/compact", json=body, headers={"idempotency-key": "k"})
    assert reply.status_code == 200, reply.text
    made = reply.json()
    wire.validate("CompactResource", made)
    assert [item["type"] for item in made["output"]] == ["message", "message", "compaction"]
    assert [item["content"][0]["text"] for item in made["output"][:2]] == ["My name is Mark.", "say a boat"]
    assert "system\nBe calm." in prompts(engine)[-1] and "Be brief" not in prompts(engine)[-1]
    again = await api.http.post("/v1/responses/compact", json=body, headers={"idempotency-key": "k"})
    assert again.json() == made and again.headers["idempotent-replayed"] == "true"
    await api.create([*made["output"], {"role": "user", "content": "say next"}], store=False)
    whole = prompts(engine)[-1]
    assert whole.count("My name is Mark.") == 1 and "Summary:" in whole
    await api.create([made["output"][-1], {"role": "user", "content": "say next"}], store=False)
    assert prompts(engine)[-1] == whole, "the item stands for all that was before it"
    from_input = await api.http.post("/v1/responses/compact", json={"model": None, "input": "Hi."})
    assert [item["type"] for item in from_input.json()["output"]] == ["message", "compaction"]
    second = await api.http.post(
        "/v1/responses/compact", json={"input": [*made["output"], *[{"role": "user", "content": "say yes"}]]}
    )
    last = await api.create([second.json()["output"][-1], {"role": "user", "content": "say z"}], store=False)
    assert text(last) == "z" and "- My name is Mark.\n- say a boat<|im_end|>" in prompts(engine)[-1]
    assert "<|im_start|>user\nsay yes<|im_end|>" in prompts(engine)[-1], "it had no answer"
    assert prompts(engine)[-1].count("Summary:") == 1


# ------------------------------------------------------------------------------------------------------------
# Whose it is, and who keeps it


async def test_what_was_altered_or_is_anothers_is_refused(tmp_path: Path) -> None:
    engine = ScriptedEngine(summarising)
    async with running_app(tmp_path, engine) as server, two_owners(server) as (first, second):
        ann, bob = Api(first), Api(second)
        [item] = (await ann.create([{"role": "user", "content": "hi"}, TRIGGER], store=False))["output"]
        blob = item["encrypted_content"]
        middle = len(blob) // 2
        changed = blob[:middle] + ("A" if blob[middle] != "A" else "B") + blob[middle + 1 :]
        for api, sealed in [(ann, changed), (bob, blob), (ann, "plain text"), (ann, "")]:
            error = await api.refused(
                400, [{**item, "encrypted_content": sealed}, {"role": "user", "content": "x"}]
            )
            assert (error["code"], error["param"]) == (
                "invalid_encrypted_content",
                "input[0].encrypted_content",
            )
        bare = {"type": "compaction", "encrypted_content": blob}
        taken = await ann.create([bare, {"role": "user", "content": "say x"}])
        assert text(taken) == "x" and SUMMARY.strip() in prompts(engine)[-1]


async def test_developers_messages_are_never_summarised(api: Api, engine: ScriptedEngine) -> None:
    def developer(said: str) -> Json:
        return {"role": "developer", "content": said}

    [item] = (await api.create([developer("Be calm."), {"role": "user", "content": "hi"}, TRIGGER]))["output"]
    asked = {"role": "user", "content": "say x"}
    for before, shown in (
        ([], "Be calm."),
        ([developer("Be calm.")], "Be calm."),
        ([developer("Run.")], "Run."),
    ):
        await api.create([*before, item, asked], store=False)
        assert prompts(engine)[-1].startswith(
            f"<|im_start|>system\n{shown}<|im_end|>\n<|im_start|>user\nThe "
        )


async def test_its_owner_can_read_the_summary(api: Api) -> None:
    made = await api.create(
        [{"role": "user", "content": "hi"}, TRIGGER], include=["compaction.summary"], store=False
    )
    [item] = made["output"]
    assert item["summary"] == SUMMARY.strip()
    kept = await api.create([item, {"role": "user", "content": "say ok"}])
    plain = await api.input_items(kept["id"])
    assert "summary" not in plain["data"][-1]
    shown = await api.input_items(kept["id"], include="compaction.summary")
    assert shown["data"][-1]["summary"] == SUMMARY.strip()


async def test_a_conversation_keeps_all_its_items(api: Api, engine: ScriptedEngine) -> None:
    conversation = await api.conversation()
    for said in ("say one", "say two"):
        await api.create(said, conversation=conversation)
    made = await api.create([TRIGGER], conversation=conversation)
    items = await api.conversation_items(conversation)
    assert [item["type"] for item in items].count("message") == 4 and made["output"][0] in items
    await api.create("say three", conversation=conversation)
    assert "assistant\none" not in prompts(engine)[-1] and "- say one" in prompts(engine)[-1]
    reply = await api.http.delete(f"/v1/conversations/{conversation}/items/{made['output'][0]['id']}")
    assert reply.status_code == 200
    await api.create("say four", conversation=conversation)
    assert "assistant\none" in prompts(engine)[-1], "without the item, everything is there again"


async def test_a_point_before_it_can_be_forked(api: Api, engine: ScriptedEngine) -> None:
    first = await told(api, "say one")
    made = await api.create(
        [{"role": "user", "content": "say two"}, TRIGGER], previous_response_id=first["id"]
    )
    [item] = made["output"]
    input_id = (await api.input_items(made["id"]))["data"][0]["id"]
    for after, sees in ((input_id, "assistant\none"), (item["id"], SUMMARY.strip())):
        fork = await api.http.post(f"/v1/responses/{made['id']}/fork", json={"after": after})
        await api.create("say x", previous_response_id=fork.json()["id"])
        assert sees in prompts(engine)[-1]


# ------------------------------------------------------------------------------------------------------------
# Ends


async def test_a_cancelled_compaction_stands_for_nothing(tmp_path: Path) -> None:
    gate = Gate()

    def held(request: GenerateRequest, prompt: str) -> Iterator[Any]:
        if is_asked(prompt):
            yield Say("half of it ")
            yield gate.wait()
        yield from obey(request, prompt)

    engine = ScriptedEngine(held)
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        first = await told(api, "say one")
        begun = await api.create([TRIGGER], previous_response_id=first["id"], background=True)
        await asyncio.wait_for(gate.reached.wait(), 20)
        done = await api.cancel(begun["id"])
        assert (done["status"], types(done)) == ("cancelled", ["compaction"])
        assert done["usage"]["output_tokens"] > 0
        await api.create("say two", previous_response_id=begun["id"])
        assert "assistant\none" in prompts(engine)[-1]
        resent = [*done["output"], {"role": "user", "content": "say three"}]
        await api.create(resent, previous_response_id=first["id"])
        assert "assistant\none" in prompts(engine)[-1]


async def test_a_limit_of_tokens_is_one_of_the_answer(api: Api) -> None:
    last = await told(api, *map(long, range(3)))
    response = await api.create(
        "count 100", previous_response_id=last["id"], context_management=MANAGED, max_output_tokens=16
    )
    assert (response["status"], types(response)) == ("incomplete", ["compaction", "message"])
    per_turn = response["usage"]["output_tokens_per_turn"]
    assert per_turn[0] > 100 and per_turn[1] == 16


@pytest.mark.long
async def test_a_kill_in_a_summary_changes_no_byte_of_it(tmp_path: Path) -> None:
    """The default script says back what it is asked, here how to summarise, word by word."""
    data, other = tmp_path / "data", tmp_path / "other"
    data.mkdir(mode=0o700)
    flags = ("--tick-s", "0.004")

    async with server_process(data, *flags) as server, server.client() as client:
        api = Api(client)
        first = await api.create("say one")
        begun = await api.create([TRIGGER], previous_response_id=first["id"], background=True)
        async with api.follow(begun["id"]) as live, asyncio.timeout(30):
            await live.until("compaction.compacting")
            server.child.kill()
    shutil.copytree(data, other)

    async def finished(folder: Path) -> tuple[Json, bytes]:
        async with server_process(folder) as server, server.client() as client:
            api, params = Api(client), {"include": "compaction.summary"}
            done = await api.ended(begun["id"])
            [shown] = (await client.get(f"/v1/responses/{begun['id']}", params=params)).json()["output"]
            assert shown["summary"] == f"You said: {ASK}"
            assert done["usage"]["output_tokens"] - len(shown["summary"]) in (0, 1, 2), "each is counted once"
            return done, await api.replay(begun["id"])

    one, two = await finished(data), await finished(other)
    assert types(one[0]) == ["compaction"] and one[0]["status"] == "completed"
    assert one[0]["output"] == two[0]["output"] and one[0]["usage"] == two[0]["usage"]
    assert one[1].split(b"response.completed")[0] == two[1].split(b"response.completed")[0]


# ------------------------------------------------------------------------------------------------------------
# The shipped model


async def test_the_shipped_model_still_knows_what_it_was_told(tmp_path: Path) -> None:
    engine = LocalEngine(CHECKPOINT, num_threads=1, kv_cache_bytes=64 << 20)
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api, greedy = Api(client), {"temperature": 0}
        facts = ("My name is Mark.", "My cat is Felix.", "What is the capital of France?")
        last = await told(api, *facts, **greedy)
        for said in ("one", "two"):
            made = await api.create(
                [{"role": "user", "content": f"Say: {said}"}, TRIGGER], previous_response_id=last["id"]
            )
            assert types(made) == ["compaction"]
            last = made
        for question, known in (("What is my name?", "Mark"), ("What is my cat?", "Felix")):
            asked = await api.create(question, previous_response_id=last["id"], **greedy)
            assert known in text(asked), text(asked)


# ------------------------------------------------------------------------------------------------------------
# Settings among the items


async def test_settings_hold_until_the_next_ones(api: Api, engine: ScriptedEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": "b"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    update = {"type": "configuration_update", "reasoning": {"effort": "high"}, "text": {"format": form}}
    first = await api.create([update, {"role": "user", "content": 'say {"a": "b"}'}])
    assert first["reasoning"]["effort"] == "high" and first["text"]["format"]["type"] == "json_schema"
    assert engine.requests[-1].constraint is not None
    second = await api.create('say {"a": "b"}', previous_response_id=first["id"])
    assert engine.requests[-1].constraint is not None and second["reasoning"]["effort"] == "high"
    back = {"type": "configuration_update", "text": {"format": {"type": "text"}}}
    third = await api.create([back, {"role": "user", "content": "say ok"}], previous_response_id=second["id"])
    assert (engine.requests[-1].constraint, text(third)) == (None, "ok")
    assert third["reasoning"]["effort"] == "high"
    made = await api.create([TRIGGER], previous_response_id=third["id"])
    assert types(made) == ["compaction", "configuration_update"]
    kept = made["output"][-1]
    assert (kept["reasoning"], kept["text"]) == ({"effort": "high"}, {"format": {"type": "text"}})
    alone = await api.create([*made["output"], {"role": "user", "content": "say ok"}], store=False)
    assert alone["reasoning"]["effort"] == "high"


# ------------------------------------------------------------------------------------------------------------
# What is refused

USER: Json = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [TRIGGER, USER]}, "input[0]"),
        ({"input": [TRIGGER]}, "input"),
        ({"input": [USER, TRIGGER], "generate": False}, "generate"),
        ({"input": [USER], "context_management": []}, "context_management"),
        ({"input": [USER], "context_management": {}}, "context_management"),
        ({"input": [USER], "context_management": [{}]}, "context_management[0].type"),
        ({"input": [USER], "context_management": [{"type": "x"}]}, "context_management[0].type"),
        (
            {"input": [USER], "context_management": [{"type": "compaction", "compact_threshold": 999}]},
            "context_management[0].compact_threshold",
        ),
        ({"input": [{"type": "configuration_update"}, USER]}, "input[0]"),
        (
            {"input": [{"type": "configuration_update", "reasoning": {"effort": "x"}}, USER]},
            "input[0].reasoning.effort",
        ),
        (
            {"input": [{"type": "configuration_update", "text": {"format": {"type": "json_object"}}}, USER]},
            "input[0].text.format.type",
        ),
    ],
)
async def test_what_makes_no_sense_is_refused(api: Api, body: Json, param: str) -> None:
    assert (await api.refused(400, **body))["param"] == param


async def test_the_endpoint_refuses_what_it_cannot_do(api: Api) -> None:
    for body, param in [({}, "input"), ({"input": [USER], "conversation": "c"}, "conversation"),
                        ({"input": [USER], "prompt_cache_key": "k" * 65}, "prompt_cache_key"),
                        ({"input": []}, "input")]:  # fmt: skip
        error = await api.fails(400, "POST", "/v1/responses/compact", json=body)
        assert error["param"] == param
    body = {"previous_response_id": "resp_none"}
    assert (await api.fails(400, "POST", "/v1/responses/compact", json=body))[
        "code"
    ] == "previous_response_not_found"
