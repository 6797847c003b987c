"""The table of every request field of every API, and the sampling fields that the APIs share.

The table says whether a field is honoured, accepted without effect, or refused. No field is ignored in
silence: a field that the table does not list, or lists as a hint, is accepted and reported as ignored
(`server.ignored`). A field that the table lists as refused is a 400 `unsupported_parameter`, unless it asks
for the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from server.ignored import ignore
from server.shapes import (
    MAX_INT32,
    Within,
    array,
    check_length,
    check_range,
    either,
    from_pydantic,
    mapping,
    number,
    refuse,
    require_spelling,
    shorten,
    text,
)

Api = Literal["responses", "input_tokens", "compact", "chat", "completions", "messages", "count_tokens"]
Kind = Literal["honoured", "hint", "refused", "extension"]

MAX_STOPS = 16  # the official API takes 4; vLLM's users send more
MAX_STOP_CHARS = 1024
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 64

# ------------------------------------------------------------------------------------------------------------
# The table


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of one field.

    honoured: official, and does what it says. hint: official, accepted and checked, without effect here, and
    named as ignored. extension: ours, honoured. refused: known, and not to be had here. `accepts`, where
    given, are the only values taken: those which ask for nothing (they are dropped when the field is
    refused). `because` tells the client what to do instead. foreign: the field is one of another endpoint, so
    that a client most likely means what `because` names.
    """

    kind: Kind
    accepts: tuple[Any, ...] | None = None
    because: str = ""
    foreign: bool = False


HONOURED = Rule("honoured")
HINT = Rule("hint")
EXTENSION = Rule("extension")


def _refused(*accepts: Any, because: str = "") -> Rule:
    return Rule("refused", accepts, because)


def _elsewhere(because: str, *accepts: Any) -> Rule:
    """A field of another endpoint. A client that sends it here has mixed up two APIs, and would wonder why it
    makes no difference."""
    return Rule("refused", accepts, because, foreign=True)


def _renamed(here: str) -> Rule:
    """A field of another endpoint that has another name on this one."""
    return _elsewhere(f"Its name here is '{here}'.")


def _each(rule: Rule, names: str) -> dict[str, Rule]:
    """One rule for several fields."""
    return dict.fromkeys(names.split(), rule)


_HINTS: Mapping[str, Rule] = {
    "user": HONOURED,  # the log tells of both, as digests
    "safety_identifier": HONOURED,
    "prompt_cache_key": HONOURED,  # where a setting says so, which `server.prompting` knows; else it is named
    "prompt_cache_retention": HINT,
    "prompt_cache_options": HINT,
    "service_tier": HONOURED,
    "client_metadata": HINT,  # Codex sends it; not in the public schema
}

Tier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]
UNKNOWN_TIER = "scale"
"""The tier that is none here, nor near to one: it makes no difference."""
PRIORITIES = {"priority": -1, "default": 0, "flex": 1}
"""The tiers that there are, and how the queues take them: lower numbers first."""

MOST, LEAST = -1000, 1000
"""The numbers that a request may ask for as its `priority`: lower ones go first."""

Priority = Annotated[int, Within(MOST, LEAST)]


def is_tier(asked: str | None) -> bool:
    """Whether a request names one of our tiers, or one near to them."""
    return asked not in (None, "auto", UNKNOWN_TIER)


def tier_of(priority: int) -> str:
    """The tier that a request with a number of its own is served at."""
    return "priority" if priority < 0 else "flex" if priority > 0 else "default"


def check_priority(service_tier: str | None, priority: int | None) -> None:
    """ApiError 400 where a request names a tier and a number that is not of that tier."""
    if priority is not None and is_tier(service_tier) and effective_tier(service_tier) != tier_of(priority):
        message = f"'priority' {priority} is of the service tier '{tier_of(priority)}', not '{service_tier}'."
        refuse("priority", f"{message} Give one of the two.")


