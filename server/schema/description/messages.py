"""Describes the Messages API: bodies of requests, messages, the events of their streams, errors."""

from __future__ import annotations

from collections.abc import Mapping

from server.schema.anthropic import (
    ASSISTANT_BLOCK,
    CHOICE,
    SYSTEM_BLOCK,
    USER_BLOCK,
    MessagesBody,
    message_tool,
    output_config_shape,
    thinking_shape,
)
from server.schema.description.parts import INTEGER, OBJECT, STRING, listed, of, ref
from server.schema.description.responses import field_schema
from server.schema.fields import FIELDS, MAX_STOPS
from server.schema.items import MAX_ITEMS
from server.shapes import Schema, or_null, schema_of


def _said(block: Schema) -> Schema:
    """A content: a text, or blocks."""
    return {"anyOf": [STRING, listed(block)]}


def _message(role: str, block: Schema) -> Schema:
    return of({"role": {"const": role}, "content": _said(block)})


def _fields() -> Mapping[str, Schema]:
    """The fields that are checked by functions."""
    text = schema_of(SYSTEM_BLOCK)
    messages = [
        _message("user", schema_of(USER_BLOCK)),
        _message("assistant", schema_of(ASSISTANT_BLOCK)),
        _message("system", text),
    ]
    return {
        "messages": listed({"anyOf": messages}, minItems=1, maxItems=MAX_ITEMS),
        "system": _said(text),
        "tools": listed(schema_of(message_tool)),
        "tool_choice": schema_of(CHOICE),
        "thinking": schema_of(thinking_shape),
        "output_config": schema_of(output_config_shape),
        "output_format": {**OBJECT, "description": "The earlier name of `output_config.format`."},
        "stop_sequences": listed(STRING, maxItems=MAX_STOPS),
        "metadata": of({}, {"user_id": STRING}),
        "moderation": {**OBJECT, "description": "An extension: as on chat completions."},
        "cache_control": {**OBJECT, "description": "Prompts are kept for later ones in any case."},
    }


def _body(api: str, *required: str) -> Schema:
    named, properties = _fields(), {}
    for name, rule in FIELDS[api].items():
        schema = named.get(name) or field_schema(MessagesBody, name) or {}
        if rule.kind == "hint":
            schema = {"description": "Taken, without effect: named in `x-antiphon-ignored`."}
        elif rule.accepts is not None:
            schema = {"enum": [None, *rule.accepts], "description": f"Not supported. {rule.because}"}
        properties[name] = schema if name in required else or_null(schema)
    return {"type": "object", "properties": properties, "required": [*required]}


_STOP = or_null(
    {
        "enum": [
            *("end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"),
            "refusal",
        ]
    }
)
_DETAILS = or_null(
    of({"type": {"const": "refusal"}, "category": or_null(STRING), "explanation": or_null(STRING)})
)
_COUNTS = {
    "input_tokens": INTEGER,
    "cache_creation_input_tokens": INTEGER,
    "cache_read_input_tokens": INTEGER,
    "output_tokens": INTEGER,
    "output_tokens_details": of({"thinking_tokens": INTEGER}),
}
_CREATION = of({"ephemeral_5m_input_tokens": INTEGER, "ephemeral_1h_input_tokens": INTEGER})
_TIME: Schema = {**STRING, "format": "date-time"}
_BLOCK: Schema = {
    "anyOf": [
        of({"type": {"const": "text"}, "text": STRING}),
        of({"type": {"const": "thinking"}, "thinking": STRING, "signature": STRING}),
        of({"type": {"const": "tool_use"}, "id": STRING, "name": STRING, "input": OBJECT}),
    ]
}
_DELTA: Schema = {
    "anyOf": [
        of({"type": {"const": "text_delta"}, "text": STRING}),
        of({"type": {"const": "thinking_delta"}, "thinking": STRING}),
        of({"type": {"const": "signature_delta"}, "signature": STRING}),
        of({"type": {"const": "input_json_delta"}, "partial_json": STRING}),
    ]
}


def _event(kind: str, **members: Schema) -> Schema:
    return of({"type": {"const": kind}, **members})


def messages_components() -> Mapping[str, Schema]:
    """Requests, replies, events and errors of the Messages API, by name."""
    return {
        "CreateMessage": _body("messages", "model", "messages", "max_tokens"),
        "CountMessageTokens": _body("count_tokens", "model", "messages"),
        "Message": of(
            {
                "id": STRING,
                "type": {"const": "message"},
                "role": {"const": "assistant"},
                "model": STRING,
                "content": listed(_BLOCK),
                "stop_reason": _STOP,
                "stop_sequence": or_null(STRING),
                "stop_details": _DETAILS,
                "usage": of(
                    {
                        **_COUNTS,
                        "cache_creation": _CREATION,
                        "service_tier": {"enum": ["standard", "priority", "batch"]},
                    }
                ),
            },
            {"moderation": ref("Verdicts")},
        ),
        "MessageEvent": {
            "anyOf": [
                _event("message_start", message=ref("Message")),
                _event("content_block_start", index=INTEGER, content_block=_BLOCK),
                _event("content_block_delta", index=INTEGER, delta=_DELTA),
                _event("content_block_stop", index=INTEGER),
                of(
                    {
                        "type": {"const": "message_delta"},
                        "delta": of(
                            {
                                "stop_reason": _STOP,
                                "stop_sequence": or_null(STRING),
                                "stop_details": _DETAILS,
                            }
                        ),
                        "usage": of(_COUNTS),
                    },
                    {"moderation": ref("Verdicts")},
                ),
                _event("message_stop"),
                _event("ping"),
                ref("MessagesError"),
            ]
        },
        "ShownModel": {"anyOf": [ref("Model"), ref("MessagesModel")]},
        "ListedModels": {"anyOf": [ref("Models"), ref("MessagesModels")]},
        "EitherError": {"anyOf": [ref("Error"), ref("MessagesError")]},
        "MessagesModel": of(
            {
                **{"type": {"const": "model"}, "id": STRING, "display_name": STRING},
                "created_at": _TIME,
                "lifecycle": {"enum": ["active", "deprecated"]},
                "retires_at": or_null(_TIME),
                "max_input_tokens": or_null(INTEGER),
                "max_tokens": or_null(INTEGER),
            }
        ),
        "MessagesModels": of(
            {
                **{"data": listed(ref("MessagesModel")), "has_more": {"const": False}},
                **{"first_id": or_null(STRING), "last_id": or_null(STRING)},
            }
        ),
        "MessageTokens": of({"input_tokens": INTEGER}),
        "MessagesError": of(
            {
                "type": {"const": "error"},
                "error": of(
                    {"type": STRING, "message": STRING},
                    {"details": of({"error_code": STRING}, {"param": STRING})},
                ),
                "request_id": STRING,
            }
        ),
    }
