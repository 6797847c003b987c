"""What an owner may store: sizes of what comes in one request, of a conversation, and of everything."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from server import quota
from server.access import OPERATOR
from server.admin import keys
from server.clock import now_us
from storage import Limits, Usage
from tests.support import wire
from tests.support.running import http_client, running_app
from tests.support.talk import WEATHER, Api, answer, call, calls
from tests.support.wire import Json


def said(text: str) -> Json:
    return {"type": "message", "role": "user", "content": text}


def error(reply: httpx.Response, status: int) -> Json:
    assert reply.status_code == status, reply.text
    found: Json = wire.validate_error(reply.json())
    return found


async def test_an_item_has_a_bounded_size_wherever_it_is_stored(tmp_path: Path) -> None:
    big = "x" * 2000
    async with running_app(tmp_path, max_item_bytes=2000) as server, http_client(server) as client:
        made = (await client.post("/v1/conversations", json={"items": [said("small")]})).json()["id"]
        waiting = await Api(client).create(call(), tools=[WEATHER], await_tool_outputs=True, background=True)
        now = await Api(client).waits(waiting["id"])
        output = answer(now["pending_tool_calls"][0]["call_id"], big)
        for path, body, param in (
            ("/v1/conversations", {"items": [said("small"), said(big)]}, "items[1]"),
            (f"/v1/conversations/{made}/items", {"items": [said(big)]}, "items[0]"),
            ("/v1/responses", {"input": big}, "input[0]"),
            ("/v1/responses", {"input": [said("small"), said(big)], "store": False}, "input[1]"),
            (f"/v1/responses/{waiting['id']}/tool_outputs", {"tool_outputs": [output]}, "tool_outputs[0]"),
        ):
            refused = error(await client.post(path, json=body), 400)
            assert (refused["code"], refused["param"]) == ("item_too_large", param)


async def test_a_file_that_is_too_large_for_an_item_is_to_be_uploaded(tmp_path: Path) -> None:
    async with running_app(tmp_path, max_item_bytes=2000) as server, http_client(server) as client:
        file = {
            "type": "input_file",
            "filename": "a.txt",
            "file_data": "data:text/plain;base64," + "YQ" * 2000,
        }
        body = {"input": [{"role": "user", "content": [file]}]}
        refused = error(await client.post("/v1/responses", json=body), 400)
        assert refused["code"] == "item_too_large" and "/v1/files" in refused["message"]


async def test_a_conversation_has_a_bounded_number_of_items(tmp_path: Path) -> None:
    async with running_app(tmp_path, max_items_per_conversation=4) as server, http_client(server) as client:
        items = [said(str(number)) for number in range(3)]
        made = (await client.post("/v1/conversations", json={"items": items})).json()["id"]
        path = f"/v1/conversations/{made}/items"
        assert error(await client.post(path, json={"items": items[:2]}), 400)["code"] == "conversation_full"
        assert (await client.post(path, json={"items": items[:1]})).status_code == 200
        turn = {"input": "hi", "conversation": made}
        refused = error(await client.post("/v1/responses", json=turn), 400)
        assert (refused["code"], refused["param"]) == ("conversation_full", "conversation")
        assert (await client.get("/v1/responses")).json()["data"] == []


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/completions"])
async def test_stop_strings_are_few_and_short(client: httpx.AsyncClient, path: str) -> None:
    bodies: dict[str, Json] = {
        "/v1/responses": {"input": "say x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "say x"}]},
        "/v1/completions": {"prompt": "say x"},
    }
    for stop in (["a"] * 17, ["x" * 1025], "x" * 1025, [""]):
        refused = error(await client.post(path, json={**bodies[path], "stop": stop}), 400)
        assert refused["param"].startswith("stop")
    fine = {**bodies[path], "stop": ["y" * 1024] * 16}
    assert (await client.post(path, json=fine)).status_code == 200


@pytest.mark.parametrize(
    "metadata", [{str(n): "x" for n in range(17)}, {"x" * 65: "x"}, {"x": "x" * 513}, {"x": 1}, []]
)
async def test_metadata_is_bounded_wherever_it_is_taken(client: httpx.AsyncClient, metadata: Any) -> None:
    made = (await client.post("/v1/conversations")).json()["id"]
    chat = {"messages": [{"role": "user", "content": "say x"}]}
    for path, body in (
        ("/v1/responses", {"input": "say x"}),
        ("/v1/chat/completions", chat),
        ("/v1/conversations", {}),
        (f"/v1/conversations/{made}", {}),
    ):
        if metadata == [] and path == "/v1/conversations":
            continue  # empty, and so taken for none
        refused = error(await client.post(path, json={**body, "metadata": metadata}), 400)
        assert refused["param"].startswith("metadata")


async def test_a_quota_that_is_used_up_refuses_every_write_until_something_is_deleted(tmp_path: Path) -> None:
    limit, each = 100_000, "x" * 20_000
    async with running_app(tmp_path, max_bytes_per_owner=limit) as server, http_client(server) as client:
        api = Api(client)
        kept = [
            (await client.post("/v1/conversations", json={"items": [said(each)]})).json()["id"]
            for _ in range(4)
        ]
        for path, body in (
            ("/v1/conversations", {"items": [said(each)]}),
            (f"/v1/conversations/{kept[0]}/items", {"items": [said(each)]}),
            ("/v1/responses", {"input": each}),
            ("/v1/responses", {"input": each, "background": True}),
            ("/v1/responses", {"input": "hi", "instructions": each}),
        ):
            reply = await client.post(path, json=body)
            refused = error(reply, 429)
            assert (refused["type"], refused["code"]) == ("insufficient_quota", "insufficient_quota")
            assert reply.headers["x-should-retry"] == "false" and "retry-after" not in reply.headers
        # What stores nothing goes on, and so does what fits.
        assert (await client.post("/v1/responses", json={"input": each, "store": False})).status_code == 200
        small = await api.create("say x")
        assert small["status"] == "completed"
        assert (await client.delete(f"/v1/conversations/{kept[0]}")).status_code == 200
        async with asyncio.timeout(10):
            while (await client.post("/v1/conversations", json={"items": [said(each)]})).status_code == 429:
                await asyncio.sleep(0.1)


async def test_old_responses_make_room_at_once(tmp_path: Path) -> None:
    """However fast it comes, an owner never stores more than its quota and one request."""
    limit, each = 200_000, "say " + "x" * 20_000
    async with running_app(tmp_path, max_bytes_per_owner=limit) as server, http_client(server) as client:
        last = ""
        for _ in range(30):
            last = (await Api(client).create(each))["id"]
            assert (await server.context.storage.usage("local")).total <= limit
        assert (await client.get(f"/v1/responses/{last}")).status_code == 200
        listed = (await client.get("/v1/responses", params={"limit": 100})).json()["data"]
        assert 1 <= len(listed) < 10


async def test_a_full_store_takes_the_oldest_responses_of_whoever_writes_and_then_refuses(
    tmp_path: Path,
) -> None:
    limit, each = 200_000, "x" * 20_000
    async with running_app(tmp_path, max_store_bytes=limit) as server, http_client(server) as nobody:
        storage = server.context.storage
        made = [await keys.make(storage, OPERATOR, name=name) for name in ("ann", "bob")]
        server.life.keys.forget()
        assert (await nobody.get("/v1/responses")).status_code == 401
        async with (
            http_client(server, authorization=f"Bearer {made[0].key}") as ann,
            http_client(server, authorization=f"Bearer {made[1].key}") as bob,
        ):
            told = [said(each)] * 3
            kept = (await ann.post("/v1/conversations", json={"items": told})).json()["id"]
            for _ in range(12):
                assert (await Api(bob).create("say " + each))["status"] == "completed"
                assert await storage.num_bytes() <= limit
            assert 1 <= len((await bob.get("/v1/responses?limit=100")).json()["data"]) < 12
            # What is left to ann holds nothing that could go: bob's responses do not go for her.
            async with asyncio.timeout(10):
                while (reply := await ann.post("/v1/conversations", json={"items": told})).status_code == 200:
                    pass
            refused = error(reply, 429)
            assert (refused["type"], refused["code"]) == ("insufficient_quota", "insufficient_quota")
            assert "of all its users" in refused["message"] and reply.headers["x-should-retry"] == "false"
            assert (await bob.get("/v1/responses")).json()["data"] != []
            assert (await ann.delete(f"/v1/conversations/{kept}")).status_code == 200
            assert (await Api(bob).create("say " + each))["status"] == "completed", "his own oldest go for it"
            async with asyncio.timeout(10):
                while (await ann.post("/v1/conversations", json={"items": told[:1]})).status_code == 429:
                    await asyncio.sleep(0.1)


async def test_responses_that_are_kept_for_repeats_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also once they are measured, and not only as long as what was asked for is remembered."""
    monkeypatch.setattr(quota, "FRESH_S", 0.0)
    limit = 100_000
    async with running_app(tmp_path, max_bytes_per_owner=limit) as server, http_client(server) as client:
        storage = server.context.storage
        for number in range(6):
            body = {"input": [said("x" * 20_000), said("say hi")], "store": False}
            reply = await client.post("/v1/responses", json=body, headers={"idempotency-key": f"k{number}"})
            if reply.status_code != 200:
                break
        assert error(reply, 429)["code"] == "insufficient_quota" and number == 4
        usage = await storage.usage("local")
        assert 80_000 < usage.total == usage.held < limit + 20_000  # an answer is stored whole
        assert await storage.num_bytes() == usage.total
        assert await storage.num_bytes_by_owner() == {"local": usage.total}
        # What nobody keeps counts nowhere.
        assert (await client.post("/v1/responses", json=body)).status_code == 200
        async for _ in storage.sweep(Limits(request_age=0), now_us() + 1_000_000):
            pass
        assert await storage.usage("local") == Usage(0, 0)