def effective_tier(asked: str | None) -> str:
    """The tier that a request is served at; those that are sold elsewhere are the nearest of ours."""
    if asked in ("fast", "ultrafast"):
        return "priority"
    return asked if asked in PRIORITIES else "default"


# Sampling beyond what each official API has; the same names everywhere.
_EXTENSIONS: Mapping[str, Rule] = _each(
    EXTENSION,
    "seed stop top_k min_p repetition_penalty frequency_penalty presence_penalty logit_bias ignore_eos "
    "min_tokens stop_token_ids num_assistant_tokens max_ngram_size assistant_confidence_threshold "
    "include_stop_str_in_output bad_words cache_salt priority guided_json guided_regex guided_choice "
    "guided_grammar structured_outputs",
)

# What other open servers take and this one does not: a client that relies on it must hear so.
_FOREIGN: Mapping[str, Rule] = {
    # An empty list would allow no token at all, so it does not say what leaving the field out says.
    "allowed_token_ids": _refused(),
    "truncate_prompt_tokens": _refused(),
    "prompt_logprobs": _refused(),
    "skip_special_tokens": _refused(True),
    "spaces_between_special_tokens": _refused(True),
    "return_token_ids": _refused(False),
    "chat_template": _refused(because="Templates come with the model; pass chat_template_kwargs."),
}

# What these ask of the text of an answer, or beside it, has no place among items.
_PLAIN: Mapping[str, Rule] = _each(
    EXTENSION,
    "skip_special_tokens spaces_between_special_tokens prompt_logprobs return_token_ids "
    "return_tokens_as_token_ids truncate_prompt_tokens add_special_tokens request_id",
)

# Of these only the best are shown, which are known at the end: nothing for a stream that is kept.
_SEARCH: Mapping[str, Rule] = _each(EXTENSION, "best_of use_beam_search length_penalty early_stopping")

# What chat calls by names of its own. No client that was recorded sends one of these to Responses.
_CHAT_WORDS: Mapping[str, Rule] = {
    "messages": _renamed("input"),
    "response_format": _renamed("text.format"),
    "reasoning_effort": _renamed("reasoning.effort"),
    "functions": _renamed("tools"),
    "function_call": _renamed("tool_choice"),
}

# What is guessed for the names of what a turn continues: without it, its answer would know of no history.
_GUESSED: Mapping[str, Rule] = {
    "conversation_id": _renamed("conversation"),
    "previous_id": _renamed("previous_response_id"),
}

# What messages call by names of their own, likewise.
_MESSAGES_WORDS: Mapping[str, Rule] = {"system": _renamed("instructions"), "stop_sequences": _renamed("stop")}

_NO_SEARCH = (
    "The best of several answers is known at their end, and a response is shown and kept as it is made: chat "
    "completions search."
)

_RESPONSES: Mapping[str, Rule] = {
    **_CHAT_WORDS,
    **_MESSAGES_WORDS,
    **_GUESSED,
    "max_tokens": _renamed("max_output_tokens"),
    "max_completion_tokens": _renamed("max_output_tokens"),
    "logprobs": _elsewhere("Ask for 'top_logprobs', and include 'message.output_text.logprobs'.", False),
    "n": _elsewhere("A response has one answer; send a request for each.", 1),
    **_HINTS,
    **_EXTENSIONS,
    **_FOREIGN,
    **dict.fromkeys(("use_beam_search", "early_stopping"), _refused(False, because=_NO_SEARCH)),
    "length_penalty": _refused(1.0, because=_NO_SEARCH),
    "best_of": _refused(1, because=_NO_SEARCH),
    **_each(
        HONOURED,
        "model input instructions previous_response_id conversation store background stream include tools "
        "tool_choice parallel_tool_calls max_tool_calls max_output_tokens temperature top_p top_logprobs "
        "truncation text metadata reasoning stream_options prompt_cache_retention",
    ),
    **_each(EXTENSION, "request_id previous_input_messages enable_response_messages"),
    **_each(EXTENSION, "chat_template_kwargs mm_processor_kwargs"),
    "await_tool_outputs": EXTENSION,
    "tool_timeout_s": EXTENSION,
    "generate": EXTENSION,  # official over WebSockets
    "prompt_cache_options": HONOURED,  # for its `prewarm`; the rest is named
    "prompt": HONOURED,
    **_each(HONOURED, "user safety_identifier"),  # the log tells of them, as digests
    "moderation": HONOURED,  # where a model for it is configured
    "context_management": HONOURED,
}

