"""Every item type of the API, by its name, and what the rest of the server asks of one.

A module of this package that holds item types has them in `ROWS`, and is found here without being named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

import orjson

from server.errors import to_api_error
from server.items.item_type import Approval, Call, Elsewhere, Execution, Item, ItemType, Tool, Words
from server.items.private_half import Private, load_item, private_of
from server.items.transcript import text_of
from server.shapes import Shape, refuse
from storage import UnknownCall
from tools import Registry


def _rows(package: str) -> Iterable[ItemType]:
    for found in walk_packages(import_module(package).__path__, f"{package}."):
        yield from getattr(import_module(found.name), "ROWS", ())


ITEM_TYPES: dict[str, ItemType] = {row.type: row for row in _rows("server.items")}
"""Type -> its row."""

# ------------------------------------------------------------------------------------------------------------
# Items


def call_of(item: Item) -> Call | None:
    """How the model writes such an item, where it is a call."""
    row = ITEM_TYPES.get(item["type"])
    return None if row is None else row.call


def execution_of(item: Item) -> Execution | None:
    """How this server carries such an item out, where it is a call of its own tools."""
    row = ITEM_TYPES.get(item["type"])
    return None if row is None or (row.ours is not None and not row.ours(item)) else row.execution


def is_running(item: Item) -> bool:
    """Whether this server has begun to carry a call out, and its outcome is not known."""
    execution = execution_of(item)
    return execution is not None and item["status"] == execution.running


def listed_elsewhere(item: Item) -> Elsewhere | None:
    """Whose tools such an item lists, where it is a listing of other servers' tools."""
    executions = (row.execution for row in ITEM_TYPES.values() if row.execution is not None)
    found = (each.elsewhere for each in executions if each.listing and each.listing.type == item["type"])
    return next(found, None)


def is_client_call(item: Item) -> bool:
    """Whether an item is one that a client answers: a call that it carries out, or one that it approves."""
    row = ITEM_TYPES.get(item["type"])
    return row is not None and row.answered_by is not None and not (row.ours and row.ours(item))


def is_answered(item: Item) -> bool:
    """Whether a call has its answer in an item of its own that names it, whoever gives that."""
    row = ITEM_TYPES.get(item["type"])
    if row is None or row.answered_by is None:
        return False
    return key_of(item) is not None if row.ours and row.ours(item) else True


def is_output(item: Item) -> bool:
    """Whether an item answers a call that it names: an output, mostly a client's, or an approval."""
    row = ITEM_TYPES.get(item["type"])
    return row is not None and row.answers is not None and not (row.ours and row.ours(item))


def is_loading(item: Item) -> bool:
    """Whether an item's `tools` can be called from there on."""
    row = ITEM_TYPES.get(item["type"])
    return row is not None and row.loads


def tools_added(item: Item) -> Sequence[Tool]:
    """The tools that an item adds to those of requests from there on."""
    row = ITEM_TYPES.get(item["type"])
    return item["tools"] if row is not None and row.adds else ()


def configuration_of(items: Iterable[Item]) -> Item:
    """The settings that items make for the responses behind them: of each the newest."""
    found: Item = {}
    for item in items:
        row = ITEM_TYPES.get(item["type"])
        if row is not None and row.configures:
            found |= {name: value for name, value in item.items() if name not in ("id", "type")}
    return found


def key_of(item: Item) -> str | None:
    """What a client's call and its answer are known to each other by; None where an answer names no call."""
    found: str | None = item.get(ITEM_TYPES[item["type"]].key)
    return found


def link_of(item: Item) -> tuple[str, str | None]:
    """The field of an answer that names its call, and its value: of the answer, or of the call itself."""
    return answer_field(item["type"]), key_of(item)


def answer_field(kind: str) -> str:
    """The field by which an answer names its call: of this type of answers, or of calls."""
    row = ITEM_TYPES[kind]
    return row.key if row.answered_by is None else ITEM_TYPES[row.answered_by].key


def answers_of(items: Iterable[Item]) -> dict[tuple[str, str | None], Item]:
    """The client's answers among items, by what links them with their calls."""
    return {link_of(item): item for item in items if is_output(item)}


