"""Parses and checks the body of POST /v1/chat/completions.

Messages are read in `schema.messages` and tools in `schema.tools`. This module has the remaining fields and
the rules between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field, SkipValidation, ValidationError

from engine import Shape
from server.ignored import ignore
from server.items import Item, Tool, is_server_run
from server.moderation import Moderation, parse_moderation
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
from server.schema.messages import check_answers, to_items
from server.schema.plain_fields import PlainFields, check_plain
from server.schema.responses import (
    CreateResponse,
    Effort,
    ReasoningOptions,
    StreamOptions,
    check_metadata,
    check_template_kwargs,
)
from server.schema.search import Search, parse_search
from server.schema.tools import (
    Messages,
    Unsupported,
    parse_tool_choice,
    parse_tools,
    require_offered,
    search_tool,
    secrets_of,
)
from server.shapes import MAX_INT32, Within, array, from_pydantic, mapping, missing, refuse

MAX_CHOICES = 128
MAX_SCORED_CHOICES = 16  # whose tokens have log probabilities, which are up to a KiB each
MAX_TEMPLATE_CHARS = 1 << 18
MAX_DOCUMENTS = 1000

Tokens = Annotated[int, Within(1, MAX_INT32)]
Name = Annotated[str, Field(min_length=1, max_length=512)]


class ChatStreamOptions(StreamOptions):
    """`stream_options`: `include_usage` asks for one more chunk, last, with the usage, and
    `continuous_usage_stats` besides for the usage so far in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False

    def name_ignored(self, body: Mapping[str, Any]) -> None:
        """See `StreamOptions.name_ignored`."""
        super().name_ignored(body)
        if self.continuous_usage_stats and not self.include_usage:
            ignore("stream_options.continuous_usage_stats")


class ChatRequest(PlainFields):
    """A request for a chat completion, checked; null and absent are one.

    `messages` as they came, `items` what they say (ids mean nothing outside). Tools and tool choice are in
    the flat form of Responses; `searches` says that `web_search_options` is the last of the tools, and
    `secrets` are the credentials that they came with, by their paths. `sampling` has `max_tokens`
    and `logprobs` resolved. `store`: keep it, with its `metadata`. `echo`: the answer begins with the last
    message. `shape` is what the answer must look like, because of the field `shape_param`. `effort_param`:
    the field that gives the effort; None: no field does. `cuts_max_tokens`: the limit is a maximum, which the
    context may end before.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    model: Name | None = None
    asked_model: str | None = None  # see `CreateResponse`
    messages: SkipValidation[list[dict[str, Any]]]
    items: SkipValidation[list[Item]]
    n: Annotated[int, Within(1, MAX_CHOICES)] = 1
    search: Search | None = None
    stream: bool = False
    stream_options: ChatStreamOptions = ChatStreamOptions()
    logprobs: bool = False
    top_logprobs: Annotated[int, Within(0, 20)] | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: Annotated[int, Within(0, MAX_INT32)] | None = None
    searches: bool = False
    secrets: dict[str, dict[str, Any]] = Field(default_factory=dict, repr=False)
    shape: Shape | None = None
    shape_param: str = "response_format"
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    reasoning_effort: Effort | None = None
    effort_param: str | None = "reasoning_effort"
    cuts_max_tokens: bool = False
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] = Field(default_factory=dict)
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    prompt_cache_key: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    service_tier: Tier | None = None
    priority: Priority | None = None
    store: bool = False
    metadata: dict[str, str] = Field(default_factory=dict)
    echo: bool = False
    documents: list[dict[str, Any]] | None = None
    chat_template: Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE_CHARS)] | None = None
    add_special_tokens: bool = False
    moderation: Moderation | None = None
    sampling: SamplingFields = SamplingFields()

    @property
    def limit_param(self) -> str:
        """The field that limits the answer: the newer name counts."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def place_of(self, index: int) -> str:
        """The path of the field that a tool came from."""
        is_field = self.searches and index == len(self.tools) - 1
        return "web_search_options" if is_field else f"tools[{index}]"

    def as_response(self) -> CreateResponse:
        """The same as a response that is not stored, for tools that the server runs; its input is `items`.
        Raises ApiError 400 for what only a generation without such tools can have."""
        _check_single(self)
        return CreateResponse.model_construct(  # every field was checked, by chat's own bounds
            model=self.model,
            asked_model=self.asked_model,
            store=False,
            stream=self.stream,
            include=("message.output_text.logprobs",) if self.logprobs else (),
            tools=tuple(self.tools),
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            max_tool_calls=self.max_tool_calls,
            max_output_tokens=self.max_completion_tokens or self.max_tokens,
            limit_param=self.limit_param,
            top_logprobs=self.top_logprobs,
            reasoning=ReasoningOptions(effort=self.reasoning_effort),
            service_tier=self.service_tier,
            priority=self.priority,
            prompt_cache_key=self.prompt_cache_key,
            chat_template_kwargs=self.chat_template_kwargs,
            mm_processor_kwargs=self.mm_processor_kwargs,
            cache_salt=self.cache_salt,
            sampling=self.sampling.model_copy(update={"max_tokens": None, "logprobs": None}),
            shape=self.shape,
            shape_param=self.shape_param,
            secrets=self.secrets,
            moderation=self.moderation,
            safety_identifier=self.safety_identifier,
            user=self.user,
        )


