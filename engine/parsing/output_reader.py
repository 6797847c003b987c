"""Reads token ids as deltas: detokenize, stop, parse, count reasoning tokens, attach log probabilities.

It is a fold: the same ids in the same feeds always give the same readings, so a stored run reads the same
again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.dialects import Dialect, dialect_named
from engine.parsing.parser import Parser
from engine.tokenizer import Detokenizer, Tokenizer
from engine.types import Delta, Done, ReaderParams, SamplingParams, Text, TokenLogprob


@dataclass(frozen=True, slots=True)
class Reading:
    """What one feed gave.

    num_tokens: how many of the fed ids count as output (a stop string or the last call cuts the rest).
    deltas: end with Done when the generation is over. reasoning_tokens: tokens now known to lie inside
    reasoning blocks, tags included; a token whose text was held back is counted in the feed that settles it.
    """

    num_tokens: int
    deltas: tuple[Delta, ...]
    reasoning_tokens: int
    done: bool


class Reader:
    """Reads one generation, prefix first. Not thread-safe; a few microseconds a token."""

    def __init__(
        self, tokenizer: Tokenizer, dialect: Dialect, params: ReaderParams, sampling: SamplingParams
    ) -> None:
        row = dialect if params.dialect and not params.special_tokens else dialect_named("plain")
        tags = tokenizer.all_tags if params.special_tokens else row.tags
        self._eos = tokenizer.eos_token_ids
        self._detokenizer = Detokenizer(tokenizer, tags, keep_first_space=not params.dialect)
        self._shows_stop = sampling.include_stop
        self._shows_end = sampling.include_stop and params.special_tokens
        # A stop string may be completed by the token that makes min_tokens full, not by one before it.
        self._unarmed = max(0, sampling.min_tokens - 1) if sampling.stop else 0
        self._stops = sampling.stop if self._unarmed else ()
        self._parser = Parser(
            row,
            calls=params.calls,
            max_calls=params.max_calls,
            starts_in=params.starts_in,
            stops=() if self._unarmed else sampling.stop,
            tools=params.tools,
            shaped=params.shaped,
            include_stop=sampling.include_stop,
        )
        self._counts_reasoning = row.reasoning is not None
        self._wants_logprobs = sampling.logprobs is not None
        self._fed = 0  # characters
        self._unsettled: deque[tuple[int, int]] = deque()  # spans of tokens that may yet be reasoning
        self._logprobs: deque[tuple[int, int, TokenLogprob]] = deque()  # spans of tokens without a delta
        self._done = False

    def feed(
        self, token_ids: Sequence[int], finish: Done | None = None, logprobs: Sequence[TokenLogprob] = ()
    ) -> Reading:
        """Read the next tokens; `finish` with the last ones. `logprobs` align with `token_ids` when asked
        for.

        An end-of-turn or stop token that ended the generation counts, and gives no text unless it is asked
        for.
        """
        assert not self._done, "the generation was over"
        parser = self._parser
        mute = len(token_ids) - 1 if finish is not None and self._is_hidden(token_ids, finish) else -1
        num_tokens = reasoning_tokens = 0
        for index, token_id in enumerate(token_ids):
            if self._unarmed:
                self._unarmed -= 1
            elif self._stops:
                parser.arm(self._stops)
                self._stops = ()
            text = "" if index == mute else self._detokenizer.push(token_id)
            start = self._fed
            self._fed += len(text)
            if text:
                parser.feed(text)
            num_tokens += 1
            if self._counts_reasoning:
                self._unsettled.append((start, self._fed))
                reasoning_tokens += self._settle(parser.settled)
            if self._wants_logprobs and index < len(logprobs) and index != mute:
                self._logprobs.append((start, self._fed, logprobs[index]))
            if parser.ended is not None:
                finish = parser.ended
                break
        if finish is not None:
            finish = parser.finish(self._detokenizer.flush(), cut=finish.reason == "length") or finish
            reasoning_tokens += self._settle(None)
            self._done = True
        deltas, spans = parser.take()
        if self._wants_logprobs:
            self._attach(deltas, spans)
        if finish is not None:
            deltas.append(finish)
        return Reading(num_tokens, tuple(deltas), reasoning_tokens, self._done)

    def _is_hidden(self, token_ids: Sequence[int], finish: Done) -> bool:
        """Whether the last token has ended the generation, and is not to be shown."""
        if finish.reason != "stop" or not token_ids:
            return False
        if finish.stop is None:
            return token_ids[-1] in self._eos and not self._shows_end
        return token_ids[-1] == finish.stop and not self._shows_stop

    def _settle(self, settled: int | None) -> int:
        """Count the tokens below `settled` (None: all) that overlap a reasoning block."""
        count = 0
        unsettled, thoughts = self._unsettled, self._parser.thoughts
        while unsettled and (settled is None or unsettled[0][1] <= settled):
            start, end = unsettled.popleft()
            # A token without text (half a character, a hidden token) lies where it stands.
            end = max(end, start + 1)
            for first, last in reversed(thoughts):
                if first < end:  # the latest block that it could lie in decides
                    count += last is None or start < last
                    break
        return count

    def _attach(self, deltas: list[Delta], spans: list[tuple[int, int]]) -> None:
        """Give each Text the log probabilities of the tokens that it, or text held back before it, came
        from."""
        texts = (index for index, delta in enumerate(deltas) if isinstance(delta, Text))
        for index, (start, end) in zip(texts, spans, strict=True):
            found = []
            while self._logprobs and self._logprobs[0][0] < end:
                first, last, logprob = self._logprobs.popleft()
                if max(last, first + 1) > start:
                    found.append(logprob)
            delta = deltas[index]
            assert isinstance(delta, Text)
            deltas[index] = replace(delta, logprobs=tuple(found))
