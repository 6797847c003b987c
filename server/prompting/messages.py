"""Turns items into the messages of a chat template, and request fields into sampling parameters.

Responses and chat completions use the same functions. How one item is worded is defined with its item type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine import ModelInfo, PromptTooLong, SamplingParams
from server.items import Item, Transcript, answers_of, source_of, words_of
from server.limits import Caps
from server.schema import SamplingFields

UNCAPPED = Caps()


def to_messages(
    items: Sequence[Item],
    instructions: str | None = None,
    names: Mapping[tuple[str, str], str] | None = None,
) -> list[dict[str, Any]]:
    """Items, oldest first, as the messages that chat templates expect; `instructions` become a system
    message. names: see `Transcript`. Raises ApiError 400 `unsupported_item` for an item that there are no
    words for."""
    made = {source: item for item in items if (source := source_of(item)) is not None}
    transcript = Transcript(answers_of(items), names, made)
    if instructions is not None:
        transcript.tell("system", instructions)
    for item in items:
        words_of(item, "input")(item, transcript)
    return transcript.messages


# ------------------------------------------------------------------------------------------------------------
# Fields to sampling


def sampling(
    fields: SamplingFields, info: ModelInfo, *, prompt_tokens: int, seed: int, caps: Caps = UNCAPPED
) -> SamplingParams:
    """Resolve sampling: the request's field, else the server's default, else the checkpoint's generation
    config, else the API's default.

    `max_tokens` unset, there too, means up to the context. Raises PromptTooLong when the prompt leaves no
    room for a token, or is longer than the server takes.
    """
    if caps.prompt_tokens is not None and prompt_tokens > caps.prompt_tokens:
        raise PromptTooLong(prompt_tokens, caps.prompt_tokens)
    room = info.max_model_len - prompt_tokens
    if room < 1:
        raise PromptTooLong(prompt_tokens, info.max_model_len)
    defaults = info.defaults

    def pick(*values: Any) -> Any:
        return next(value for value in values if value is not None)

    asked = fields.max_tokens
    if asked is None and caps.default_output_tokens is None:
        asked = defaults.max_new_tokens
    return SamplingParams(
        seed=seed if fields.seed is None else fields.seed,
        max_tokens=min(room, pick(caps.output(asked), room)),
        temperature=pick(fields.temperature, caps.default_temperature, defaults.temperature, 1.0),
        top_p=pick(fields.top_p, defaults.top_p, 1.0),
        top_k=pick(fields.top_k, defaults.top_k, 0),
        min_p=pick(fields.min_p, defaults.min_p, 0.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=pick(fields.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=tuple(sorted((int(token), bias) for token, bias in (fields.logit_bias or {}).items())),
        min_tokens=fields.min_tokens or 0,
        stop=tuple(fields.stop or ()),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=fields.logprobs,
        num_assistant_tokens=fields.num_assistant_tokens,
        max_ngram_size=fields.max_ngram_size,
        assistant_confidence_threshold=fields.assistant_confidence_threshold,
    )
