"""`kill -9` in a search and in a fetch: the next process does it again, and the answer goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.loopback_web import loopback_web
from tests.support.processes import server_process
from tests.support.wire import Json


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["search", "fetch"])
async def test_a_killed_call_is_made_again(tmp_path: Path, place: str) -> None:
    async with loopback_web() as web:
        data = tmp_path / "data"
        data.mkdir(mode=0o700)
        (data / "antiphon.toml").write_text(f'[web]\nprovider = "searxng"\nurl = "http://{web.host}"\n')
        url = web.url("/p/harbour.html")
        arguments = {"queries": ["buoy"]} if place == "search" else {"url": url}
        name = "web_search" if place == "search" else "open_page"
        body: Json = {
            "instructions": f"Pages may be read, such as {url}",
            "input": f"call {name} {json.dumps(arguments)}",
            "tools": [{"type": "web_search"}],
            "background": True,
        }
        web.holds = "/search" if place == "search" else "/p/"
        async with (
            server_process(data, "--egress-allow", web.host) as server,
            server.client() as client,
        ):
            begun = (await client.post("/v1/responses", json=body)).json()
            await asyncio.wait_for(web.held.wait(), 60)
            server.child.kill()
        web.holds = None
        web.release.set()
        async with (
            server_process(data, "--egress-allow", web.host) as server,
            server.client() as client,
        ):
            done = (await client.get(f"/v1/responses/{begun['id']}", params={"wait": "30"})).json()
            call, message = done["output"]
            assert (done["status"], call["status"], len(web.asked)) == ("completed", "completed", 2)
            # The scripted model repeats what its prompt says that the tool answered.
            assert "【1】" in message["content"][0]["text"] or "harbour" in message["content"][0]["text"]
            events = (await client.get(f"/v1/responses/{begun['id']}", params={"stream": "true"})).text
            own = [line[7:] for line in events.splitlines() if line.startswith("event: response.web_search")]
            assert own == [
                f"response.web_search_call.{step}" for step in ("in_progress", "searching", "completed")
            ]
            again = [{"role": "user", "content": body["input"]}, call, message]
            counted = [
                (await client.post("/v1/responses/input_tokens", json=asked)).json()["input_tokens"]
                for asked in (
                    {"input": "so?", "previous_response_id": begun["id"]},
                    {"input": [*again, {"role": "user", "content": "so?"}]},
                )
            ]
            assert counted[0] == counted[1], "what was kept is found again"
