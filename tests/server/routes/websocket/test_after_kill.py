"""A server that is killed with two lanes at work: another start goes on with both, and HTTP reads them on."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

from websockets.exceptions import ConnectionClosed

from tests.support import wire
from tests.support.lines import line
from tests.support.processes import server_process
from tests.support.talk import Api, text


async def test_both_lanes_go_on_at_the_next_token(tmp_path: Path) -> None:
    said = {"a": "count 60", "b": "count 80"}
    seen: dict[str, list[dict[str, object]]] = {"a": [], "b": []}
    async with server_process(tmp_path, "--tick-s", "0.02") as server, line(server.url) as socket:
        for lane, words in said.items():
            await socket.ask(words, stream_id=lane)
        try:
            while min(map(len, seen.values())) < 12:
                frame = await socket.next()
                seen[frame.pop("stream_id")].append(frame)
            server.signal(signal.SIGKILL)
            while True:
                frame = await socket.next()
                seen[frame.pop("stream_id")].append(frame)
        except ConnectionClosed:
            pass
        await server.ended()
    async with server_process(tmp_path) as server, server.client() as http:
        api = Api(http)
        for lane, words in said.items():
            response_id = seen[lane][0]["response"]["id"]  # type: ignore[index]
            last = seen[lane][-1]["sequence_number"]
            async with asyncio.timeout(30):
                rest = wire.events(await api.replay(response_id, last))
            whole = [*seen[lane], *rest]
            assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
            response = wire.check_stream([json.loads(json.dumps(event)) for event in whole])
            assert text(response).split()[-1].strip(",") == words.split()[1]
