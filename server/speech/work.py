"""Carries out what a form with sound asks, window by window, within the limits of whoever asks."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import NoReturn

import orjson

from engine import transcribe
from server.access import Principal, require_use
from server.config import Config
from server.errors import ApiError
from server.limits import Limiter, Subject, Visit
from server.model_registry import SpeechModel
from server.schema import refuse
from server.speech.answers import POSITIONS_A_SECOND, Heard, deltas, done
from server.speech.requests import SpeechRequest
from server.sse_frame import frame
from server.telemetry import current
from server.usage import Meter
from storage import Account, Counts
from tools import ReadersBusy, ReadingLimits, Sound, UnreadableDocument, read_sound

CPU_S, WALL_S = 180, 300.0
"""Of a processor, and by the clock, that the decoding of a file may take: an hour of sound takes some ten
seconds."""

LAST_FRAME = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class SpeechWork:
    """A request's work. file: reads the file's bytes. filename: as the client says it."""

    served: SpeechModel
    asked: SpeechRequest
    filename: str
    file: Callable[[], Awaitable[bytes]]
    principal: Principal
    subjects: tuple[Subject, ...]
    limiter: Limiter
    meter: Meter
    config: Config

    async def windows(self, stack: ExitStack) -> AsyncGenerator[Heard]:
        """What was heard so far, after each window. stack: closed when the request is over.

        The first step takes a place among those that wait, so that a refusal costs next to nothing. Raises
        ApiError 400, 403, 413, 429 and 503, and the engine's errors; closing it ends the work.
        """
        who, served = self.principal, self.served
        require_use(who, served.allowed_as)
        window = self.asked.window(served.info)
        visit = await self.limiter.enter(self.subjects, served.name)
        stack.callback(visit.leave)
        if self.asked.stream:
            stack.enter_context(self.limiter.stream(self.subjects))
        place = stack.enter_context(served.engine.admission.enter(who.owner, who.service.weight))
        heard: Heard | None = None
        try:
            # Only so many sounds at once are in memory; the files of others wait in storage.
            async with served.engine.gate.enter(who.owner):
                place.begin()
                sound = await self._sound()
                heard = Heard(sound.seconds)
                await visit.reserve(heard.audio_tokens, 0)
                windows = transcribe(
                    served.engine,
                    memoryview(sound.samples),
                    window,
                    owner=who.owner,
                    weight=who.service.weight,
                    deadline=served.caps.deadline(),
                )
                async with aclosing(windows):
                    async for each in windows:
                        heard.windows.append(each)
                        yield heard
        finally:
            if heard is not None and heard.windows:
                self._spent(heard, visit)

    async def whole(self, stack: ExitStack) -> Heard:
        """All that was heard. See `windows`."""
        heard: Heard | None = None
        async with aclosing(self.windows(stack)) as windows:
            async for each in windows:
                heard = each
        assert heard is not None
        return heard

    async def frames(self, stack: ExitStack) -> AsyncGenerator[bytes]:
        """The events of a stream: the text of each window as soon as it is heard, and the end. See
        `windows`."""
        heard, told = None, ""
        async with aclosing(self.windows(stack)) as windows:
            async for heard in windows:
                events = [*deltas(told, heard.windows[-1][1].segments, self.asked)]
                told += "".join(event["delta"] for event in events)
                # Even a window without a word is told, so that whoever waits sees that the work goes on.
                yield b"".join(frame(None, orjson.dumps(event)) for event in events) or b": silence\n\n"
        assert heard is not None
        yield frame(None, orjson.dumps(done(heard, self.asked)))
        yield LAST_FRAME

    async def _sound(self) -> Sound:
        limits = ReadingLimits(
            max_bytes=self.config.max_audio_bytes,
            max_seconds=self.config.max_audio_s,
            memory=(1 << 30) + round(2 * 4 * 16_000 * self.config.max_audio_s),
            cpu_s=CPU_S,
            wall_s=WALL_S,
        )
        try:
            return await read_sound(
                await self.file(), self.filename, owner=self.principal.owner, limits=limits
            )
        except UnreadableDocument as why:
            _refuse(why)

    def _spent(self, heard: Heard, visit: Visit) -> None:
        """Count what was heard, also of what was given up."""
        last, text = heard.windows[-1]
        seconds = min(heard.seconds, last + text.advance / 16_000)
        inputs, outputs = round(seconds * POSITIONS_A_SECOND), heard.output_tokens
        visit.used = lambda: (inputs + outputs, 0)
        who, served = self.principal, self.served
        account = Account(who.owner, who.key_id, served.name, "default", kind="audio_transcriptions")
        # of sound, seconds are what is counted as its input
        self.meter.spend(account, Counts(requests=1, input_tokens=math.ceil(seconds), output_tokens=outputs))
        if (record := current.get()) is not None:
            record.model, record.prompt_tokens, record.output_tokens = served.name, inputs, outputs


def _refuse(why: UnreadableDocument) -> NoReturn:
    message = f"The file cannot be read as sound. {why.message}"
    soon = {"retry-after": "1"}
    if isinstance(why, ReadersBusy) and why.own:
        raise ApiError(429, message, code="rate_limit_exceeded", param="file", headers=soon)
    match why.code:
        case "unsupported_file":
            refuse("file", message, "unsupported_file")
        case "invalid_file":
            refuse("file", message, "invalid_file")
        case "too_large":
            refuse("file", message, "file_too_large")
        case "server_error":
            raise ApiError(503, message, code="file_not_read", param="file", headers=soon)
