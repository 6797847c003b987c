"""Measured requests to an engine in this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from itertools import count

from engine import Engine, EngineError, GenerateRequest, ReaderParams, SamplingParams
from server.bench.figures import Sample


class Inside:
    """A started engine, asked for `num_output` tokens a prompt."""

    def __init__(self, engine: Engine, num_output: int, *, temperature: float, seed: int) -> None:
        self._engine = engine
        self._num_output = num_output
        self._temperature = temperature
        self._seed = seed
        self._numbers = count()
        special = set(engine.info.eos_token_ids)
        self._vocabulary = [token for token in range(engine.info.vocab_size) if token not in special]

    async def ask(self, prompt: Sequence[int], due: float) -> Sample:
        """See `load.Ask`."""
        number = next(self._numbers)
        size = len(self._vocabulary)
        request = GenerateRequest(
            id=f"bench-{number}",
            prompt_ids=tuple(self._vocabulary[value % size] for value in prompt),
            sampling=SamplingParams(
                seed=self._seed + number,
                max_tokens=self._num_output,
                temperature=self._temperature,
                ignore_eos=True,
                num_assistant_tokens=0,  # random texts loop: guesses at them would flatter every figure
            ),
            reader=ReaderParams(dialect=False),
        )
        arrivals: list[float] = []
        steps: list[int] = []
        num_output, num_cached, error = 0, 0, None
        try:
            async with aclosing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    if chunk.token_ids:
                        arrivals.append(time.perf_counter())
                        steps.append(self._engine.stats().steps_total)
                    num_output += len(chunk.token_ids)
                    num_cached += chunk.cached_tokens or 0
        except EngineError as failure:
            error = f"{type(failure).__name__}: {failure}"
        return Sample(
            due,
            time.perf_counter(),
            tuple(arrivals),
            num_output,
            len(prompt),
            num_cached,
            "usage",
            error,
            steps[-1] - steps[0] if steps else None,
        )


def decode_step_s(rounds: Sequence[Sequence[Sample]]) -> float | None:
    """Seconds of a decode step of a batch that was sent at once, the median of some rounds.

    It is read off the request whose first token came last: from there on all of the batch decodes. A step may
    make several tokens of a request.
    """
    last = [max(samples, key=lambda sample: sample.first_s) for samples in rounds]
    times = [sum(sample.gaps_s) / sample.steps for sample in last if sample.error is None and sample.steps]
    return statistics.median(times) if times else None
