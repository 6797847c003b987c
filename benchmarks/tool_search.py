"""How long prompts are with a hundred tools, offered and deferred: `python -m benchmarks.tool_search`.

A server process with the shipped model is asked with the tools of an MCP server on loopback, all of them, and
deferred with a search that is demanded. Prints the tokens of the prompts, and the seconds of both responses.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tests.support.mcp_servers import large_server, serving
from tests.support.processes import server_process

ASKED = "Archive parcel 7."
DESK = {"type": "mcp", "server_label": "desk", "server_url": "builtin:desk", "require_approval": "never"}
DEFERRED = {**DESK, "defer_loading": True, "server_description": "The archive of the house."}


async def main() -> None:
    """Ask both ways, and print."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        async with serving(large_server([]).streamable_http_app()) as url:
            (data / "antiphon.toml").write_text(f'[mcp.servers.desk]\nurl = "{url}/mcp"\n')
            async with server_process(data, engine="local") as server, server.client() as client:
                while (await client.get("/ready")).status_code != 200:
                    await asyncio.sleep(0.1)
                await measure(client, "offered ", tools=[DESK])
                search = {"type": "tool_search"}
                await measure(client, "deferred", tools=[DEFERRED, search], tool_choice=search)


async def measure(client: httpx.AsyncClient, way: str, **body: Any) -> None:
    """One response of at most 64 tokens."""
    began = time.perf_counter()
    asked = {"input": ASKED, "max_output_tokens": 64, **body}
    reply = await client.post("/v1/responses", json=asked, timeout=600)
    assert reply.status_code == 200, reply.text
    turns = reply.json()["usage"]["input_tokens_per_turn"]
    print(f"{way}: prompts of {', '.join(map(str, turns))} tokens; {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    asyncio.run(main())
