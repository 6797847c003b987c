"""The assembler: engine deltas in, event drafts out, and the fold from events back to the output.

Owns item ids, output indices and well-formedness: whatever is open when a run is cut short is closed as
incomplete before the terminal event. Pure: what it emits depends on what it was fed and on nothing else; no
clock, no random, no I/O. A draft is an event without its sequence number; its shapes are those of the
official event schema.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from engine import CallArgs, CallEnd, CallStart, Delta, Done, Reasoning, Text, TokenLogprob
from server.prompting import InputReader

if TYPE_CHECKING:
    from server.encrypted_reasoning import Seal

Draft = dict[str, Any]
Item = dict[str, Any]

PREFIXES: Mapping[str, str] = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "mcp_list_tools": "mcpl_",
    "mcp_call": "mcp_",
    "call": "call_",
}


def derived_id(secret: bytes, kind: str, index: int | str) -> str:
    """The id of the `index`-th output item: made of the run's stored secret, so a replay makes the same."""
    digest = hashlib.blake2b(f"{kind}:{index}".encode(), key=secret, digest_size=24)
    return PREFIXES[kind] + digest.hexdigest()


def item_logprob(entry: TokenLogprob) -> dict[str, Any]:
    """A token's log probability as items and chat choices carry it, with bytes."""
    return {
        "token": entry.token,
        "logprob": entry.logprob,
        "bytes": list(entry.data),
        "top_logprobs": [
            {"token": token, "logprob": logprob, "bytes": list(data)} for _, token, data, logprob in entry.top
        ],
    }


