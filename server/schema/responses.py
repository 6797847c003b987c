"""Parses and checks the request bodies of the Responses API, and echoes them in the Response object.

The bodies are those that create a response, count input tokens and submit the outputs of tools. The items of
the input are read in `schema.items`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from engine import Shape
from server.ignored import ignore, unread
from server.items import ITEM_TYPES, Item, answer_field, identifier, is_approval, link_of
from server.moderation import Moderation, parse_moderation
from server.schema.fields import (
    UNKNOWN_TIER,
    Api,
    Number,
    Priority,
    SamplingFields,
    Tier,
    check_priority,
    effective_tier,
    sampling_fields,
    screen,
)
from server.schema.formats import TEXT, asked_shape, parse_format
from server.schema.items import NewId, check_number, normalize_item
from server.schema.messages import to_items
from server.schema.plain_fields import request_name
from server.schema.prompts import FilledPrompt
from server.schema.tools import (
    Unsupported,
    parse_tool_choice,
    parse_tools,
    require_offered,
    secrets_of,
)
from server.shapes import (
    MAX_INT32,
    Within,
    array,
    check_length,
    from_pydantic,
    mapping,
    missing,
    mistyped,
    name_others,
    one_of,
    record,
    refuse,
    require_spelling,
    shorten,
    whole,
)

MIN_OUTPUT_TOKENS = 16
MAX_CACHE_KEY = 64
"""Characters of a `prompt_cache_key` where the official schema has a bound."""
MAX_TOOL_TIMEOUT_S = 7 * 24 * 3600
MAX_TEMPLATE_KWARGS_BYTES = 64 * 1024

INCLUDES = frozenset(
    {
        "compaction.summary",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "message.input_image.image_url",
        "message.output_text.logprobs",
        "reasoning.encrypted_content",
    }
)
"""Every official value, and one of ours: that of compactions."""

# What a template gets from us; a client's argument of the same name would collide with it.
_TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "documents", "conversation", "chat_template", "add_generation_prompt", "tokenize",
     "continue_final_message", "return_dict", "return_tensors", "self"}
)  # fmt: skip

Text = Annotated[str, Field(max_length=10_485_760)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextOptions(_Part):
    """`text`: the format in its flat form; `verbosity` is checked and echoed."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(_Part):
    """`reasoning`: all but `effort` is only checked. `generate_summary` is the deprecated name of
    `summary`."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None


class StreamOptions(_Part):
    """`stream_options`."""

    include_obfuscation: bool | None = None

    def name_ignored(self, body: Mapping[str, Any]) -> None:
        """Name what is ignored of these options, which are those of `body`."""
        unread(body.get("stream_options") or {}, type(self).model_fields, "stream_options")


def check_metadata(value: Any) -> dict[str, str]:
    """At most 16 pairs of strings, keys up to 64 and values up to 512 characters; raises ApiError 400."""
    mapping(value, "metadata")
    check_length("metadata", len(value), "object", most=16)
    for key, element in value.items():
        path = f"metadata.{shorten(key)}"
        if not isinstance(element, str):
            mistyped(path, "a string", element)
        if len(key) > 64:
            message = f"Invalid '{path}': a key has at most 64 characters, and this one {len(key)}."
            refuse(path, message, "string_above_max_length")
        check_length(path, len(element), "string", most=512)
    return dict(value)


def check_template_kwargs(value: Any, param: str = "chat_template_kwargs") -> dict[str, Any]:
    """Arguments for the chat template: an object of at most 64 KiB without the names that we pass
    ourselves."""
    mapping(value, param)
    taken = _TEMPLATE_NAMES & value.keys()
    if taken:
        refuse(f"{param}.{min(taken)}", f"Invalid '{param}': '{min(taken)}' is set by the server.")
    if any(not key.isidentifier() for key in value):
        refuse(param, f"Invalid '{param}': the keys must be identifiers.")
    try:
        size = len(orjson.dumps(value))
    except orjson.JSONEncodeError as error:
        refuse(param, f"Invalid '{param}': {error}.")
    if size > MAX_TEMPLATE_KWARGS_BYTES:
        refuse(param, f"Invalid '{param}': larger than {MAX_TEMPLATE_KWARGS_BYTES} bytes.")
    return dict(value)


def _id(value: str) -> str:
    if not value.isprintable():
        raise ValueError("ids must be printable")
    return value


Id = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_id)]


class CreateResponse(BaseModel):
    """A request to create a response, checked; null and absent are one.

    `input` is as it came (see `schema.items.normalize_input`), None when absent. `tools` and `tool_choice`
    are in their flat form. `tool_timeout_s`: None is the server's default. `generate`: false where only the
    prompt is to be computed, for a next turn. `sampling` leaves `max_tokens` and `logprobs` unset: they
    follow from `max_output_tokens`, and from `top_logprobs` with `include`. `shape` is what the answer must
    look like, because of the field `shape_param`, and `limit_param` the field that gave `max_output_tokens`.
    `compact_threshold` is the number of tokens from which on a prompt is compacted, 0 where the server is to
    choose it, None where it never is; `compacts` is true where the request asks for a compaction, and nothing
    else.
    `secrets` are the credentials that its tools came with, and those that its input adds, by their paths.
    `request_id`: what its id ends with. `enable_response_messages`: its end tells the messages that it was
    made of. `asked_model` is the name that the request gave, where another model answers it under `model`.
    `prompt` is what the template that it names has become: its messages, where it has any, stand in the place
    of `instructions` (`schema.prompts.fill`).
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", arbitrary_types_allowed=True)

    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    input: Any = None
    instructions: Text | None = None
    prompt: FilledPrompt | None = None
    previous_response_id: Id | None = None
    conversation_id: Id | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    include: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: Annotated[int, Within(0, MAX_INT32)] | None = None
    max_output_tokens: Annotated[int, Within(MIN_OUTPUT_TOKENS, MAX_INT32)] | None = None
    top_logprobs: Annotated[int, Within(0, 20)] | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    service_tier: Tier | None = None
    priority: Priority | None = None
    prompt_cache_key: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: Annotated[str, Field(max_length=128)] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    await_tool_outputs: bool = False
    tool_timeout_s: Annotated[Number, Field(gt=0, le=MAX_TOOL_TIMEOUT_S)] | None = None
    generate: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] = Field(default_factory=dict)
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    sampling: SamplingFields = SamplingFields()
    shape: Shape | None = None
    shape_param: str = "text.format"
    limit_param: str = "max_output_tokens"
    secrets: dict[str, dict[str, Any]] = Field(default_factory=dict, repr=False)
    asked_model: str | None = None

    compact_threshold: int | None = None
    compacts: bool = False
    moderation: Moderation | None = None
    request_id: str | None = None
    enable_response_messages: bool = False

    @property
    def lead(self) -> tuple[Item, ...]:
        """The messages of its prompt template, which stand before everything else."""
        return () if self.prompt is None else self.prompt.items

    def sampling_fields(self) -> dict[str, Any]:
        """The sampling fields that are set, as JSON values that `SamplingFields` takes back."""
        return self.sampling.model_dump(exclude_none=True)


