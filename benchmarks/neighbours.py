"""What a mask that is never made does to other rows: `python -m benchmarks.neighbours`.

16 rows on the shipped model, half of them free and half of them each under a grammar of its own. In every
second round there is one row more, whose grammar hangs in the middle of its text. Printed are the longest
gaps between the tokens of a row, of every round, as the asyncio side sees them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import suppress

from engine import (
    Constraint,
    ConstraintError,
    GenerateRequest,
    LocalEngine,
    ReaderParams,
    RenderInput,
    SamplingParams,
    Shape,
)
from engine.tiny import CHECKPOINT

ROWS = 16
TOKENS = 150
ROUNDS = 8


def regex(pattern: str) -> Constraint:
    """Texts of this pattern."""
    return Constraint(answer=Shape("regex", pattern))


def endless(letters: int) -> Constraint:
    """A grammar whose mask is never made behind so many letters: a line break is forced for ever."""
    return Constraint(answer=Shape("lark", f'start: X NL "\\n"\nNL: /\\n+/\nX: /[a-z]{{{letters}}}/'))


async def gap_ms(
    engine: LocalEngine, prompt: tuple[int, ...], constraint: Constraint | None, row: int
) -> float:
    """The longest time between two tokens of one row."""
    sampling = SamplingParams(seed=row, max_tokens=TOKENS, min_tokens=TOKENS, ignore_eos=True)
    asked = GenerateRequest(f"r{row}", prompt, sampling, ReaderParams(dialect=False), constraint)
    gap, last = 0.0, 0.0
    async for _ in engine.generate(asked):
        now = time.perf_counter()
        gap, last = max(gap, now - last if last else 0.0), now
    return gap * 1e3


async def measured(engine: LocalEngine, prompt: tuple[int, ...], killer: Constraint | None) -> list[float]:
    """The longest gap of free rows, and of those under grammars."""
    constraints = [regex(f"[a-z ]{{{2000 + row}}}") if row % 2 else None for row in range(ROWS)]
    rows = [gap_ms(engine, prompt, constraint, row) for row, constraint in enumerate(constraints)]
    hung = None if killer is None else asyncio.create_task(gap_ms(engine, prompt, killer, ROWS))
    gaps = await asyncio.gather(*rows)
    if hung is not None:
        with suppress(ConstraintError):
            await hung
    return [max(gaps[0::2]), max(gaps[1::2])]


async def main() -> None:
    """Print the gaps without the row that hangs, and beside it."""
    engine = LocalEngine(CHECKPOINT)
    await engine.start()
    prompt = (await engine.render(RenderInput([{"role": "user", "content": "Tell me a story."}]))).ids
    await measured(engine, prompt, None)  # warm
    found: dict[str, list[list[float]]] = {"alone": [], "beside it": []}
    for turn in range(ROUNDS):
        killer = endless(30 + turn)
        with suppress(ConstraintError):
            await engine.check(killer)  # its trial is not what is measured
        found["alone"].append(await measured(engine, prompt, None))
        found["beside it"].append(await measured(engine, prompt, killer))
    for what, rounds in found.items():
        for kind, gaps in zip(("free", "under grammars"), zip(*rounds, strict=True), strict=True):
            every = " ".join(f"{gap:.0f}" for gap in gaps)
            print(f"{what:10} {kind:15} longest gap: {statistics.median(gaps):5.0f} ms, each {every}")
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