def _event_logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The same as stream events carry it: without bytes."""
    return {
        "token": entry["token"],
        "logprob": entry["logprob"],
        "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in entry["top_logprobs"]],
    }


@dataclass(slots=True)
class _Open:
    """The output item that is being written: what deltas add to, until it is closed."""

    index: int
    item: Item
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    reader: InputReader | None = None  # of a custom call

    def at(self, type_: str, **fields: Any) -> Draft:
        return {"type": type_, "item_id": self.item["id"], "output_index": self.index, **fields}

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Assembler:
    """Builds one response's output.

    secret: the run's, for ids. servers: function name -> server label, for calls that the server runs itself
    (`mcp_call` items). custom_tool_names: names of tools that take a text (`custom_tool_call` items). names:
    of all tools, None where any may be called; nobody can answer a call of another one, so it ends as
    incomplete. logprobs: whether text carries them. seal: seals the content of reasoning, which is pure as
    well. output, unfinished: what `fold` made of its events, when a run goes on.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        servers: Mapping[str, str] | None = None,
        custom_tool_names: Collection[str] = (),
        names: Collection[str] | None = None,
        logprobs: bool = False,
        seal: Seal | None = None,
        output: Iterable[Item] = (),
        unfinished: Iterable[int] = (),
    ) -> None:
        self._secret = secret
        self._servers = servers or {}
        self._customs = custom_tool_names
        self._names = names
        self._logprobs = logprobs
        self._seal = seal
        self.output: list[Item] = list(output)
        self._calling: dict[str, int] = {  # mcp calls whose outcome is still to come: item id -> output index
            item["id"]: index for index, item in enumerate(self.output) if pending_server_call(item)
        }
        open_items = [_reopened(index, self.output[index]) for index in unfinished]
        self._open: _Open | None = next((o for o in open_items if not pending_server_call(o.item)), None)
        self._closed: list[tuple[int, Item]] = []  # since `take_closed`

    # -- what the engine says --------------------------------------------------------------------------------

    def feed(self, deltas: Sequence[Delta]) -> list[Draft]:
        """Drafts for one chunk's deltas."""
        drafts: list[Draft] = []
        for delta in deltas:
            match delta:
                case Text():
                    self._text(delta, drafts)
                case Reasoning():
                    self._reasoning(delta.text, drafts)
                case CallArgs():
                    self._arguments(delta.text, drafts)
                case CallStart():
                    self._call(delta.name, drafts)
                case CallEnd():
                    self._close(drafts, "completed" if delta.complete else "incomplete")
                case Done():
                    self._close(drafts, "completed" if delta.reason == "stop" else "incomplete")
        return drafts

    def _text(self, delta: Text, drafts: list[Draft]) -> None:
        part = self._open_part("message", drafts, phase="commentary" if delta.preamble else None)
        logprobs = [item_logprob(entry) for entry in delta.logprobs] if self._logprobs else []
        part.pieces.append(delta.text)
        part.logprobs.extend(logprobs)
        drafts.append(
            part.at(
                "response.output_text.delta",
                content_index=0,
                delta=delta.text,
                logprobs=[_event_logprob(entry) for entry in logprobs],
            )
        )

    def _reasoning(self, text: str, drafts: list[Draft]) -> None:
        part = self._open_part("reasoning", drafts)
        part.pieces.append(text)
        drafts.append(part.at("response.reasoning_text.delta", content_index=0, delta=text))

    def _call(self, name: str, drafts: list[Draft]) -> None:
        self._close(drafts, "completed")
        index = len(self.output)
        label = self._servers.get(name)
        if label is None and not self._is_offered(name):  # where a server has tools, it tells the model so
            label = next(iter(self._servers.values()), None)
        if label is not None:
            item: Item = {"id": self._id("mcp_call"), "type": "mcp_call", "status": "in_progress"}
            item |= {"server_label": label, "name": name, "arguments": "", "output": None}
            item |= {"error": None, "approval_request_id": None}
            opened = self._open_item(item, drafts)
            drafts.append(opened.at("response.mcp_call.in_progress"))
            return
        kind = "custom_tool_call" if name in self._customs else "function_call"
        item = {"id": self._id(kind), "type": kind, "status": "in_progress"}
        item |= {
            "call_id": derived_id(self._secret, "call", index)[:29],
            "name": name,
            _CALLS[kind].field: "",
        }
        opened = self._open_item(item, drafts)
        if kind == "custom_tool_call":
            opened.reader = InputReader()

    def _is_offered(self, name: str) -> bool:
        return self._names is None or name in self._names

    def _arguments(self, text: str, drafts: list[Draft]) -> None:
        call = self._open
        if call is not None and call.reader is not None:
            text = call.reader.feed(text)
        if call is None or not text:
            return
        call.pieces.append(text)
        drafts.append(call.at(_CALLS[call.item["type"]].event + ".delta", delta=text))

    def _fault(self, call: Item, count: int) -> str:
        """What the model is told of a server-run call that cannot be made, the `count`-th in a row."""
        again = f" It is number {count} of such calls in a row." if count > 1 else ""
        if not self._is_offered(call["name"]):
            known = ", ".join(sorted(self._names or ()))
            return f"There is no tool named {call['name']!r}. The tools are: {known}.{again}"
        return f"The call is not whole: its arguments are cut short, or no JSON.{again}"

    # -- what the server does itself -------------------------------------------------------------------------

    def tools_listed(self, label: str, tools: Sequence[Mapping[str, Any]]) -> list[Draft]:
        """Drafts of a finished tool listing of one server."""
        drafts: list[Draft] = []
        item: Item = {
            "id": self._id("mcp_list_tools"),
            "type": "mcp_list_tools",
            "server_label": label,
            "tools": [],
        }
        opened = self._open_item(item, drafts)
        item |= {"tools": [dict(tool) for tool in tools], "error": None}
        drafts.append(opened.at("response.mcp_list_tools.in_progress"))
        drafts.append(opened.at("response.mcp_list_tools.completed"))
        self._item_done(opened, drafts)
        return drafts

    def call_finished(self, item_id: str, output: str | None, error: str | None) -> list[Draft]:
        """Drafts of a server-run call's outcome: an output, or what went wrong."""
        index = self._calling.pop(item_id)
        item = self.output[index]
        failed = error is not None
        item["status"] = "failed" if failed else "completed"
        item["output"] = output
        item["error"] = None if error is None else _tool_error(error)
        opened = _Open(index, item)
        drafts = [opened.at("response.mcp_call.failed" if failed else "response.mcp_call.completed")]
        self._item_done(opened, drafts)
        return drafts

    def output_received(self, item: Item) -> list[Draft]:
        """Drafts of a tool output that a client fed to a waiting run."""
        drafts: list[Draft] = []
        self._item_done(self._open_item(dict(item), drafts), drafts)
        return drafts

    # -- ends ------------------------------------------------------------------------------------------------

    def ensure_output(self, since: int) -> list[Draft]:
        """Drafts of an empty message when what was made from index `since` on said and called nothing. A
        thought that was cut short stands alone: nobody came to an answer."""
        drafts: list[Draft] = []
        made = self.output[since:]
        cut = bool(made) and made[-1].get("status") == "incomplete"
        if not cut and all(item["type"] == "reasoning" for item in made):
            self._open_part("message", drafts)
            self._close(drafts, "completed")
        return drafts

    def interrupt(self) -> list[Draft]:
        """Drafts that close whatever is open as incomplete."""
        drafts: list[Draft] = []
        self._close(drafts, "incomplete")
        for item_id in list(self._calling):
            drafts += self.call_finished(item_id, None, "The response ended before the tool did.")
        return drafts

    def take_closed(self) -> list[tuple[int, Item]]:
        """The (output index, item) closed since the last call."""
        closed, self._closed = self._closed, []
        return closed

    # -- items -----------------------------------------------------------------------------------------------

    def _id(self, kind: str) -> str:
        return derived_id(self._secret, kind, len(self.output))

    def _open_item(self, item: Item, drafts: list[Draft]) -> _Open:
        self._close(drafts, "completed")
        opened = _Open(len(self.output), item)
        self.output.append(item)
        drafts.append(
            {"type": "response.output_item.added", "output_index": opened.index, "item": _copy(item)}
        )
        if item["type"] not in _CLOSED_AT_ONCE:
            self._open = opened
        return opened

    def _open_part(self, kind: str, drafts: list[Draft], *, phase: str | None = None) -> _Open:
        """The open message or reasoning item, opened together with its only content part."""
        opened = self._open
        if opened is not None and opened.item["type"] == kind and opened.item.get("phase") == phase:
            return opened
        self._close(drafts, "completed")
        item: Item = {"id": self._id(kind), "type": kind, "status": "in_progress"}
        item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        if phase is not None:
            item["phase"] = phase
        if kind == "reasoning":
            item["encrypted_content"] = None
        opened = self._open_item(item, drafts)
        drafts.append(opened.at("response.content_part.added", content_index=0, part=_part(kind, "", [])))
        return opened

    def _close(self, drafts: list[Draft], status: str) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        item, text = opened.item, opened.text
        kind = item["type"]
        if kind in ("message", "reasoning"):
            part = _part(kind, text, opened.logprobs)
            done: dict[str, Any] = {"text": text}
            if kind == "message":
                done["logprobs"] = [_event_logprob(entry) for entry in opened.logprobs]
            drafts.append(opened.at(_TEXT_DONE[kind], content_index=0, **done))
            drafts.append(opened.at("response.content_part.done", content_index=0, part=part))
            item["content"] = [part]
            if kind == "reasoning" and self._seal is not None:
                item["encrypted_content"] = self._seal(item["id"], item["content"])
        else:
            call = _CALLS[kind]
            item[call.field] = text
            named = {"name": item["name"]} if kind == "function_call" else {}
            drafts.append(opened.at(call.event + ".done", **named, **{call.field: text}))
            if not self._is_offered(item["name"]):
                status = "incomplete"
            if kind == "mcp_call" and status == "completed":
                item["status"] = "calling"
                self._calling[item["id"]] = opened.index  # its outcome closes it
                return
            if kind == "mcp_call":
                item["error"] = _tool_error(
                    self._fault(item, broken_in_a_row(self.output[: opened.index]) + 1)
                )
                drafts.append(opened.at("response.mcp_call.failed"))
        item["status"] = status
        self._item_done(opened, drafts)

    def _item_done(self, opened: _Open, drafts: list[Draft]) -> None:
        drafts.append(
            {"type": "response.output_item.done", "output_index": opened.index, "item": _copy(opened.item)}
        )
        self._closed.append((opened.index, _copy(opened.item)))


