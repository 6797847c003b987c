"""Parses and checks the body of POST /v1/completions.

A prompt is a text or a list of token ids, and one request may hold several prompts of either form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError

from engine import Shape
from server.ignored import ignore
from server.schema.chat import MAX_CHOICES, ChatStreamOptions, Name, check_choices
from server.schema.fields import (
    UNKNOWN_TIER,
    Priority,
    SamplingFields,
    Tier,
    check_priority,
    sampling_fields,
    screen,
)
from server.schema.formats import asked_shape, parse_format
from server.schema.plain_fields import PlainFields, check_plain
from server.schema.search import Search, parse_search
from server.shapes import MAX_INT32, Within, check_length, from_pydantic, missing, mistyped, refuse

MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16

Prompt = str | list[int]


class CompletionRequest(PlainFields):
    """A request for completions, checked.

    prompts: one or more, each a text or token ids.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    model: Name | None = None
    prompts: list[Prompt]
    n: Annotated[int, Within(1, MAX_CHOICES)] = 1
    search: Search | None = None
    stream: bool = False
    stream_options: ChatStreamOptions = ChatStreamOptions()
    echo: bool = False
    logprobs: Annotated[int, Within(0, 20)] | None = None
    max_tokens: Annotated[int, Within(0, MAX_INT32)] = DEFAULT_MAX_TOKENS
    add_special_tokens: bool = True
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    service_tier: Tier | None = None
    priority: Priority | None = None
    sampling: SamplingFields = SamplingFields()
    shape: Shape | None = None
    shape_param: str = "response_format"


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """A body of POST /v1/completions. Raises ApiError 400."""
    values = screen("completions", body)
    if "prompt" not in values:
        missing("prompt")
    values["prompts"] = _prompts(values.pop("prompt"))
    form = values.get("response_format")
    if form is not None:
        form = parse_format(form, "response_format", nested=True)
    values["shape"], values["shape_param"] = asked_shape(values, form, "response_format")
    try:
        request = CompletionRequest(**values)
    except ValidationError as error:
        raise from_pydantic(error) from None
    search = parse_search(values, n=request.n, stream=request.stream)
    if search is not None and search.beams is not None:
        _check_beams(request)
    if body.get("stream_options") is not None and not request.stream:
        refuse("stream_options", "The 'stream_options' parameter is only allowed when 'stream' is enabled.")
    check_choices(request.n, scored=request.logprobs is not None)
    request.stream_options.name_ignored(values)
    check_plain(request, values, stream=request.stream, logprobs=request.logprobs is not None)
    if request.service_tier == UNKNOWN_TIER:
        ignore("service_tier")
    check_priority(request.service_tier, request.priority)
    candidates = request.n if search is None else search.num_candidates
    if len(request.prompts) * candidates > MAX_PROMPTS:
        refuse("prompt", f"At most {MAX_PROMPTS} completions can be asked for at once.")
    # No token may be wanted, but the engine generates one at least; the view leaves it out.
    limit = max(request.max_tokens, 1)
    shown = [request.prompt_logprobs, request.logprobs if request.echo else None]
    prompt_logprobs = max((count for count in shown if count is not None), default=None)
    sampling = sampling_fields(
        values, max_tokens=limit, logprobs=request.logprobs, prompt_logprobs=prompt_logprobs
    )
    return request.model_copy(update={"sampling": sampling, "search": search})


def _check_beams(request: CompletionRequest) -> None:
    if request.shape is not None:
        message = f"'{request.shape_param}' cannot be combined with 'use_beam_search'."
        refuse(request.shape_param, message, "unsupported_parameter")
    if request.echo and request.logprobs is not None:
        refuse(
            "echo",
            "'echo' with 'logprobs' cannot be combined with 'use_beam_search'.",
            "unsupported_parameter",
        )


def _prompts(value: Any) -> list[Prompt]:
    """The four official forms: a text, texts, token ids, lists of token ids. An array that begins with an id
    is one prompt."""
    if not isinstance(value, list) or (value and type(value[0]) is int):
        return [_prompt(value, "prompt")]
    check_length("prompt", len(value), "array", 1, MAX_PROMPTS)
    return [_prompt(prompt, f"prompt[{index}]") for index, prompt in enumerate(value)]


def _prompt(value: Any, path: str) -> Prompt:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        mistyped(path, "a string or an array of token ids", value)
    check_length(path, len(value), "array", 1)
    for index, token_id in enumerate(value):
        if type(token_id) is not int:
            mistyped(f"{path}[{index}]", "a token id", token_id)
    return value
