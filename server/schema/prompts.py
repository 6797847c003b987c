"""Prompts in requests: which template a request names, and what its variables make of it.

A template's `{{name}}` is replaced once, in the texts of its instructions and messages, and what is put there
is not searched for names again. A variable that is an image or a file becomes a part of its message, between
the texts that it stood between.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from server.errors import ApiError
from server.ignored import collecting, unread
from server.items import USER_PART, Item, Private, identifier, private_of, with_private
from server.schema.fields import FIELDS, Api
from server.schema.items import NewId, normalize_input
from server.shapes import Schema, check_length, mapping, missing, mistyped, refuse, shorten

VARIABLE = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_.-]{0,63})\s*\}\}")
"""Where a text has a variable. Other braces are text."""

MAX_VARIABLES = 256

LEAD = "lead"
"""What paths into the messages of a filled prompt begin with, until `FilledPrompt.named` has seen them."""

_PARTS = ("input_text", "input_image", "input_file")


@dataclass(frozen=True, slots=True)
class PromptReference:
    """What a request says of its prompt. version: None for the default one."""

    id: str
    version: int | None
    variables: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FilledPrompt:
    """A prompt template as a request uses it.

    version: the one that was used. variables: as the request gave them. items: its messages, normalised,
    which stand in the place of instructions. paths: which variables the images and files among their parts
    came from, by their paths. private: the private halves of the items, where a plan keeps them (`for_plan`).
    """

    id: str
    version: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    items: tuple[Item, ...] = ()
    paths: Mapping[str, str] = field(default_factory=dict)
    private: tuple[Private | None, ...] = ()

    def for_plan(self) -> FilledPrompt:
        """The same with the private halves of its items beside them, so that JSON has both."""
        return replace(self, private=tuple(map(private_of, self.items)))

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> FilledPrompt:
        """What a plan kept, back."""
        halves = zip(data["items"], data["private"], strict=True)
        items = tuple(with_private(item, private) for item, private in halves)
        return cls(**{**data, "items": items, "private": tuple(data["private"])})

    def echo(self) -> dict[str, Any]:
        """As the Response object shows it."""
        return {"id": self.id, "version": self.version, "variables": dict(self.variables)}

    @contextmanager
    def named(self) -> Iterator[None]:
        """Have errors that name a part of the messages name the variable that it came from; the prompt, where
        it is the template's own."""
        try:
            yield
        except ApiError as error:
            if error.param is not None and error.param.startswith(LEAD):
                part = next((part for part in self.paths if error.param.startswith(part)), None)
                path = "prompt" if part is None else error.param.replace(part, self.paths[part], 1)
                error.message = error.message.replace(error.param, path)
                error.param = path
            raise


def parse_prompt(value: Any) -> PromptReference:
    """The `prompt` of a request. Raises ApiError 400; 404 for a version that can be none."""
    if not isinstance(value, dict):
        mistyped("prompt", "an object", value)
    unread(value, ("id", "version", "variables"), "prompt")
    if value.get("id") is None:
        missing("prompt.id")
    version = value.get("version")
    if version is not None and not isinstance(version, str):
        mistyped("prompt.version", "a string", version)
    given = {} if value.get("variables") is None else mapping(value["variables"], "prompt.variables")
    check_length("prompt.variables", len(given), "object", most=MAX_VARIABLES)
    variables = {
        name: _variable(each, f"prompt.variables.{shorten(name)}")
        for name, each in given.items()
        if each is not None
    }
    number = None if version is None else version_number(version, "prompt.version")
    return PromptReference(identifier(value["id"], "prompt.id"), number, variables)


def version_number(version: str, param: str) -> int:
    """The number of a version as clients write it. Raises ApiError 404 for what no version is called."""
    if version.isascii() and version.isdigit() and len(version) < 10 and not version.startswith("0"):
        return int(version)
    message = f"Prompt version with id '{shorten(version)}' not found."
    raise ApiError(404, message, code="not_found", param=param)


def _variable(value: Any, path: str) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        mistyped(path, "a string or a part of a message", value)
    if value.get("type") not in _PARTS:
        wanted = ", ".join(f"'{kind}'" for kind in _PARTS)
        refuse(f"{path}.type", f"Invalid '{path}.type': supported values are {wanted}.")
    return USER_PART(value, path)