_TEXT_DONE = {"message": "response.output_text.done", "reasoning": "response.reasoning_text.done"}


class _Call(NamedTuple):
    """What a kind of call names its content, and the events that bring it."""

    field: str
    event: str


_CALLS = {
    "function_call": _Call("arguments", "response.function_call_arguments"),
    "custom_tool_call": _Call("input", "response.custom_tool_call_input"),
    "mcp_call": _Call("arguments", "response.mcp_call_arguments"),
}
_CLOSED_AT_ONCE = frozenset({"mcp_list_tools", "function_call_output", "custom_tool_call_output"})


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _tool_error(text: str) -> dict[str, Any]:
    return {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}


def _copy(item: Item) -> Item:
    """A draft's own copy: the item goes on changing, the draft must not."""
    copy = dict(item)
    if isinstance(copy.get("content"), list):
        copy["content"] = list(copy["content"])
    return copy


def broken_in_a_row(output: Sequence[Item]) -> int:
    """How many of the latest server-run calls were not whole, or of no tool, since the last that was."""
    made = [item["status"] for item in output if item["type"] == "mcp_call"]
    return next((count for count, status in enumerate(reversed(made)) if status != "incomplete"), len(made))


def pending_server_call(item: Item) -> bool:
    """True for a call that the server has begun to make and whose outcome is not known."""
    return bool(item["type"] == "mcp_call" and item["status"] == "calling")