async def test_replies_that_are_kept_for_repeats_count_and_are_not_kept_where_there_is_no_room(
    tmp_path: Path,
) -> None:
    settings = {"owner_limit": ("stored_bytes=50000",)}
    async with running_app(tmp_path, **settings) as server, http_client(server) as client:
        storage, kept = server.context.storage, list[bool]()
        made = (await client.post("/v1/conversations")).json()["id"]
        held = (await storage.usage("local")).total
        tokenize = ("/tokenize", {"prompt": "word " * 300})
        items = (f"/v1/conversations/{made}/items", {"items": [said("x" * 4000)]})
        for path, body in (*[tokenize] * 60, *[items] * 9):
            key = {"idempotency-key": f"k{len(kept)}"}
            replies = [await client.post(path, json=body, headers=key) for _ in range(2)]
            if replies[0].status_code == 429:
                assert path == items[0], "what brings nothing to be stored is not refused"
                break
            assert replies[0].status_code == 200
            kept.append(replies[1].status_code == 200)
            assert kept[-1] or error(replies[1], 409)["code"] == "idempotency_reply_not_kept"
            assert (await storage.usage("local")).total <= 50_000
        assert kept[0] and not kept[59] and kept == sorted(kept, reverse=True)
        assert (await storage.usage("local")).held > 45_000 > held
        async for _ in storage.sweep(Limits(request_age=0), now_us() + 1_000_000):
            pass
        assert (await storage.usage("local")).held < 10_000