def variables_of(template: Mapping[str, Any]) -> list[str]:
    """The names of a template's variables, in the order of their first use."""
    texts = [template.get("instructions") or ""]
    for message in template.get("messages") or ():
        content = message["content"]
        texts += [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
    return list(dict.fromkeys(name for text in texts for name in VARIABLE.findall(text)))


def fill(
    body: Mapping[str, Any],
    wanted: PromptReference,
    version: int,
    template: Mapping[str, Any],
    *,
    new_id: NewId,
    api: Api = "responses",
) -> dict[str, Any]:
    """A request's body with its prompt filled, and with those fields of the template that it does not have.

    Instructions of the request take the place of the template's, as they are. Raises ApiError 400 for a
    variable that is missing, or that the template does not have.
    """
    own = {name: value for name, value in body.items() if value is not None}
    instructions = own.get("instructions")
    messages: list[Mapping[str, Any]] = list(template.get("messages") or ())
    if instructions is None and template.get("instructions") is not None:
        messages = [{"role": "system", "content": template["instructions"]}, *messages]
    names = variables_of(template)
    _require_known(wanted.variables, names)
    _require_given(wanted.variables, variables_of({"messages": messages}))
    filled, paths = _filled_messages(messages, wanted.variables)
    if filled and isinstance(instructions, str):  # one of another type is refused with the other fields
        filled = [{"role": "system", "content": instructions}, *filled]
        paths = {_moved(path): name for path, name in paths.items()}
    with collecting():  # what the template says in vain was named when it was stored
        items = normalize_input(filled, new_id=new_id, param=LEAD)
    rules = FIELDS[api].keys() - {"instructions", "messages"}
    given = {name: value for name, value in template.items() if name in rules}
    prompt = FilledPrompt(wanted.id, str(version), wanted.variables, tuple(items), paths)
    return {**given, **own, "prompt": prompt}


def _moved(path: str) -> str:
    """The path of a part whose message has got another one before it."""
    return re.sub(r"\d+", lambda index: str(int(index[0]) + 1), path, count=1)


def _require_known(variables: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in variables:
        if name not in names:
            meant = difflib.get_close_matches(name, names, n=1)
            known = f"Its variables are {', '.join(names)}." if names else "It has no variables."
            hint = f"Did you mean '{meant[0]}'?" if meant else known
            path = f"prompt.variables.{shorten(name)}"
            message = f"Unknown variable: the prompt has no variable '{shorten(name)}'. {hint}"
            refuse(path, message, "unknown_parameter")


def _require_given(variables: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if name not in variables:
            missing(f"prompt.variables.{name}")


def _filled_messages(
    messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Messages with their variables replaced, and which variables their images and files are."""
    filled: list[dict[str, Any]] = []
    paths: dict[str, str] = {}
    for index, message in enumerate(messages):
        content = message["content"]
        parts: list[dict[str, Any]] = []
        for part in [{"text": content}] if isinstance(content, str) else content:
            if part.get("text") is None:
                parts.append(part)
                continue
            for said in _filled(part["text"], variables):
                if isinstance(said, str):
                    parts.append({"type": "input_text", **part, "text": said})
                    continue
                name, thing = said
                if message["role"] == "assistant":
                    path = f"prompt.variables.{name}"
                    refuse(path, f"Invalid '{path}': this variable is in a message of the assistant: a text.")
                paths[f"{LEAD}[{index}].content[{len(parts)}]"] = f"prompt.variables.{name}"
                parts.append(thing)
        texts_only = isinstance(content, str) and len(parts) == 1 and "text" in parts[0]
        filled.append({**message, "content": parts[0]["text"] if texts_only else parts})
    return filled, paths


def _filled(text: str, variables: Mapping[str, Any]) -> list[str | tuple[str, dict[str, Any]]]:
    """A text with its variables replaced: texts, and between them the names and parts of what is no text."""
    found: list[str | tuple[str, dict[str, Any]]] = []
    said = ""
    for place, piece in enumerate(VARIABLE.split(text)):
        if place % 2 == 0:
            said += piece
            continue
        value = variables[piece]
        if isinstance(value, dict) and value["type"] != "input_text":
            found += [said] if said else []
            found.append((piece, value))
            said = ""
        else:
            said += value if isinstance(value, str) else value["text"]
    if said or not found:
        found.append(said)
    return found


REFERENCE: Schema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "version": {"type": ["string", "null"], "description": "Without it, the default one."},
        "variables": {
            "type": ["object", "null"],
            "additionalProperties": {"anyOf": [{"type": "string"}, {"type": "object"}]},
            "maxProperties": MAX_VARIABLES,
        },
    },
    "required": ["id"],
}
"""The `prompt` of a request, as JSON Schema."""
