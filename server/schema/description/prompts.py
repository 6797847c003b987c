"""Describes prompt templates."""

from __future__ import annotations

from collections.abc import Mapping

from server.schema.description.parts import INTEGER, METADATA, OBJECT, STRING, listed, of, page_of, ref
from server.schema.prompt_templates import MAX_MESSAGES
from server.shapes import Schema, or_null

_TEMPLATE: Schema = {
    "type": "object",
    "description": "Fields of `POST /v1/responses` that hold where a request leaves them out. A `{{name}}` "
    "in `instructions` and `messages` is a variable.",
    "properties": {
        "instructions": or_null(STRING),
        "messages": or_null(listed(ref("InputItem"), maxItems=MAX_MESSAGES)),
    },
}
_VERSION = {"version": STRING, "created_at": INTEGER, "template": _TEMPLATE, "variables": listed(STRING)}


def prompt_components() -> Mapping[str, Schema]:
    """The schemas of prompt templates, by name."""
    return {
        "CreatePrompt": of({"template": _TEMPLATE}, {"name": STRING, "metadata": METADATA}),
        "UpdatePrompt": of(
            {},
            {
                "name": STRING,
                "metadata": METADATA,
                "template": {
                    **_TEMPLATE,
                    "description": "A new version, which becomes the default unless `default_version` names "
                    "another.",
                },
                "default_version": {**STRING, "description": "What a request gets that names no version."},
            },
        ),
        "Prompt": of(
            {
                "id": STRING,
                "object": {"const": "prompt"},
                "created_at": INTEGER,
                "name": or_null(STRING),
                "metadata": METADATA,
                "default_version": STRING,
                "latest_version": STRING,
            }
        ),
        "Prompts": page_of(ref("Prompt")),
        "PromptVersion": of(
            {"id": STRING, "object": {"const": "prompt.version"}, "prompt_id": STRING, **_VERSION}
        ),
        "PromptVersions": page_of(ref("PromptVersion")),
        "ResponsePrompt": of({"id": STRING}, {"version": STRING, "variables": OBJECT}),
    }
