"""The events of a response as pages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import ScriptedEngine
from server.clock import now_us
from tests.support import wire
from tests.support.owners import two_owners
from tests.support.running import http_client, live_app, running_app
from tests.support.talk import Api, Gate, gated

Json = dict[str, Any]


async def page(client: httpx.AsyncClient, response_id: str, **params: str | int) -> Json:
    reply = await client.get(f"/v1/responses/{response_id}/events", params=params)
    assert reply.status_code == 200, reply.text
    found: Json = reply.json()
    numbers = [str(event["sequence_number"]) for event in found["data"]]
    assert len(found["times"]) == len(numbers)
    assert (found["first_id"], found["last_id"]) == ((numbers[0], numbers[-1]) if numbers else (None, None))
    return found


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_pages_hold_what_the_stream_said(client: httpx.AsyncClient, order: str) -> None:
    streamed = await Api(client).stream("think hm then say one two three")
    response_id = streamed.response["id"]
    whole = await page(client, response_id)
    assert (whole["data"], whole["has_more"]) == (streamed.events, False)
    found: list[Json] = []
    times: list[float] = []
    params: dict[str, str | int] = {"limit": 3, "order": order}
    while True:
        part = await page(client, response_id, **params)
        found += part["data"]
        times += part["times"]
        if not part["has_more"]:
            break
        assert len(part["data"]) == 3
        params["after"] = part["last_id"]
    assert found == (streamed.events if order == "asc" else streamed.events[::-1])
    assert times == (whole["times"] if order == "asc" else whole["times"][::-1])


async def test_events_say_when_they_were_made(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        before = now_us() / 1_000_000
        begun = await Api(client).create("hi", background=True)
        await asyncio.wait_for(gate.reached.wait(), 20)
        opened = now_us() / 1_000_000
        gate.release.set()
        response = await Api(client).ended(begun["id"])
        found = await page(client, begun["id"])
        times = found["times"]
        late = next(i for i, event in enumerate(found["data"]) if "three" in event.get("delta", ""))
        assert before <= times[0] <= opened <= times[late] <= times[-1] <= now_us() / 1_000_000
        assert times == sorted(times) and int(times[0]) >= response["created_at"]


async def test_the_ends_of_a_log(client: httpx.AsyncClient) -> None:
    streamed = await Api(client).stream("say hi")
    response_id, last = streamed.response["id"], len(streamed.events) - 1
    behind = await page(client, response_id, after=last)
    assert (behind["data"], behind["has_more"]) == ([], False)
    assert (await page(client, response_id, after=last + 100))["data"] == []
    assert (await page(client, response_id, order="desc", after=0))["data"] == []
    assert (await page(client, response_id, after=-1, limit=1))["data"] == streamed.events[:1]
    assert (await page(client, response_id, order="desc", limit=1))["data"] == streamed.events[-1:]


async def test_a_response_that_is_being_made(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        begun = await Api(client).create("hi", background=True)
        await asyncio.wait_for(gate.reached.wait(), 20)
        before = await page(client, begun["id"])
        assert before["data"][0]["type"] == "response.created"
        assert before["data"][-1]["type"] != "response.completed"
        gate.release.set()
        await Api(client).ended(begun["id"])
        after = await page(client, begun["id"])
        assert after["data"][: len(before["data"])] == before["data"]
        assert after["data"][-1]["type"] == "response.completed"


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=1001", "limit"), ("after=x", "after"), ("order=up", "order")],
)
async def test_bad_parameters(client: httpx.AsyncClient, query: str, param: str) -> None:
    response = await Api(client).create("say hi")
    reply = await client.get(f"/v1/responses/{response['id']}/events?{query}")
    assert reply.status_code == 400
    assert wire.validate_error(reply.json())["param"] == param


async def test_another_owners_events_are_unknown(tmp_path: Path) -> None:
    async with running_app(tmp_path) as running, two_owners(running) as (own, other):
        response = await Api(own).create("say hi")
        assert (await page(own, response["id"]))["data"]
        path = f"/v1/responses/{response['id']}/events"
        foreign = await Api(other).fails(404, "GET", path)
        unknown = await Api(other).fails(404, "GET", "/v1/responses/resp_none/events")
        assert foreign["message"].replace(response["id"], "resp_none") == unknown["message"]


async def test_a_fork_has_no_events(client: httpx.AsyncClient) -> None:
    response = await Api(client).create("say hi")
    fork = (await client.post(f"/v1/responses/{response['id']}/fork", json={})).json()
    error = await Api(client).fails(400, "GET", f"/v1/responses/{fork['id']}/events")
    assert error["code"] == "no_events"