# ------------------------------------------------------------------------------------------------------------
# From events back


def fold(events: Iterable[Mapping[str, Any]]) -> tuple[list[Item], set[int]]:
    """The output items that a stream of events describes, and the indices of those still open.

    For a whole stream the items equal the terminal event's output; for a stream cut anywhere they hold what
    its deltas said.
    """
    output: list[Item] = []
    unfinished: set[int] = set()
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                output.append(json.loads(json.dumps(event["item"])))
                unfinished.add(event["output_index"])
            case "output_item.done":
                output[event["output_index"]] = dict(event["item"])
                unfinished.discard(event["output_index"])
            case "content_part.added" | "content_part.done":
                content = output[event["output_index"]]["content"]
                content[event["content_index"] :] = [dict(event["part"])]
            case "output_text.delta" | "reasoning_text.delta":
                part = output[event["output_index"]]["content"][event["content_index"]]
                part["text"] += event["delta"]
                if event.get("logprobs"):
                    part["logprobs"] = [*part["logprobs"], *map(_with_bytes, event["logprobs"])]
            case "function_call_arguments.delta" | "mcp_call_arguments.delta":
                output[event["output_index"]]["arguments"] += event["delta"]
            case "custom_tool_call_input.delta":
                output[event["output_index"]]["input"] += event["delta"]
            case "mcp_call_arguments.done":
                output[event["output_index"]]["status"] = "calling"
    return output, unfinished


def _with_bytes(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An event's log probability as an item carries it. Its bytes are those of its text, which is not exact
    for a token that holds a part of a character; only an item that a crash cut short ever shows them."""
    tops = [{**top, "bytes": list(top["token"].encode())} for top in entry["top_logprobs"]]
    return {**entry, "bytes": list(entry["token"].encode()), "top_logprobs": tops}


def _reopened(index: int, item: Item) -> _Open:
    """An item that a fold left open, as it was when its last event was made."""
    if (call := _CALLS.get(item["type"])) is not None:
        return _Open(index, item, [item[call.field]])
    part = item["content"][0]
    return _Open(index, item, [part["text"]], list(part.get("logprobs", ())))
