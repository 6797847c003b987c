"""Every item type of the API as a row: its id's prefix, its fields, its statuses.

Owns what each type looks like in the official resource form. Refuses to know how clients abbreviate them
(`schema.items` does) and what they mean. Source of the rows: the OpenAPI document's InputItem and
ItemResource unions. Rows say what a stored item must have to be valid there; fields that they do not name are
kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.schema.shapes import (
    NAME,
    STRING,
    Shape,
    anything,
    array,
    boolean,
    described,
    either,
    map_of,
    mapping,
    number,
    one_of,
    record,
    refuse,
    tagged,
    text,
    whole,
)
from server.schema.tools import normalize_tool

MAX_ID = 512


def identifier(value: Any, path: str) -> Any:
    """An id: printable, and short enough to be a key in any database."""
    text(1, MAX_ID)(value, path)
    if not value.isprintable():
        refuse(path, f"Invalid '{path}': ids must be printable.")
    return value


described(identifier, lambda: {"type": "string", "minLength": 1, "maxLength": MAX_ID})

# ------------------------------------------------------------------------------------------------------------
# Content parts

_FILE_CITATION = {"file_id": STRING, "filename": STRING}
_ANNOTATION = tagged(
    {
        "file_citation": record({"index": whole(), **_FILE_CITATION}),
        "url_citation": record(
            {"url": STRING, "start_index": whole(), "end_index": whole(), "title": STRING}
        ),
        "container_file_citation": record(
            {"container_id": STRING, "start_index": whole(), "end_index": whole(), **_FILE_CITATION}
        ),
        "file_path": record({"file_id": STRING, "index": whole()}),
    }
)
_LOGPROB_FIELDS: Mapping[str, Shape] = {"token": STRING, "logprob": number}
_BYTES = array(whole(0, 255))
_LOGPROB = record(
    _LOGPROB_FIELDS,
    {"bytes": _BYTES, "top_logprobs": array(record(_LOGPROB_FIELDS, {"bytes": _BYTES}, bytes=[]))},
    bytes=[],
    top_logprobs=[],
)

_INPUT_IMAGE = record(
    {},
    {"image_url": STRING, "file_id": STRING, "detail": one_of("auto", "low", "high", "original")},
    detail="auto",
)
_INPUT_FILE = record(
    {},
    {
        "file_id": STRING,
        "filename": STRING,
        "file_data": STRING,
        "file_url": STRING,
        "detail": one_of("auto", "low", "high"),
    },
)
_TEXT = record({"text": STRING})
_INPUT_PARTS: Mapping[str, Shape] = {
    "input_text": _TEXT,
    "input_image": _INPUT_IMAGE,
    "input_file": _INPUT_FILE,
}
_AUDIO = record({"input_audio": record({"data": STRING, "format": STRING})})

USER_PART = tagged(
    {**_INPUT_PARTS, "input_audio": _AUDIO, "computer_screenshot": _INPUT_IMAGE},
    aliases={"text": "input_text", "output_text": "input_text"},
)
ASSISTANT_PART = tagged(
    {
        "output_text": record(
            {"text": STRING},
            {"annotations": array(_ANNOTATION), "logprobs": array(_LOGPROB)},
            annotations=[],
            logprobs=[],
        ),
        "refusal": record({"refusal": STRING}),
    },
    aliases={"text": "output_text", "input_text": "output_text"},
)
OUTPUT_PART = tagged(_INPUT_PARTS, aliases={"text": "input_text", "output_text": "input_text"})

# ------------------------------------------------------------------------------------------------------------
# Item types


@dataclass(frozen=True, slots=True)
class ItemKind:
    """One item type: the prefix of its ids, its shape, and whether the client must name it."""

    prefix: str
    shape: Shape
    needs_id: bool = False


_STATUSES = ("completed", "in_progress", "incomplete")


def _kind(
    prefix: str,
    required: Mapping[str, Shape],
    optional: Mapping[str, Shape] | None = None,
    *,
    statuses: Sequence[str] = _STATUSES,
    needs_id: bool = False,
    **defaults: Any,
) -> ItemKind:
    """A row. The first of `statuses` is the default; without any the item has no status."""
    more = {"id": anything, "created_by": STRING, **(optional or {})}
    if statuses:
        more["status"] = one_of(*statuses)
        defaults["status"] = statuses[0]
    return ItemKind(prefix, record(required, more, **defaults), needs_id)


def _call(**fields: Shape) -> dict[str, Shape]:
    return {"call_id": identifier, **fields}


_CALLER = {
    "caller": tagged({"direct": record({}), "program": record({"caller_id": STRING})}),
}
_NAMED_CALLER = {**_CALLER, "namespace": STRING}
_TOOL_OUTPUT = either(STRING, array(OUTPUT_PART))
_TOOLS = array(normalize_tool)
_SAFETY = array(record({"id": STRING}, {"code": STRING, "message": STRING}))
_POINT = {"x": whole(), "y": whole()}
_KEYS = {"keys": array(STRING)}
_COMPUTER_ACTION = tagged(
    {
        "click": record({**_POINT, "button": one_of("left", "right", "wheel", "back", "forward")}, _KEYS),
        "double_click": record(_POINT, _KEYS, keys=None),
        "drag": record({"path": array(record(_POINT))}, _KEYS),
        "keypress": record(_KEYS),
        "move": record(_POINT, _KEYS),
        "screenshot": record({}),
        "scroll": record({**_POINT, "scroll_x": whole(), "scroll_y": whole()}, _KEYS),
        "type": record({"text": STRING}),
        "wait": record({}),
    }
)
_SEARCHING = ("completed", "in_progress", "searching", "failed")
_SCREENSHOT = tagged({"computer_screenshot": record({}, {"image_url": STRING, "file_id": STRING})})
_FILE_HIT = {"file_id": STRING, "text": STRING, "filename": STRING, "attributes": mapping, "score": number}
_DIFF = {"path": NAME, "diff": STRING}
_MCP_ERROR = {"code": whole(), "message": STRING}
_EXECUTION = {"execution": one_of("client", "server")}
_MCP_TOOL = record({"name": STRING, "input_schema": mapping}, {"description": STRING, "annotations": mapping})

KINDS: Mapping[str, ItemKind] = {
    "function_call": _kind("fc_", _call(name=NAME, arguments=STRING), _NAMED_CALLER),
    "function_call_output": _kind("fco_", _call(output=_TOOL_OUTPUT), {**_NAMED_CALLER, "name": STRING}),
    "custom_tool_call": _kind("ctc_", _call(name=NAME, input=STRING), _NAMED_CALLER),
    "custom_tool_call_output": _kind("ctco_", _call(output=_TOOL_OUTPUT), _CALLER),
    "reasoning": _kind(
        "rs_",
        {},
        {
            "summary": array(tagged({"summary_text": _TEXT})),
            "content": array(tagged({"reasoning_text": _TEXT}, aliases={"text": "reasoning_text"})),
            "encrypted_content": STRING,
        },
        summary=[],
    ),
    "web_search_call": _kind(
        "ws_",
        {
            "action": tagged(
                {
                    "search": record(
                        {},
                        {
                            "query": STRING,
                            "queries": array(STRING),
                            "sources": array(tagged({"url": record({"url": STRING})})),
                        },
                    ),
                    "open_page": record({}, {"url": STRING}),
                    "find_in_page": record({"url": STRING, "pattern": STRING}),
                }
            )
        },
        statuses=_SEARCHING,
        action={"type": "search"},
    ),
    "file_search_call": _kind(
        "fs_",
        {"queries": array(STRING)},
        {"results": array(record({}, _FILE_HIT))},
        statuses=(*_SEARCHING, "incomplete"),
    ),
    "code_interpreter_call": _kind(
        "ci_",
        {"container_id": STRING},
        {
            "code": STRING,
            "outputs": array(tagged({"logs": record({"logs": STRING}), "image": record({"url": STRING})})),
        },
        statuses=(*_STATUSES, "interpreting", "failed"),
        code=None,
        outputs=None,
    ),
    "image_generation_call": _kind(
        "ig_",
        {},
        {"result": STRING},
        statuses=("completed", "in_progress", "generating", "failed"),
        result=None,
    ),
    "computer_call": _kind(
        "cu_",
        _call(),
        {"action": _COMPUTER_ACTION, "actions": array(_COMPUTER_ACTION), "pending_safety_checks": _SAFETY},
        pending_safety_checks=[],
    ),
    "computer_call_output": _kind(
        "cuo_",
        _call(output=_SCREENSHOT),
        {"acknowledged_safety_checks": _SAFETY},
        statuses=("completed", "incomplete", "failed", "in_progress"),
    ),
    "local_shell_call": _kind(
        "lsh_",
        _call(
            action=record(
                {"command": array(STRING)},
                {"timeout_ms": whole(), "working_directory": STRING, "env": map_of(STRING), "user": STRING},
                type="exec",
                env={},
            )
        ),
    ),
    # Its id is the call's, so nobody but the client can know it.
    "local_shell_call_output": _kind("lsho_", {"output": STRING}, {"call_id": identifier}, needs_id=True),
    "shell_call": _kind(
        "sh_",
        _call(
            action=record(
                {"commands": array(STRING)},
                {"timeout_ms": whole(), "max_output_length": whole()},
                timeout_ms=None,
                max_output_length=None,
            )
        ),
        {
            **_CALLER,
            "environment": tagged(
                {"local": record({}), "container_reference": record({"container_id": STRING})}
            ),
        },
        environment=None,
    ),
    "shell_call_output": _kind(
        "sho_",
        _call(
            output=array(
                record(
                    {
                        "stdout": STRING,
                        "stderr": STRING,
                        "outcome": tagged({"exit": record({"exit_code": whole()}), "timeout": record({})}),
                    }
                )
            )
        ),
        {**_CALLER, "max_output_length": whole()},
        max_output_length=None,
    ),
    "apply_patch_call": _kind(
        "apc_",
        _call(
            operation=tagged(
                {
                    "create_file": record(_DIFF),
                    "delete_file": record({"path": NAME}),
                    "update_file": record(_DIFF),
                }
            )
        ),
        _CALLER,
        statuses=("completed", "in_progress"),
    ),
    "apply_patch_call_output": _kind(
        "apco_", _call(), {**_CALLER, "output": STRING}, statuses=("completed", "failed")
    ),
    "mcp_list_tools": _kind(
        "mcpl_", {"server_label": STRING, "tools": array(_MCP_TOOL)}, {"error": STRING}, statuses=()
    ),
    "mcp_call": _kind(
        "mcp_",
        {"server_label": STRING, "name": STRING, "arguments": STRING},
        {
            "output": STRING,
            "error": tagged(
                {
                    "mcp_protocol_error": record(_MCP_ERROR),
                    "mcp_tool_execution_error": record({"content": anything}),
                    "http_error": record(_MCP_ERROR),
                }
            ),
            "approval_request_id": STRING,
        },
        statuses=(*_STATUSES, "calling", "failed"),
    ),
    "mcp_approval_request": _kind(
        "mcpr_", {"server_label": STRING, "name": STRING, "arguments": STRING}, statuses=()
    ),
    "mcp_approval_response": _kind(
        "mcpa_",
        {"approval_request_id": STRING, "approve": boolean},
        {"reason": STRING, "request_id": STRING},
        statuses=(),
    ),
    "compaction": _kind("cmp_", {"encrypted_content": STRING}, statuses=()),
    "compaction_trigger": _kind("cmpt_", {}, statuses=()),
    "tool_search_call": _kind(
        "tsc_",
        {"arguments": anything},
        {"call_id": identifier, **_EXECUTION},
        call_id=None,
        execution="client",
    ),
    "tool_search_output": _kind(
        "tso_", {"tools": _TOOLS}, {"call_id": identifier, **_EXECUTION}, call_id=None, execution="client"
    ),
    "additional_tools": _kind(
        "at_", {"tools": _TOOLS}, {"role": one_of("developer")}, statuses=(), role="developer"
    ),
    "program": _kind("prog_", _call(code=STRING, fingerprint=STRING), statuses=(), needs_id=True),
    "program_output": _kind("po_", _call(result=STRING), statuses=("completed", "incomplete"), needs_id=True),
    "configuration_update": _kind("cfg_", {}, {"reasoning": mapping, "text": mapping}, statuses=()),
}

_MESSAGE_KEYS: Mapping[str, Shape] = {
    "role": one_of("user", "assistant", "system", "developer"),
    "status": one_of(*_STATUSES),
    "phase": one_of("commentary", "final_answer"),
    "created_by": STRING,
    "id": anything,
    "content": anything,
}
MESSAGE = record({"role": _MESSAGE_KEYS["role"]}, _MESSAGE_KEYS, status="completed")

PREFIXES: Mapping[str, str] = {"message": "msg_", **{name: kind.prefix for name, kind in KINDS.items()}}
"""Item type -> the prefix of ids that this server gives."""