def parse_create(
    body: Mapping[str, Any], *, unsupported_tools: Unsupported = "refuse", waits: bool = False
) -> CreateResponse:
    """A body of POST /responses. unsupported_tools: see `require_offered`. waits: what `await_tool_outputs`
    is where the body leaves it open and could have it. Raises ApiError 400."""
    request = _parse("responses", body, unsupported_tools)
    if "await_tool_outputs" not in request.model_fields_set:
        could = request.store and (request.stream or request.background)
        request = request.model_copy(update={"await_tool_outputs": waits and could})
    of_stored = request.previous_response_id or request.conversation_id
    if request.input is None and of_stored is None and not request.lead:
        message = "One of 'input', 'previous_response_id' or 'conversation' must be provided."
        refuse("input", f"Missing required parameter. {message}", "missing_required_parameter")
    if request.background and not request.store:
        refuse("background", "Background responses are stored: 'store' cannot be false.")
    if "stream_options" in body and body["stream_options"] is not None and not request.stream:
        refuse("stream_options", "The 'stream_options' parameter is only allowed when 'stream' is enabled.")
    if request.await_tool_outputs and not (request.stream or request.background):
        refuse("await_tool_outputs", "'await_tool_outputs' needs 'stream' or 'background'.")
    if request.await_tool_outputs and not request.store:
        refuse("await_tool_outputs", "A response that waits is stored: 'store' cannot be false.")
    if request.top_logprobs and "message.output_text.logprobs" not in request.include:
        ignore("top_logprobs")
    if request.tool_timeout_s is not None and not request.await_tool_outputs:
        ignore("tool_timeout_s")
    if request.service_tier == UNKNOWN_TIER:
        ignore("service_tier")
    check_priority(request.service_tier, request.priority)
    if _prewarms(request.prompt_cache_options):
        return request.model_copy(update={"generate": False})
    return request


