"""No request holds the event loop for longer than 20 ms at a time, whatever it contains."""

from __future__ import annotations

import asyncio
from pathlib import Path

from engine import ScriptedEngine
from server.process.serve import load_late_modules
from tests.support.running import live_app
from tests.support.slices import LARGE, LIMIT_S, TRIES, exchange, go_on, request, slowness, watched


async def test_no_request_holds_the_loop(tmp_path: Path) -> None:
    await asyncio.to_thread(load_late_modules)
    engine = ScriptedEngine(max_model_len=1 << 20)
    async with live_app(tmp_path, engine) as server:
        await asyncio.to_thread(exchange, server.base_url, request("GET", "/health"))
        behind = await go_on(server.base_url)
        longest: dict[str, float] = {}
        for name in (*LARGE, *behind):
            for _ in range(TRIES):
                raw = behind[name] if name in behind else await asyncio.to_thread(LARGE[name])
                with watched() as slices:
                    status, reply = await asyncio.to_thread(exchange, server.base_url, raw)
                assert status in (200, 400, 404, 413), (name, status, reply[:200])
                slice_s = slices.seconds if slices.seconds <= LIMIT_S else slices.seconds / slowness()
                longest[name] = min(slice_s, longest.get(name, slice_s))
                if longest[name] <= LIMIT_S:
                    break
        too_long = {name: f"{seconds * 1e3:.1f} ms" for name, seconds in longest.items() if seconds > LIMIT_S}
        assert not too_long
