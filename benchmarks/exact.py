"""What `deterministic` promises and costs, with the shipped model in process: `python -m benchmarks.exact`.

First: of streams sampled at temperature 1, how many are the same when they are generated again from a random
token on (as after a crash), all together, each with the tokens before it as its prefix. Then: tokens a second
without and with the mode, in turn, so that a drift of the machine hits both alike.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time

from engine import GenerateRequest, LocalEngine, ReaderParams, RenderInput, SamplingParams
from engine.config import Dtype
from engine.tiny import CHECKPOINT

STREAMS = 96
RESUMES = 4  # of every stream
TOKENS = 128
BATCHES = (1, 16, 64)
ROUNDS = 3

Ids = tuple[int, ...]


async def started(dtype: Dtype, deterministic: bool) -> LocalEngine:
    """An engine over the shipped model."""
    engine = LocalEngine(CHECKPOINT, dtype=dtype, deterministic=deterministic)
    await engine.start()
    return engine


async def prompts(engine: LocalEngine, count: int) -> list[Ids]:
    """As many different prompts."""
    text = "Say alpha beta gamma delta number {}."
    return [
        tuple((await engine.render(RenderInput([{"role": "user", "content": text.format(10 + i)}]))).ids)
        for i in range(count)
    ]


async def generate(engine: LocalEngine, prompt: Ids, seed: int, prefix: Ids = (), owner: str = "") -> Ids:
    """`TOKENS` sampled tokens, those of the prefix included."""
    request = GenerateRequest(
        str(seed),
        prompt,
        SamplingParams(seed=seed, max_tokens=TOKENS, ignore_eos=True),
        ReaderParams(dialect=False),
        prefix=(prefix,) if prefix else (),
        owner=owner,
    )
    return tuple([token async for chunk in engine.generate(request) for token in chunk.token_ids])


async def repeated(dtype: Dtype, deterministic: bool) -> tuple[int, int]:
    """Resumed streams that equal the uninterrupted ones, and how many there were."""
    engine = await started(dtype, deterministic)
    asked = list(enumerate(await prompts(engine, STREAMS)))
    whole = await asyncio.gather(*(generate(engine, prompt, seed) for seed, prompt in asked))
    draw, equal = random.Random(0), 0
    for attempt in range(RESUMES):
        resumed = await asyncio.gather(
            *(
                generate(engine, prompt, seed, whole[seed][: draw.randrange(1, TOKENS)], f"again {attempt}")
                for seed, prompt in asked
            )
        )
        equal += sum(one == other for one, other in zip(whole, resumed, strict=True))
    await engine.close()
    return equal, STREAMS * RESUMES


async def speeds(dtype: Dtype) -> list[tuple[int, float, float]]:
    """(batch, tokens a second by default, and with the mode), medians of the rounds."""
    engines = [await started(dtype, deterministic) for deterministic in (False, True)]
    asked = await prompts(engines[0], max(BATCHES))
    rows = []
    for batch in BATCHES:
        times: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for engine, own in zip(engines, times, strict=True):
                began = time.perf_counter()
                owner = str(began)  # nothing is cached
                await asyncio.gather(
                    *(generate(engine, prompt, seed, (), owner) for seed, prompt in enumerate(asked[:batch]))
                )
                own.append(time.perf_counter() - began)
        plain, exact = (batch * TOKENS / statistics.median(own) for own in times)
        rows.append((batch, plain, exact))
    for engine in engines:
        await engine.close()
    return rows


async def main() -> None:
    """Print both tables."""
    print("| resumed streams equal to the uninterrupted ones | default | deterministic |\n|---|---|---|")
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        (plain, count), (exact, _) = await repeated(dtype, False), await repeated(dtype, True)
        print(f"| {dtype} | {plain} of {count} | {exact} of {count} |", flush=True)
    print("\n| tokens a second, sampled | default | deterministic | ratio |\n|---|---|---|---|")
    for dtype in dtypes:
        for batch, plain_speed, exact_speed in await speeds(dtype):
            ratio = exact_speed / plain_speed
            print(
                f"| {dtype}, batch {batch} | {plain_speed:.0f} | {exact_speed:.0f} | {ratio:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    asyncio.run(main())
