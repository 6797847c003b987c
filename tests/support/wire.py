"""Checks of everything that goes over the wire: bodies and events against the official schemas, and streams
against their grammar.

The schemas are those of `tests/spec/openapi.json`, with these differences: `user` and `usage` may be null, as
in the document's own examples; there are two further events, `response.cancelled` and one of compactions that
SDKs know; and an item that changes settings is in no union of the document. Every check raises AssertionError
that says what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, ValidationError, validators  # type: ignore[import-untyped]
from jsonschema.exceptions import best_match  # type: ignore[import-untyped]
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from server.items import COMPACTING, Stream, call_of, is_output, source_of
from server.schema import events as grammar

Json = dict[str, Any]

SPEC = Path(__file__).parents[1] / "spec" / "openapi.json"
URI = "urn:openapi"


# ------------------------------------------------------------------------------------------------------------
# Schemas


@cache
def document() -> Json:
    """The OpenAPI document."""
    loaded: Json = json.loads(SPEC.read_text())
    return loaded


@cache
def _registry() -> Registry[Any]:
    empty: Registry[Any] = Registry()
    registry: Registry[Any] = empty.with_resource(URI, DRAFT202012.create_resource(document()))
    return registry


def schema(name: str) -> Json:
    """A component schema by name."""
    found: Json = document()["components"]["schemas"][name]
    return found


def resolve(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema behind its references."""
    while "$ref" in node:
        node = schema(node["$ref"].rsplit("/", 1)[1])
    return node


def properties(node: Mapping[str, Any]) -> dict[str, Any]:
    """All properties of an object schema, those of its `allOf` included."""
    node = resolve(node)
    found = dict(node.get("properties", {}))
    for part in node.get("allOf", ()):
        found.update(properties(part))
    return found


def required(node: Mapping[str, Any]) -> set[str]:
    """All required names of an object schema, those of its `allOf` included."""
    node = resolve(node)
    return set(node.get("required", ())).union(*(required(part) for part in node.get("allOf", ())))


def tags(node: Mapping[str, Any], name: str) -> set[str]:
    """The values of a discriminator that an alternative stands for."""
    node = resolve(node)
    if "oneOf" in node or "anyOf" in node:
        return set().union(*(tags(part, name) for part in node.get("oneOf", node.get("anyOf"))))
    return set(resolve(properties(node).get(name, {})).get("enum", ()))


def _alternatives(validator: Any, alternatives: Any, instance: Any, node: Mapping[str, Any]) -> Iterator[Any]:
    """`oneOf` and `anyOf`, guided by the discriminator: far fewer alternatives, far better messages."""
    name = node.get("discriminator", {}).get("propertyName")
    chosen = list(alternatives)
    if name and isinstance(instance, dict) and isinstance(instance.get(name), str):
        chosen = [part for part in alternatives if instance[name] in (tags(part, name) or {instance[name]})]
        if not chosen:
            yield ValidationError(f"{instance[name]!r} is not an official {name}")
            return
    failures = []
    for part in chosen:
        errors = list(validator.descend(instance, part))
        if not errors:
            return
        failures.append(errors)
    if len(failures) == 1:
        yield from failures[0]
    else:
        context = [error for errors in failures for error in errors]
        yield ValidationError(f"{instance!r} fits no alternative", context=context)


_Validator: Any = validators.extend(Draft202012Validator, {"oneOf": _alternatives, "anyOf": _alternatives})


@cache
def _validator(name: str) -> Any:
    return _Validator({"$ref": f"{URI}#/components/schemas/{name}"}, registry=_registry())


def validate(name: str, value: Any) -> None:
    """Check a value against a component schema by name."""
    error = best_match(_validator(name).iter_errors(value))
    assert error is None, f"{name}: {error.json_path}: {error.message[:500]}"


_NULLABLE = ("user", "usage")
SETTINGS = "configuration_update"


def _changes_settings(item: Any) -> bool:
    """Whether an item is one that the document has no words for."""
    return isinstance(item, dict) and item.get("type") == SETTINGS


