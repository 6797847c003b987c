"""What HTTP and storage cost beside the engine itself: `python -m benchmarks.serving`.

64 greedy answers of the same length at once: from `LocalEngine` in this process, and as streams of Responses
from `antiphon serve`, stored and not, in turn, so that a drift of the machine hits all alike. Their client is
a process that does as little as it can. Prints tokens a second, and each as a share of the engine's own,
round by round. The shipped model, or random weights of a real size (`--size qwen3-0.6b`).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.crowd import read, run
from benchmarks.start import serving
from engine import (
    SIZES,
    GenerateRequest,
    LocalEngine,
    ReaderParams,
    RenderInput,
    SamplingParams,
    write_random_model,
)
from engine.tiny import CHECKPOINT

INPUT = "Tell me a story."
WAYS = ("engine", "store=false", "store=true")


async def answers(engine: LocalEngine, streams: int, count: int) -> float:
    """Seconds until all have been answered."""
    prompt = await engine.render(RenderInput([{"role": "user", "content": INPUT}]))
    sampling = SamplingParams(
        seed=0, max_tokens=count, min_tokens=count, temperature=0.0, num_assistant_tokens=0
    )

    async def one(index: int) -> None:
        request = GenerateRequest(f"r{index}", prompt.ids, sampling, ReaderParams(starts_in=prompt.starts_in))
        num_tokens = 0
        async for chunk in engine.generate(request):
            num_tokens += len(chunk.token_ids)
        assert num_tokens == count

    began = time.perf_counter()
    await asyncio.gather(*map(one, range(streams)))
    return time.perf_counter() - began


async def measure(model: Path, streams: int, count: int, rounds: int, *further: str) -> None:
    """Rounds; each begins with another of the ways. further: flags of the server."""
    fields: dict[str, Any] = {
        "max_output_tokens": count,
        "min_tokens": count,
        "temperature": 0,
        "num_assistant_tokens": 0,
    }
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    flags = ("--model", str(model), "--log-level", "error", *further)  # nobody reads what it says
    engine = LocalEngine(model)
    await engine.start()
    gc.freeze()
    with tempfile.TemporaryDirectory() as data, serving(Path(data), *flags) as url:
        for number in range(rounds + 1):
            for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):
                if way == "engine":
                    seconds = await answers(engine, streams, count)
                else:
                    stored = way == "store=true"
                    seconds = (await read(url, streams, INPUT, store=stored, fields=fields)).seconds
                if number:  # the first one is for warming up
                    speeds[way].append(streams * count / seconds)
    await engine.close()
    for way, found in speeds.items():
        shares = [own / whole for own, whole in zip(found, speeds["engine"], strict=True)]
        print(
            f"{way:12} {statistics.median(found):7.0f} tok/s, {statistics.median(shares):.1%} of it "
            f"({rounds} rounds: {min(shares):.0%} to {max(shares):.0%})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=["tiny", *SIZES], default="tiny")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--engine-process", action="store_true", help="the server's in a process of its own")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model = CHECKPOINT
        if options.size != "tiny":
            model = Path(temporary) / options.size
            write_random_model(options.size, model)
        further = ["--engine-process"] if options.engine_process else []
        run(measure(model, options.streams, options.tokens, options.rounds, *further))


if __name__ == "__main__":
    main()
