"""Which token comes next: what a Whisper model may write at a place, and what is taken of it.

The rules of times are those of the model's makers: the first token is a time; times come in pairs around text
and never run backwards; and where all times together are likelier than any one text, a time is taken.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Marks:
    """Tokens that a checkpoint gives a meaning. no_speech, before: None where it has none. last_first_time:
    the latest time that a window may begin with. banned: never taken. banned_first: not as the first one."""

    end: int
    start: int
    first_time: int
    no_times: int
    before: int | None
    no_speech: int | None
    transcribe: int | None
    translate: int | None
    languages: dict[str, int]
    last_first_time: int | None
    banned: tuple[int, ...]
    banned_first: tuple[int, ...]


class Rules:
    """Takes from logits what a model must not write."""

    def __init__(self, marks: Marks, vocab_size: int, device: torch.device) -> None:
        self._marks = marks
        self._banned = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._banned[[*marks.banned, marks.no_times]] = True
        self._banned_first = self._banned.clone()
        self._banned_first[list(marks.banned_first)] = True

    def apply(self, logits: Tensor, written: Sequence[int]) -> Tensor:
        """logits [V] as f32 -> the same with -inf for what may not follow what was `written` in this
        window."""
        marks, first = self._marks, self._marks.first_time
        logits = logits.masked_fill(self._banned if written else self._banned_first, -torch.inf)
        after_time = bool(written) and written[-1] >= first
        if after_time and (len(written) < 2 or written[-2] >= first):
            logits[first:] = -torch.inf  # a pair is complete: text, or the end
        elif after_time:
            logits[: marks.end] = -torch.inf  # a stretch has ended: the next one's time, or the end
        times = [each for each in written if each >= first]
        if times:
            # The beginning of a stretch may be the end of the one before; its own end may not be its
            # beginning.
            ended = after_time and len(written) >= 2 and written[-2] < first
            logits[first : times[-1] + (0 if ended else 1)] = -torch.inf
        if not written:
            logits[:first] = -torch.inf
            if marks.last_first_time is not None:
                logits[marks.last_first_time + 1 :] = -torch.inf
        shares = logits.log_softmax(dim=-1)
        if shares[first:].logsumexp(dim=-1) > shares[:first].max():
            logits[:first] = -torch.inf
        return logits


def pick(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[int, float]:
    """A token of logits [V] under the rules, and its natural log probability. 0 takes the likeliest."""
    shares = logits.log_softmax(dim=-1)
    if temperature > 0:
        token = int(torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator))
    else:
        token = int(shares.argmax())
    return token, float(shares[token])


def compression_ratio(text: str) -> float:
    """Bytes of a text for each of the same text compressed; 0 for none."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def mean(logprobs: Sequence[float]) -> float:
    """The average; the end counts as a token, and without any it is 0."""
    return sum(logprobs) / len(logprobs) if logprobs else 0.0
