"""Commands for a shell. Clients carry them out, or this server does in a container, where the environment of
the tool is one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from server.items.calls.function_tools import CALLERS
from server.items.item_type import (
    Call,
    Execution,
    Item,
    ItemType,
    Scene,
    Tool,
    Whole,
    flat_function,
    with_call_id,
)
from server.items.parts import (
    CALLER,
    NEW_CONTAINER,
    PLACE,
    call_shape,
    identifier,
    item_shape,
    read_arguments,
    why_not_run,
)
from server.items.private_half import Private, private_of
from server.items.transcript import Transcript
from server.shapes import (
    NAME,
    STRING,
    Shape,
    array,
    described,
    map_of,
    record,
    refuse,
    tagged,
    whole,
)
from tools import RUN_CODE, RUN_SHELL, Registry, ToolResult, execute

_COMMAND = "output_index command_index"
_NUMBER = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
_NUMBER_SHAPE = whole(1, 2**31 - 1)

# ------------------------------------------------------------------------------------------------------------
# `shell`: several commands at once

_SKILL = record({"name": NAME, "description": STRING, "path": NAME})
_LOCAL = record({}, {"skills": array(_SKILL, max_items=200)})


def _no_skills(value: Any, path: str) -> Any:
    if value:
        refuse(path, f"Invalid '{path}': containers have none here.", "unsupported_parameter")
    return value


described(_no_skills, lambda: {"type": "array", "maxItems": 0})

_TOOL = record(
    {},
    {
        "environment": tagged(
            {
                "local": _LOCAL,
                "container_auto": record({}, {**NEW_CONTAINER, "skills": _no_skills}),
                "container_reference": record({"container_id": STRING}),
            }
        ),
        "allowed_callers": CALLERS,
    },
)


def _is_hosted(said: Mapping[str, Any]) -> bool:
    """Whether the environment of a tool, or of a call, is a container of this server."""
    return (said.get("environment") or {}).get("type") in ("container_auto", "container_reference")


def _lacks(tool: Tool, registry: Registry) -> str | None:
    if not _is_hosted(tool) or RUN_SHELL in registry:
        return None
    if RUN_CODE in registry:
        return "Monty runs no commands: --sandbox bubblewrap does"
    return why_not_run("commands", registry)


def _fields(tool: Tool) -> Mapping[str, Any]:
    if not _is_hosted(tool):
        return {"environment": {"type": "local"}}
    # A request whose tokens are only counted has no container yet.
    id = tool.get("container", {}).get("container_id", "")
    return {"environment": {"type": "container_reference", "container_id": id}}


_SHELL = (
    "Runs commands in a shell on the user's machine, in the given order, and returns what each printed and "
    "its exit code."
)
_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "commands": {
            "type": "array",
            "items": {"type": "string"},
            "minItems": 1,
            "description": "The commands, each as one would type it.",
        },
        "timeout_ms": {**_NUMBER, "description": "How long they may take, in milliseconds."},
        "max_output_length": {
            **_NUMBER,
            "description": "How many characters of output of each command to return at most.",
        },
    },
    "required": ["commands"],
    "additionalProperties": False,
}
_NAMES = ("commands", "timeout_ms", "max_output_length")
_ARGUMENTS = record(
    {"commands": array(STRING, 1)},
    {"timeout_ms": _NUMBER_SHAPE, "max_output_length": _NUMBER_SHAPE},
    timeout_ms=None,
    max_output_length=None,
)


_HOSTED = (
    "Runs commands in a shell in a container, in the given order, and returns what each printed and its exit "
    "code. {about} Files are in /mnt/data, and stay; in the answer, a link to sandbox:/mnt/data/NAME lets "
    "the user download one."
)


def _offers(tool: Tool, registry: Registry, _path: str) -> Sequence[Tool]:
    if _is_hosted(tool):
        about = registry[RUN_SHELL].description
        return [flat_function("shell", _HOSTED.format(about=about), _PARAMETERS)]
    skills = (tool.get("environment") or {}).get("skills") or ()
    told = [f"- {skill['name']} ({skill['path']}): {skill['description']}" for skill in skills]
    if told:
        told.insert(0, "There are skills, folders whose file SKILL.md says how something is done:")
    return [flat_function("shell", "\n".join([_SHELL, *told]), _PARAMETERS)]


def _read(arguments: str) -> Item | None:
    action = read_arguments(arguments, _ARGUMENTS, _NAMES)
    if action is None:
        return None
    return {"action": {name: action[name] for name in _NAMES}}


def _events(item: Item) -> Sequence[Mapping[str, Any]]:
    events: list[Mapping[str, Any]] = []
    for index, command in enumerate(item["action"]["commands"]):
        at = {"command_index": index}
        events.append({"type": "response.shell_call_command.added", **at, "command": ""})
        if command:
            events.append({"type": "response.shell_call_command.delta", **at, "delta": command})
        events.append({"type": "response.shell_call_command.done", **at, "command": command})
    return events


def _added(fields: Item) -> Mapping[str, Any]:
    return {"action": {**fields["action"], "commands": []}}


def _fold(item: Item, event: Mapping[str, Any]) -> None:
    if event["type"] == "response.shell_call_command.done":
        item["action"]["commands"].append(event["command"])


_EMPTY: Item = {"action": {"commands": [], "timeout_ms": None, "max_output_length": None}}

# ------------------------------------------------------------------------------------------------------------
# Commands that this server runs

LOST = (
    "The server stopped while these commands ran: files are as of the last finished call, and what else they "
    "have done is lost."
)
_NOT_KEPT = "The output of these commands was not kept."


async def _run(item: Item, registry: Registry, scene: Scene) -> ToolResult:
    if RUN_SHELL not in registry:
        return ToolResult(error="Commands cannot be run here any more.")
    tools = (tool["container"] for tool in scene.tools if tool["type"] == "shell" and _is_hosted(tool))
    container = next(tools, {"type": "id", "container_id": item["environment"]["container_id"]})
    told = {"owner": scene.owner, "key": scene.key_id or "", "call": item["id"], "at": scene.at}
    asked = {**item["action"], **told, "container": container}
    return await execute(registry[RUN_SHELL], json.dumps(asked))


def _finish(item: Item, result: ToolResult) -> str | None:
    item["status"] = "completed" if result.error is None else "incomplete"
    return None


def _keeps(_item: Item, result: ToolResult) -> Private:
    kept = {key: value for key, value in (result.kept or {}).items() if key in ("container_files", "broken")}
    return kept if result.error is None else {**kept, "error": result.error}


def _follows(item: Item, result: ToolResult) -> Item:
    if result.error is None and result.kept is not None:
        output = result.kept["output"]
    else:
        output = [{"stdout": "", "stderr": result.error, "outcome": {"type": "exit", "exit_code": 1}}]
    return {
        "type": "shell_call_output",
        "call_id": item["call_id"],
        "status": item["status"],
        "output": output,
        "max_output_length": item["action"]["max_output_length"],
    }


def _tells(item: Item) -> tuple[Mapping[str, Any], Sequence[tuple[str, Mapping[str, Any]]]]:
    events: list[tuple[str, Mapping[str, Any]]] = []
    for index, one in enumerate(item["output"]):
        if said := {stream: one[stream] for stream in ("stdout", "stderr") if one[stream]}:
            events.append(
                ("response.shell_call_output_content.delta", {"command_index": index, "delta": said})
            )
        events.append(("response.shell_call_output_content.done", {"command_index": index, "output": [one]}))
    return {"status": "in_progress", "output": []}, events


def _repeatable(_item: Item, _registry: Registry) -> bool:
    return False


# ------------------------------------------------------------------------------------------------------------
# `local_shell`: one program with its arguments

_LOCAL_SHELL = (
    "Runs one program on the user's machine, without a shell in between, and returns what it printed. For a "
    'line of a shell, run that: ["bash", "-lc", "ls | wc -l"].'
)
_LOCAL_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "command": {
            "type": "array",
            "items": {"type": "string"},
            "minItems": 1,
            "description": "The program and its arguments.",
        },
        "timeout_ms": {**_NUMBER, "description": "How long it may take, in milliseconds."},
        "working_directory": {"type": "string", "description": "The folder to run it in."},
        "env": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "Environment variables to set for it.",
        },
        "user": {"type": "string", "description": "The user to run it as."},
    },
    "required": ["command"],
    "additionalProperties": False,
}
_LOCAL_NAMES = ("command", "timeout_ms", "working_directory", "env", "user")


def _action(command: Shape, number: Shape, **defaults: Any) -> Shape:
    optional = {"timeout_ms": number, "working_directory": STRING, "env": map_of(STRING), "user": STRING}
    return record({"command": command}, optional, type="exec", env={}, **defaults)


_LOCAL_ARGUMENTS = _action(
    array(STRING, 1), _NUMBER_SHAPE, timeout_ms=None, working_directory=None, user=None
)


def _offers_local(_tool: Tool, _registry: Registry, _path: str) -> Sequence[Tool]:
    return [flat_function("local_shell", _LOCAL_SHELL, _LOCAL_PARAMETERS)]


def _read_local(arguments: str) -> Item | None:
    action = read_arguments(arguments, _LOCAL_ARGUMENTS, _LOCAL_NAMES)
    if action is None:
        return None
    # What the model has not said is left out and never null, which clients refuse here: Vercel's AI SDK does.
    said = {name: action[name] for name in _LOCAL_NAMES if action[name] is not None}
    return {"action": {"type": "exec", **said}}


# ------------------------------------------------------------------------------------------------------------
# Words


def _say(item: Item, transcript: Transcript) -> None:
    call_id, private = item["call_id"], private_of(item) or {}
    if private.get("broken"):  # nothing followed it
        transcript.call(call_id, "shell", "{}")
        transcript.answer(call_id, f"error: {private['error']}")
        return
    _say_action(item, transcript, "shell", _NAMES)
    answered = ("call_id", call_id) in transcript.answers
    if _is_hosted(item) and not answered and transcript.has(call_id):
        transcript.answer(call_id, _NOT_KEPT)


def _say_local(item: Item, transcript: Transcript) -> None:
    _say_action(item, transcript, "local_shell", _LOCAL_NAMES)


def _say_action(item: Item, transcript: Transcript, name: str, names: Sequence[str]) -> None:
    if transcript.shows(item["call_id"], whole=item.get("status") != "incomplete"):
        # In one order, whatever the client's: the same call is the same prompt.
        action = {key: item["action"][key] for key in names if item["action"].get(key)}
        transcript.call(item["call_id"], name, json.dumps(action, ensure_ascii=False))


def _say_output(item: Item, transcript: Transcript) -> None:
    transcript.answer(item["call_id"], "\n\n".join(map(_told, item["output"])))


def _printed(text: str) -> Item:
    """The output of commands that have printed a text, and of which nothing else is known."""
    ended = {"type": "exit", "exit_code": 0}
    return {"output": [{"stdout": text, "stderr": "", "outcome": ended}], "max_output_length": None}


def _say_local_output(item: Item, transcript: Transcript) -> None:
    transcript.answer(item["call_id"], item["output"])


def _printed_by_one(text: str) -> Item:
    return {"output": text}


def _told(command: dict[str, Any]) -> str:
    """What came of one command."""
    outcome = command["outcome"]
    end = "timed out" if outcome["type"] == "timeout" else f"exit code {outcome['exit_code']}"
    said = (command[stream].rstrip("\n") for stream in ("stdout", "stderr"))
    return "\n".join([*filter(None, said), f"[{end}]"])


ROWS = (
    ItemType(
        "shell_call",
        "sh_",
        item_shape(
            call_shape(
                action=record(
                    {"commands": array(STRING)},
                    {"timeout_ms": whole(), "max_output_length": whole()},
                    timeout_ms=None,
                    max_output_length=None,
                )
            ),
            {
                **CALLER,
                "environment": tagged(
                    {"local": record({}), "container_reference": record({"container_id": STRING})}
                ),
            },
            environment=None,
        ),
        _say,
        events={
            "response.shell_call_command.added": f"{_COMMAND} command",
            "response.shell_call_command.delta": f"{_COMMAND} delta",
            "response.shell_call_command.done": f"{_COMMAND} command",
        },
        order="(shell_call_command.added shell_call_command.delta* shell_call_command.done)*",
        tools={"shell": _TOOL},
        call=Call(
            with_call_id,
            whole=Whole(_read, _added, _events, _fold, broken=_EMPTY),
            offers=_offers,
            lacks=_lacks,
            fields=_fields,
            execution=Execution(
                "in_progress",
                _run,
                _finish,
                _repeatable,
                keeps=_keeps,
                follows=_follows,
                tells=_tells,
                uncertain=LOST,
            ),
        ),
        answered_by="shell_call_output",
        ours=_is_hosted,
    ),
    ItemType(
        "shell_call_output",
        "sho_",
        item_shape(
            call_shape(
                output=array(
                    record(
                        {
                            "stdout": STRING,
                            "stderr": STRING,
                            "outcome": tagged(
                                {"exit": record({"exit_code": whole()}), "timeout": record({})}
                            ),
                        }
                    )
                )
            ),
            {**CALLER, "max_output_length": whole()},
            max_output_length=None,
        ),
        _say_output,
        events={
            "response.shell_call_output_content.delta": f"{PLACE} command_index delta",
            "response.shell_call_output_content.done": f"{PLACE} command_index output",
        },
        order="(shell_call_output_content.delta* shell_call_output_content.done)*",
        answers="shell_call",
        of_text=_printed,
    ),
    ItemType(
        "local_shell_call",
        "lsh_",
        item_shape(call_shape(action=_action(array(STRING), whole()))),
        _say_local,
        tools={"local_shell": record({})},
        call=Call(with_call_id, whole=Whole(_read_local), offers=_offers_local),
        answered_by="local_shell_call_output",
    ),
    # Its id is the call's, so nobody but the client can know it.
    ItemType(
        "local_shell_call_output",
        "lsho_",
        item_shape({"output": STRING}, {"call_id": identifier}),
        _say_local_output,
        needs_id=True,
        doubled=("call_id", "id"),
        answers="local_shell_call",
        of_text=_printed_by_one,
    ),
)
