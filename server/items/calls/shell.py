"""Commands for a shell, which clients carry out."""

from __future__ import annotations

import json
from typing import Any

from server.items.item_type import Item, ItemType
from server.items.parts import CALLER, PLACE, call_shape, identifier, item_shape
from server.items.transcript import Transcript
from server.shapes import STRING, array, map_of, mapping, record, tagged, whole

_COMMAND = "output_index command_index"


def _say(item: Item, transcript: Transcript) -> None:
    _say_action(item, transcript, "shell")


def _say_local(item: Item, transcript: Transcript) -> None:
    _say_action(item, transcript, "local_shell")


def _say_action(item: Item, transcript: Transcript, name: str) -> None:
    if transcript.shows(item["call_id"], whole=item.get("status") != "incomplete"):
        action = {key: value for key, value in item["action"].items() if key != "type" and value}
        transcript.call(item["call_id"], name, json.dumps(action, ensure_ascii=False))


def _say_output(item: Item, transcript: Transcript) -> None:
    transcript.answer(item["call_id"], "\n\n".join(map(_told, item["output"])))


def _say_local_output(item: Item, transcript: Transcript) -> None:
    transcript.answer(item["call_id"], item["output"])


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
        tools={"shell": record({}, {"environment": mapping})},
        answered_by="shell_call_output",
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
    ),
    ItemType(
        "local_shell_call",
        "lsh_",
        item_shape(
            call_shape(
                action=record(
                    {"command": array(STRING)},
                    {
                        "timeout_ms": whole(),
                        "working_directory": STRING,
                        "env": map_of(STRING),
                        "user": STRING,
                    },
                    type="exec",
                    env={},
                )
            )
        ),
        _say_local,
        tools={"local_shell": record({})},
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
    ),
)
