"""`kill -9` while an image is made: it is not paid for twice, unless the operator says that it may be."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.loopback_images import PNG, loopback_images
from tests.support.processes import server_process
from tests.support.wire import Json


@pytest.mark.parametrize("idempotent", [False, True])
async def test_a_killed_call_is_made_again_only_where_it_may_be(tmp_path: Path, idempotent: bool) -> None:
    async with loopback_images() as images:
        data = tmp_path / "data"
        data.mkdir(mode=0o700)
        table = f'[images]\nurl = "{images.url}"\nidempotent = {str(idempotent).lower()}\n'
        (data / "antiphon.toml").write_text(table)
        body: Json = {
            "input": 'call image_generation {"prompt": "a cat"}',
            "tools": [{"type": "image_generation"}],
            "background": True,
        }
        images.hold = True
        async with server_process(data) as server, server.client() as client:
            begun = (await client.post("/v1/responses", json=body)).json()
            await asyncio.wait_for(images.held.wait(), 60)
            server.child.kill()
        images.hold = False
        images.release.set()
        async with server_process(data) as server, server.client() as client:
            done = (await client.get(f"/v1/responses/{begun['id']}", params={"wait": "30"})).json()
            call, message = done["output"]
            assert (done["status"], len(images.asked)) == ("completed", 2 if idempotent else 1)
            told = message["content"][0]["text"]
            if idempotent:
                assert (call["status"], call["result"]) == ("completed", PNG)
                assert "The image was made" in told
            else:
                assert (call["status"], call["result"]) == ("failed", None)
                assert "Whether it had any effect is not known" in told
            assert call["revised_prompt"] == "a cat"