_INPUT_TOKENS: Mapping[str, Rule] = {
    **_CHAT_WORDS,
    **_GUESSED,
    "system": _renamed("instructions"),
    **_each(
        HONOURED,
        "model input instructions previous_response_id conversation tools tool_choice parallel_tool_calls "
        "text truncation reasoning",
    ),
    **_each(EXTENSION, "prompt chat_template_kwargs mm_processor_kwargs"),
    "personality": HINT,
}

_UNMODERATED = _elsewhere(
    "Nothing is moderated here: POST /v1/responses and /v1/chat/completions do that, and "
    "POST /v1/moderations judges any text."
)

# These two APIs keep nothing of what they are asked.
_ON_THEIR_OWN: Mapping[str, Rule] = {
    **_each(_elsewhere("POST /v1/responses goes on from stored turns."), "previous_response_id conversation"),
    "background": _elsewhere("POST /v1/responses makes answers in the background.", False),
    "moderation": _UNMODERATED,
}

_COMPACT: Mapping[str, Rule] = {
    **_CHAT_WORDS,
    "system": _renamed("instructions"),
    "moderation": _UNMODERATED,
    **_each(HONOURED, "model input instructions previous_response_id prompt_cache_key service_tier"),
    **_each(HINT, "prompt_cache_retention prompt_cache_options client_metadata"),
    **_each(EXTENSION, "cache_salt priority chat_template_kwargs"),
    "conversation": _elsewhere("Send an item of type 'compaction_trigger' to POST /v1/responses."),
}

_CHAT: Mapping[str, Rule] = {
    "input": _renamed("messages"),
    "prompt": _renamed("messages"),
    **_each(_elsewhere("Send a message with the role 'system'."), "instructions system"),
    "stop_sequences": _renamed("stop"),
    "max_output_tokens": _renamed("max_completion_tokens"),
    "text": _renamed("response_format"),
    "reasoning": _renamed("reasoning_effort"),
    **_each(
        _elsewhere("Chat completions go on from nothing; POST /v1/responses does, from stored turns."),
        "previous_response_id conversation",
    ),
    "background": _elsewhere("POST /v1/responses makes answers in the background.", False),
    **_HINTS,
    **_EXTENSIONS,
    **_FOREIGN,
    **_PLAIN,
    **_SEARCH,
    **_each(
        HONOURED,
        "model messages temperature top_p frequency_penalty presence_penalty stop logit_bias logprobs "
        "top_logprobs max_tokens max_completion_tokens n seed stream stream_options tools tool_choice "
        "parallel_tool_calls response_format reasoning_effort web_search_options",
    ),
    "max_tool_calls": EXTENSION,
    "modalities": Rule("honoured", (["text"],), "This server answers in text only."),
    "metadata": HONOURED,  # of completions that are stored; of others it is named
    "store": HONOURED,
    "echo": EXTENSION,
    "documents": EXTENSION,
    "chat_template": EXTENSION,  # where a setting says so
    "prediction": HINT,
    "verbosity": HINT,
    "include_reasoning": EXTENSION,
    **_each(EXTENSION, "chat_template_kwargs mm_processor_kwargs"),
    "continue_final_message": EXTENSION,
    "add_generation_prompt": EXTENSION,
    "audio": _refused(),
    "moderation": HONOURED,  # where a model for it is configured
    "functions": _refused([], because="It is deprecated; use tools."),
    "function_call": _refused("none", "auto", because="It is deprecated; use tool_choice."),
}