def parse_chat(
    body: Mapping[str, Any], *, unsupported_tools: Unsupported = "refuse", on: Messages = "chat"
) -> ChatRequest:
    """A body of POST /v1/chat/completions. unsupported_tools, on: see `require_offered`. Raises ApiError 400
    naming the path of what is wrong."""
    values = screen("chat", body)
    if "messages" not in values:
        missing("messages")
    values["items"] = to_items(values["messages"], new_id=_unnamed)
    if on == "chat":
        check_answers(values["messages"])
    values |= _tools(values, unsupported_tools, on)
    if "chat_template_kwargs" in values:
        values["chat_template_kwargs"] = check_template_kwargs(values["chat_template_kwargs"])
    form = values.get("response_format")
    if form is not None:
        form = parse_format(form, "response_format", nested=True)
    values["shape"], values["shape_param"] = asked_shape(values, form, "response_format")
    if "metadata" in values:
        values["metadata"] = check_metadata(values["metadata"])
    if "moderation" in values:
        values["moderation"] = parse_moderation(values["moderation"])
    if "documents" in values:
        values["documents"] = _documents(values["documents"])
    try:
        request = ChatRequest(**values)
    except ValidationError as error:
        raise from_pydantic(error) from None
    _check_rules(request, body)
    search = parse_search(values, n=request.n, stream=request.stream)
    if search is not None and search.beams is not None and (request.shape is not None or request.tools):
        param = "tools" if request.shape is None else request.shape_param
        refuse(param, f"'{param}' cannot be combined with 'use_beam_search'.", "unsupported_parameter")
    limit = request.max_completion_tokens or request.max_tokens
    logprobs = request.top_logprobs or 0 if request.logprobs else None
    sampling = sampling_fields(
        values, max_tokens=limit, logprobs=logprobs, prompt_logprobs=request.prompt_logprobs
    )
    return request.model_copy(update={"sampling": sampling, "search": search})


def _tools(values: Mapping[str, Any], unsupported: Unsupported, on: Messages) -> dict[str, Any]:
    """The tools of a screened body, and what is said of them."""
    found: dict[str, Any] = {}
    if "tools" in values:
        found["tools"] = parse_tools(values["tools"], strict=False, on=on)
        _require_names(found["tools"])
        found["secrets"] = secrets_of(values["tools"])
    if "tool_choice" in values:
        found["tool_choice"] = parse_tool_choice(values["tool_choice"], on=on)
    require_offered(found.get("tools", ()), found.get("tool_choice"), unsupported, on=on)
    if "web_search_options" in values:
        tool = search_tool(values["web_search_options"])
        found["tools"], found["searches"] = [*found.get("tools", ()), tool], True
    return found


def check_choices(n: int, *, scored: bool) -> None:
    """Raise ApiError 400 for more choices than can be held with the log probabilities of their tokens."""
    if scored and n > MAX_SCORED_CHOICES:
        refuse("n", f"At most {MAX_SCORED_CHOICES} choices can have 'logprobs', but 'n' is {n}.")


