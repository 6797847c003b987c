"""`kill -9` while code runs: Monty goes on as if nothing had been, and other sandboxes lose no file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.support.processes import server_process
from tests.support.sandboxes import require_sandbox
from tests.support.wire import Json
from tools.sandbox import Tier

TOOL: Json = {"type": "code_interpreter", "container": {"type": "auto"}}
OUTPUTS = {"include[]": "code_interpreter_call.outputs"}
FIRST = "x = 5\nopen('a.txt', 'w').write('first')"
SLOW = "import random\nopen('a.txt', 'w').write('second')\nfor n in range({count}): x = x + 1\nprint(x)"


def body(code: str, previous: str | None = None) -> Json:
    told = {"code": code}
    import json

    asked = {"input": f"call python {json.dumps(told)}", "tools": [TOOL], "background": True}
    return asked | ({} if previous is None else {"previous_response_id": previous})


async def ended(client: httpx.AsyncClient, begun: Json) -> Json:
    reply = await client.get(f"/v1/responses/{begun['id']}", params={"wait": "60", **OUTPUTS})
    done: Json = reply.json()
    assert done["status"] == "completed", done
    return done


async def interpreting(client: httpx.AsyncClient, begun: Json) -> None:
    url = f"/v1/responses/{begun['id']}"
    async with client.stream("GET", url, params={"stream": "true"}) as stream:
        async for line in stream.aiter_lines():
            if line == "event: response.code_interpreter_call.interpreting":
                return


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sandbox", ["monty", "bubblewrap"])
async def test_code_that_was_cut_short(tmp_path: Path, sandbox: Tier) -> None:
    await require_sandbox(sandbox)
    flags = ("--sandbox", sandbox)
    slow = SLOW.format(count=3_000_000 if sandbox == "monty" else 300_000_000)
    async with server_process(tmp_path, *flags) as server, server.client() as client:
        first = await ended(client, (await client.post("/v1/responses", json=body(FIRST))).json())
        cut = (await client.post("/v1/responses", json=body(slow, first["id"]))).json()
        await asyncio.wait_for(interpreting(client, cut), 60)
        server.child.kill()
    async with server_process(tmp_path, *flags) as server, server.client() as client:
        done = await ended(client, cut)
        [call] = [item for item in done["output"] if item["type"] == "code_interpreter_call"]
        read = (
            "print(open('a.txt').read(), 'x' in dir() and x)"
            if sandbox == "bubblewrap"
            else ("print(open('a.txt').read(), x)")
        )
        after = await ended(client, (await client.post("/v1/responses", json=body(read, done["id"]))).json())
        [said] = [item for item in after["output"] if item["type"] == "code_interpreter_call"]
        if sandbox == "monty":
            assert (call["status"], call["outputs"]) == ("completed", [{"type": "logs", "logs": "3000005\n"}])
            assert said["outputs"][0]["logs"] == "second 3000005\n"
        else:
            assert call["status"] == "failed" and "the session was lost" in call["outputs"][0]["logs"]
            assert said["outputs"][0]["logs"].endswith("first False\n")
