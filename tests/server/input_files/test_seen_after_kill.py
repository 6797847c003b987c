"""An image is shown to a run that goes on after its process was killed, though its file is gone by then."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx

from tests.support.processes import server_process
from tests.support.seeing import asked, data_url, encoded, uploaded
from tests.support.wire import Json

SEEING = """
import engine
from tests.support.seeing import SeeingScript
from engine.backends.script import Say

def described(request, prompt):
    yield Say(" ".join([prompt[prompt.index("(image"):].split(")")[0], *map(str, range(300))]))

class Seeing(SeeingScript):
    def __init__(self, **settings):
        super().__init__(described, **settings)

engine.ScriptedEngine = Seeing
from server.cli import main
main()
"""


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


async def test_a_run_goes_on_with_the_same_pixels(tmp_path: Path) -> None:
    image = encoded("JPEG", "purple", 60, 44)
    flags = ("--tick-s", "0.01")
    async with server_process(tmp_path, *flags, code=SEEING) as server, server.client() as client:
        sent = {"background": True, "input": asked({"image_url": data_url(image)})}
        whole = await polled(client, (await client.post("/v1/responses", json=sent)).json()["id"])
        file_id = await uploaded(client, image, "a.jpg")
        body = {"background": True, "stream": True, "input": asked({"file_id": file_id})}
        async with client.stream("POST", "/v1/responses", json=body) as reply:
            response_id = ""
            async for line in reply.aiter_lines():
                if '"response.created"' in line:
                    response_id = line.partition('"id":"')[2].partition('"')[0]
                if '"response.output_text.delta"' in line:
                    break
            assert (await client.delete(f"/v1/files/{file_id}")).status_code == 200
            server.signal(signal.SIGKILL)
            await server.ended()
    async with server_process(tmp_path, *flags, code=SEEING) as server, server.client() as client:
        resumed = await polled(client, response_id)
    assert whole["status"] == resumed["status"] == "completed"
    assert words(resumed) == words(whole) and "(image " in words(whole)[0]["text"]
    assert resumed["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
