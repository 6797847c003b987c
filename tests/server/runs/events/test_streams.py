"""Streams: what was seen live is what is read again, byte for byte, from any event on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import ScriptedEngine
from server.access import LOCAL
from server.runs.events import channel
from server.sse_frame import frames
from tests.support import wire
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import BUILTIN, TIME, WEATHER, Api, Gate, call, gated, text


@pytest.fixture
def api(client: httpx.AsyncClient) -> Api:
    return Api(client)


KINDS: dict[str, dict[str, Any]] = {
    "text": {"input": "say one two"},
    "reasoning": {"input": "think hm then say hi"},
    "calls": {"input": f"{call()}\n{call('get_time')}", "tools": [WEATHER, TIME]},
    "server tools": {"input": 'call calculator {"expression": "2+2"}', "tools": [BUILTIN]},
    "incomplete": {"input": "count 50", "max_output_tokens": 16},
    "failed": {"input": "say one\nfail now"},
    "background": {"input": "say hi", "background": True},
    "logprobs": {"input": "say hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1},
    "a long echo": {"input": "say hi", "instructions": "é" * 5000, "metadata": {"k": "\u0000\n\ndata: x"}},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_replay_equals_what_was_seen_live_from_every_event_on(api: Api, kind: str) -> None:
    live = await api.stream(**KINDS[kind])
    frames = [frame + b"\n\n" for frame in live.raw.split(b"\n\n")[:-1]]
    assert await api.replay(live.response["id"]) == live.raw
    for after in range(-1, len(frames)):
        tail = b"".join(frames[after + 1 :])
        assert await api.replay(live.response["id"], after) == tail, f"after {after}"
        if after >= 0:
            assert await api.replay(live.response["id"], **{"last-event-id": str(after)}) == tail


async def test_id_lines_come_only_where_an_event_stream_is_accepted(api: Api) -> None:
    body = {"input": "say one two", "stream": True}
    accepting = {"accept": "text/event-stream"}
    numbered = await api.http.post("/v1/responses", json=body, headers=accepting)
    events = wire.events(numbered.content, ids=True)
    response = wire.check_stream(events)
    plain = await api.replay(response["id"])
    assert b"\nid:" not in plain and not plain.startswith(b"id:")
    assert wire.events(plain) == events
    assert await api.replay(response["id"], **accepting) == numbered.content
    again = await api.replay(response["id"], 3, **accepting)
    assert [e["sequence_number"] for e in wire.events(again, ids=True)] == list(range(4, len(events)))


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "٣", "9" * 30])
async def test_a_last_event_id_that_is_no_number_is_refused(api: Api, value: str) -> None:
    response = await api.create("say hi")
    path = f"/v1/responses/{response['id']}?stream=true"
    error = await api.fails(400, "GET", path, headers={"last-event-id": value.encode()})
    assert error["param"] == "Last-Event-ID"


async def test_starting_after_goes_before_last_event_id(api: Api) -> None:
    live = await api.stream("say hi")
    tail = await api.replay(live.response["id"], 2, **{"last-event-id": "5"})
    wire.check_tail(wire.events(tail), live.events, 2)


# ------------------------------------------------------------------------------------------------------------
# Streams under way


async def test_readers_that_join_while_it_runs_see_the_same(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        api = Api(client)
        async with api.open("hi") as live:
            await live.until("output_text.delta")
            await gate.reached.wait()
            async with api.follow(live.id) as whole, api.follow(live.id, 3) as tail:
                assert (await tail.next() or {})["sequence_number"] == 4, "from the log, before anything new"
                gate.release.set()
                done = await live.done()
                assert await whole.done() == done
                while await tail.next() is not None:
                    pass
        assert whole.raw == live.raw
        wire.check_tail(tail.events, live.events, 3)
        assert await api.replay(live.id) == live.raw


async def test_a_cursor_beyond_the_log_of_a_running_response_is_refused(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        api = Api(client)
        async with api.open("hi") as live:
            await live.until("output_text.delta")
            await gate.reached.wait()
            last = (await live.until("output_text.delta"))["sequence_number"]
            path = f"/v1/responses/{live.id}?stream=true&starting_after="
            error = await api.fails(400, "GET", f"{path}{last + 1}")
            assert (error["code"], error["param"]) == ("cursor_beyond_log", "starting_after")
            async with api.follow(live.id, last) as tail:
                gate.release.set()
                assert (await tail.next() or {})["sequence_number"] == last + 1
                await live.done()


async def test_a_cursor_beyond_the_log_of_an_ended_response_is_refused(tmp_path: Path) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        async with api.open("say one two") as live:
            await live.done()
        last, path = live.events[-1]["sequence_number"], f"/v1/responses/{live.id}"
        reply = await client.get(path, params={"stream": "true", "starting_after": last})
        assert (reply.status_code, reply.text) == (200, ""), "nothing comes behind the end"
        for beyond in (last + 1, 10**18 - 1):
            error = await api.fails(400, "GET", f"{path}?stream=true&starting_after={beyond}")
            assert (error["code"], error["param"]) == ("cursor_beyond_log", "starting_after")
        error = await api.fails(400, "GET", f"{path}?stream=true", headers={"last-event-id": str(last + 1)})
        assert (error["code"], error["param"]) == ("cursor_beyond_log", "Last-Event-ID")
        assert server.context.runs.feed.total_readers == 0


async def test_a_slow_reader_falls_back_to_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What memory no longer holds is read from the log, without a gap and without a repeat."""
    monkeypatch.setattr(channel, "TAIL_BYTES", 1000)
    gate = Gate()
    engine = ScriptedEngine(gated(gate, "one two", " w" * 300))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        begun = await api.create("hi", background=True)
        reader, _ = await server.context.runs.views.follow("local", begun["id"])
        events = reader.events()
        seen = [*(await anext(events)).bodies]
        gate.release.set()
        ended = await api.ended(begun["id"])
        async for more in events:
            seen += more.bodies
        reader.close()
        assert len(seen) > 2
        assert frames(enumerate(seen)) == await api.replay(begun["id"])
        assert text(ended) == "one two" + " w" * 300