def _require_names(tools: Sequence[Tool]) -> None:
    """Raise ApiError 400 for two functions or custom tools of one name: nobody could tell which is called."""
    taken: set[str] = set()
    for index, tool in enumerate(tools):
        if tool["type"] not in ("function", "custom"):
            continue
        if tool["name"] in taken:
            refuse(f"tools[{index}]", f"Two tools are named '{tool['name']}'.")
        taken.add(tool["name"])


def _unnamed(prefix: str) -> str:
    """Chat's items live for one prompt, so they need no names."""
    return prefix


def _check_rules(request: ChatRequest, body: Mapping[str, Any]) -> None:
    if body.get("stream_options") is not None and not request.stream:
        refuse("stream_options", "The 'stream_options' parameter is only allowed when 'stream' is enabled.")
    if request.top_logprobs is not None and not request.logprobs:
        refuse("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
    check_choices(request.n, scored=request.logprobs)
    request.stream_options.name_ignored(body)
    if request.max_tool_calls is not None and not any(map(is_server_run, request.tools)):
        ignore("max_tool_calls")
    check_plain(request, body, stream=request.stream, logprobs=request.logprobs)
    if request.metadata and not request.store:
        ignore("metadata")
    if request.echo and echoed(request) is None:
        ignore("echo")
    if request.service_tier == UNKNOWN_TIER:
        ignore("service_tier")
    check_priority(request.service_tier, request.priority)
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        ignore("max_tokens")  # the newer name counts
    if request.continue_final_message:
        if request.add_generation_prompt:
            message = "'continue_final_message' and 'add_generation_prompt' cannot both be true."
            refuse("continue_final_message", message, "mutually_exclusive_parameters")
        last = mapping(request.messages[-1], "messages")
        if last["role"] != "assistant" or last.get("tool_calls"):
            message = "To continue the final message, it must be an assistant's without tool calls."
            refuse(f"messages[{len(request.messages) - 1}]", message)


def _check_single(request: ChatRequest) -> None:
    """Raise ApiError 400 for what a request cannot have whose calls are made before its answer: they would be
    made for each of several answers, and a message that is continued has no place for them."""
    for param, asked in {"n": request.n > 1, "best_of": request.search is not None}.items():
        if asked:
            message = (
                f"'{param}' cannot be combined with tools that the server runs, because it would make their "
                "calls for each answer. Send a request for each."
            )
            refuse(param, message, "unsupported_parameter")
    continued = {
        "continue_final_message": request.continue_final_message,
        "add_generation_prompt": request.add_generation_prompt is False,
    }
    for param, asked in continued.items():
        if asked:
            message = f"'{param}' cannot be combined with tools that the server runs."
            refuse(param, message, "unsupported_parameter")
    for param in ("prompt_logprobs", "return_token_ids", "echo", "chat_template", "documents", "request_id"):
        if param in request.model_fields_set and getattr(request, param) not in (None, False):
            message = f"'{param}' cannot be combined with tools that the server runs."
            refuse(param, message, "unsupported_parameter")
    for param in ("truncate_prompt_tokens", "add_special_tokens", "skip_special_tokens"):
        if getattr(request, param) != type(request).model_fields[param].default:
            message = f"'{param}' cannot be combined with tools that the server runs."
            refuse(param, message, "unsupported_parameter")
    if request.stream_options.continuous_usage_stats:
        ignore("stream_options.continuous_usage_stats")  # what a response has used is known at its end


def echoed(request: ChatRequest) -> str | None:
    """The text of the last message, which an answer that echoes it begins with; None where that is not an
    assistant's, whose words the answer goes on with, or has no text."""
    last = request.messages[-1]
    content = last.get("content")
    if last["role"] != "assistant" or not content:
        return None
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text") or None


def _documents(value: Any) -> list[dict[str, Any]]:
    """Documents for the chat template: objects, together no larger than arguments of templates may be."""
    documents: list[dict[str, Any]] = array(mapping, 0, MAX_DOCUMENTS)(value, "documents")
    check_template_kwargs({"given": documents}, "documents")
    return documents
