"""How soon a server that is full says so: `python -m benchmarks.overload`.

A scripted engine with four lanes and a queue of twelve gets ten times the requests that it can answer, each
on a connection of its own, from a process of its own. Prints how long refusals took by the client's clock and
by the server's, and what one costs the loop.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from server.process.process_ends import tune_process

LANES, WAITING, TICK_S = 4, 12, 0.05
REQUESTS, APART_S = 1500, 0.0075


async def main() -> None:
    """One overload, and then refusals one after the other."""
    from engine import ScriptedEngine
    from server.access import LOCAL_OWNER
    from server.process.serve import load_late_modules
    from tests.support.running import live_app
    from tests.support.slices import exchange, request

    await asyncio.to_thread(load_late_modules)
    engine = ScriptedEngine(tick_s=TICK_S, max_running=LANES, max_waiting=WAITING)
    with tempfile.TemporaryDirectory() as folder:
        async with live_app(Path(folder), engine, max_waiting=WAITING) as server:
            argv = (sys.executable, "-m", "benchmarks.overload", server.base_url)
            process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
            out, _ = await process.communicate()
            found = json.loads(out)
            for clock in ("client", "server"):
                ordered = sorted(found[clock])
                at = {share: ordered[int(share * (len(ordered) - 1))] * 1e3 for share in (0.5, 0.99, 1.0)}
                print(f"{clock}: p50 {at[0.5]:.1f}, p99 {at[0.99]:.1f}, slowest {at[1.0]:.1f} ms of refusals")
            print(f"{found['answered']} answered, {len(found['client'])} refused")
            held = [engine.admission.enter(LOCAL_OWNER, promised=True) for _ in range(LANES + WAITING)]
            raw = request("POST", "/v1/responses", {"input": "count 4", "stream": True})
            spent = time.thread_time()
            for _ in range(200):
                status, _body = await asyncio.to_thread(exchange, server.base_url, raw)
                assert status == 429
            spent = time.thread_time() - spent
            print(f"{spent / 200 * 1e6:.0f} us of the loop a refusal, with its connection")
            for place in held:
                place.leave()


async def _crowd(url: str) -> None:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    body = json.dumps({"input": "count 4", "stream": True})
    head = "POST /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    found: dict[str, list[float]] = {"client": [], "server": []}
    answered = 0

    async def one() -> None:
        nonlocal answered
        began = time.monotonic()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write((head + body).encode())
        reply = await reader.read()
        writer.close()
        if reply.startswith(b"HTTP/1.1 200 "):
            answered += 1
            return
        assert reply.startswith(b"HTTP/1.1 429 "), reply
        found["client"].append(time.monotonic() - began)
        said = re.search(rb"openai-processing-ms: (\d+)", reply)
        assert said is not None
        found["server"].append(int(said[1]) / 1e3)

    async with asyncio.TaskGroup() as group:
        for _ in range(REQUESTS):
            group.create_task(one())
            await asyncio.sleep(APART_S)
    print(json.dumps({**found, "answered": answered}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(_crowd(sys.argv[1]))
    else:
        tune_process()
        asyncio.run(main())
