"""What guessing ahead is worth: `python -m benchmarks.speculation`.

The shipped model with drafts out of the text, beside itself without, in turn, so that a drift of the machine
hits both alike. Copying is what such drafts are for; the story is drawn freely and repeats little, so it
shows what guessing in vain costs. Every text is compared with the one that came without drafts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass, replace

from engine import GenerateRequest, LocalEngine, ReaderParams, RenderInput, SamplingParams
from engine.tiny import CHECKPOINT

TEXT = (
    "alpha river stone green window paper seven lamp garden bread silver chair winter table music forest "
    "yellow small bird house water night summer letter"
)
WORDS = TEXT.split()


@dataclass(frozen=True)
class Load:
    """What is asked: `batch` requests at once, `repeats` times one after the other."""

    name: str
    batch: int
    repeats: int
    copies: bool


LOADS = (
    Load("copying", 1, 12, True),
    Load("copying", 8, 3, True),
    Load("copying", 64, 1, True),
    Load("a story", 1, 4, False),
    Load("a story", 8, 1, False),
    Load("a story", 64, 1, False),
)


@dataclass(frozen=True)
class Took:
    """What a load took of the clock and of the processors, in seconds, and what was said."""

    clock: float
    processors: float
    said: list[tuple[int, ...]]


async def run(engine: LocalEngine, load: Load, seed: int) -> Took:
    """The whole load once."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(load.batch * load.repeats):
        text = f"Say {' '.join(rng.sample(WORDS, 18))}." if load.copies else "Tell me a story."
        prompts.append((await engine.render(RenderInput([{"role": "user", "content": text}]))).ids)
    cold = SamplingParams(seed=0, max_tokens=96, temperature=0.0)
    free = SamplingParams(seed=0, max_tokens=96, min_tokens=96)
    sampling = cold if load.copies else free

    async def one(index: int) -> tuple[int, ...]:
        own = replace(sampling, seed=index)
        return await answer(engine, prompts[index], own, owner=f"{seed}/{index}")

    clock, processors, said = time.perf_counter(), time.process_time(), []
    for at in range(0, len(prompts), load.batch):
        said += await asyncio.gather(*map(one, range(at, at + load.batch)))
    return Took(time.perf_counter() - clock, time.process_time() - processors, said)


async def answer(
    engine: LocalEngine, prompt: tuple[int, ...], sampling: SamplingParams, owner: str = ""
) -> tuple[int, ...]:
    """The tokens of one answer."""
    request = GenerateRequest("r", prompt, sampling, ReaderParams(dialect=False), owner=owner)
    return tuple([token async for chunk in engine.generate(request) for token in chunk.token_ids])


async def measure(num_rounds: int, num_drafts: int) -> None:
    """Print the ratio of each load's speed with drafts to that without."""
    without, guessing = (LocalEngine(CHECKPOINT, num_assistant_tokens=count) for count in (0, num_drafts))
    for engine in (without, guessing):
        await engine.start()
        await run(engine, LOADS[0], -1)
    for load in LOADS:
        clock, processors, before = [], [], guessing.stats()
        for seed in range(num_rounds):
            pair = (without, guessing) if seed % 2 else (guessing, without)
            found = {engine: await run(engine, load, seed) for engine in pair}
            plain, fast = found[without], found[guessing]
            assert plain.said == fast.said, "drafts changed a text"
            clock.append(plain.clock / fast.clock)
            processors.append(plain.processors / fast.processors)
        stats = guessing.stats()
        drafts = stats.drafts_total - before.drafts_total
        accepted = stats.drafts_accepted_total - before.drafts_accepted_total
        print(
            f"{load.name:8} batch {load.batch:2}: {statistics.median(clock):.2f} x as fast "
            f"({min(clock):.2f} to {max(clock):.2f}), {statistics.median(processors):.2f} x by processors; "
            f"{accepted} of {drafts} drafts came true",
            flush=True,
        )
    for engine in (without, guessing):
        await engine.close()


async def prove(count: int) -> None:
    """Compare as many answers, cold and drawn, without drafts, out of the text, and by a draft model."""
    engines = {
        "none": LocalEngine(CHECKPOINT, num_assistant_tokens=0),
        "text": LocalEngine(CHECKPOINT, num_assistant_tokens=8),
        "model": LocalEngine(CHECKPOINT, draft_model=CHECKPOINT, assistant_confidence_threshold=0.2),
    }
    rng, prompts = random.Random(1), []
    for engine in engines.values():
        await engine.start()
    for index in range(count):
        words = " ".join(rng.choices(WORDS, k=rng.randrange(1, 24)))
        text = rng.choice(("Say {}.", "Repeat after me: {}", "Tell me a story about {}.", "{}?")).format(
            words
        )
        rendered = await engines["none"].render(RenderInput([{"role": "user", "content": text}]))
        heat = 0.0 if index % 2 else rng.choice((0.4, 0.8, 1.2))
        prompts.append((rendered.ids, SamplingParams(seed=index, max_tokens=64, temperature=heat)))
    said = {}
    for kind, engine in engines.items():
        answers: list[tuple[int, ...]] = []
        for at in range(0, count, 8):
            several = prompts[at : at + 8]
            answers += await asyncio.gather(*(answer(engine, *each) for each in several))
        said[kind] = answers
        stats = engine.stats()
        same = sum(own == other for own, other in zip(answers, said["none"], strict=True))
        print(
            f"{kind:5}: {same} of {count} texts are the same; {stats.drafts_accepted_total} of "
            f"{stats.drafts_total} drafts came true in {stats.steps_total} steps",
            flush=True,
        )
        await engine.close()


def main() -> None:
    """Measure, or prove."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafts", type=int, default=8, help="num_assistant_tokens")
    parser.add_argument(
        "--prove", type=int, metavar="PROMPTS", help="compare so many texts, and measure nothing"
    )
    args = parser.parse_args()
    asyncio.run(prove(args.prove) if args.prove else measure(args.rounds, args.drafts))


if __name__ == "__main__":
    main()