def _prewarms(options: Mapping[str, Any] | None) -> bool:
    """Whether `prompt_cache_options` ask that only the prompt is computed. Raises ApiError 400."""
    prewarm = (options or {}).get("prewarm")
    if prewarm is not None and not isinstance(prewarm, bool):
        mistyped("prompt_cache_options.prewarm", "a boolean", prewarm)
    return bool(prewarm)


def parse_input_tokens(
    body: Mapping[str, Any], *, unsupported_tools: Unsupported = "refuse"
) -> CreateResponse:
    """A body of POST /responses/input_tokens, as the request whose prompt is counted. Raises ApiError 400."""
    request = _parse("input_tokens", body, unsupported_tools)
    if request.truncation == "auto":
        ignore("truncation")  # the whole of it is counted
    return request


def _parse(api: Api, body: Mapping[str, Any], unsupported_tools: Unsupported) -> CreateResponse:
    values = screen(api, body)
    if "conversation" in values:
        values["conversation_id"] = _conversation_id(values.pop("conversation"))
        if "previous_response_id" in values:
            message = "'previous_response_id' cannot be used in conjunction with 'conversation'."
            refuse("previous_response_id", message, "mutually_exclusive_parameters")
    if "request_id" in values:
        values["request_id"] = request_name(values["request_id"]).removeprefix("resp_")
    if "previous_input_messages" in values:
        values["input"] = _after_messages(values)
    if "include" in values:
        values["include"] = parse_include(values["include"])
    if "tools" in values:
        tools = parse_tools(values["tools"])
        values["secrets"] = secrets_of(values["tools"])
        values["tools"] = tuple(tools)
    if "tool_choice" in values:
        values["tool_choice"] = parse_tool_choice(values["tool_choice"])
    require_offered(values.get("tools", ()), values.get("tool_choice"), unsupported_tools)
    if "context_management" in values:
        values["compact_threshold"] = _compact_threshold(values.pop("context_management"))
    if "metadata" in values:
        values["metadata"] = check_metadata(values["metadata"])
    if "moderation" in values:
        values["moderation"] = parse_moderation(values["moderation"])
    if "chat_template_kwargs" in values:
        values["chat_template_kwargs"] = check_template_kwargs(values["chat_template_kwargs"])
    values["sampling"] = sampling_fields(values, max_tokens=None)
    form = _format(values)
    values["shape"], values["shape_param"] = asked_shape(values, form, "text.format")
    try:
        request = CreateResponse(**values)
    except ValidationError as error:
        raise from_pydantic(error) from None
    if request.input == [] and not (
        request.instructions or request.lead or request.previous_response_id or request.conversation_id
    ):
        check_length("input", 0, "array", least=1)  # there would be nothing to answer
    require_spelling(values.get("text") or {}, ("format", "verbosity"), "text")
    unread(values.get("text") or {}, ("format",), "text")
    require_spelling(values.get("reasoning") or {}, ("effort", "summary", "generate_summary"), "reasoning")
    unread(values.get("reasoning") or {}, ("effort",), "reasoning")
    unread(request.prompt_cache_options or {}, ("prewarm",), "prompt_cache_options")
    request.stream_options.name_ignored(values)
    return request


LEAST_THRESHOLD = 1000
"""Tokens from which on a request may ask for a compaction."""

CONTEXT_MANAGEMENT = array(
    record({"type": one_of("compaction")}, {"compact_threshold": whole(LEAST_THRESHOLD, MAX_INT32)}), 1
)


def _compact_threshold(value: Any) -> int:
    """The lowest threshold of `context_management`; 0 where its entries leave it to the server."""
    entries = CONTEXT_MANAGEMENT(value, "context_management")
    thresholds = [entry["compact_threshold"] for entry in entries if "compact_threshold" in entry]
    return min(thresholds, default=0)


