"""Turns text and messages into tokens and back, without blocking the asyncio loop.

Short texts are encoded on the spot and long ones in a thread, for which owners take turns; a text that is
certainly too long is refused unencoded. This module also chooses the dialect of a checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from engine.dialects import Dialect, choose_dialect
from engine.tokenizer.growing_prompts import GrowingPrompts
from engine.tokenizer.pictures import without_pictures
from engine.tokenizer.tokenizer import Tokenizer
from engine.turns import Turns
from engine.types import LoadError, Picture, Prompt, PromptTooLong, RenderError, RenderInput

HOPELESS = 4  # times the context: beyond it a text is not even counted
SMALL_TEXT = 4096  # characters that are encoded on the spot; more goes to a thread
TEXT_THREADS = 8
"""Of an engine, for its texts. Long ones have half of them, so that what is small waits for none of these."""


def open_dialect(tokenizer: Tokenizer, *, tools: str | None, reasoning: str | None) -> Dialect:
    """The dialect that the chat template shows, but for the halves that are named; LoadError for an unknown
    name."""
    try:
        return choose_dialect(tokenizer.chat_template, tools=tools, reasoning=reasoning)
    except KeyError as error:
        raise LoadError(str(error.args[0])) from None


Encode = Callable[[str], Sequence[int]]


class Placer(Protocol):
    """Puts images into prompts; see `engine.vision.ImageProcessor.placed`."""

    def placed(self, prompt: Prompt, pictures: Sequence[Picture], encode: Encode) -> Prompt:
        """A prompt with the tokens of its images in their places. Raises RenderError."""
        ...


class Prompts:
    """A model's tokenizer and dialect, for an engine whose context holds `limit` tokens. pool: `TEXT_THREADS`
    of them. placer: of a model that sees."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        dialect: Dialect,
        *,
        limit: int,
        pool: ThreadPoolExecutor,
        placer: Placer | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.dialect = dialect
        self._growing = GrowingPrompts(tokenizer, dialect)
        self._limit = limit
        self._pool = pool
        self._long = Turns(pool, TEXT_THREADS // 2)
        self._placer = placer

    async def render(self, messages: RenderInput) -> Prompt:
        """See `Engine.render`; a text that no tokens could make fit the context is PromptTooLong at once."""

        def work() -> Prompt:
            plain, pictures = without_pictures(messages)
            prompt = self._growing.prompt(plain, self._require_hope)
            if not pictures:
                return prompt
            if self._placer is None:
                raise RenderError("the model takes text only, and the messages have images")
            return self._placer.placed(prompt, pictures, self.tokenizer.encode)

        if _is_small(messages):
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        return await self._long.do(messages.scope or "", work)

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, owner: str = ""
    ) -> tuple[int, ...]:
        """See `Engine.tokenize`; PromptTooLong as for `render`."""
        if len(text) < SMALL_TEXT:
            return self._encode(text, add_special_tokens=add_special_tokens)
        return await self._long.do(owner, lambda: self._encode(text, add_special_tokens=add_special_tokens))

    async def detokenize(self, token_ids: Sequence[int], *, owner: str = "") -> str:
        """See `Engine.detokenize`."""
        if len(token_ids) < SMALL_TEXT:
            return self.tokenizer.decode(token_ids)
        return await self._long.do(owner, lambda: self.tokenizer.decode(token_ids))

    def token_text(self, token_id: int) -> str:
        """See `Engine.token_text`; bytes that are not whole characters show as U+FFFD."""
        return self.tokenizer.token_bytes(token_id).decode(errors="replace")

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        self._require_hope(len(text))
        return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _require_hope(self, num_chars: int) -> None:
        """A text far beyond the context is refused by its length, with the least count it can have: encoding
        it could cost more than generating (10 MB of one letter: seconds and gigabytes)."""
        least = num_chars // self.tokenizer.longest_token
        if least > HOPELESS * self._limit:
            raise PromptTooLong(least, self._limit, at_least=True)


def _is_small(messages: RenderInput) -> bool:
    """Whether an input has less than `SMALL_TEXT` characters, and no images. It is not read on from there."""
    told = (messages.messages, messages.tools, messages.template_kwargs, messages.chat_template)
    room, todo = SMALL_TEXT, [*told, messages.answer and messages.answer.source]
    while todo and room > 0:
        value: Any = todo.pop()
        room -= len(value) if isinstance(value, str) else SMALL_TEXT if isinstance(value, Picture) else 1
        if isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
    return room > 0