def answering(outputs: Iterable[Item], items: Iterable[Item]) -> list[Item]:
    """Outputs under the type that answers their calls, which are among `items`. One that came without a type
    is that of a function. Raises ApiError 400 for one without a call, or of another type than its call's."""
    kinds = {link_of(item): ITEM_TYPES[item["type"]].answered_by for item in items if is_client_call(item)}
    found = []
    for index, item in enumerate(outputs):
        name, key = link_of(item)
        if (name, key) not in kinds:
            if meant := next((kind for (_, known), kind in kinds.items() if known == key), None):
                message = f'\'{key}\' is answered by an item with "type": "{meant}".'
                refuse(f"tool_outputs[{index}].type", message, "unknown_call_id")
            raise to_api_error(UnknownCall(str(key)), param=f"tool_outputs[{index}].{name}")
        kind = kinds[name, key] or item["type"]
        if kind != item["type"] != "function_call_output":
            message = f"An output of type '{item['type']}' does not answer this call; '{kind}' would."
            refuse(f"tool_outputs[{index}].type", message)
        of_text = None if kind == item["type"] else ITEM_TYPES[kind].of_text
        told = {} if of_text is None else of_text(text_of(item["output"]))
        found.append({**item, "type": kind, **told})
    return found


# ------------------------------------------------------------------------------------------------------------
# Approvals


def asks_approval(item: Item) -> bool:
    """Whether an item asks the client to approve a call. It may stay unanswered."""
    row = ITEM_TYPES.get(item["type"])
    return row is not None and row.answered_by is not None and is_approval({"type": row.answered_by})


def is_approval(item: Item) -> bool:
    """Whether an item answers a request for an approval, in whatever way."""
    row = ITEM_TYPES.get(item["type"])
    return row is not None and row.approves is not None


def approves(item: Item) -> bool:
    """Whether an item lets the call be made that it answers the request for."""
    row = ITEM_TYPES.get(item["type"])
    return row is not None and row.approves is not None and row.approves(item)


def type_asked_for(request: Item) -> ItemType:
    """The item type of the calls that such an item asks approval for."""
    for row in ITEM_TYPES.values():
        if (approval := approval_of(row)) is not None and approval.request == request["type"]:
            return row
    raise AssertionError(f"no call is asked for by items of type {request['type']}")


def approval_of(row: ItemType) -> Approval | None:
    """How a client is asked for calls of this type; None where it never is."""
    return None if row.execution is None else row.execution.approval


def server_asked(request: Item) -> str | None:
    """The server that a call is to be made at which such an item asks approval for; None where nobody knows
    any more, or where there is one alone."""
    approval = approval_of(type_asked_for(request))
    return None if approval is None else approval.server(request)


def server_labelled(request: Item, tools: Iterable[Tool]) -> str | None:
    """The server that the same call would be made at with these tools: the one that they have in its place,
    be it another one; None where there is none."""
    row = type_asked_for(request)
    call = row.call
    assert call is not None, "what is asked for is a call"
    same = (tool for tool in tools if tool["type"] in row.tools)
    found = (call.server(tool) for tool in same if call.fields(tool).items() <= request.items())
    return next(found, None)


def num_tool_calls(output: Sequence[Item]) -> int:
    """How many of an output's calls count against a limit of calls: those that this server has made or is
    about to make, whatever came of them, and those that the client has been asked for and not declined."""
    declined = {key_of(item) for item in output if is_approval(item) and not approves(item)}
    asked = {key_of(item) for item in output if asks_approval(item)}
    made = [item for item in output if execution_of(item) is not None]
    # A hosted shell's call has no status for failing: one that was made is followed by its output.
    told = {item.get("call_id") for item in output if execution_of(item) is None} - {None}
    whole = [
        item
        for item in made
        if is_running(item) or item["status"] in ("completed", "failed") or item.get("call_id") in told
    ]
    return len(asked - declined) + sum(source_of(item) not in asked for item in whole)


def source_of(call: Item) -> str | None:
    """The id of the item that asked for a call before it was made."""
    row = ITEM_TYPES.get(call["type"])
    approval = None if row is None else approval_of(row)
    return None if approval is None else call.get(approval.source)


def broken_in_a_row(output: Sequence[Item]) -> int:
    """How many of the latest server-run calls were not whole, or of no tool, since the last that was."""
    count = 0
    for item in reversed(output):
        if (execution := execution_of(item)) is not None:
            if not _is_broken(item, execution):
                break
            count += 1
    return count


