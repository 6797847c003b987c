"""How many tokens a step of a pooling engine computes: as many as take a moment."""

from __future__ import annotations

STEP_S = 0.1
"""What a step is to take: so long an owner's only text waits for another's step, and so long what is dropped
goes on. On a processor a step of 0.1 s computes hardly fewer tokens a second than one of a minute."""

LEAST = 128
"""Tokens of a step, however long they take: with fewer, reading the weights is most of it."""

NEWEST = 0.3
"""Weight of the latest step among all."""


class StepSize:
    """Learns from each step how long a token takes, in seconds of the processor: where others use it, too, a
    step lasts longer, and smaller ones would only be more."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._token_s = 0.0
        self.tokens = min(LEAST, most)

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took the thread so long."""
        each = seconds / num_tokens
        self._token_s += (each - self._token_s) * (NEWEST if self._token_s else 1.0)
        wanted = STEP_S / self._token_s if self._token_s else self._most
        # at most twice as many as before: the first steps of a process are no measure
        self.tokens = int(min(self._most, max(LEAST, min(wanted, 2 * self.tokens))))