def _official(response: Json) -> Json:
    """A Response without what the schema has no words for."""
    kept = {k: v for k, v in response.items() if not (k in _NULLABLE and v is None)}
    return {**kept, "output": [item for item in response["output"] if not _changes_settings(item)]}


def validate_response(response: Json, *, warm_up: bool = False) -> None:
    """Check a Response object: the schema, and what every client relies on beyond it.

    warm_up: its request had `generate: false`, so that once completed it has read a prompt, and has neither
    output nor output tokens. Every other one that is completed has output.
    """
    validate("Response", _official(response))
    present = "status completed_at previous_response_id truncation text presence_penalty frequency_penalty"
    present += " top_logprobs reasoning usage max_output_tokens max_tool_calls store background service_tier"
    present += " safety_identifier prompt_cache_key conversation"
    missing = set(present.split()) - response.keys()
    assert not missing, f"Response without {sorted(missing)}"
    assert "output_text" not in response, "output_text is computed by SDKs, never sent"
    for name in ("temperature", "top_p", "top_logprobs", "presence_penalty", "frequency_penalty"):
        assert isinstance(response[name], int | float), f"{name} is {response[name]!r}"
    reasoning = response["reasoning"]
    assert reasoning is None or {"effort", "summary"} <= reasoning.keys()
    status = response["status"]
    assert (response["error"] is not None) == (status == "failed"), f"{status} with error {response['error']}"
    details = response["incomplete_details"]
    assert (details is not None) == (status == "incomplete"), f"{status} with incomplete_details {details}"
    assert (response["completed_at"] is not None) == (status == "completed"), f"{status}: completed_at"
    if status in ("completed", "incomplete"):
        check_usage(response["usage"])
    if status == "completed" and "forked_from" not in response:
        assert warm_up or response["output"], "a completed response has an output item"
    if status == "completed" and warm_up:
        usage = response["usage"]
        assert response["output"] == [], "a warm-up answers nothing"
        assert usage["input_tokens"] > 0 and usage["output_tokens"] == 0, usage
    for item in response["output"]:
        validate_item(item)


def check_usage(usage: Json) -> None:
    """The counts of a Response's usage add up, and its details have numbers alone: clients refuse others."""
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], usage
    check_input(usage["input_tokens_details"], usage["input_tokens"])
    assert 0 <= usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"], usage
    for details in (usage["input_tokens_details"], usage["output_tokens_details"]):
        assert all(type(count) is int for count in details.values()), usage


def check_input(details: Json, num_tokens: int) -> None:
    """What of a prompt was in the cache, and what came into it, are two parts of it."""
    cached, written = details["cached_tokens"], details["cache_write_tokens"]
    assert min(cached, written) >= 0 and cached + written <= num_tokens, details


def validate_item(item: Json, union: str = "OutputItem") -> None:
    """Check an item as a member of OutputItem, ItemResource, ConversationItem or InputItem."""
    if not _changes_settings(item):
        validate(union, item)
    if union != "InputItem":
        assert item.get("id"), f"an item without id: {item}"


def validate_event(event: Json, *, warm_up: bool = False) -> None:
    """Check one event of a stream against the schema of its type. warm_up: see `validate_response`."""
    kind = event["type"]
    fields = grammar.fields()
    assert kind in fields, f"unknown event type {kind!r}"
    missing = {"sequence_number", *fields[kind]} - event.keys()
    assert not missing, f"{kind} without {sorted(missing)}"
    assert not event.get("error"), "an `error` key makes SDKs abort the stream"
    official = event
    if "response" in event:
        validate_response(event["response"], warm_up=warm_up)
        official = {**event, "response": _official(event["response"])}
    if kind == "response.cancelled":
        official = {**official, "type": "response.completed"}
    if kind == COMPACTING:
        assert event["item_id"].startswith("cmp_"), event
    elif not _changes_settings(event.get("item")):
        validate("ResponseStreamEvent", official)


def validate_error(body: Json) -> Json:
    """Check an error body; returns the inner object."""
    validate("ErrorResponse", body)
    assert set(body) == {"error"}, body
    error: Json = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"], error
    return error


