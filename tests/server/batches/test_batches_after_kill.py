"""`kill -9` in the middle of batches: every request has one result, and every response was made once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from storage import open_storage
from tests.support.batching import chats, input_file, lines_of, responses
from tests.support.processes import server_process

NUM_LINES = 90


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("endpoint", "kills"), [("/v1/responses", 2), ("/v1/chat/completions", 1)])
async def test_every_line_has_one_result(tmp_path: Path, endpoint: str, kills: int) -> None:
    lines = (responses if endpoint == "/v1/responses" else chats)(NUM_LINES, "say a b c {}")
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    url = f"sqlite:///{data / 'antiphon.db'}"
    storage = await open_storage(url, runner="test")
    file_id = await input_file(storage, lines)
    await storage.close()
    batch_id = ""
    for kill in range(kills + 1):
        async with server_process(data, "--tick-s", "0.02", "--db", url) as server, server.client() as client:
            if not batch_id:
                asked = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
                batch_id = (await client.post("/v1/batches", json=asked)).json()["id"]
            wanted = NUM_LINES if kill == kills else (kill + 1) * NUM_LINES // (kills + 1)
            async with asyncio.timeout(120):
                while True:
                    batch = (await client.get(f"/v1/batches/{batch_id}")).json()
                    done = batch["request_counts"]["completed"]
                    if batch["status"] == "completed" or (kill < kills and done >= wanted):
                        break
                    await asyncio.sleep(0.02)
            if kill < kills:
                assert done < NUM_LINES, "the kill comes too late to show anything"
                server.child.kill()
                continue
            made = []
            if endpoint == "/v1/responses":
                after: dict[str, str] = {}
                while page := (await client.get("/v1/responses", params={"limit": "100", **after})).json()[
                    "data"
                ]:
                    made += page
                    after = {"after": page[-1]["id"]}
    assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    storage = await open_storage(url, runner="test")
    output = await lines_of(storage, batch["output_file_id"])
    await storage.close()
    ids = [each["custom_id"] for each in output]
    assert sorted(ids) == sorted(f"r{n}" for n in range(NUM_LINES))
    for each in output:
        body = each["response"]["body"]
        said = body["output"][0]["content"][0]["text"] if made else body["choices"][0]["message"]["content"]
        assert said == f"a b c {each['custom_id'][1:]}"
    if endpoint == "/v1/responses":
        assert {each["response"]["body"]["id"] for each in output} == {each["id"] for each in made}
        assert len(made) == NUM_LINES
