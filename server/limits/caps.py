"""Bounds that the operator sets on every request, whoever makes it."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caps:
    """What requests get that do not say, and the most that they can get. None: as the model has it.

    Tokens of output are those of one answer, and of all generations of a response together. timeout_s: for
    one generation, from when the engine is asked for it. keys_salt: a
    `prompt_cache_key` says which prompts share the prefix cache. request_templates: a request may bring a
    chat template of its own. text_parts: how chat templates are given texts (`RenderInput`). response_role:
    the role of answers of chat completions.
    """

    default_temperature: float | None = None
    default_output_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    timeout_s: float | None = None
    keys_salt: bool = False
    request_templates: bool = False
    text_parts: bool | None = None
    response_role: str = "assistant"

    def output(self, asked: int | None) -> int | None:
        """How many tokens an answer may have, where a request asks for so many; None where nothing says."""
        wanted = self.default_output_tokens if asked is None else asked
        bounds = [bound for bound in (wanted, self.output_tokens) if bound is not None]
        return min(bounds, default=None)

    def deadline(self) -> float | None:
        """Until when a generation that begins now may take, by `time.monotonic`."""
        return None if self.timeout_s is None else time.monotonic() + self.timeout_s
