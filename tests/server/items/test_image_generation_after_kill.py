"""`kill -9` while an image is made: it is not paid for twice, unless the operator says that it may be."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.loopback_images import PNG, encoded, loopback_images, png
from tests.support.processes import server_process
from tests.support.wire import Json

ORIGINAL = png(3)
IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{encoded(ORIGINAL)}"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("idempotent", [False, True])
async def test_a_killed_call_is_made_again_only_where_it_may_be(
    tmp_path: Path, idempotent: bool, edits: bool
) -> None:
    async with loopback_images() as images:
        data = tmp_path / "data"
        data.mkdir(mode=0o700)
        table = f'[images]\nurl = "{images.url}"\nidempotent = {str(idempotent).lower()}\n'
        (data / "antiphon.toml").write_text(table)
        arguments = {"prompt": "a cat", **({"images": [1]} if edits else {})}
        said = {"type": "input_text", "text": f"call image_generation {json.dumps(arguments)}"}
        body: Json = {
            "input": [{"role": "user", "content": [said, *([IMAGE] if edits else [])]}],
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
            assert done["status"] == "completed"
            num_asked = 2 if idempotent else 1
            assert (len(images.asked), len(images.edited)) == ((0, num_asked) if edits else (num_asked, 0))
            assert all(dict(form)["image"] == ORIGINAL for form in images.edited)
            told = message["content"][0]["text"]
            if idempotent:
                assert (call["status"], call["result"]) == ("completed", PNG)
                assert "The image was made" in told
            else:
                assert (call["status"], call["result"]) == ("failed", None)
                assert "Whether it had any effect is not known" in told
            assert call["revised_prompt"] == "a cat"
