"""The older vocabulary of a response's events, and the form that it has for items.

Each official event becomes one older event or none, under the same number; where a part of it has an event of
its own there (`response.additional_context`), that one comes first and has the number, too, so that a client
which has seen a number has all that belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from storage import TERMINAL_STATUSES

Json = dict[str, Any]
Rates = list[Json]
"""What is left of rate limits, each by its name."""

_RENAMED: Mapping[str, str] = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
    "response.reasoning_summary_part.added": "response.reasoning.summary.added",
    "response.reasoning_summary_text.delta": "response.reasoning.summary.delta",
    "response.failed": "response.error",
}

_LEFT_OUT = frozenset(
    {
        "response.reasoning_summary_part.done",
        "response.reasoning_summary_text.done",
        "response.function_call_arguments.done",  # the whole arguments are in the item, which follows
    }
)

_STATUSES: Mapping[str, int] = {
    "invalid_prompt": 400,
    "rate_limit_exceeded": 429,
}
"""The number of an error by its official code; 500 where it is none of these."""

_LAST = frozenset(f"response.{status}" for status in TERMINAL_STATUSES)
_PARTS = ("response.content_part.added", "response.content_part.done")
_ITEMS = ("response.output_item.added", "response.output_item.done")


class Older:
    """Turns the events of one response, in their order from the first on, into older ones.

    write: JSON as the older `response.tool_call.delta` holds it: as it is, or as a text. rates: what is left
    of rate limits when the last event is sent.
    """

    def __init__(self, write: Callable[[Json], Any], rates: Callable[[], Rates]) -> None:
        self._write, self._rates = write, rates
        self._response_id = ""
        self._calls: dict[int, Json] = {}

    def shown(self, event: Json) -> list[Json]:
        """What stands in the place of an event, in order."""
        kind = event["type"]
        if "response" in event:
            self._response_id = event["response"]["id"]
            return [*self._limits(event), _lifecycle(event)]
        if kind in _ITEMS:
            return self._item(event)
        if kind == "response.function_call_arguments.delta":
            return [self._call_delta(event)]
        if kind in _PARTS and event["part"]["type"] == "reasoning_text":
            name = f"response.reasoning_part.{kind.rpartition('.')[2]}"
            return [{**event, "type": name, "part": _thought(event["part"])}]
        if kind == "error":
            return [{**event, "code": number_of(event.get("code"))}]
        return [] if kind in _LEFT_OUT else [{**event, "type": _RENAMED.get(kind, kind)}]

    def _limits(self, event: Json) -> list[Json]:
        """What is left of rate limits, before the last event, where there are any."""
        if event["type"] not in _LAST or not (rates := self._rates()):
            return []
        told = {"type": "response.rate_limits.updated", "sequence_number": event["sequence_number"]}
        return [{**told, "rate_limits": rates}]

    def _item(self, event: Json) -> list[Json]:
        item = event["item"]
        if item["type"] == "function_call":
            self._calls[event["output_index"]] = item
        shown = {**event, "item": older_item(item)}
        if event["type"] == "response.output_item.added" or not (context := _context(item)):
            return [shown]
        place = {"item_id": item["id"], "output_index": event["output_index"]}
        more = {"type": "response.additional_context", "sequence_number": event["sequence_number"]}
        return [{**more, **place, "additional_context": context}, shown]

    def _call_delta(self, event: Json) -> Json:
        call = self._calls[event["output_index"]]
        content = {
            "type": "tool_call",
            "id": call["call_id"],
            "call_id": call["call_id"],
            "name": call["name"],
            "arguments": event["delta"],
        }
        return {
            "type": "response.tool_call.delta",
            "sequence_number": event["sequence_number"],
            "output_index": event["output_index"],
            "response": {"id": self._response_id},
            "delta": {"content": [self._write(content)]},
        }


def _lifecycle(event: Json) -> Json:
    kind = _RENAMED.get(event["type"], event["type"])
    response = older_response(event["response"])
    told = {**event, "type": kind, "response": response}
    return {**told, "error": response["error"]} if kind == "response.error" else told


def older_response(response: Mapping[str, Any]) -> Json:
    """A Response object with its items, and the code of its error, in their older form."""
    told = {**response, "output": [older_item(item) for item in response["output"]]}
    if (error := told.get("error")) is not None:
        told["error"] = {**error, "code": number_of(error["code"])}
    return told


def older_item(item: Mapping[str, Any]) -> Json:
    """An item in its older form, which is that of the official item unless it is a call or a thought."""
    if item["type"] == "function_call":
        said = {"name": item["name"], "arguments": item["arguments"]}
        rest = {name: value for name, value in item.items() if name not in ("type", "id", *said)}
        return {"type": "function", "id": item["call_id"], **rest, "function": said}
    if item["type"] == "reasoning":
        rest = {name: value for name, value in item.items() if name != "content"}
        content = [_thought(part) for part in item.get("content") or ()]
        return {**rest, "role": "assistant", "content": content}
    return dict(item)


def _thought(part: Mapping[str, Any]) -> Json:
    return {"type": "reasoning", "reasoning": part["text"]} if part["type"] == "reasoning_text" else {**part}


def _context(item: Mapping[str, Any]) -> Json:
    """What the older vocabulary tells in an event of its own: sources, and thoughts that are sealed."""
    found = {}
    if (sealed := item.get("encrypted_content")) is not None:
        found["encrypted_content"] = sealed
    action = item.get("action")
    if isinstance(action, Mapping) and (sources := action.get("sources")):
        found["sources"] = sources
    return found


def number_of(code: str | None) -> int:
    """An error's code as the older vocabulary has it: the status of an HTTP reply."""
    return _STATUSES.get(code or "", 500)
