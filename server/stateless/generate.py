"""Tokens in, tokens out: what `/inference/v1/generate` asks of the engine and answers; nothing is stored.

It is a text completion of one prompt whose choices are token ids, for clients that have the tokenizer
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine import Chunk, Done, Place
from server.access import Principal
from server.model_registry import ServedModel
from server.schema import CompletionRequest, words_of_generation
from server.stateless.choices import Completion, Part, PromptTold, logprob_by_id
from server.stateless.completions import prepare_completion
from server.telemetry import Telemetry
from server.usage import Meter


async def prepare_generation(
    request: CompletionRequest,
    served: ServedModel,
    place: Place,
    *,
    principal: Principal,
    person: str | None,
    telemetry: Telemetry,
    meter: Meter,
) -> Completion:
    """Resolve everything that is asked for. Raises ApiError 400 and 403, and RequestError."""
    with words_of_generation():
        completion = await prepare_completion(
            request, served, place, principal=principal, person=person, telemetry=telemetry, meter=meter
        )
    return replace(
        completion,
        writers=[TokenWriter(choice, logprobs=request.logprobs) for choice in range(request.n)],
        head={**completion.head, "request_id": request.request_id or completion.head["id"]},
        told=PromptTold(num_scores=request.prompt_logprobs),
    )


class TokenWriter:
    """One choice: the ids of tokens to the parts of chunks, and those to the whole. logprobs: how many
    alternatives a token shows; None is off."""

    def __init__(self, index: int, *, logprobs: int | None) -> None:
        self._index = index
        self._logprobs = logprobs

    def write(self, chunk: Chunk) -> list[Part]:
        """One part; none for a chunk that neither has tokens nor ends the choice."""
        done = next((delta for delta in chunk.deltas if isinstance(delta, Done)), None)
        if not chunk.token_ids and done is None:
            return []
        part: Part = {"index": self._index, "token_ids": list(chunk.token_ids), "logprobs": None}
        if self._logprobs is not None:
            part["logprobs"] = {"content": [logprob_by_id(entry) for entry in chunk.logprobs]}
        part["finish_reason"] = None if done is None else done.reason
        if done is not None:
            part["stop_reason"] = done.stop
        return [part]

    def fold(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The choice that its parts make."""
        whole = {**parts[-1], "token_ids": [token_id for part in parts for token_id in part["token_ids"]]}
        if self._logprobs is not None:
            whole["logprobs"] = {
                "content": [entry for part in parts for entry in part["logprobs"]["content"]]
            }
        return whole
