"""Parses and checks the bodies of POST /v1/messages and of /v1/messages/count_tokens.

What the engine is asked is a `ChatRequest`, as chat completions have it; beside it stands how the answer is
to be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine import PromptTooLong, RequestError
from server.errors import ApiError
from server.ignored import ignore, unread
from server.items import Item, images_in, input_files_of
from server.moderation import Moderation, parse_moderation
from server.schema.anthropic.blocks import Conversation, Place
from server.schema.anthropic.tools import read_choice, read_tools
from server.schema.chat import ChatRequest, ChatStreamOptions
from server.schema.fields import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    Temperature,
    sampling_fields,
    screen,
)
from server.schema.formats import asked_shape, parse_format
from server.schema.items import UNSUPPORTED_KINDS
from server.schema.tools import Unsupported
from server.shapes import (
    MAX_INT32,
    Within,
    anything,
    array,
    from_pydantic,
    mapping,
    member,
    missing,
    one_of,
    record,
    refuse,
    tagged,
    text,
    whole,
)

Json = dict[str, Any]
Display = Literal["summarized", "omitted"]

MIN_BUDGET = 1024
"""The official least budget of thoughts, in tokens."""

_BUDGETS = ((4096, "low"), (16384, "medium"))
"""Below how many tokens a budget is which effort; above them it is high."""

_SHOWN = {"display": one_of("summarized", "omitted")}
thinking_shape = tagged(
    {
        "enabled": record({"budget_tokens": whole(MIN_BUDGET, MAX_INT32)}, _SHOWN),
        "adaptive": record({}, _SHOWN),
        "between_tools": record({}, _SHOWN),
        "disabled": record({}),
    }
)
output_config_shape = record(
    {}, {"effort": one_of("low", "medium", "high", "xhigh", "max"), "format": anything}
)
_STOPS = array(text(1, MAX_STOP_CHARS), 0, MAX_STOPS)
_METADATA = record({}, {"user_id": text(0, 1024)})


class MessagesBody(BaseModel):
    """The plain fields of a body, checked; null and absent are one. `max_tokens` 0 asks for nothing but that
    the prompt is computed."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    model: Annotated[str, Field(min_length=1, max_length=512)]
    max_tokens: Annotated[int, Within(0, MAX_INT32)]
    stream: bool = False
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Within(0, MAX_INT32)] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard", "fast"] | None = None


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A request for a message, checked.

    chat: what the engine is asked. places: where each of its items came from. display: how thoughts are
    shown; None: not at all. budget: tokens of thought that were asked for, for templates that can be told.
    only_reads: the prompt is computed, and nothing is answered.
    """

    chat: ChatRequest
    places: tuple[Place, ...]
    display: Display | None = None
    budget: int | None = None
    only_reads: bool = False

    @property
    def model(self) -> str | None:
        """The name of the model that is asked for."""
        return self.chat.model

    @property
    def safety_identifier(self) -> str | None:
        """What the client calls the person for whom it asks."""
        return self.chat.safety_identifier

    @property
    def user(self) -> None:
        """An older name for that, which this API does not have."""
        return None

    @property
    def items(self) -> list[Item]:
        """The conversation."""
        return self.chat.items

    @property
    def moderation(self) -> Moderation | None:
        """What is to be judged."""
        return self.chat.moderation

    @property
    def stream(self) -> bool:
        """Whether the reply is a stream."""
        return self.chat.stream

    @property
    def stream_options(self) -> ChatStreamOptions:
        """What a stream has besides; it has its usage in any case."""
        return self.chat.stream_options

    def file_paths(self) -> list[str]:
        """The paths of the files among the parts of items, in their order."""
        placed = zip(self.chat.items, self.places, strict=True)
        return [place.parts[position] for item, place in placed for position, _ in input_files_of(item)]

    def image_paths(self) -> list[str]:
        """The paths of the images among the parts of items, in their order."""
        placed = zip(self.chat.items, self.places, strict=True)
        return [place.parts[position] for item, place in placed for position, _ in images_in(item)]

    def to_model(self, name: str | None, items: list[Item]) -> MessagesRequest:
        """The same to the model of another name, with items of which more is known."""
        return replace(self, chat=self.chat.model_copy(update={"model": name, "items": items}))

    def unreadable(self, modalities: frozenset[str]) -> tuple[str, str] | None:
        """(path, modality) of the first part that a model of these modalities cannot read; files are read for
        it."""
        for item, place in zip(self.chat.items, self.places, strict=True):
            parts = item.get("content" if item["type"] == "message" else "output")
            for path, part in zip(place.parts, parts if isinstance(parts, list) else (), strict=False):
                modality = UNSUPPORTED_KINDS.get(part["type"])
                if modality not in (None, "file") and modality not in modalities:
                    return path, modality
        return None


def parse_messages(body: Mapping[str, Any], *, unsupported_tools: Unsupported = "refuse") -> MessagesRequest:
    """A body of POST /v1/messages. unsupported_tools: whether tools that this server does not run are a 400,
    or left out. Raises ApiError 400 naming the path of what is wrong."""
    _require_whole(body)
    return _parse(screen("messages", body), unsupported_tools)


def parse_count(body: Mapping[str, Any], *, unsupported_tools: Unsupported = "refuse") -> MessagesRequest:
    """A body of POST /v1/messages/count_tokens, as the request whose prompt it asks for. Raises ApiError 400
    as `parse_messages` does."""
    return _parse({**screen("count_tokens", body), "max_tokens": 1, "stream": False}, unsupported_tools)


def _require_whole(body: Mapping[str, Any]) -> None:
    """Raise the ApiError 400 that has clients send a conversation whole, of which a server of threads would
    keep the beginning."""
    if body.get("thread") is not None:
        message = "This server keeps no threads of messages. Send the whole conversation without 'thread'."
        refuse("thread", message, "thread_unsupported_request")


def _parse(values: Mapping[str, Any], unsupported: Unsupported) -> MessagesRequest:
    if "messages" not in values:
        missing("messages")
    conversation = Conversation()
    if "system" in values:
        conversation.tell(values["system"])
    conversation.read(values["messages"])
    try:
        plain = MessagesBody(**{name: values[name] for name in MessagesBody.model_fields if name in values})
    except ValidationError as error:
        raise from_pydantic(error) from None
    tools = read_tools(values["tools"], unsupported) if "tools" in values else []
    choice, parallel = read_choice(values["tool_choice"]) if "tool_choice" in values else ("auto", True)
    thinks = _thinking(values)
    shape, shape_param = _shape(values)
    if "cache_control" in values:
        mapping(values["cache_control"], "cache_control")
    stops = _STOPS(values["stop_sequences"], "stop_sequences") if "stop_sequences" in values else None
    drawn = {
        name: value for name in ("temperature", "top_p", "top_k") if (value := values.get(name)) is not None
    }
    if stops:
        drawn["stop"] = stops
    metadata = _METADATA(values["metadata"], "metadata") if "metadata" in values else {}
    chat = ChatRequest.model_construct(  # every field was checked, by the bounds of this API
        model=plain.model,
        messages=[],
        items=conversation.items,
        stream=plain.stream,
        max_tokens=max(1, plain.max_tokens),
        cuts_max_tokens=True,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        shape=shape,
        shape_param=shape_param,
        continue_final_message=conversation.continues,
        reasoning_effort=cast(Any, thinks.effort),
        effort_param=thinks.param,
        service_tier=_tier(plain),
        safety_identifier=metadata.get("user_id") or None,
        moderation=parse_moderation(values["moderation"]) if "moderation" in values else None,
        sampling=sampling_fields(drawn, max_tokens=max(1, plain.max_tokens)),
    )
    return MessagesRequest(
        chat,
        tuple(conversation.places),
        display=thinks.display,
        budget=thinks.budget,
        only_reads=plain.max_tokens == 0,
    )


@dataclass(frozen=True, slots=True)
class _Thinking:
    """What is asked of thoughts: the effort, and the field that says it (None: none does)."""

    effort: str
    param: str | None = None
    display: Display | None = None
    budget: int | None = None


def _thinking(values: Mapping[str, Any]) -> _Thinking:
    """Thoughts are made, as far as the model can be told, and shown, where `thinking` asks for them."""
    config = (
        output_config_shape(values["output_config"], "output_config") if "output_config" in values else {}
    )
    effort = config.get("effort")
    thinking: dict[str, Any] = (
        thinking_shape(values["thinking"], "thinking") if "thinking" in values else {"type": "disabled"}
    )
    display: Display = thinking.get("display", "summarized")
    if thinking["type"] == "disabled":
        if effort is not None:
            ignore("output_config.effort")
        return _Thinking("none", "thinking" if "thinking" in values else None)
    if thinking["type"] != "enabled":
        return _Thinking(effort or "high", "output_config.effort" if effort else None, display)
    budget = thinking["budget_tokens"]
    if effort is None:
        effort = next((effort for most, effort in _BUDGETS if budget < most), "high")
    return _Thinking(effort, "thinking.budget_tokens", display, budget)


def _shape(values: Mapping[str, Any]) -> tuple[Any, str]:
    """The shape of the answer, and the field that asks for it."""
    found = [
        (path, form)
        for path, form in (
            ("output_config.format", (values.get("output_config") or {}).get("format")),
            ("output_format", values.get("output_format")),
        )
        if form is not None
    ]
    if len(found) > 1:
        message = "'output_format' is the earlier name of 'output_config.format': give one of the two."
        refuse("output_format", message, "mutually_exclusive_parameters")
    if not found:
        return None, "output_config.format"
    path, form = found[0]
    mapping(form, path)
    member(form, "type", one_of("json_schema"), path)
    unread(form, ("type", "schema", "name"), path)
    parsed = parse_format(
        {"type": "json_schema", "name": "answer", "schema": form.get("schema"), "strict": True}, path
    )
    return asked_shape({}, parsed, path)


def _tier(plain: MessagesBody) -> Any:
    """The service tier, in the words of Responses."""
    if plain.service_tier == "standard_only":
        return "default"
    return "fast" if plain.speed == "fast" else plain.service_tier


# ------------------------------------------------------------------------------------------------------------
# Words


_SOURCES = {"file_data": "data", "file_url": "url", "file_id": "file_id"}
"""What a part of a chat message calls the bytes of a file -> the member of a block's `source`."""


def in_words_of_messages(error: ApiError) -> ApiError:
    """An error of a chat completion, which names the field of the message that it came from."""
    param = error.param or ""
    if param.startswith("tools["):
        error.param = param.replace("].parameters", "].input_schema", 1)
        error.message = error.message.replace("'parameters", "'input_schema")
    block, _, field = param.rpartition(".")
    if param.startswith("messages[") and field in _SOURCES:
        error.param = f"{block}.source.{_SOURCES[field]}"
        error.message = error.message.replace(f"'{param}'", f"'{error.param}'")
    return error


@contextmanager
def words_of_messages() -> Iterator[None]:
    """Have what is wrong with a chat completion name the field of the message that it came from, and a prompt
    that is too long be told in the words that clients shorten their history at."""
    try:
        yield
    except PromptTooLong as error:
        message = f"prompt is too long: {error.count} tokens > {error.limit} maximum"
        raise ApiError(400, message, code="context_length_exceeded", param="messages") from None
    except ApiError as error:
        raise in_words_of_messages(error) from None
    except RequestError as error:
        error.param = error.param or "messages"
        raise
