"""What a turn of a long chain costs: `python -m benchmarks.chain [--model antiphon-tiny]`.

One client goes on with `previous_response_id`, turn after turn, and asks for few words. Prints the processor
time of a turn that is the tenth of its chain and of one that is the last of `--turns`, without that of the
engine's thread, which has the attention, and with it. Medians.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import tempfile
import threading
from pathlib import Path

import orjson

from server.process.process_ends import tune_process

ROUNDS = 20
"""Turns of the long chain that are measured, each beside one of a chain that has just begun."""


async def main(model: str, turns: int) -> None:
    """A long chain and short ones, in turn: so whatever else the machine does slows both."""
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

            async def go_on(previous: str | None, number: int) -> tuple[str, int]:
                body = {"input": f"say w{number}", "max_output_tokens": 16, "previous_response_id": previous}
                raw = request("POST", RESPONSES, body)
                status, reply = await asyncio.to_thread(exchange, server.base_url, raw)
                assert status == 200, reply
                made = orjson.loads(reply)
                return made["id"], made["usage"]["input_tokens"]

            longs: str | None = None
            for number in range(1, turns):
                longs, _ = await go_on(longs, number)
            spent: dict[int, list[tuple[float, float]]] = {10: [], turns: []}
            for number in range(ROUNDS):
                short: str | None = None
                for early in range(9):
                    short, _ = await go_on(short, early)
                for turn, previous in ((10, short), (turns, longs)):
                    began = _spent()
                    found, tokens = await go_on(previous, turns + number)
                    whole, engines = (now - then for now, then in zip(_spent(), began, strict=True))
                    spent[turn].append((whole - engines, whole))
                    longs = found if turn == turns else longs
            for turn, seconds in spent.items():
                own, whole = (statistics.median(column) * 1e3 for column in zip(*seconds, strict=True))
                print(f"turn {turn:5}: {own:6.1f} ms without the engine's thread, {whole:6.1f} ms with it")
            print(f"{tokens} tokens of prompt at the end")


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
    parser.add_argument("--turns", type=int, default=1000)
    options = parser.parse_args()
    tune_process()
    asyncio.run(main(options.model, options.turns))
