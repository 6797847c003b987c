"""Recognizes sampling settings under which texts fall apart, for a warning in the log.

Such settings are allowed, and an operator who hears of bad answers looks for their cause in the model first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from engine import SamplingParams

EVERY_S = 60.0
"""Each kind is told at most once in so many seconds: a client sends the same settings with each request."""

HOTTEST = 1.5
"""Above this temperature, drawing from the whole vocabulary, unlikely tokens are most of what is drawn."""
MOST_PENALTY = 2.0
"""Above this a repetition penalty keeps a text from using the words of its own language twice."""
LEAST_PENALTY = -1.0
"""From this frequency or presence penalty on down, what was said is likelier to be said again, for ever."""

log = logging.getLogger("antiphon.sampling")


def degenerate(drawn: SamplingParams) -> Iterator[tuple[str, str]]:
    """The kind of each degenerate setting, and what it does."""
    whole = drawn.top_p >= 1 and not drawn.top_k and not drawn.min_p
    if drawn.temperature > HOTTEST and whole:
        yield (
            "temperature",
            f"temperature {drawn.temperature:g} without top_p, top_k or min_p draws from all words",
        )
    if drawn.repetition_penalty < 1:
        yield "repetition_penalty", f"repetition_penalty {drawn.repetition_penalty:g} rewards repetition"
    if drawn.repetition_penalty > MOST_PENALTY:
        yield "repetition_penalty", f"repetition_penalty {drawn.repetition_penalty:g} bans common words"
    for name, penalty in (("frequency", drawn.frequency_penalty), ("presence", drawn.presence_penalty)):
        if penalty <= LEAST_PENALTY:
            yield f"{name}_penalty", f"{name}_penalty {penalty:g} rewards repetition"


class Warnings:
    """Warnings of one server, each kind now and then."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}  # when each kind was told last, by time.monotonic

    def look(self, model: str, drawn: SamplingParams) -> None:
        """Log a warning of what is degenerate about a generation's settings."""
        for kind, what in degenerate(drawn):
            now = time.monotonic()
            if now - self._told.get(kind, -EVERY_S) >= EVERY_S:
                self._told[kind] = now
                log.warning("a request to %s may get bad text: %s", model, what, extra={"model": model})