def parse_compact(body: Mapping[str, Any]) -> CreateResponse:
    """A body of POST /responses/compact, as the request that makes the compaction. Raises ApiError 400."""
    request = _parse("compact", body, "refuse")
    if request.input is None and request.previous_response_id is None:
        message = "One of 'input' or 'previous_response_id' must be provided."
        refuse("input", f"Missing required parameter. {message}", "missing_required_parameter")
    check_length("prompt_cache_key", len(request.prompt_cache_key or ""), "string", most=MAX_CACHE_KEY)
    return request.model_copy(update={"compacts": True, "store": False})


def _after_messages(values: Mapping[str, Any]) -> list[Any]:
    """The input of a body, behind the messages that come before it in the form of chat."""
    param = "previous_input_messages"
    for other in ("previous_response_id", "conversation_id"):
        if other in values:
            field = other.removesuffix("_id") if other == "conversation_id" else other
            message = f"'{param}' and '{field}' both say what came before: give one of them."
            refuse(param, message, "mutually_exclusive_parameters")
    before = to_items(values[param], new_id=lambda prefix: prefix, param=param)
    earlier = [
        {
            name: item[name]
            for name in item
            if name not in (_OF_CHAT if item["type"] == "message" else ("id",))
        }
        for item in before
    ]
    given = values.get("input")
    if isinstance(given, str):
        return [*earlier, {"type": "message", "role": "user", "content": given}]
    return [*earlier, *given] if isinstance(given, list) else earlier if given is None else given


_OF_CHAT = ("id", "name", "template_role")
"""What messages of chat have as items, and those of Responses do not take."""


def _format(values: dict[str, Any]) -> dict[str, Any] | None:
    """The text format of a body, which is given its flat form; None where there is none."""
    options = values.get("text")
    if not isinstance(options, dict) or options.get("format") is None:
        return None
    form = parse_format(options["format"], "text.format")
    values["text"] = {**options, "format": form}
    return form


def _conversation_id(value: Any) -> str:
    if isinstance(value, dict):
        value, path = record({"id": identifier})(value, "conversation")["id"], "conversation.id"
    elif not isinstance(value, str):
        mistyped("conversation", "a string or an object", value)
    else:
        path = "conversation"
    found: str = identifier(value, path)
    return found


def parse_include(value: Any) -> tuple[str, ...]:
    """An `include` list, of a body or a query; raises ApiError 400 for a value that is not official."""
    if not isinstance(value, list):
        mistyped("include", "an array", value)
    for index, name in enumerate(value):
        if not isinstance(name, str):
            mistyped(f"include[{index}]", "a string", name)
        if name not in INCLUDES:
            wanted = ", ".join(f"'{known}'" for known in sorted(INCLUDES))
            message = f"Invalid value: '{shorten(name)}'. Supported values are: {wanted}."
            refuse(f"include[{index}]", message)
    return tuple(dict.fromkeys(value))


def configured(request: CreateResponse, settings: Mapping[str, Any]) -> CreateResponse:
    """A request with the settings that items before its answer make: they are newer than its own. Raises
    ApiError 400."""
    update: dict[str, Any] = {}
    if (effort := settings.get("reasoning", {}).get("effort")) is not None:
        reasoning = request.reasoning or ReasoningOptions()
        update["reasoning"] = reasoning.model_copy(update={"effort": effort})
    form = settings.get("text", {}).get("format")
    if form is not None and request.shape_param == "text.format":
        update["text"] = request.text.model_copy(update={"format": form})
        update["shape"], update["shape_param"] = asked_shape({}, form, "text.format")
    return request.model_copy(update=update) if update else request


# ------------------------------------------------------------------------------------------------------------
# Tool outputs


class ToolOutputs(BaseModel):
    """A body of POST /responses/{id}/tool_outputs: normalised items, one for each call that is answered.
    Those that came without a type are `function_call_output` items."""

    model_config = ConfigDict(frozen=True, strict=True)

    items: tuple[Item, ...]
    stream: bool = False