def _is_broken(item: Item, execution: Execution) -> bool:
    if execution.keeps is None:
        return bool(item["status"] == execution.broken)
    return bool((private_of(item) or {}).get("broken"))  # its status may be that of any failure


def words_of(item: Item, path: str) -> Words:
    """What writes an item into a transcript. Raises ApiError 400 `unsupported_item` where nothing does."""
    say = ITEM_TYPES[item["type"]].say
    if say is None:
        message = f"Invalid '{path}': no model here can be shown an item of type '{item['type']}'."
        refuse(path, message, "unsupported_item")
    return say


def is_left_out(item: Item) -> bool:
    """Whether a prompt says nothing of an item because its private half is not known here."""
    return ITEM_TYPES[item["type"]].told_privately and private_of(item) is None


def filled(item: Item, private: Private, include: Iterable[str]) -> Item:
    """An item with the fields that values of `include` ask for, as far as its private half has them."""
    fill = ITEM_TYPES[item["type"]].includes
    shown = dict(item)
    for name in include:
        if name in fill:
            fill[name](shown, private)
    return shown


def filled_body(body: bytes, private: bytes | None, include: Iterable[str]) -> bytes:
    """A stored item's JSON with the fields that values of `include` ask for."""
    if private is None or not FILLED.intersection(include):
        return body
    item = load_item(body, private)
    return orjson.dumps(filled(item, private_of(item) or {}, include))


FILLED = frozenset(name for row in ITEM_TYPES.values() for name in row.includes)
"""The values of `include` that private halves can fill."""

# ------------------------------------------------------------------------------------------------------------
# Tools of a request


def tool_shapes() -> dict[str, Shape]:
    """`tools[].type` -> the shape of such a tool, for every type that is known."""
    return {kind: shape for row in ITEM_TYPES.values() for kind, shape in row.tools.items()}


def type_of_calls(kind: str) -> ItemType | None:
    """The item type of the calls of tools of this type; None where no model can call them here."""
    rows = (row for row in ITEM_TYPES.values() if kind in row.tools and row.call is not None)
    return next(rows, None)


def instead_of(kind: str) -> str:
    """What a client can do in the place of a tool of this type that no model can call here, as a sentence;
    empty where there is nothing to be said."""
    rows = (row.instead for row in ITEM_TYPES.values() if kind in row.tools)
    return next(rows, "")


def is_offered(tool: Mapping[str, Any]) -> bool:
    """Whether a tool of a request is offered to the model."""
    row = type_of_calls(tool["type"])
    return row is not None and row.call is not None and row.call.takes(dict(tool))


def is_direct(tool: Mapping[str, Any]) -> bool:
    """Whether the model may call a tool itself. Others are for programs that it writes, which none here
    runs."""
    return "direct" in tool.get("allowed_callers", ("direct",))


def is_server_run(tool: Mapping[str, Any]) -> bool:
    """Whether the calls of a tool of a request are this server's to carry out, and no searches, which only
    load the tools of others."""
    row = type_of_calls(tool["type"])
    if row is None or row.call is None or row.execution is None or row.call.searches is not None:
        return False
    return is_offered(tool) and (
        row.ours is None or row.ours({"type": row.type, **row.call.fields(dict(tool))})
    )


def stores_of(tool: Mapping[str, Any]) -> Sequence[str]:
    """The ids of the vector stores that a tool of a request searches."""
    row = type_of_calls(tool["type"])
    return () if row is None or row.call is None else row.call.stores(dict(tool))


def changes_images(tool: Mapping[str, Any]) -> bool:
    """Whether calls of a tool of a request may work on the images of the conversation."""
    row = type_of_calls(tool["type"])
    return row is not None and row.call is not None and row.call.changes_images(dict(tool))


def declines(tool: Mapping[str, Any]) -> bool:
    """Whether a client that sends this tool agrees that a server which `lacks` it offers nothing."""
    row = type_of_calls(tool["type"])
    return row is not None and row.call is not None and row.call.declines(dict(tool))


def lacks(tool: Mapping[str, Any], registry: Registry) -> str | None:
    """Why this server cannot run a tool of a request that it would otherwise offer; None where it can."""
    row = type_of_calls(tool["type"])
    return None if row is None or row.call is None else row.call.lacks(dict(tool), registry)
