"""Streams of the shipped model in this process, and what something beside them costs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine

from engine import GenerateRequest, LocalEngine, ReaderParams, RenderInput, SamplingParams
from engine.tiny import CHECKPOINT

STREAMS = 8


class Streams:
    """`STREAMS` of them at a time, sampled, without an end."""

    def __init__(self) -> None:
        self._engine = LocalEngine(CHECKPOINT)
        self._prompt: tuple[int, ...] = ()

    async def start(self) -> None:
        """Load the model, and generate until it is warm."""
        await self._engine.start()
        story = RenderInput([{"role": "user", "content": "Tell me a story."}])
        self._prompt = (await self._engine.render(story)).ids
        await self._rate(1.0)

    async def close(self) -> None:
        """End the engine."""
        await self._engine.close()

    async def alone_and_beside(
        self, window_s: float, *others: Coroutine[None, None, None]
    ) -> tuple[float, float]:
        """Tokens a second of all streams together: alone, and then beside others, which are cancelled."""
        alone = await self._rate(window_s)
        tasks = [asyncio.create_task(other) for other in others]
        beside = await self._rate(window_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return alone, beside

    async def _rate(self, window_s: float) -> float:
        num = 0

        async def stream(number: int) -> None:
            nonlocal num
            sampling = SamplingParams(seed=number, max_tokens=900, ignore_eos=True)
            while True:
                asked = GenerateRequest(f"r{number}", self._prompt, sampling, ReaderParams(dialect=False))
                async for chunk in self._engine.generate(asked):
                    num += len(chunk.token_ids)

        streams = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
        await asyncio.sleep(0.3)  # all are under way
        before, began = num, time.perf_counter()
        await asyncio.sleep(window_s)
        rate = (num - before) / (time.perf_counter() - began)
        for each in streams:
            each.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        return rate