async def test_tool_outputs_count(tmp_path: Path) -> None:
    async with running_app(tmp_path, max_bytes_per_owner=50_000) as server, http_client(server) as client:
        first = await Api(client).create(call(), tools=[WEATHER])
        output = answer(calls(first)[0]["call_id"], "x" * 60_000)
        path = f"/v1/responses/{first['id']}/tool_outputs"
        refused = error(await client.post(path, json={"tool_outputs": [output]}), 429)
        assert refused["code"] == "insufficient_quota"


async def test_an_administrator_sees_what_an_owner_stores(tmp_path: Path) -> None:
    path = "/v1/organization/projects/local/limits"
    async with (
        running_app(tmp_path) as server,
        http_client(server) as client,
        http_client(server, authorization=f"Bearer {server.life.admin_token}") as admin,
    ):

        async def stored() -> int:
            return int((await admin.get(path)).json()["used"]["stored_bytes"])

        assert await stored() == 0
        assert (await client.post("/v1/responses", json={"input": "x" * 20_000})).status_code == 200
        text = await stored()
        assert text > 20_000, "what has just ended counts, though no sweep has passed yet"
        form = {"files": {"file": ("a.txt", b"y" * 5000)}, "data": {"purpose": "user_data"}}
        made = (await client.post("/v1/files", **form)).json()
        assert await stored() == text + 5000
        set_to = (await admin.post(path, json={"limits": {"stored_bytes": 30_000}})).json()
        assert set_to["used"]["stored_bytes"] == text + 5000
        assert (await client.delete(f"/v1/files/{made['id']}")).status_code == 200
        assert await stored() == text


