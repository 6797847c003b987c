"""Describes prompt templates."""

from __future__ import annotations

from collections.abc import Mapping

from server.schema.description.parts import INTEGER, METADATA, OBJECT, STRING, listed, of, page_of, ref
from server.schema.description.responses import request_schema
from server.schema.prompt_templates import MAX_MESSAGES, OF_EACH_REQUEST
from server.schema.responses import CreateResponse
from server.shapes import Schema, or_null


def _template() -> Schema:
    """A template: the fields of a request, without those that are for each request to say."""
    fields = request_schema("responses", CreateResponse)["properties"]
    return {
        "type": "object",
        "description": "Fields of `POST /v1/responses` that hold where a request leaves them out. A "
        "`{{name}}` in `instructions` and `messages` is a variable.",
        "properties": {
            **{name: schema for name, schema in fields.items() if name not in OF_EACH_REQUEST},
            "messages": or_null(listed(ref("InputItem"), maxItems=MAX_MESSAGES)),
        },
    }


def prompt_components() -> Mapping[str, Schema]:
    """The schemas of prompt templates, by name."""
    template = ref("PromptTemplate")
    version = {"version": STRING, "created_at": INTEGER, "template": template, "variables": listed(STRING)}
    return {
        "PromptTemplate": _template(),
        "CreatePrompt": of({"template": template}, {"name": STRING, "metadata": METADATA}),
        "UpdatePrompt": of(
            {},
            {
                "name": STRING,
                "metadata": METADATA,
                "template": {
                    **template,
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
            {"id": STRING, "object": {"const": "prompt.version"}, "prompt_id": STRING, **version}
        ),
        "PromptVersions": page_of(ref("PromptVersion")),
        "ResponsePrompt": of({"id": STRING, "version": STRING, "variables": OBJECT}),
    }
