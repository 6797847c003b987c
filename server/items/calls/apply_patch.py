"""Changes of files, which clients carry out.

A change comes as a diff in the format V4A. Its lines are a regular language, so the schema of the call has
them as patterns, and a model under a grammar cannot write another diff.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from server.items.calls.function_tools import CALLERS
from server.items.item_type import Call, Item, ItemType, Tool, Whole, flat_function, with_call_id
from server.items.parts import CALLER, call_shape, item_shape, read_arguments
from server.items.transcript import Transcript
from server.shapes import NAME, STRING, one_of, record, tagged
from tools import Registry

_DIFF = {"path": NAME, "diff": STRING}
_OPERATION = tagged(
    {"create_file": record(_DIFF), "delete_file": record({"path": NAME}), "update_file": record(_DIFF)}
)


# ------------------------------------------------------------------------------------------------------------
# The function that the model is offered

_ADDED = r"\+[^\n]*"
_CHANGED = r"[ +\-][^\n]*"
_HEADERS = r"(@@( [^\n]+)?\n)"

CREATE = rf"^{_ADDED}(\n{_ADDED})*\n?$"
"""The diff of a new file: all of its lines, each behind a plus; one at least, because the Agents SDK refuses
an empty diff."""
UPDATE = (
    rf"^{_HEADERS}*{_CHANGED}(\n{_CHANGED})*"
    rf"(\n{_HEADERS}+{_CHANGED}(\n{_CHANGED})*)*"
    r"(\n\*\*\* End of File)?\n?$"
)
"""The diff of a change: sections of lines that stay, go and come. All but the first have a header, a line
`@@` that may say in which function or class they are; the last may be at the end of the file."""

_DESCRIPTION = (
    "Creates, changes or deletes one file on the user's machine. `diff` says what is in it. create_file: all "
    "lines of the new file, each behind a '+'. update_file: the lines to be changed, with about three lines "
    "before and behind them: a line that stays has a space in front, one that goes a '-', one that comes a "
    "'+'. Between two such sections stands a line '@@', or '@@ ' and the line of the file that begins the "
    "function or class of the second section. delete_file takes no diff."
)
_PATH = {
    "type": "string",
    "pattern": r"^[^\x00-\x1f]+$",
    "description": "The file, from the root of the workspace on.",
}


def _operation(kind: str, pattern: str | None) -> Mapping[str, Any]:
    diff = {} if pattern is None else {"diff": {"type": "string", "pattern": pattern}}
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, "path": _PATH, **diff},
        "required": ["type", "path", *diff],
        "additionalProperties": False,
    }


_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
        "path": _PATH,
        "diff": {"type": "string", "description": "The lines of the file, or of its change."},
    },
    "required": ["type", "path"],
    "anyOf": [
        _operation("create_file", CREATE),
        _operation("update_file", UPDATE),
        _operation("delete_file", None),
    ],
}
_NAMES = ("type", "path", "diff")


def _offers(_tool: Tool, _registry: Registry, _path: str) -> Sequence[Tool]:
    return [flat_function("apply_patch", _DESCRIPTION, _PARAMETERS)]


def _read(arguments: str) -> Item | None:
    # Whether the diff fits its file is seen by whoever applies it, and the output tells the model.
    operation = read_arguments(arguments, _OPERATION, _NAMES)
    return None if operation is None else {"operation": _ordered(operation)}


def _ordered(operation: Item) -> Item:
    """An operation with its keys in one order, whatever a client's: the same call is the same prompt."""
    names = _NAMES if operation["type"] != "delete_file" else _NAMES[:2]
    return {name: operation[name] for name in names}


# ------------------------------------------------------------------------------------------------------------
# Items


def _say(item: Item, transcript: Transcript) -> None:
    operation = json.dumps(_ordered(item["operation"]), ensure_ascii=False)
    transcript.call(item["call_id"], "apply_patch", operation)


def _say_output(item: Item, transcript: Transcript) -> None:
    told = item.get("output")
    if item["status"] == "failed":
        told = f"error: {told or 'The patch could not be applied.'}"
    transcript.answer(item["call_id"], told or "The patch was applied.")


def _applied(text: str) -> Item:
    return {"status": "completed", "output": text}


ROWS = (
    ItemType(
        "apply_patch_call",
        "apc_",
        item_shape(call_shape(operation=_OPERATION), CALLER, statuses=("completed", "in_progress")),
        _say,
        tools={"apply_patch": record({}, {"allowed_callers": CALLERS})},
        call=Call(with_call_id, whole=Whole(_read), offers=_offers),
        answered_by="apply_patch_call_output",
    ),
    ItemType(
        "apply_patch_call_output",
        "apco_",
        # Without it an error would count as success.
        item_shape(
            call_shape(status=one_of("completed", "failed")), {**CALLER, "output": STRING}, statuses=()
        ),
        _say_output,
        answers="apply_patch_call",
        of_text=_applied,
    ),
)
