"""Checks the bodies that create and change prompt templates.

A template is a part of a body of `POST /v1/responses`: instructions, messages that stand before the input,
and fields that hold where a request leaves them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from server.errors import ApiError
from server.ignored import within
from server.schema.fields import FIELDS
from server.schema.items import NewId, normalize_input
from server.schema.prompts import MAX_VARIABLES, variables_of, version_number
from server.schema.responses import check_metadata, parse_create
from server.schema.tools import Unsupported, secrets_of
from server.shapes import check_length, label, missing, mistyped, name_others, refuse, text

_NAME = label(0, 256)
_INSTRUCTIONS = text(0, 10_485_760)
_MEMBERS = ("name", "metadata", "template")
MAX_MESSAGES = 256

OF_EACH_REQUEST = frozenset(
    {
        *("input", "prompt", "previous_response_id", "conversation", "store", "background", "stream"),
        *("stream_options", "metadata", "user", "safety_identifier", "moderation", "service_tier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "client_metadata"),
        *("await_tool_outputs", "tool_timeout_s", "cache_salt", "priority", "context_management"),
        "generate",
    }
)
"""Fields of a request that say how it is carried out, and for whom: no template has them."""


@dataclass(frozen=True, slots=True)
class PromptBody:
    """A body that creates or changes a prompt; None: not said. name: empty takes it away. template: JSON.
    metadata: a JSON object."""

    name: str | None = None
    metadata: bytes | None = None
    template: bytes | None = None
    default_version: int | None = None


def parse_new_prompt(body: Mapping[str, Any], *, new_id: NewId, unsupported: Unsupported) -> PromptBody:
    """A body of POST /prompts. Raises ApiError 400."""
    name_others(body, _MEMBERS)
    if body.get("template") is None:
        missing("template")
    return _parsed(body, new_id, unsupported)


def parse_prompt_change(body: Mapping[str, Any], *, new_id: NewId, unsupported: Unsupported) -> PromptBody:
    """A body of POST /prompts/{id}. Raises ApiError 400, and 404 for a version that can be none."""
    name_others(body, (*_MEMBERS, "default_version"))
    if not any(name in body for name in (*_MEMBERS, "default_version")):
        message = "Nothing is to be changed: give a name, metadata, a template or a default_version."
        refuse("template", message)
    return _parsed(body, new_id, unsupported)


def _parsed(body: Mapping[str, Any], new_id: NewId, unsupported: Unsupported) -> PromptBody:
    name, version = body.get("name"), body.get("default_version")
    if version is not None and not isinstance(version, str):
        mistyped("default_version", "a string", version)
    template = body.get("template")
    return PromptBody(
        name=("" if "name" in body else None) if name is None else _NAME(name, "name"),
        metadata=_metadata(body["metadata"]) if "metadata" in body else None,
        template=None if template is None else _template(template, new_id, unsupported),
        default_version=None if version is None else version_number(version, "default_version"),
    )


def _metadata(value: Any) -> bytes:
    return orjson.dumps(check_metadata({} if value is None else value))


def _template(value: Any, new_id: NewId, unsupported: Unsupported) -> bytes:
    """A template, checked as a request with it would be, as it is stored: its known fields, as they came."""
    if not isinstance(value, dict):
        mistyped("template", "an object", value)
    given = {name: each for name, each in value.items() if each is not None}
    for name in given:
        if name in OF_EACH_REQUEST:
            path = f"template.{name}"
            refuse(path, f"Invalid '{path}': it is for each request to say.", "unsupported_parameter")
    rules = FIELDS["responses"]
    kept = {name: each for name, each in given.items() if name in rules or name == "messages"}
    fields = {name: each for name, each in kept.items() if name not in ("instructions", "messages")}
    with _inside("template"):
        name_others(given, rules)
        parse_create({**fields, "input": "-"}, unsupported_tools=unsupported)
        for path, secrets in secrets_of(fields.get("tools") or []).items():
            where = f"{path}.{min(secrets)}"
            message = "a prompt keeps no credentials; send the tool with the request."
            refuse(where, f"Invalid '{where}': {message}")
        if "instructions" in kept:
            _INSTRUCTIONS(kept["instructions"], "instructions")
        if "messages" in kept:
            _check_messages(kept["messages"], new_id)
        if not kept:
            refuse("instructions", "A template has instructions, messages, or other fields of a request.")
        check_length("variables", len(variables_of(kept)), "array", most=MAX_VARIABLES)
    return orjson.dumps(kept)


def _check_messages(value: Any, new_id: NewId) -> None:
    if not isinstance(value, list):
        mistyped("messages", "an array", value)
    check_length("messages", len(value), "array", least=1, most=MAX_MESSAGES)
    for index, item in enumerate(normalize_input(value, new_id=new_id, param="messages")):
        if item["type"] != "message":
            path = f"messages[{index}].type"
            refuse(path, f"Invalid '{path}': a template has messages, and no other items.")


@contextmanager
def _inside(member: str) -> Iterator[None]:
    """Have errors, and what is ignored, name a member of the body as the place where they are."""
    with within(member):
        try:
            yield
        except ApiError as error:
            if error.param is not None:
                error.message = error.message.replace(f"'{error.param}'", f"'{member}.{error.param}'")
                error.param = f"{member}.{error.param}"
            raise
