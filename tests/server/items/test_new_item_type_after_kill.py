"""A hosted tool with items of its own, added to a real server as two files, and a `kill -9` in its call.

The server runs from a copy of the packages that has the two modules below besides, where CONTRIBUTING says
that they belong; nothing else of it knows of them. The tool asks the test for its result over a socket, so
that the test knows when the call is under way, and kills the process then.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.support.processes import server_process
from tests.support.wire import Json

ROOT = Path(__file__).parents[3]

TOOL = '''
"""A tool that rolls dice: it asks whoever holds the cup."""

import asyncio
import os

from tools.spec import ToolSpec


async def roll(input: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(os.environ["CUP"]))
    writer.write(input.encode() + b"\\n")
    answer = await reader.readline()
    writer.close()
    return answer.decode().strip()


INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
TOOLS = (
    ToolSpec("roll", "Rolls dice, such as 2d6.", INPUT, roll, offered_by="dice", idempotent=IDEMPOTENT),
)
'''

ITEMS = '''
"""The items of calls of dice."""

import json

from server.items.item_type import Call, Execution, ItemType, function_of
from server.shapes import STRING, record
from tools import execute


def opened(_name, _call_id, arguments):
    return {"dice": json.loads(arguments)["input"], "total": None, "fault": None}


def finish(item, result):
    item["status"] = "completed" if result.error is None else "failed"
    item["total"], item["fault"] = result.output, result.error
    return "response.dice_call.rolled"


def say(item, transcript):
    transcript.call(item["id"], "roll", json.dumps({"input": item["dice"]}))
    transcript.answer(item["id"], item["total"] or f"no dice: {item['fault']}")


def offers(_tool, registry, _path):
    return [function_of(spec) for spec in registry.values() if spec.offered_by == "dice"]


async def run(item, registry, _scene):
    return await execute(registry["roll"], json.dumps({"input": item["dice"]}))


ROWS = (
    ItemType(
        "dice_call",
        "dice_",
        record({"dice": STRING}, {"total": STRING, "fault": STRING, "status": STRING}),
        say,
        events={
            "response.dice_call.rolling": "item_id output_index",
            "response.dice_call.rolled": "item_id output_index",
        },
        order="(dice_call.rolling dice_call.rolled?)?",
        tools={"dice": record({})},
        call=Call(
            opened,
            offers=offers,
            execution=Execution(
                "rolling",
                run,
                finish,
                lambda _item, registry: registry["roll"].idempotent,
                starts=("response.dice_call.rolling",),
                broken="failed",
            ),
        ),
    ),
)
'''


def house_with_dice(folder: Path, *, idempotent: bool) -> Path:
    """A copy of the house with the two modules added, and nothing else changed."""
    house = folder / "house"
    for room in ("server", "tools"):
        shutil.copytree(ROOT / room, house / room, ignore=shutil.ignore_patterns("__pycache__"))
    for untouched in ("engine", "storage", "alembic", "alembic.ini"):
        (house / untouched).symlink_to(ROOT / untouched)
    (house / "tools" / "builtin" / "roll.py").write_text(TOOL.replace("IDEMPOTENT", str(idempotent)))
    (house / "server" / "items" / "calls" / "dice.py").write_text(ITEMS)
    return house


@pytest.mark.sampled(2)
@pytest.mark.parametrize("idempotent", [True, False], ids=["may run twice", "may not"])
async def test_a_killed_call_of_an_added_tool_goes_on_after_the_restart(
    tmp_path: Path, idempotent: bool
) -> None:
    rolls: asyncio.Queue[tuple[str, asyncio.StreamWriter]] = asyncio.Queue()

    async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rolls.put_nowait(((await reader.readline()).decode().strip(), writer))

    house = house_with_dice(tmp_path, idempotent=idempotent)
    async with await asyncio.start_server(asked, "127.0.0.1", 0) as cup:
        data, env = tmp_path / "data", {"CUP": str(cup.sockets[0].getsockname()[1])}
        async with server_process(data, house=house, env=env) as server, server.client() as client:
            body: Json = {
                "input": 'call roll {"input": "2d6"}',
                "tools": [{"type": "dice"}],
                "background": True,
            }
            begun = (await client.post("/v1/responses", json=body)).json()
            notation, lost = await asyncio.wait_for(rolls.get(), 30)
            assert notation == "2d6"
            server.child.kill()
        lost.close()
        async with server_process(data, house=house, env=env) as server, server.client() as client:
            if idempotent:
                notation, again = await asyncio.wait_for(rolls.get(), 30)
                assert notation == "2d6"
                again.write(b"12\n")
                again.close()
            done = (await client.get(f"/v1/responses/{begun['id']}", params={"wait": "30"})).json()
            assert rolls.empty(), "a call that may not run twice did not"
            call, message = done["output"]
            assert (done["status"], call["type"], call["dice"]) == ("completed", "dice_call", "2d6")
            told = "12" if idempotent else f"no dice: {call['fault']}"
            assert (call["status"], call["total"]) == (
                ("completed", "12") if idempotent else ("failed", None)
            )
            assert ("is not known" in str(call["fault"])) is not idempotent
            # The scripted model repeats what its prompt says that the tool answered.
            assert message["content"][0]["text"] == f"The tool said: {told}"
            events = (await client.get(f"/v1/responses/{begun['id']}", params={"stream": "true"})).text
            numbers = [line for line in events.splitlines() if line.startswith("event: response.dice_call.")]
            assert numbers == ["event: response.dice_call.rolling", "event: response.dice_call.rolled"]
            counted = [
                (await client.post("/v1/responses/input_tokens", json=asking)).json()["input_tokens"]
                for asking in (
                    {"input": "and now?", "previous_response_id": begun["id"], "tools": body["tools"]},
                    {"input": [{"role": "user", "content": body["input"]}, call, message,
                               {"role": "user", "content": "and now?"}], "tools": body["tools"]},
                )
            ]  # fmt: skip
            assert counted[0] == counted[1], "a next turn reads the restored call as one that a client sends"
