"""Reads one request's tokens as chunks, on the asyncio side of the local engine.

A request has a mailbox, in which the outputs of steps gather while its consumer is busy; they leave it as one
`Chunk`. A request that goes on after a crash replays the tokens of its stored prefix first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.dialects import Dialect
from engine.parsing import Reader
from engine.step import RowLogprobs, RowOutput
from engine.tokenizer import Tokenizer
from engine.types import (
    Chunk,
    Done,
    EngineError,
    GenerateRequest,
    ModelInfo,
    TokenLogprob,
)

LONG_SCORES = 256
"""Scored tokens of a prompt; each takes some 5 us to read, so more are read in a thread."""


def takes_long(output: RowOutput) -> bool:
    """Whether an output has so many scores of its prompt that it is read, and written, in a thread."""
    return len(output.prompt_logprobs or ()) > LONG_SCORES


def end_of_prefix(request: GenerateRequest, info: ModelInfo) -> Done | None:
    """What ended the generation at the last token of its prefix, if a token-level end did.

    Without a prefix: Done where nothing is to be generated (`max_tokens` 0, and no prompt to score).
    """
    prefix, sampling = request.flat_prefix, request.sampling
    if prefix:
        last = prefix[-1]
        if last in info.eos_token_ids and not (sampling.ignore_eos and request.constraint is None):
            return Done("stop")
        if last in sampling.stop_token_ids:
            return Done("stop", last)
    elif sampling.max_tokens > 0 or sampling.prompt_logprobs is not None:
        return None
    total = len(request.prompt_ids) + len(prefix)
    return Done("length") if len(prefix) >= sampling.max_tokens or total >= info.max_model_len else None


class Mailbox:
    """What the engine thread delivered for one request and its consumer has not taken yet. begin: to be
    called when the engine begins with the request."""

    __slots__ = ("_begun", "_outputs", "_waiter", "begin", "num_uncredited")

    def __init__(self, begin: Callable[[], object] = lambda: None) -> None:
        self.begin = begin
        self._begun = False  # something was taken
        self._outputs: list[RowOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self.num_uncredited = 0  # tokens taken that the engine thread has not been told of

    def put(self, output: RowOutput, *, waits: bool = False) -> None:
        """Add an output and wake the taker. waits: only to the first and the last; for the others somebody
        calls `wake`."""
        self._outputs.append(output)
        if not waits or not self._begun or output.finish is not None or output.error is not None:
            self.wake()

    def fail(self, error: EngineError) -> None:
        """End with an error, in place of what could not be put here."""
        self._outputs.append(RowOutput(-1, error=error))
        self.wake()

    def wake(self) -> None:
        """Wake the taker if there is something."""
        if self._outputs and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[RowOutput]:
        """Everything that gathered; waits until there is something."""
        while not self._outputs:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs, self._outputs = self._outputs, []
        self._begun = True
        self.num_uncredited += sum(len(output.token_ids) for output in outputs)
        return outputs


class Generation:
    """Reads one request's tokens, prefix first."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, dialect: Dialect) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._reader = Reader(tokenizer, dialect, request.reader, request.sampling)

    def replay(self, end: Done | None) -> list[Chunk]:
        """The chunks of the durable prefix, read again; `end` is what its last token ended the generation
        with.
        """
        prefix = self._request.prefix
        if not prefix and end is not None:
            return [Chunk((), self._reader.feed((), end).deltas, cached_tokens=0)]
        chunks = []
        given = self._request.prefix_logprobs
        for i, token_ids in enumerate(prefix):
            logprobs = given[i] if given else ()
            reading = self._reader.feed(token_ids, end if i == len(prefix) - 1 else None, logprobs)
            chunks.append(
                Chunk(
                    tuple(token_ids[: reading.num_tokens]),
                    reading.deltas,
                    logprobs=logprobs[: reading.num_tokens],
                    reasoning_tokens=reading.reasoning_tokens,
                    replayed=True,
                )
            )
            if reading.done:  # a stop string, or the last call
                break
        return chunks

    def read(self, outputs: list[RowOutput]) -> Chunk | None:
        """One chunk of what gathered; None when nothing but an error did."""
        token_ids = tuple(token for output in outputs for token in output.token_ids)
        finish, sampling = outputs[-1].finish, self._request.sampling
        if not token_ids and finish is None:
            return None
        logprobs: tuple[TokenLogprob, ...] = ()
        if sampling.logprobs is not None:
            rows = (row for output in outputs for row in output.logprobs)
            logprobs = tuple(self._logprob(row, sampling.logprobs) for row in rows)
        reading = self._reader.feed(token_ids, finish, logprobs)
        prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        if (scored := outputs[0].prompt_logprobs) is not None:
            count = sampling.prompt_logprobs or 0
            prompt_logprobs = (None, *(self._logprob(row, count) for row in scored))
        return Chunk(
            token_ids[: reading.num_tokens],
            reading.deltas,
            logprobs=logprobs[: reading.num_tokens],
            reasoning_tokens=reading.reasoning_tokens,
            cached_tokens=outputs[0].cached_tokens,
            prompt_logprobs=prompt_logprobs,
            timing=outputs[0].timing,
        )

    def _logprob(self, row: RowLogprobs, count: int) -> TokenLogprob:
        best = zip(row.top_ids[:count], row.top_logprobs[:count], strict=True)
        top = tuple((token_id, *self._text(token_id), logprob) for token_id, logprob in best)
        return TokenLogprob(row.token_id, *self._text(row.token_id), row.logprob, top)

    def _text(self, token_id: int) -> tuple[str, bytes]:
        data = self._tokenizer.token_bytes(token_id)
        return data.decode(errors="replace"), data


def is_last(chunk: Chunk) -> bool:
    """True for the chunk that ends a generation."""
    return bool(chunk.deltas) and isinstance(chunk.deltas[-1], Done)
