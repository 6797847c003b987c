"""Writes requests to `/v1/completions` of another server, and reads its answers, by token ids.

The fields are those that vLLM, SGLang and Antiphon share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from engine.step import RowLogprobs, RowOutput
from engine.types import Done, GenerateRequest, RequestFailed, SamplingParams

ID_MARK = "token_id:"  # how `return_tokens_as_token_ids` writes a token

Json = dict[str, Any]


def completion_body(
    request: GenerateRequest, produced: Sequence[int], *, room: int, eos: Sequence[int], priority: bool
) -> Json:
    """The body, all but `model`, that asks for what follows `produced`, the output so far.

    room: tokens that the context still holds. eos: end-of-turn ids, named so that every server ends at the
    same ones. priority: whether the server takes one. Every sampling field is sent, for a server's own
    defaults may differ; stop strings are not, because where text ends is for the reader to say.
    """
    sampling = request.sampling
    max_tokens = min(sampling.max_tokens - len(produced), room)
    ends = sampling.stop_token_ids if sampling.ignore_eos else (*eos, *sampling.stop_token_ids)
    body: Json = {
        "prompt": [*request.prompt_ids, *produced],
        "stream": True,
        "return_token_ids": True,
        "max_tokens": max_tokens,
        "min_tokens": max(0, min(sampling.min_tokens - len(produced), max_tokens)),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,  # SGLang takes no 0
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(dict.fromkeys(ends)),
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.temperature > 0:  # elsewhere it would only cost: servers draw seeded rows one by one
        body["seed"] = _seed(request, len(produced))
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    echo = wants_echo(sampling, produced)
    if sampling.logprobs is not None or echo:
        asked = (sampling.logprobs or 0, sampling.prompt_logprobs or 0)
        body |= {"logprobs": max(asked), "return_tokens_as_token_ids": True, "echo": echo}
    if request.owner or request.cache_salt:
        body["cache_salt"] = salt(request)
    if priority:
        body["priority"] = request.priority
    return body


def salt(request: GenerateRequest) -> str:
    """The prefix cache's salt: one for each owner and salt of theirs, and neither to be read from it."""
    parts = f"{len(request.owner)} {request.owner}{request.cache_salt}"
    return blake2b(parts.encode(), digest_size=16).hexdigest()


def wants_echo(sampling: SamplingParams, produced: Sequence[int]) -> bool:
    """Whether the prompt is to be scored: at the start only, an answer that goes on has told it already."""
    return sampling.prompt_logprobs is not None and not produced


def _seed(request: GenerateRequest, num_produced: int) -> int:
    """The client's own seed where the draw is the first of its kind, and else one derived from it: two
    choices must not draw alike, nor a continuation repeat the draws of what it continues."""
    if not (request.choice or request.generation or num_produced):
        return request.sampling.seed
    key = f"{request.sampling.seed} {request.choice} {request.generation} {num_produced}"
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest()) >> 1


# ------------------------------------------------------------------------------------------------------------
# Answers


class Answer:
    """Reads the events of one stream. num_unscored: tokens of the prompt whose scores are still to come."""

    def __init__(self, request: GenerateRequest, produced: Sequence[int], *, eos: Sequence[int]) -> None:
        sampling = request.sampling
        self._stops = frozenset(sampling.stop_token_ids)
        self._eos = frozenset() if sampling.ignore_eos else frozenset(eos)
        self._left = sampling.max_tokens - len(produced)
        self.num_unscored = len(request.prompt_ids) if wants_echo(sampling, produced) else 0
        self._wants_logprobs = sampling.logprobs is not None

    def read(self, events: Iterable[Mapping[str, Any]]) -> list[RowOutput]:
        """What they say, up to the one that ends the answer: with `finish`, or with RequestFailed as `error`
        when it ended in another way than generations do."""
        outputs = []
        for event in events:
            try:
                output = self._read(event)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                output = RowOutput(0, error=RequestFailed(f"it cannot be read: {error!r}"))
            if output is not None:
                outputs.append(output)
                if output.finish is not None or output.error is not None:
                    break
        return outputs

    def _read(self, event: Mapping[str, Any]) -> RowOutput | None:
        if event.get("error"):
            return RowOutput(0, error=RequestFailed(error_message(event)))
        if not event.get("choices"):
            return None
        choice = event["choices"][0]
        token_ids = tuple(choice.get("token_ids") or ())[: self._left]
        self._left -= len(token_ids)
        logprobs: tuple[RowLogprobs | None, ...] = ()
        scored = None
        if choice.get("logprobs"):
            logprobs = read_logprobs(choice["logprobs"])
            if self.num_unscored:
                scored = tuple(row for row in logprobs[1 : self.num_unscored] if row is not None)
                logprobs, self.num_unscored = logprobs[self.num_unscored :], 0
        known = tuple(row for row in logprobs[: len(token_ids)] if row is not None)
        if self._wants_logprobs and len(known) != len(token_ids):
            return RowOutput(0, error=RequestFailed("there are tokens without log probabilities"))
        reason = choice.get("finish_reason")
        if reason == "abort":
            return RowOutput(0, token_ids, logprobs=known, error=RequestFailed("it was aborted there"))
        finish = None if reason is None else self._finish(reason, token_ids)
        return RowOutput(0, token_ids, finish, known, prompt_logprobs=scored)

    def _finish(self, reason: str, token_ids: Sequence[int]) -> Done:
        if reason == "length":
            return Done("length")
        last = token_ids[-1] if token_ids else -1
        return Done("stop", last if last in self._stops - self._eos else None)


def read_logprobs(logprobs: Mapping[str, Any]) -> tuple[RowLogprobs | None, ...]:
    """The legacy form's rows, its tokens written as ids; None for a token that nothing was known of. Raises
    ValueError for tokens that are written as text."""
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    return tuple(
        None if logprob is None else _row(token, logprob, top or {})
        for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
    )


def _row(token: str, logprob: float, top: Mapping[str, float]) -> RowLogprobs:
    best = sorted(top.items(), key=lambda item: -item[1])
    ids, values = tuple(_id(text) for text, _ in best), tuple(value for _, value in best)
    return RowLogprobs(_id(token), logprob, ids, values)


def _id(token: str) -> int:
    if not token.startswith(ID_MARK):
        raise ValueError(f"{token!r} is no token id")
    return int(token[len(ID_MARK) :])


def error_message(body: object) -> str:
    """The words of an error body, whichever server's form it has."""
    error = body.get("error", body) if isinstance(body, Mapping) else body
    message = error.get("message", error) if isinstance(error, Mapping) else error
    return str(message)[:500]