_COMPLETIONS: Mapping[str, Rule] = {
    **_ON_THEIR_OWN,
    "messages": _elsewhere("Send a 'prompt', or POST /v1/chat/completions."),
    "input": _renamed("prompt"),
    **_each(_elsewhere("Begin the 'prompt' with them, or POST /v1/chat/completions."), "instructions system"),
    "stop_sequences": _renamed("stop"),
    "tools": _elsewhere("A prompt has no place for tools: POST /v1/chat/completions.", []),
    "tool_choice": _elsewhere("A prompt has no place for tools: POST /v1/chat/completions.", "none", "auto"),
    "text": _renamed("response_format"),
    "max_output_tokens": _renamed("max_tokens"),
    "max_completion_tokens": _renamed("max_tokens"),
    **_EXTENSIONS,
    **_FOREIGN,
    **_PLAIN,
    **_SEARCH,
    **_each(
        HONOURED,
        "model prompt best_of echo frequency_penalty presence_penalty logit_bias logprobs max_tokens n seed "
        "stop stream stream_options temperature top_p",
    ),
    "service_tier": EXTENSION,
    "user": HONOURED,  # the log tells of both, as digests
    "safety_identifier": EXTENSION,
    "response_format": EXTENSION,
    "prompt_embeds": _refused(because="Prompts are texts or token ids."),
    "suffix": _refused("", because="The model cannot fill in the middle."),
}

# Of the Messages API. Prompts are kept for later ones whether or not a request asks for it.
_COUNT_TOKENS: Mapping[str, Rule] = {
    **_ON_THEIR_OWN,
    "input": _renamed("messages"),
    "prompt": _renamed("messages"),
    "instructions": _renamed("system"),
    **_each(_renamed("output_config.format"), "response_format text"),
    **_each(_renamed("output_config.effort"), "reasoning_effort reasoning"),
    "functions": _renamed("tools"),
    "function_call": _renamed("tool_choice"),
    **_each(
        HONOURED,
        "model messages system tools tool_choice thinking output_config output_format cache_control",
    ),
    **_each(HINT, "speed user_profile_id workspace_id context_management betas"),
    "mcp_servers": _refused([], because="POST /v1/responses takes MCP servers among its tools."),
}

_MESSAGES: Mapping[str, Rule] = {
    **_COUNT_TOKENS,
    **_each(_renamed("max_tokens"), "max_output_tokens max_completion_tokens"),
    "stop": _renamed("stop_sequences"),
    "n": _elsewhere("A message has one answer; send a request for each.", 1),
    **_each(
        HONOURED,
        "max_tokens stop_sequences stream temperature top_p top_k metadata service_tier speed",
    ),
    **_each(HINT, "container diagnostics inference_geo"),
    "thread": _refused(because="Send the whole conversation."),
    "moderation": EXTENSION,  # where a model for it is configured
}

FIELDS: Mapping[str, Mapping[str, Rule]] = {
    "responses": _RESPONSES,
    "input_tokens": _INPUT_TOKENS,
    "compact": _COMPACT,
    "chat": _CHAT,
    "completions": _COMPLETIONS,
    "messages": _MESSAGES,
    "count_tokens": _COUNT_TOKENS,
}