@pytest.mark.parametrize("whose", ["your key", "your project", "this server"])
async def test_a_limit_on_stored_bytes_refuses_and_deletes_nothing(tmp_path: Path, whose: str) -> None:
    limits, each = {"stored_bytes": 100_000}, [said("x" * 20_000), said("say hi")]
    settings = {"owner_limit": ("stored_bytes=100000",)} if whose == "this server" else {}
    async with running_app(tmp_path, **settings) as server, http_client(server) as client:
        storage = server.context.storage
        if not settings:
            own = limits if whose == "your key" else None
            made = await keys.make(storage, OPERATOR, owner="local", name="ann", limits=own)
            server.life.keys.forget()
            client.headers["authorization"] = f"Bearer {made.key}"
            if own is None:
                admin = {"authorization": f"Bearer {server.life.admin_token}"}
                path = "/v1/organization/projects/local/limits"
                changed = await client.post(path, json={"limits": limits}, headers=admin)
                assert changed.status_code == 200, changed.text
        ids = []
        while (reply := await client.post("/v1/responses", json={"input": each})).status_code == 200:
            ids.append(reply.json()["id"])
            assert len(ids) < 10
        assert ids
        refused = error(reply, 429)
        free = 100_000 - (await storage.usage("local")).total
        told = f"{max(0, free)} of the 100000 bytes that may be stored are free"
        assert told in refused["message"] and f"of {whose}." in refused["message"]
        needs = int(refused["message"].split("needs ")[1].split()[0])
        assert needs > max(free, 20_000)
        for _ in range(3):
            assert (await client.post("/v1/responses", json={"input": each})).status_code == 429
        for id in ids:
            assert (await client.get(f"/v1/responses/{id}")).status_code == 200
        assert (
            'antiphon_over_limit_total{limit="stored_bytes"} 4.0'
            in server.life.telemetry.exposition().decode()
        )
        assert (await client.delete(f"/v1/responses/{ids[0]}")).status_code == 200
        async with asyncio.timeout(10):
            while (await client.post("/v1/responses", json={"input": each})).status_code == 429:
                await asyncio.sleep(0.1)


async def test_a_write_that_is_larger_than_the_limit_is_told_what_is_free(tmp_path: Path) -> None:
    async with (
        running_app(tmp_path, owner_limit=("stored_bytes=50000",)) as server,
        http_client(server) as client,
    ):
        assert (await Api(client).create([said("x" * 5000), said("say hi")]))["status"] == "completed"
        refused = error(await client.post("/v1/responses", json={"input": "x" * 60_000}), 429)
        free = 50_000 - (await server.context.storage.usage("local")).total
        assert 0 < free < 45_000 and f"and {free} of the 50000 bytes" in refused["message"]


async def test_what_goes_to_make_room_is_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    each = "say " + "x" * 20_000
    async with running_app(tmp_path, max_bytes_per_owner=200_000) as server, http_client(server) as client:
        for _ in range(12):
            await Api(client).create(each)
        left = len((await client.get("/v1/responses", params={"limit": 100})).json()["data"])
        gone = 12 - left
        assert gone > 0
        assert f"antiphon_retention_responses_total {float(gone)}" in (await client.get("/metrics")).text
        assert server.life._retention is not None
        for _ in range(2):  # it is told of once
            await server.life._retention.sweep()
        told = [each.getMessage() for each in caplog.records if each.name == "antiphon.retention"]
        assert [line for line in told if f"{gone} of the oldest responses of 1 owners" in line] == told[:1]
