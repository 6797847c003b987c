"""Turns items into the messages of a chat template, and request fields into sampling parameters.

Responses and chat completions use the same functions. How one item is worded is defined with its item type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine import ModelInfo, PromptTooLong, SamplingParams
from server.errors import ApiError, PromptOverLimit
from server.items import (
    Item,
    Transcript,
    answers_of,
    beside,
    is_left_out,
    is_output,
    seen,
    source_of,
    words_of,
)
from server.limits import Caps
from server.schema import SamplingFields

UNCAPPED = Caps()


Names = Mapping[tuple[str, str], str]


@dataclass(frozen=True, slots=True)
class Told:
    """The beginning of a conversation as messages, so that only what follows it has to be worded.

    num_items: how many items it is. answers, made: see `Transcript`.
    """

    num_items: int = 0
    answers: Mapping[tuple[str, str | None], Item] = field(default_factory=dict)
    made: Mapping[str, Item] = field(default_factory=dict)
    transcript: Transcript = field(default_factory=Transcript)

    def and_then(
        self, items: Sequence[Item], source: str, names: Names | None = None, most: int | None = None
    ) -> Told:
        """The same with more items behind it. source: the field that they came by. most: see `to_messages`.
        Raises ApiError 400 `unsupported_item`."""
        answers = {**self.answers, **answers_of(items)}
        sources = ((source_of(item), item) for item in items)
        made = {**self.made, **{source: item for source, item in sources if source is not None}}
        transcript = self.transcript.branch(answers, names, made)
        for item in items:
            say = words_of(item, source)
            transcript.turn_to(clients=is_output(item), most=most, id=item.get("id"), beside=beside(item))
            if not is_left_out(item):
                say(item, transcript)
        transcript.pause()
        return Told(self.num_items + len(items), answers, made, transcript)

    def holds(self, names: Names | None) -> bool:
        """Whether these messages stay the same whatever follows, and under these names of tools."""
        return self.transcript.settled and not (names and self.transcript.names_others)


NOTHING_TOLD = Told()


def to_messages(
    items: Sequence[Item],
    instructions: str | Sequence[Item] | None = None,
    names: Names | None = None,
    told: Told | None = None,
    most: int | None = None,
    *,
    sees: bool = False,
) -> list[dict[str, Any]]:
    """Items, oldest first, as the messages that chat templates expect. instructions: what stands before them,
    as a text, which becomes a system message, or as items. names: see `Transcript`. told: the first of the
    items, worded before. most: characters to which each output of this server's tools is cut, where it is
    longer. sees: whether the model is shown images; any other is told of them. Raises ApiError 400
    `unsupported_item` for an item that there are no words for."""
    messages = _messages(_transcript(items, names, told, most), sees)
    if instructions is None:
        return messages
    if isinstance(instructions, str):
        return [{"role": "system", "content": instructions}, *messages]
    return [*_messages(_transcript(instructions, names, None, None), sees), *messages]


def _messages(transcript: Transcript, sees: bool) -> list[dict[str, Any]]:
    return seen(transcript.messages, sees=sees) if transcript.shows_images else transcript.messages


def longest_result(items: Sequence[Item], names: Names | None = None, told: Told | None = None) -> int:
    """Characters of the longest output of this server's tools, as `to_messages` words it."""
    return _transcript(items, names, told, None).longest


def _transcript(
    items: Sequence[Item], names: Names | None, told: Told | None, most: int | None
) -> Transcript:
    if told is None or most is not None or not told.holds(names):
        told = NOTHING_TOLD
    return told.and_then(items[told.num_items :], "input", names, most).transcript


# ------------------------------------------------------------------------------------------------------------
# Fields to sampling


def sampling(
    fields: SamplingFields, info: ModelInfo, *, prompt_tokens: int, seed: int, caps: Caps = UNCAPPED
) -> SamplingParams:
    """Resolve sampling: the request's field, else the server's default, else the checkpoint's generation
    config, else the API's default.

    `max_tokens` unset, there too, means up to the context. Raises PromptTooLong when the prompt leaves no
    room for a token, or is longer than the server takes; ApiError 400 for what the engine cannot do.
    """
    if caps.prompt_tokens is not None and prompt_tokens > caps.prompt_tokens:
        raise PromptOverLimit(prompt_tokens, caps.prompt_tokens)
    room = info.max_model_len - prompt_tokens
    if room < 1:
        raise PromptTooLong(prompt_tokens, info.max_model_len)
    if fields.bad_words and "bad_words" not in info.capabilities:
        message = f"The model '{info.name}' cannot be kept from saying words."
        raise ApiError(400, message, code="unsupported_parameter", param="bad_words")
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
        include_stop=bool(fields.include_stop_str_in_output),
        bad_words=tuple(fields.bad_words or ()),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=fields.logprobs,
        num_assistant_tokens=(
            defaults.num_assistant_tokens
            if fields.num_assistant_tokens is None
            else fields.num_assistant_tokens
        ),
        max_ngram_size=fields.max_ngram_size,
        assistant_confidence_threshold=fields.assistant_confidence_threshold,
    )
