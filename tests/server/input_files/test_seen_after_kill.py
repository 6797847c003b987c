"""A model that sees, served by a process of its own that is killed in the middle of an answer."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.support.processes import server_process
from tests.support.seeing import asked, data_url, encoded, uploaded
from tests.support.wire import Json

BODY: Json = {"max_output_tokens": 400, "temperature": 0, "ignore_eos": True, "background": True}


async def polled(client: httpx.AsyncClient, response_id: str) -> Json:
    """A response once it has ended."""
    async with asyncio.timeout(60):
        while True:
            found: Json = (await client.get(f"/v1/responses/{response_id}")).json()
            if found["status"] not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.05)


def words(response: Json) -> list[Json]:
    return [part for item in response["output"] for part in item["content"]]


async def test_a_run_goes_on_with_the_same_pixels(seeing: Callable[[str], Path], tmp_path: Path) -> None:
    image = encoded("JPEG", "purple", 60, 44)
    flags = ("--model", str(seeing("qwen2_5_vl")), "--num-threads", "1", "--kv-cache-bytes", str(8 << 20))
    async with server_process(tmp_path, *flags, engine="local") as server, server.client() as client:
        sent = {**BODY, "input": asked({"image_url": data_url(image)})}
        whole = await polled(client, (await client.post("/v1/responses", json=sent)).json()["id"])
        file_id = await uploaded(client, image, "a.jpg")
        body = {**BODY, "stream": True, "input": asked({"file_id": file_id})}
        async with client.stream("POST", "/v1/responses", json=body) as reply:
            lines = reply.aiter_lines()
            response_id = ""
            async for line in lines:
                if '"response.created"' in line:
                    response_id = line.partition('"id":"')[2].partition('"')[0]
                if '"response.output_text.delta"' in line:
                    break
            assert (await client.delete(f"/v1/files/{file_id}")).status_code == 200
            server.signal(signal.SIGKILL)
            await server.ended()
    async with server_process(tmp_path, *flags, engine="local") as server, server.client() as client:
        resumed = await polled(client, response_id)
    assert words(resumed) == words(whole)
    assert resumed["usage"]["output_tokens"] == 400 and resumed["status"] == "incomplete"
    assert resumed["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > 60