def parse_tool_outputs(body: Mapping[str, Any], *, new_id: NewId) -> ToolOutputs:
    """Read both forms: `{"tool_outputs": [{"call_id", "output"}]}` and `{"tool_call_id", "output"}`. An entry
    with a `type` is a whole item that answers a call.

    Raises ApiError 400, also for a call answered twice.
    """
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        mistyped("stream", "a boolean", stream)
    several = body.get("tool_outputs")
    if several is None and body.keys().isdisjoint({"call_id", "tool_call_id", "output"}):
        missing("tool_outputs")
    if several is None:
        items = [_tool_output(body, "", new_id, "stream")]
    elif not isinstance(several, list):
        mistyped("tool_outputs", "an array", several)
    else:
        check_number(several, "tool_outputs")
        name_others(body, ("tool_outputs", "stream"))
        items = [_tool_output(entry, f"tool_outputs[{index}]", new_id) for index, entry in enumerate(several)]
    if not items:
        check_length("tool_outputs", 0, "array", least=1)
    seen: set[str | None] = set()
    for index, item in enumerate(items):
        name, key = link_of(item)
        if key in seen:
            refuse(f"tool_outputs[{index}].{name}", f"Call '{shorten(str(key))}' is answered twice.")
        seen.add(key)
    return ToolOutputs(items=tuple(items), stream=bool(stream))


_OUTPUTS = tuple(row.type for row in ITEM_TYPES.values() if row.answers is not None)
_APPROVALS = tuple(kind for kind in _OUTPUTS if is_approval({"type": kind}))


def _tool_output(entry: Any, path: str, new_id: NewId, *known: str) -> Item:
    """One output; `known` is what else stands in the same object."""
    if not isinstance(entry, dict):
        mistyped(path, "an object", entry)
    dot = f"{path}." if path else ""
    if entry.get("type") is not None:
        one_of(*_OUTPUTS)(entry["type"], f"{dot}type")
    if entry.get("type") not in (None, "function_call_output"):
        written = {name: value for name, value in entry.items() if name not in known}
        return normalize_item(written, path or "tool_outputs", new_id)
    if approval := next((kind for kind in _APPROVALS if entry.get(answer_field(kind)) is not None), None):
        message = f'Missing required parameter: \'{dot}type\'. An approval has "type": "{approval}".'
        refuse(f"{dot}type", message, "missing_required_parameter")
    name_others(entry, ("type", "call_id", "tool_call_id", "output", *known), path)
    call_id = entry.get("call_id") if entry.get("call_id") is not None else entry.get("tool_call_id")
    for name, value in (("call_id", call_id), ("output", entry.get("output"))):
        if value is None:
            missing(f"{dot}{name}")
    item = {"type": "function_call_output", "call_id": call_id, "output": entry["output"]}
    return normalize_item(item, path or "tool_outputs", new_id)


# ------------------------------------------------------------------------------------------------------------
# The echo


def echo(request: CreateResponse, *, model: str, temperature: float, top_p: float) -> dict[str, Any]:
    """The part of a Response object that never changes: the request's fields at their effective values.

    model: as resolved. temperature, top_p: as drawn with. Every field that the official schema or the Open
    Responses suite asks for is there, and numbers are never null, but for limits that are off.
    """
    reasoning = request.reasoning or ReasoningOptions()
    fields: dict[str, Any] = {
        "background": request.background,
        "conversation": {"id": request.conversation_id} if request.conversation_id is not None else None,
        "frequency_penalty": request.sampling.frequency_penalty or 0.0,
        "instructions": list(request.lead) or request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata,
        "model": model,
        "parallel_tool_calls": request.parallel_tool_calls,
        "presence_penalty": request.sampling.presence_penalty or 0.0,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        # That of the SDK, too, in the official spelling.
        "prompt_cache_retention": (request.prompt_cache_retention or "").replace("-", "_") or None,
        # No summaries are made, so the effective value is null even where one was asked for.
        "reasoning": {"effort": reasoning.effort, "summary": None, "context": reasoning.context},
        "safety_identifier": request.safety_identifier,
        "service_tier": effective_tier(request.service_tier),
        "store": request.store,
        "temperature": temperature,
        "text": {
            "format": request.text.format or dict(TEXT),
            "verbosity": request.text.verbosity or "medium",
        },
        "tool_choice": request.tool_choice,
        "tools": list(request.tools),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": top_p,
        "truncation": request.truncation,
    }
    if request.prompt is not None:
        fields["prompt"] = request.prompt.echo()
    if request.user is not None:
        fields["user"] = request.user  # not nullable in the schema
    return fields
