"""What shapes cost: `python -m benchmarks.shapes`.

32 requests at once on the shipped model: free, under a JSON Schema, in strict auto (free text beside a tool).
Tokens a second, in turn, so that a drift of the machine hits all alike; the time of all processors together,
which other work on the machine changes little, masks that are made beside the forward included; and the time
of one mask by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine import (
    Constraint,
    GenerateRequest,
    LocalEngine,
    ReaderParams,
    RenderInput,
    SamplingParams,
    Shape,
    ToolShape,
)
from engine.structured.grammar import Grammars
from engine.tiny import CHECKPOINT

ROWS = 32
TOKENS = 128
ROUNDS = 7
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "items": {
                "type": "array",
                "minItems": 40,
                "items": {
                    "type": "object",
                    "properties": {"name": {"type": "string", "maxLength": 40}, "n": {"type": "integer"}},
                    "required": ["name", "n"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["items"],
        "additionalProperties": False,
    }
)
TOOL = ToolShape("look_up", '{"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}')
KINDS: dict[str, Constraint | None] = {
    "free": None,
    "json": Constraint(answer=Shape("json", SCHEMA)),
    "strict auto": Constraint((TOOL,), None, Shape("text")),
}


async def rate(
    engine: LocalEngine, prompt: tuple[int, ...], constraint: Constraint | None
) -> tuple[float, float]:
    """Tokens a second of all rows together, and microseconds of the processors for each."""
    sampling = SamplingParams(seed=0, max_tokens=TOKENS, temperature=1.0, min_tokens=TOKENS)
    reader = ReaderParams(dialect=constraint is not None and bool(constraint.tools))
    request = GenerateRequest("r", prompt, sampling, reader, constraint)

    async def one(row: int) -> int:
        count = 0
        own = replace(request, id=f"r{row}", sampling=replace(sampling, seed=row))
        async for chunk in engine.generate(own):
            count += len(chunk.token_ids)
        return count

    began, used = time.perf_counter(), used_s(engine)
    total = sum(await asyncio.gather(*map(one, range(ROWS))))
    return total / (time.perf_counter() - began), (used_s(engine) - used) / total * 1e6


def used_s(engine: LocalEngine) -> float:
    """Seconds of the processors so far, those of the process that makes masks included (on Linux)."""
    worker = None if engine._constraints is None else engine._constraints.fast._worker
    file = None if worker is None else Path(f"/proc/{worker.process.pid}/stat")
    ticks = [0, 0] if file is None or not file.exists() else file.read_text().rsplit(")", 1)[1].split()[11:13]
    return time.process_time() + sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


async def mask_us(
    engine: LocalEngine, prompt: tuple[int, ...], constraint: Constraint
) -> tuple[float, float]:
    """Microseconds of one mask along a generation: median and 99th percentile."""
    sampling = SamplingParams(seed=1, max_tokens=TOKENS)
    reader = ReaderParams(dialect=bool(constraint.tools))
    tokens: list[int] = []
    async for chunk in engine.generate(GenerateRequest("m", prompt, sampling, reader, constraint)):
        tokens += chunk.token_ids
    grammars = Grammars(engine._tokenizer, engine._dialect)
    matcher = grammars.compile(constraint, reader).matcher(TOKENS)
    mask, times = np.zeros((engine.info.vocab_size + 31) // 32, np.int32), []
    for token in tokens:
        began = time.perf_counter()
        matcher.fill(mask)
        times.append(time.perf_counter() - began)
        if token in engine.info.eos_token_ids:
            break
        matcher.advance(token)
    return statistics.median(times) * 1e6, float(np.percentile(times, 99)) * 1e6


async def main() -> None:
    """Print the rates, and each kind's beside the free one's."""
    engine = LocalEngine(CHECKPOINT)
    await engine.start()
    prompt = (await engine.render(RenderInput([{"role": "user", "content": "Tell me a story."}]))).ids
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for constraint in KINDS.values():
        await rate(engine, prompt, constraint)  # warm
    for _ in range(ROUNDS):
        for kind, constraint in KINDS.items():
            found[kind].append(await rate(engine, prompt, constraint))
    for kind, constraint in KINDS.items():
        pairs = list(zip(found[kind], found["free"], strict=True))
        speed = statistics.median(own[0] / free[0] for own, free in pairs)
        cost = statistics.median(own[1] / free[1] for own, free in pairs)
        tokens, used = map(statistics.median, zip(*found[kind], strict=True))
        line = f"{kind:12} {tokens:7.0f} tokens/s  {speed:6.1%} of free"
        line += f"  {used:6.0f} us of the processors a token, {cost - 1:+.1%}"
        if constraint is not None:
            median, worst = await mask_us(engine, prompt, constraint)
            line += f"  a mask {median:.1f} us, p99 {worst:.1f} us"
        print(line)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
