"""What a turn of a long chain costs: `python -m benchmarks.chain [--model antiphon-tiny]`.

One client goes on with `previous_response_id`, turn after turn, and asks for few words. Prints processor time
per turn around some turns, without that of the engine's thread (which has the attention) and with it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
import threading
from pathlib import Path

import orjson

TURNS = (10, 100, 300, 1000)
AROUND = 10
"""Turns that are measured in front of each of them, itself included."""


async def main(model: str, last: int) -> None:
    """One chain."""
    from server.config import Config
    from server.model_registry import build_engine
    from server.process.serve import load_late_modules
    from tests.support.running import live_app
    from tests.support.slices import RESPONSES, exchange, request

    await asyncio.to_thread(load_late_modules)
    with tempfile.TemporaryDirectory() as data:
        kind = "scripted" if model == "scripted" else "local"
        engine = build_engine(Config(data=Path(data), engine=kind, model=model))
        async with live_app(Path(data), engine) as server:
            gc.freeze()
            previous = None
            began = _spent()
            for turn in range(1, last + 1):
                if turn + AROUND - 1 in TURNS:
                    began = _spent()
                body = {"input": f"say w{turn}", "max_output_tokens": 16, "previous_response_id": previous}
                status, reply = await asyncio.to_thread(
                    exchange, server.base_url, request("POST", RESPONSES, body)
                )
                if status != 200:
                    print(f"turn {turn}: {reply.decode()}")
                    return
                previous = orjson.loads(reply)["id"]
                if turn in TURNS:
                    whole, engines = (now - then for now, then in zip(_spent(), began, strict=True))
                    tokens = orjson.loads(reply)["usage"]["input_tokens"]
                    print(
                        f"turn {turn:5}: {(whole - engines) / AROUND * 1e3:6.1f} ms without the engine's "
                        f"thread, {whole / AROUND * 1e3:6.1f} ms with it; {tokens} tokens of prompt",
                        flush=True,
                    )


def _spent() -> tuple[float, float]:
    """Seconds of processor time: of all threads of Python's, and of the engine's."""
    spent = {
        thread.name: int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
        for thread in threading.enumerate()
    }
    return sum(spent.values()), spent.get("engine", 0.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="scripted", help="a folder, or antiphon-tiny (default: no model)")
    parser.add_argument("--turns", type=int, default=max(TURNS))
    options = parser.parse_args()
    sys.setswitchinterval(1e-4)
    asyncio.run(main(options.model, options.turns))