# ------------------------------------------------------------------------------------------------------------
# SSE


@dataclass(frozen=True, slots=True)
class Frame:
    """One event of an SSE stream: its `event:` line, `id:` line and data."""

    event: str | None
    id: str | None
    data: str


def parse_sse(raw: bytes) -> list[Frame]:
    """Split a whole stream strictly on LF; comments are dropped, anything unusual is an error."""
    text = raw.decode()
    assert "\r" not in text, "line ends are LF only"
    assert not text or text.endswith("\n\n"), f"the stream ends inside a frame: {text[-80:]!r}"
    frames = []
    for block in text.split("\n\n")[:-1]:
        assert block, "an empty block"
        if all(line.startswith(":") for line in block.split("\n")):
            continue
        fields: dict[str, str] = {}
        for line in block.split("\n"):
            name, separator, value = line.partition(": ")
            assert separator and name in ("event", "id", "data"), f"unexpected line {line!r}"
            assert name not in fields, f"{name} twice in one frame"
            fields[name] = value
        assert "data" in fields, f"a frame without data: {block!r}"
        frames.append(Frame(fields.get("event"), fields.get("id"), fields["data"]))
    return frames


def events(raw: bytes, *, ids: bool = False) -> list[Json]:
    """The events of a Responses stream: names repeated in the data, no [DONE], ids only where asked for."""
    found = []
    for frame in parse_sse(raw):
        event: Json = json.loads(frame.data)
        assert frame.event == event["type"], f"event: {frame.event}, data says {event['type']}"
        assert frame.id == (str(event["sequence_number"]) if ids else None), f"id: {frame.id}"
        found.append(event)
    return found


def chunks(raw: bytes) -> list[Json]:
    """The chunks of a chat or completions stream: data lines only, ended by [DONE]."""
    frames = parse_sse(raw)
    assert all(frame.event is None and frame.id is None for frame in frames), "data lines only"
    assert frames and frames[-1].data == "[DONE]", f"no [DONE] at the end: {frames[-1:]}"
    return [json.loads(frame.data) for frame in frames[:-1]]


# ------------------------------------------------------------------------------------------------------------
# A response's stream


def check_stream(stream: Sequence[Json]) -> Json:
    """Check a whole stream, from `response.created` to its terminal event; returns the last Response.

    Every event's schema; numbers from 0 without a gap; the order of the lifecycle and of each item's events;
    one id per item; contiguous indices; and that deltas, done events and the final output tell the same
    story.
    """
    assert stream, "an empty stream"
    for event in stream:
        validate_event(event)
    numbers = [event["sequence_number"] for event in stream]
    assert numbers == list(range(len(stream))), f"sequence numbers {numbers}"
    lifecycle = [event["type"] if "response" in event else "item" for event in stream]
    assert grammar.in_order(grammar.LIFECYCLE, lifecycle), f"order: {' '.join(lifecycle)}"
    output = check_items([event for event in stream if "response" not in event])
    final = _check_lifecycle([event for event in stream if "response" in event])
    assert final["output"] == output, f"final output {final['output']} is not that of the events {output}"
    if final["status"] == "completed":
        open_items = [item["id"] for item in output if not _ended(item)]
        assert not open_items, f"a completed response with unfinished items {open_items}"
    return final


def _ended(item: Json) -> bool:
    """Whether an item may stand in a completed response. The model may have ended its turn with a call that
    is no call, and that is then said of the call alone."""
    status = item.get("status", "completed")
    return status in ("completed", "failed") or (status == "incomplete" and item["type"].endswith("_call"))


def check_tail(tail: Sequence[Json], whole: Sequence[Json], after: int) -> None:
    """Check that a resumed stream is exactly what the whole one has after event `after`."""
    assert list(tail) == list(whole[after + 1 :]), f"the tail after {after} differs"


