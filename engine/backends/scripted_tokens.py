"""Turns what a scripted engine says into tokens.

Its tokenizer has one token for each of the 256 bytes, and the tags of the model that ships. A script's text
is cut into chunks, filtered by the grammar, and ended where the request ends.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from string import ascii_letters
from typing import TYPE_CHECKING, Literal, NamedTuple

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.backends.script import Fail, Say, Script, Tick, Wait
from engine.dialects import Dialect, dialect_named
from engine.tokenizer import BYTE_ALPHABET, Tokenizer
from engine.types import Done, GenerateRequest, RequestFailed, SamplingParams

if TYPE_CHECKING:
    from engine.structured.isolation import Matcher

TEMPLATE = Path(__file__).parents[1] / "tiny" / "checkpoint" / "chat_template.jinja"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


Tokens = tuple[int, ...]


class _Part(NamedTuple):
    """Tokens of a step that says something. begins: they are its first. ends: the grammar ends after them."""

    token_ids: Tokens
    begins: bool = False
    ends: bool = False


_Piece = _Part | Wait | Fail | Tick


def scripted_tokenizer(template: str | None = None, *, allow_special_tokens: bool = False) -> Tokenizer:
    """A tokenizer of 256 bytes, ChatML's special tokens and the hermes tags; `template` replaces the shipped
    one."""
    alphabet = {char: value[0] for char, value in BYTE_ALPHABET.items()}
    backend = Backend(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tags = sorted(dialect_named("hermes").tags)
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in tags])
    ids = backend.get_vocab(with_added_tokens=True)
    return Tokenizer(
        backend,
        templates={"default": template or TEMPLATE.read_text(encoding="utf-8")},
        special_tokens={"eos_token": "<|im_end|>"},
        eos_token_ids=(ids["<|im_end|>"], ids["<|endoftext|>"]),
        allow_special_tokens=allow_special_tokens,
    )


class Speech:
    """Turns scripts into chunks of tokens. chunk: "word" (a word with the space before it) or a number of
    tokens."""

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect, chunk: Literal["word"] | int) -> None:
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._chunk = chunk

    def chunks(
        self,
        request: GenerateRequest,
        prompt: str,
        script: Script,
        matcher: Matcher | None,
        max_tokens: int,
    ) -> Iterator[tuple[Tokens, Done | None] | Wait | Fail | Tick]:
        """Chunks of tokens, the last with how it ends, and between them what else the script has.

        prompt: the request's, as text. The whole generation, whatever of it is durable: what comes out
        depends on the request alone.
        """
        pieces = self._pieces(request, prompt, script)
        if matcher is not None:
            pieces = self._constrained(pieces, matcher)
        num_tokens = 0
        for piece in pieces:
            if not isinstance(piece, _Part):
                yield piece
                continue
            token_ids, finish = self._cut(request.sampling, piece.token_ids, num_tokens, max_tokens)
            num_tokens += len(token_ids)
            if finish is None and piece.ends:
                finish = Done("stop")
            if token_ids or finish:
                yield token_ids, finish
            if finish:
                return

    def _pieces(self, request: GenerateRequest, prompt: str, script: Script) -> Iterator[_Piece]:
        """The script's steps, its text as chunks of tokens; then the end of turn, for ever, with filler in
        front where the end does not count."""
        for step in script(request, prompt):
            if isinstance(step, Say):
                for index, token_ids in enumerate(self._words(step)):
                    yield _Part(token_ids, begins=not index)
            else:
                yield step
        eos = self._tokenizer.eos_token_ids[0]
        filler = tuple(self._tokenizer.encode(" more"))
        while True:
            yield _Part(filler if request.sampling.ignore_eos else (eos,), begins=True)
            yield _Part(filler, begins=True)  # reached only when min_tokens has taken the end out

    def _words(self, say: Say) -> Iterator[Tokens]:
        if say.whole:
            yield tuple(self._tokenizer.encode(say.text))
        elif self._chunk == "word":
            for word in re.findall(r"\s*\S+|\s+$", say.text):
                yield tuple(self._tokenizer.encode(word))
        else:
            token_ids = self._tokenizer.encode(say.text)
            for start in range(0, len(token_ids), self._chunk):
                yield tuple(token_ids[start : start + self._chunk])

    def _constrained(self, steps: Iterator[_Piece], matcher: Matcher) -> Iterator[_Piece]:
        """What of the steps the grammar lets through, and the shortest end from where it does not: that of a
        call, behind which the next step follows, or else that of the generation."""
        assert self._dialect.calls is not None
        opening = self._tokenizer.token_id(self._dialect.calls.open)
        closing = self._tokenizer.token_id(self._dialect.calls.close)
        calling = bent = False
        for step in steps:
            if not isinstance(step, _Part):
                yield step
                continue
            if step.begins:
                calling = bent = False
            if bent:  # the rest of a call that the grammar has ended otherwise
                continue
            allowed = step.token_ids[: matcher.take(step.token_ids, freely=True)]
            yield _Part(allowed, ends=matcher.stopped)
            for token_id in allowed:
                calling = token_id == opening or (calling and token_id != closing)
            if not matcher.stopped and len(allowed) < len(step.token_ids):
                bent = True
                yield from self._complete(matcher, closing if calling else None)
            if matcher.stopped:
                return

    @cached_property
    def _closing_order(self) -> list[int]:
        """Every token but the reasoning tags, those first that end something."""
        assert self._dialect.calls is not None and self._dialect.reasoning is not None
        ends = [*self._tokenizer.eos_token_ids, self._tokenizer.token_id(self._dialect.calls.close)]
        ends += self._tokenizer.encode('\n}]",: 0123456789')
        hidden = {self._tokenizer.token_id(self._dialect.reasoning.open)}
        order = dict.fromkeys(
            [*ends, *self._tokenizer.encode(ascii_letters), *range(self._tokenizer.vocab_size)]
        )
        return [token_id for token_id in order if token_id is not None and token_id not in hidden]

    def _complete(self, matcher: Matcher, until: int | None) -> Iterator[_Piece]:
        """Tokens that close what is open about as early as the grammar allows, up to eight a chunk. until:
        the token that is the last one; None goes on to the grammar's end.

        What did not help four times (sixty-four for JSON's own marks) gives way to what was said less often.
        """
        marks, used = frozenset(b'{}[]",:'), Counter[int]()
        done = False
        while not done:
            chunk: list[int] = []
            while len(chunk) < 8 and not done:
                allowed = matcher.allowed(self._closing_order)
                # Where a letter and a brace may stand, a string is open: its end closes more than a brace.
                if ord("a") in allowed and ord("}") in allowed:
                    first = frozenset(allowed).intersection(b'"' + ascii_letters.encode())
                    order = (ord('"'), *ascii_letters.encode())
                    allowed = [*(each for each in order if each in first), *allowed]
                if not allowed:
                    raise RequestFailed("the grammar allows no token")
                token_id = min(allowed, key=lambda each: used[each] // (64 if each in marks else 4))
                matcher.take((token_id,))
                used[token_id] += 1
                if token_id in marks:  # another place: what did not help before may help here
                    used = Counter({mark: used[mark] for mark in marks})
                chunk.append(token_id)
                done = matcher.stopped or token_id == until
            yield _Part(tuple(chunk), ends=matcher.stopped)

    def finish(
        self, sampling: SamplingParams, token_ids: Tokens, num_tokens: int, max_tokens: int
    ) -> Done | None:
        """How a generation of `num_tokens` whose last chunk is `token_ids` has ended, as its tokens tell."""
        last = token_ids[-1] if token_ids else -1
        if num_tokens > sampling.min_tokens:
            if last in sampling.stop_token_ids:
                return Done("stop", last)
            if last in self._tokenizer.eos_token_ids and not sampling.ignore_eos:
                return Done("stop")
        return Done("length") if num_tokens >= max_tokens else None

    def _cut(
        self, sampling: SamplingParams, token_ids: Tokens, num_tokens: int, max_tokens: int
    ) -> tuple[Tokens, Done | None]:
        """The chunk up to the first token that ends the generation."""
        ends = frozenset((*self._tokenizer.eos_token_ids, *sampling.stop_token_ids))
        kept: list[int] = []
        for token_id in token_ids:
            if token_id in ends and num_tokens + len(kept) < sampling.min_tokens:
                continue
            kept.append(token_id)
            finish = self.finish(sampling, (token_id,), num_tokens + len(kept), max_tokens)
            if finish is not None:
                return tuple(kept), finish
        return tuple(kept), None