def screen(api: Api, body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request that the table takes; those that change nothing are named as ignored.

    Null means absent. Raises ApiError 400 `unsupported_parameter` for a refused field that asks for more than
    the default, `unknown_parameter` for one that is misspelt.
    """
    rules = FIELDS[api]
    require_spelling(body, rules.keys())
    kept: dict[str, Any] = {}
    for name, value in body.items():
        rule = rules.get(name)
        if value is None:
            continue
        if rule is None or rule.kind == "hint":
            ignore(name)
        if rule is None:
            continue
        if rule.accepts is None:
            kept[name] = value
        elif not any(_same(value, accepted) for accepted in rule.accepts):
            why = "is a field of another endpoint" if rule.foreign else "cannot be honoured by this server"
            message = f"Unsupported parameter: '{name}' {why}. {rule.because}".rstrip()
            refuse(name, message, "unsupported_parameter")
        elif rule.kind != "refused":
            kept[name] = value
    return kept


def _same(value: Any, accepted: Any) -> bool:
    """Equality as JSON has it: true is not 1, 1 is 1.0."""
    return isinstance(value, bool) == isinstance(accepted, bool) and bool(value == accepted)


# ------------------------------------------------------------------------------------------------------------
# Sampling

Number = Annotated[float, Field(allow_inf_nan=False)]
Temperature = Annotated[Number, Field(ge=0, le=2)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
TokenId = Annotated[int, Within(0, MAX_INT32)]
_STOP = text(1, MAX_STOP_CHARS)
_STOPS = either(_STOP, array(_STOP, max_items=MAX_STOPS))
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]


class SamplingFields(BaseModel):
    """The sampling fields of a request, checked; None is unset (the checkpoint's, then the API's default
    holds).

    `max_tokens`, `logprobs` (how many alternatives; None is off) and `prompt_logprobs` are resolved by each
    API, which knows them by other names. `stop` is a list, `logit_bias` maps token ids to what is added to
    their logits. The dump validates again unchanged, after JSON too, so that a plan can keep it.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    temperature: Temperature | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Within(-1, MAX_INT32)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # it divides and multiplies logits; the bounds are far beyond what any text survives
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=10)] | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Within(-(1 << 63), (1 << 63) - 1)] | None = None
    stop: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    min_tokens: Annotated[int, Within(0, MAX_INT32)] | None = None
    ignore_eos: bool | None = None
    num_assistant_tokens: Annotated[int, Within(0, 32)] | None = None
    max_ngram_size: Annotated[int, Within(1, 16)] | None = None
    assistant_confidence_threshold: Annotated[Number, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Within(0, MAX_INT32)] | None = None
    logprobs: Annotated[int, Within(0, 20)] | None = None
    prompt_logprobs: Annotated[int, Within(0, 20)] | None = None

    @field_validator("top_p")
    @classmethod
    def _smallest_nucleus(cls, top_p: float | None) -> float | None:
        # 0 is official and means the likeliest token only; samplers want a nucleus that is not empty.
        return 1e-6 if top_p == 0 else top_p

    @field_validator("top_k")
    @classmethod
    def _top_k_off(cls, top_k: int | None) -> int | None:
        return 0 if top_k == -1 else top_k  # -1 is off elsewhere, 0 here

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, stop: Any) -> Any:
        stops = _STOPS(stop, "stop")
        return [stops] if isinstance(stops, str) else stops

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bias_by_id(cls, bias: Any) -> Any:
        check_length("logit_bias", len(mapping(bias, "logit_bias")), "object", most=MAX_BIASES)
        out: dict[str, float] = {}
        for token_id, value in bias.items():
            path = f"logit_bias.{shorten(token_id)}"
            if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= 9):
                refuse(path, f"Invalid '{path}': the keys of 'logit_bias' must be token ids.")
            check_range(path, number(value, path), "decimal", -100, 100)
            out[token_id] = float(value)
        return out


_SAMPLING_NAMES = frozenset(SamplingFields.model_fields) - {"max_tokens", "logprobs", "prompt_logprobs"}


def sampling_fields(
    body: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingFields:
    """The sampling fields of a screened body, with what the API resolved; raises ApiError 400 naming the
    field."""
    values = {name: body[name] for name in _SAMPLING_NAMES if name in body}
    try:
        return SamplingFields(
            **values, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )
    except ValidationError as error:
        raise from_pydantic(error) from None