def _check_lifecycle(stream: Sequence[Json]) -> Json:
    """Lifecycle events agree on everything that never changes; the last one's status is its name's."""
    changing = {"status", "output", "usage", "error", "incomplete_details", "completed_at"}
    changing |= {"moderation", "input_messages", "output_messages", "restarts", "cancel_reason"}
    first = {k: v for k, v in stream[0]["response"].items() if k not in changing}
    for event in stream:
        response: Json = event["response"]
        now = {k: v for k, v in response.items() if k not in changing}
        assert now == first, f"{event['type']} changed {[k for k in now if now[k] != first.get(k)]}"
        name = event["type"].removeprefix("response.")
        if name == "created":
            name = "queued" if stream[1]["type"] == "response.queued" else response["status"]
            assert name in ("queued", "in_progress"), f"response.created with status {name}"
        assert response["status"] == name, f"{event['type']} with status {response['status']}"
        if event["type"] not in grammar.TERMINAL:
            assert response["output"] == [] and response["usage"] is None, f"{event['type']} shows an end"
    return response


def check_items(stream: Iterable[Json]) -> list[Json]:
    """Check the events of items, all of them closed at the end; returns the items as they closed."""
    items: list[_Item] = []
    for event in stream:
        kind, index = event["type"], event["output_index"]
        if kind == "response.output_item.added":
            assert index == len(items), f"output_index {index} for item number {len(items)}"
            items.append(_Item(event["item"]))
            continue
        assert index < len(items), f"{kind} for output index {index} before its output_item.added"
        item = items[index]
        assert item.done is None, f"{kind} after the output_item.done of index {index}"
        if kind == "response.output_item.done":
            item.close(event["item"])
        else:
            item.take(event)
    ids = [item.added["id"] for item in items]
    assert len(set(ids)) == len(ids), f"an item id twice: {ids}"
    for item in items:
        assert item.done is not None, f"item {item.added['id']} was never closed"
    return [item.done for item in items if item.done is not None]


class _Item:
    """One item while its stream is read: what deltas said, to be compared with what done events say."""

    def __init__(self, added: Json) -> None:
        self.added = added
        self.done: Json | None = None
        self._names: list[str] = []
        self._parts: list[Json] = []
        self._summary: list[str] = []
        self._commands: list[str] = []
        self._said = ""
        self._logprobs: list[Json] = []
        empty: dict[str, tuple[str, Any]] = {"message": ("content", []), "reasoning": ("summary", [])}
        if (stream := _stream(added)) is not None:
            if source_of(added) is not None:  # the model wrote the arguments when it asked for the call
                self._said = added[stream.field]
            else:
                empty[added["type"]] = (stream.field, "")
        if added["type"] in empty:
            field, value = empty[added["type"]]
            assert added[field] == value, f"{added['type']} added with {field} {added[field]!r}"
        begun = added.get("status", "in_progress") in ("in_progress", "completed")
        assert begun or is_output(added), added

    def take(self, event: Json) -> None:
        name = event["type"].removeprefix("response.")
        self._names.append(name)
        if "item_id" in event:
            assert event["item_id"] == self.added["id"], f"{name}: item_id {event['item_id']}"
        if name == "content_part.added":
            assert event["content_index"] == len(self._parts), f"content_index {event['content_index']}"
            self._parts.append(event["part"])
            part_text = event["part"].get("text", event["part"].get("refusal"))
            assert part_text == "", f"a part added with text {part_text!r}"
            self._said, self._logprobs = "", []
        elif "command_index" in event and name.endswith(".added"):
            assert event["command_index"] == len(self._commands) and event["command"] == "", event
            self._said = ""
        elif "content_index" in event:
            assert event["content_index"] == len(self._parts) - 1, f"{name}: content_index"
        if name == "content_part.done":
            self._part_done(event["part"])
        elif name.endswith(".delta"):
            self._said += event["delta"] if isinstance(event["delta"], str) else ""
            self._logprobs += event.get("logprobs", [])
        elif (final := self._final_field(name)) is not None:
            said = event[final]
            assert said == self._said, f"{name} says {said!r}, its deltas said {self._said!r}"
            if "logprobs" in event:
                assert event["logprobs"] == self._logprobs, f"{name}: logprobs differ from the deltas'"
            if name == "function_call_arguments.done":
                assert event["name"] == self.added["name"], f"{name}: name {event['name']}"
        if name == "reasoning_summary_part.added":
            assert event["summary_index"] == len(self._summary)
            self._said = ""
        elif name == "shell_call_command.done":
            self._commands.append(event["command"])
        elif name == "reasoning_summary_text.done":
            self._summary.append(event["text"])

    def _final_field(self, name: str) -> str | None:
        """Where an event says all that the deltas before it have said."""
        if (stream := _stream(self.added)) is not None and f"response.{name}" == f"{stream.event}.done":
            return stream.field
        return _FINAL_FIELD.get(name)

    def _part_done(self, part: Json) -> None:
        said = part.get("text", part.get("refusal"))
        assert said == self._said, f"the part's text is {said!r}, its deltas said {self._said!r}"
        if part["type"] == "output_text":
            short = [
                {"token": one["token"], "logprob": one["logprob"],
                 "top_logprobs": [{k: top[k] for k in ("token", "logprob")} for top in one["top_logprobs"]]}
                for one in part["logprobs"]
            ]  # fmt: skip
            assert short == self._logprobs, "the part's logprobs differ from its deltas'"
        self._parts[-1] = part

    def close(self, done: Json) -> None:
        self.done = done
        kind = self.added["type"]
        for field in ("type", "id", "call_id", "name", "role", "server_label"):
            assert done.get(field) == self.added.get(field), f"output_item.done changed {field}"
        assert done.get("status", "completed") != "in_progress", f"an item closed in progress: {done}"
        assert grammar.in_order(grammar.order(kind), self._names), f"{kind}: {' '.join(self._names)}"
        if kind in ("message", "reasoning"):
            assert done["content"] == self._parts, f"content {done['content']}, parts {self._parts}"
        if kind == "reasoning":
            assert [part["text"] for part in done["summary"]] == self._summary
        if kind == "shell_call":
            assert self.added["action"]["commands"] == [] and done["action"]["commands"] == self._commands
        if (stream := _stream(self.added)) is not None:
            said = done[stream.field]
            assert said == self._said, f"{kind} has {said!r}, its deltas said {self._said!r}"


