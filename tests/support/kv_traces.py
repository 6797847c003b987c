"""Random traces of conversations on an engine that saves KV on disk, beside one that does not."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engine import LocalEngine
from engine.core import tiering
from engine.tiers import rates
from engine.types import GenerateRequest, ReaderParams
from tests.support.driver import greedy

PLAIN = ReaderParams(dialect=False)
LETTERS = range(33, 60)


@contextmanager
def slow_arithmetic() -> Iterator[None]:
    """Small models compute faster than any disk reads: computing seems slow."""
    least, compute_s, read_s = tiering.LEAST_S, rates.Rates.compute_s, rates.Rates.read_s
    tiering.LEAST_S = 0.0
    rates.Rates.compute_s = lambda _, begin, end: float(end - begin)  # type: ignore[method-assign]
    rates.Rates.read_s = lambda _, num_bytes: 1e-9 * num_bytes  # type: ignore[method-assign]
    try:
        yield
    finally:
        tiering.LEAST_S = least
        rates.Rates.compute_s, rates.Rates.read_s = compute_s, read_s  # type: ignore[method-assign]


def ask(prompt: tuple[int, ...], max_tokens: int = 8, **fields: Any) -> GenerateRequest:
    """A greedy request, saved as `r` unless said otherwise."""
    return GenerateRequest(
        id="r",
        prompt_ids=prompt,
        sampling=greedy(max_tokens, ignore_eos=True),
        **{"reader": PLAIN, "saved_as": "r", **fields},
    )


async def answer(engine: LocalEngine, request: GenerateRequest) -> tuple[tuple[int, ...], int]:
    """The tokens of an answer, and how many of the prompt were not computed."""
    tokens: list[int] = []
    cached = 0
    async for chunk in engine.generate(request):
        tokens += chunk.token_ids
        cached = chunk.cached_tokens if chunk.cached_tokens is not None else cached
    return tuple(tokens), cached


async def flood(engine: LocalEngine, num: int = 12) -> None:
    """Other prompts, which need a small pool several times over."""
    for letter in range(num):
        await answer(engine, ask((100 + letter,) * 160, 2, saved_as=None))


class Trace:
    """One trace: conversations go on, branch, run side by side, are forgotten and evicted, files are damaged,
    and the engine is restarted, or killed while it writes."""

    def __init__(self, model: Path, folder: Path, draw: random.Random, *, deterministic: bool) -> None:
        self.num_restored = self.num_restarts = self.num_kills = self.num_damaged = 0
        self._model, self._folder, self._draw = model, folder, draw
        self._settings: dict[str, Any] = {
            "num_threads": 1,
            "deterministic": deterministic,
            "max_num_seqs": 8,
            "num_blocks": draw.choice([34, 60]),
            "kv_disk_bytes": draw.choice([200 << 10, 10 << 20]),
            "max_num_batched_tokens": draw.choice([48, 2048]),
        }

    async def run(self, num_turns: int = 10) -> list[str]:
        """What was wrong."""
        draw, wrong = self._draw, []
        plain = await self._start(kv_disk_bytes=0, num_blocks=400)
        engine = await self._start(kv_disk_folder=self._folder)
        histories = [tuple(draw.choices(LETTERS, k=40)) for _ in range(3)]
        for turn in range(num_turns):
            requests = [self._request(histories, f"{turn}-{i}") for i in range(draw.randint(1, 4))]
            got = await asyncio.gather(*(answer(engine, each) for each in requests))
            want = await asyncio.gather(*(answer(plain, each) for each in requests))
            if [tokens for tokens, _ in got] != [tokens for tokens, _ in want]:
                wrong.append(f"turn {turn} said something else")
            histories += [
                (*each.prompt_ids, *tokens) for each, (tokens, _) in zip(requests, want, strict=True)
            ]
            engine = await self._disturb(engine, turn)
            engine.check_integrity()
        await engine.settled()
        self.num_restored += engine.stats().tier.restored_tokens_total
        if engine.stats().kv_blocks_used:
            wrong.append("a block leaked")
        await engine.close()
        await plain.close()
        return wrong

    def _request(self, histories: list[tuple[int, ...]], name: str) -> GenerateRequest:
        draw, base = self._draw, self._draw.choice(histories)
        cut = draw.choice([len(base), draw.randint(1, len(base))])
        prompt = (*base[:cut], *draw.choices(LETTERS, k=draw.randint(1, 30)))[:300]
        return ask(prompt, draw.randint(1, 20), saved_as=draw.choice([name, name, None]))

    async def _disturb(self, engine: LocalEngine, turn: int) -> LocalEngine:
        draw = self._draw
        if draw.random() < 0.3:
            engine.forget([f"{draw.randint(0, turn)}-{draw.randint(0, 3)}"])
        if draw.random() < 0.5:
            await flood(engine, 4)
        if draw.random() < 0.2:
            self._damage()
        if draw.random() < 0.7:
            return engine
        self.num_restored += engine.stats().tier.restored_tokens_total
        if draw.random() < 0.5:  # what lies there now, while it may be writing, is what a kill leaves
            self.num_kills += 1
            left = self._folder.with_name(f"{self._folder.name}-{turn}")
            with suppress(shutil.Error):  # files that it renamed or removed meanwhile
                shutil.copytree(self._folder, left)
            self._folder = left
        self.num_restarts += 1
        await engine.close()
        return await self._start(kv_disk_folder=self._folder)

    def _damage(self) -> None:
        files = sorted(self._folder.rglob("*.kv"))
        if files:
            self.num_damaged += 1
            path = self._draw.choice(files)
            with suppress(OSError):
                data = bytearray(path.read_bytes())
                if data and self._draw.random() < 0.7:
                    data[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
                else:
                    del data[self._draw.randint(0, len(data)) :]
                path.write_bytes(data)

    async def _start(self, **settings: Any) -> LocalEngine:
        engine = LocalEngine(self._model, **{**self._settings, **settings})
        await engine.start()
        return engine