async def test_a_slow_reader_of_an_unstored_run_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "TAIL_BYTES", 1000)
    gate = Gate()
    engine = ScriptedEngine(gated(gate, "one two", " w" * 300))
    async with running_app(tmp_path, engine) as server:
        from server.runs.events.feed import ReaderLagged
        from server.schema.items import message
        from server.schema.responses import CreateResponse

        request = CreateResponse(input="hi", store=False)
        started = await server.context.runs.create(LOCAL, request, [message("user", "hi", "msg_1")])
        events = started.reader.events()
        await anext(events)
        gate.release.set()
        assert await started.reader.finished() is not None
        with pytest.raises(ReaderLagged):
            async for _ in events:
                pass
        started.reader.close()


async def test_a_stream_that_ended_meanwhile_is_read_to_its_end(server_app: Running, api: Api) -> None:
    """A run whose end is committed but not yet shown here: the log has what the channel lacks."""
    live = await api.stream("say one two")
    feed = server_app.context.runs.feed
    stored = await server_app.context.storage.get_response("local", live.response["id"])
    records = await server_app.context.storage.records(stored.id, after=-1)
    behind = feed.open(stored.id, stored.echo, stored=True)
    for record in records[:-1]:
        behind.publish(record)
    reader = feed.join(stored.id)
    seen = [body async for events in reader.events(ended=True) for body in events.bodies]
    assert frames(enumerate(seen)) == live.raw
    reader.close()
    feed.release(stored.id)


def without_comments(stream: bytes) -> bytes:
    return stream.replace(b": keep-alive\n\n", b"")


async def test_keep_alives_are_comments_between_frames(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated(gate)), keepalive_s=0.02) as server,
        http_client(server) as client,
        Api(client).open("hi") as live,
    ):
        await live.until("output_text.delta")
        while b": keep-alive" not in live.raw:
            live.raw += await anext(live.chunks)
        gate.release.set()
        await live.done()
        again = await Api(client).replay(live.id)
        assert without_comments(again) == without_comments(live.raw)


async def test_nothing_is_left_of_a_stream_that_ended(tmp_path: Path) -> None:
    async with live_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        await asyncio.gather(*(api.stream(f"count {n}") for n in range(8)))
        feed = server.context.runs.feed
        assert (server.context.runs.num_active, feed.total_readers, feed._channels) == (0, 0, {})