_FINAL_FIELD = {
    "output_text.done": "text",
    "refusal.done": "refusal",
    "reasoning_text.done": "text",
    "shell_call_command.done": "command",
    "reasoning_summary_text.done": "text",
}


def _stream(item: Json) -> Stream | None:
    """How the arguments of a call are streamed."""
    call = call_of(item)
    return None if call is None else call.stream


# ------------------------------------------------------------------------------------------------------------
# Chat and completions streams


def check_chunks(stream: Sequence[Json], name: str, *, include_usage: bool = False) -> list[Json]:
    """Check the chunks of a chat or completions stream (`name`: their schema); returns the choices, folded.

    One identity throughout; every choice ends once, with its last chunk; usage comes last and alone, if asked
    for.
    """
    assert stream, "an empty stream"
    for chunk in stream:
        _validate_chunk(chunk, name)
        for field in ("id", "created", "model", "object", "system_fingerprint"):
            assert chunk[field] == stream[0][field], f"{field} changed"
    choices = [choice for chunk in stream for choice in chunk["choices"]]
    if include_usage:
        assert stream[-1]["choices"] == [] and stream[-1]["usage"], "the usage chunk comes last"
        _check_completion_usage(stream[-1]["usage"])
        assert all("usage" in chunk and chunk["usage"] is None for chunk in stream[:-1])
    else:
        assert all("usage" not in chunk for chunk in stream)
    assert all(chunk["choices"] for chunk in (stream[:-1] if include_usage else stream)), "an empty chunk"
    indices = sorted({choice["index"] for choice in choices})
    assert indices == list(range(len(indices))), f"choice indices {indices}"
    return [_fold([choice for choice in choices if choice["index"] == index]) for index in indices]


