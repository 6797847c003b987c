"""Finds out whether the model generates, at most once in a few seconds however often it is asked."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing

from engine import Engine, EngineError, GenerateRequest, ReaderParams, SamplingParams
from server.errors import ApiError

log = logging.getLogger("antiphon")

PROBE_S = 10.0
"""How long two tokens may take before the model counts as one that does not generate."""

FRESH_S = 5.0
"""How long a finding is repeated: nobody can keep the model busy by asking."""

FIRST = -1_000_000
"""Its priority: it stands before all requests, whose number says nothing of the model's health."""


class GenerationProbe:
    """Generates two tokens, so that both a prompt and a step after it are computed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._finding: asyncio.Task[str | None] | None = None
        self._found_at = 0.0

    async def check(self) -> None:
        """Raise ApiError 503 `probe_failed` where the latest probe did; those who ask at once share it."""
        finding = self._finding
        if finding is None or (finding.done() and time.monotonic() - self._found_at > FRESH_S):
            finding = self._finding = asyncio.create_task(self._find(), name="probe")
        if (fault := await asyncio.shield(finding)) is not None:
            message = f"The model does not generate: {fault}."
            raise ApiError(503, message, code="probe_failed", headers={"retry-after": str(int(FRESH_S))})

    async def _find(self) -> str | None:
        """What keeps the model from generating."""
        fault: str | None = "the generation ended without a token"
        try:
            async with asyncio.timeout(PROBE_S):
                prompt = await self._engine.tokenize("ready")
                request = GenerateRequest(
                    id="probe",
                    prompt_ids=prompt,
                    sampling=SamplingParams(seed=0, max_tokens=2, temperature=0.0, ignore_eos=True),
                    reader=ReaderParams(dialect=False),
                    priority=FIRST,
                )
                with self._engine.admission.enter(promised=True) as place:
                    async with aclosing(self._engine.generate(request, place)) as chunks:
                        async for chunk in chunks:
                            fault = None if chunk.token_ids else fault
        except TimeoutError:
            fault = f"it took longer than {PROBE_S:g} s"
        except EngineError as error:
            fault = type(error).__name__
        if fault is not None:
            log.error("the model does not generate: %s", fault)
        self._found_at = time.monotonic()
        return fault
