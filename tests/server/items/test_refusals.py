"""Refusals that other servers' models have marked: what is kept of them, and what the model is told."""

from __future__ import annotations

from pathlib import Path

from engine import ScriptedEngine
from tests.support.running import http_client, running_app
from tests.support.talk import Api, prompts
from tests.support.wire import Json

REFUSED = "I will not pick locks."
PART: Json = {"type": "refusal", "refusal": REFUSED}
HISTORY: list[Json] = [
    {"role": "user", "content": "Pick that lock."},
    {"type": "message", "role": "assistant", "id": "msg_no", "status": "completed", "content": [PART]},
]
NEXT: Json = {"role": "user", "content": "say fine"}


async def test_a_refusal_is_kept_and_told(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as running, http_client(running) as http:
        api = Api(http)
        first = await api.create([*HISTORY, NEXT])
        told = prompts(engine)[-1]
        assert f"<|im_start|>assistant\n{REFUSED}<|im_end|>" in told
        kept = (await api.input_items(first["id"], order="asc"))["data"][1]
        assert (kept["id"], kept["content"]) == ("msg_no", [PART])
        await api.create([NEXT], previous_response_id=first["id"])
        assert REFUSED in prompts(engine)[-1]
        await api.create([{"type": "item_reference", "id": "msg_no"}, NEXT])
        assert REFUSED in prompts(engine)[-1]
        again = await api.create([HISTORY[0], kept, NEXT])
        assert prompts(engine)[-1] == told
        assert (await api.input_items(again["id"], order="asc"))["data"][1] == kept

        conversation = await api.conversation(*HISTORY)
        assert [PART] in [item["content"] for item in await api.conversation_items(conversation)]
        await api.create([NEXT], conversation=conversation)
        assert prompts(engine)[-1] == told


async def test_chat_tells_a_refusal_as_responses_do(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as running, http_client(running) as http:
        await Api(http).create([*HISTORY, NEXT])
        told = prompts(engine)[-1]
        for message in (
            {"role": "assistant", "content": None, "refusal": REFUSED},
            {"role": "assistant", "content": "", "refusal": REFUSED},
            {"role": "assistant", "content": [PART]},
        ):
            body = {"messages": [HISTORY[0], message, NEXT]}
            reply = await http.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200 and "x-antiphon-ignored" not in reply.headers
            assert prompts(engine)[-1] == told
            # What is declined here is text, and nothing marks it.
            answer = reply.json()["choices"][0]["message"]
            assert (answer["content"], answer["refusal"]) == ("fine", None)