def _validate_chunk(chunk: Json, name: str) -> None:
    """The schema, which forgets that `usage` may be null, that completions are streamed as well, and that
    custom tools are called in streams."""
    tolerated = {k: v for k, v in chunk.items() if not (k == "usage" and v is None)}
    if name == "CreateChatCompletionStreamResponse":
        tolerated["choices"] = [_without_custom_calls(choice) for choice in chunk["choices"]]
    if name == "CreateCompletionResponse":
        choices = [
            choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]
        ]
        tolerated["choices"] = [_without_nulls(choice) for choice in choices]
    validate(name, tolerated)


def _without_custom_calls(choice: Json) -> Json:
    """A chat chunk's choice without the type of calls of custom tools."""
    calls = [
        {key: value for key, value in call.items() if key != "type" or value != "custom"}
        for call in choice["delta"].get("tool_calls", ())
    ]
    return {**choice, "delta": {**choice["delta"], "tool_calls": calls}} if calls else choice


def _without_nulls(choice: Json) -> Json:
    """A completion's choice without the nulls that stand for the first token's log probability."""
    logprobs = choice["logprobs"] and {
        key: [value for value in values if value is not None] for key, values in choice["logprobs"].items()
    }
    return {**choice, "logprobs": logprobs}


def validate_chat(completion: Json) -> list[Json]:
    """Check a chat completion; returns its choices."""
    validate("CreateChatCompletionResponse", completion)
    _check_completion_usage(completion["usage"])
    choices: list[Json] = completion["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return choices


def validate_completion(completion: Json) -> list[Json]:
    """Check a text completion; returns its choices."""
    choices: list[Json] = completion["choices"]
    tolerated = {**completion, "choices": [_without_nulls(choice) for choice in choices]}
    validate("CreateCompletionResponse", tolerated)
    _check_completion_usage(completion["usage"])
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    for choice in choices:
        lengths = {len(values) for values in (choice["logprobs"] or {}).values()}
        assert len(lengths) < 2, f"log probabilities of lengths {lengths}"
    return choices


def _check_completion_usage(usage: Json) -> None:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], usage
    check_input(usage["prompt_tokens_details"], usage["prompt_tokens"])
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"], usage


def _fold(parts: Sequence[Json]) -> Json:
    """One choice's chunks as one choice, the way clients do it."""
    reasons = [part["finish_reason"] for part in parts]
    assert reasons[-1] and not any(reasons[:-1]), f"finish reasons {reasons}"
    folded: Json = {"index": parts[0]["index"], "finish_reason": reasons[-1], "logprobs": None}
    if "stop_reason" in parts[-1]:
        folded["stop_reason"] = parts[-1]["stop_reason"]
    for part in parts:
        logprobs = part.get("logprobs")
        if logprobs is not None:
            into = folded["logprobs"] = folded["logprobs"] or {}
            for key, value in logprobs.items():
                into[key] = into.get(key, []) + value if isinstance(value, list) else value
    if "text" in parts[0]:
        return folded | {"text": "".join(part["text"] for part in parts)}
    message: Json = {}
    for position, part in enumerate(parts):
        delta = part["delta"]
        assert ("role" in delta) == (position == 0), "the role comes once, first"
        for key, value in delta.items():
            if key == "tool_calls":
                _fold_calls(message.setdefault("tool_calls", []), value)
            elif isinstance(value, list):
                message.setdefault(key, []).extend(value)
            elif key == "role" or value is None:
                message.setdefault(key, value)
            else:
                message[key] = (message.get(key) or "") + value
    return folded | {"message": message}


def _fold_calls(calls: list[Json], deltas: Iterable[Json]) -> None:
    for delta in deltas:
        if delta["index"] == len(calls):
            kind = delta["type"]
            assert delta["id"] and kind in ("function", "custom") and delta[kind]["name"], delta
            calls.append({"id": delta["id"], "type": kind, kind: {**delta[kind]}})
        else:
            assert delta["index"] == len(calls) - 1 and "id" not in delta, f"out of order: {delta}"
            kind, field = calls[-1]["type"], "input" if calls[-1]["type"] == "custom" else "arguments"
            calls[-1][kind][field] += delta[kind][field]
