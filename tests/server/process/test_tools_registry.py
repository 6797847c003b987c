"""The operator's own tools in a server: offered, called, refused at the start, and cut by a `kill -9`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

import tools
from server.config import Config
from server.process.lifecycle import Refused, ServerLifecycle
from tests.support.processes import server_process
from tests.support.running import http_client, running_app
from tests.support.talk import BUILTIN, Api
from tests.support.wire import Json

ROOT = Path(__file__).parents[3]
PYTHON = json.dumps(sys.executable)

WEATHER = f"""
[tools.get_weather]
description = "Get the weather of a city."
command = [{PYTHON}, "weather.py"]
idempotent = true
parameters = {{type = "object", required = ["city"], properties = {{city = {{type = "string"}}}}}}
"""
PROGRAM = """
import json, sys
city = json.load(sys.stdin)["city"]
if city != "Paris":
    sys.exit(f"there is no weather of {city}")
print("sunny")
"""


def write_weather(folder: Path, more: str = "") -> None:
    """A weather service in a data folder, under the name by which it is found."""
    folder.mkdir(exist_ok=True)
    (folder / "tools.toml").write_text(WEATHER + more)
    (folder / "weather.py").write_text(PROGRAM)


async def test_a_tool_of_the_data_folder_is_listed_and_called(tmp_path: Path) -> None:
    write_weather(tmp_path)
    async with running_app(tmp_path, registry=None) as running, http_client(running) as client:
        done = await Api(client).create('call get_weather {"city": "Paris"}', tools=[BUILTIN])
        listing, call, message = done["output"]
        assert {tool["name"] for tool in listing["tools"]} == {*tools.BUILTIN, "get_weather"}
        assert (call["type"], call["status"], call["output"]) == ("mcp_call", "completed", "sunny")
        assert message["content"][0]["text"] == "The tool said: sunny"
        failed = await Api(client).create('call get_weather {"city": "Rome"}', tools=[BUILTIN])
        error = "the program failed with status 1: there is no weather of Rome"
        assert failed["output"][1]["error"]["content"] == [{"type": "text", "text": error}]
        assert failed["output"][2]["content"][0]["text"] == f"The tool said: error: {error}"


async def test_a_schema_that_no_model_can_be_held_to_is_checked(tmp_path: Path) -> None:
    """Otherwise every request with `builtin:` would be refused for a schema that it did not bring."""
    write_weather(
        tmp_path,
        f"""
        [tools.unique]
        description = "Takes different things."
        command = [{PYTHON}, "-c", "print('called')"]
        [tools.unique.parameters]
        type = "object"
        properties = {{things = {{type = "array", uniqueItems = true, items = {{type = "object"}}}}}}
        """,
    )
    async with running_app(tmp_path, registry=None) as running, http_client(running) as client:
        for things, outcome in (([{}], "called"), ([{}, {}], None)):
            asked = f"call unique {json.dumps({'things': things})}"
            done = await Api(client).create(asked, tools=[BUILTIN])
            assert done["output"][1]["output"] == outcome
        assert "has non-unique elements" in done["output"][1]["error"]["content"][0]["text"]


async def test_a_bad_file_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "tools.toml").write_text("\n[tools.x]\ndescription = 'x'\n")
    life = ServerLifecycle(Config(data=tmp_path, engine="scripted"))
    try:
        with pytest.raises(Refused) as refused:
            await life.start()
        assert str(refused.value) == (
            f"{tmp_path}/tools.toml:2: tool 'x': it must have either a 'command' or a 'url'"
        )
    finally:
        await life.close()


SLOW = """
import os, sys, time
with open("begun", "a") as file:
    file.write(f"{os.getpid()}\\n")
while not os.path.exists("go"):
    time.sleep(0.02)
print("done")
"""


async def begun(folder: Path, count: int) -> list[int]:
    """The programs that have begun, when there are so many."""
    async with asyncio.timeout(30):
        while True:
            text = (folder / "begun").read_text() if (folder / "begun").exists() else ""
            if text.count("\n") >= count:
                return [int(pid) for pid in text.split()]
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("idempotent", [True, False], ids=["may run twice", "may not"])
async def test_a_call_that_a_kill_cuts_is_run_again_only_where_the_file_says_so(
    tmp_path: Path, idempotent: bool
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "tools.toml").write_text(
        f'[tools.slow]\ndescription = "Slow."\ncommand = [{PYTHON}, "slow.py"]\n'
        f"idempotent = {str(idempotent).lower()}\n"
    )
    async with server_process(tmp_path) as server, server.client() as client:
        body: Json = {"input": "call slow {}", "tools": [BUILTIN], "background": True}
        response = (await client.post("/v1/responses", json=body)).json()
        await begun(tmp_path, 1)
        server.child.kill()
    async with server_process(tmp_path) as server, server.client() as client:
        if idempotent:
            await begun(tmp_path, 2)
        (tmp_path / "go").touch()
        done = (await client.get(f"/v1/responses/{response['id']}", params={"wait": "30"})).json()
        call = done["output"][1]
        assert done["status"] == "completed"
        assert len(await begun(tmp_path, 1)) == (2 if idempotent else 1)
        if idempotent:
            assert (call["status"], call["output"]) == ("completed", "done")
        else:
            assert call["status"] == "failed" and "is not known" in json.dumps(call["error"])


async def test_a_call_that_is_cancelled_ends_its_program(tmp_path: Path) -> None:
    """In a real process, whose event loop is another one than that of tests."""
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "tools.toml").write_text(
        f'[tools.slow]\ndescription = "Slow."\ncommand = [{PYTHON}, "slow.py"]\n'
    )
    async with server_process(tmp_path) as server, server.client() as client:
        body: Json = {"input": "call slow {}", "tools": [BUILTIN], "background": True}
        response = (await client.post("/v1/responses", json=body)).json()
        (program,) = await begun(tmp_path, 1)
        await client.post(f"/v1/responses/{response['id']}/cancel")
        async with asyncio.timeout(10):
            while Path(f"/proc/{program}").exists():
                await asyncio.sleep(0.02)
