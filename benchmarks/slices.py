"""The longest slice of the event loop that each of the largest requests takes: `python -m benchmarks.slices`.

A scripted engine, so that what is measured is the server's. Prints the status of the reply, the longest slice
in processor time of the loop's thread, and how long the whole request took.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from pathlib import Path

from server.process.process_ends import tune_process


async def main() -> None:
    """Each request, once to warm up and then twice."""
    from engine import ScriptedEngine
    from server.process.serve import load_late_modules
    from tests.support.running import live_app
    from tests.support.slices import LARGE, exchange, go_on, watched

    await asyncio.to_thread(load_late_modules)
    with tempfile.TemporaryDirectory() as folder:
        async with live_app(Path(folder), ScriptedEngine(max_model_len=1 << 20)) as server:
            gc.freeze()
            behind = await go_on(server.base_url)
            for name in (*LARGE, *behind):
                raw = behind[name] if name in behind else await asyncio.to_thread(LARGE[name])
                longest = seconds = 0.0
                for _ in range(2):
                    began = time.monotonic()
                    with watched() as slices:
                        status, _body = await asyncio.to_thread(exchange, server.base_url, raw)
                    longest, seconds = max(longest, slices.seconds), time.monotonic() - began
                print(f"{name:45} {status} {longest * 1e3:6.1f} ms {seconds:8.2f} s", flush=True)


if __name__ == "__main__":
    tune_process()
    asyncio.run(main())
