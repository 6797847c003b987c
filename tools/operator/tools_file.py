"""Tools of the operator in a TOML file: what the model is told, and the program or endpoint behind it."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.arguments import SchemaFault, check_schema
from tools.egress import EgressError
from tools.operator.command import command_tool
from tools.operator.endpoint import endpoint_tool
from tools.operator.fault import ToolFault, ToolsError, check_name
from tools.spec import Function, ToolSpec

TIMEOUT_S, MAX_TIMEOUT_S = 30.0, 900.0
"""Seconds that a call may take: unless the file says otherwise, and at most."""

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

_KEYS: Mapping[str, Any] = {
    "description": str,
    "parameters": dict,
    "command": list,
    "url": str,
    "env": dict,
    "headers": dict,
    "timeout_s": (int, float),
    "idempotent": bool,
    "strict": bool,
}


def read_tools(file: Path) -> list[ToolSpec]:
    """The tools of a file, each a table `[tools.NAME]`; raises ToolsError at the first fault."""
    try:
        text = file.read_text("utf-8")
        content = tomllib.loads(text)
    except (OSError, ValueError) as exc:
        raise ToolsError(f"{file}: {exc}") from None
    if unknown := [key for key in content if key != "tools"]:
        raise ToolsError(f"{file}: {unknown[0]!r} is not known: a tool is a table [tools.NAME]")
    tables = content.get("tools", {})
    if not isinstance(tables, dict):
        raise ToolsError(f"{file}: 'tools' holds no tables [tools.NAME]")
    specs = []
    for name, table in tables.items():
        try:
            specs.append(_tool(name, table, file.parent))
        except (ToolFault, SchemaFault, EgressError) as fault:
            raise ToolsError(f"{file}{_line(text, name)}: tool {name!r}: {fault}") from None
    return specs


def _tool(name: str, table: Any, folder: Path) -> ToolSpec:
    if not isinstance(table, dict):
        raise ToolFault(f"it is no table [tools.{name}]")
    check_name(name)
    for key, value in table.items():
        if key not in _KEYS:
            raise ToolFault(f"{key!r} is not known; there are {', '.join(_KEYS)}")
        if not isinstance(value, _KEYS[key]) or (isinstance(value, bool) and _KEYS[key] is not bool):
            raise ToolFault(f"{key!r} has a value of another type")
    if not table.get("description"):
        raise ToolFault("it has no 'description', by which the model would know what it is for")
    parameters = table.get("parameters", NO_PARAMETERS)
    check_schema(parameters)
    timeout_s = float(table.get("timeout_s", TIMEOUT_S))
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ToolFault(f"'timeout_s' must be above 0 and at most {MAX_TIMEOUT_S:g}")
    return ToolSpec(
        name=name,
        description=table["description"],
        parameters=parameters,
        run=_function(table, folder, timeout_s),
        idempotent=table.get("idempotent", False),
        timeout_s=timeout_s,
        strict=table.get("strict", True),
        stops="command" in table,
    )


def _function(table: Mapping[str, Any], folder: Path, timeout_s: float) -> Function:
    if ("command" in table) == ("url" in table):
        raise ToolFault("it must have either a 'command' or a 'url'")
    headers, env = _texts(table, "headers"), _texts(table, "env")
    if not all(value.isascii() and value.isprintable() for value in headers.values()):
        raise ToolFault("'headers' holds printable ASCII")
    if "url" in table:
        if env:
            raise ToolFault("'env' belongs to a 'command'")
        return endpoint_tool(table["url"], headers, timeout_s)
    if headers:
        raise ToolFault("'headers' belong to a 'url'")
    if faulty := [name for name, value in env.items() if not name or "=" in name or "\0" in name + value]:
        raise ToolFault(f"'env' cannot have the variable {faulty[0]!r}")
    command = table["command"]
    if not command or not all(isinstance(word, str) for word in command):
        raise ToolFault('\'command\' is a list of a program and its arguments, such as ["df", "-h"]')
    return command_tool([_program(command[0], folder), *command[1:]], folder, env)


def _texts(table: Mapping[str, Any], key: str) -> dict[str, str]:
    """A table of texts, each of which may be `{ env = "NAME" }`: a variable of the server, so that no secret
    has to stand in the file."""
    texts = {}
    for name, value in table.get(key, {}).items():
        if isinstance(value, dict) and value.keys() == {"env"} and isinstance(value["env"], str):
            if (read := os.environ.get(value["env"])) is None:
                raise ToolFault(f"'{key}.{name}': there is no variable {value['env']!r} in the environment")
            value = read
        if not isinstance(value, str):
            raise ToolFault(f"'{key}.{name}' is no text, and no {{ env = \"NAME\" }}")
        texts[name] = value
    return texts


def _program(program: str, folder: Path) -> str:
    """The program's full path: of a name by PATH, of a path by the folder of the file."""
    if os.sep not in program:
        found = shutil.which(program)
    else:
        path = folder / program
        found = str(path) if path.is_file() and os.access(path, os.X_OK) else None
    if found is None:
        raise ToolFault(f"the program {program!r} cannot be run: it is not there, or not executable")
    return found


def _line(text: str, name: str) -> str:
    """`:LINE` of the head of a tool's table, where it has one."""
    head = re.compile(rf"^\s*\[\s*tools\s*\.\s*[\"']?{re.escape(name)}[\"']?\s*[\].]", re.MULTILINE)
    found = head.search(text)
    return f":{text.count(chr(10), 0, found.end()) + 1}" if found else ""
