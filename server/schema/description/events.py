"""Describes the events of responses, in streams and in lists, and the frames of WebSockets."""

from __future__ import annotations

from collections.abc import Mapping

from server.items import ANNOTATION, ASSISTANT_PART, ITEM_TYPES
from server.schema import events
from server.schema.description.parts import (
    INTEGER,
    NUMBER,
    OBFUSCATION,
    RETRY_AFTER,
    STRING,
    listed,
    mapped,
    of,
    page_of,
    ref,
)
from server.schema.description.responses import TOOL_OUTPUTS, request_schema
from server.schema.responses import CreateResponse
from server.shapes import Schema, or_null, schema_of

_TOKEN = {"token": STRING, "logprob": NUMBER}
_MEMBERS: Mapping[str, Schema] = {
    "response": ref("Response"),
    "item": ref("Item"),
    "part": {
        "anyOf": [
            schema_of(ASSISTANT_PART),
            of({"type": {"enum": ["reasoning_text", "summary_text"]}, "text": STRING}),
        ]
    },
    "annotation": schema_of(ANNOTATION),
    "logprobs": listed(of({**_TOKEN, "top_logprobs": listed(of(_TOKEN))})),
    **dict.fromkeys(("error code", "error param"), or_null(STRING)),
    "response.shell_call_output_content.delta delta": of({}, {"stdout": STRING, "stderr": STRING}),
    "response.shell_call_output_content.done output": schema_of(ITEM_TYPES["shell_call_output"].shape)[
        "properties"
    ]["output"],
}
"""The members of events that are neither texts nor numbers, by name, or by the event's type and a name."""

_MORE: Mapping[str, Mapping[str, Schema]] = {
    "error": {"retry_after": RETRY_AFTER},
    "response.image_generation_call.partial_image": dict.fromkeys(
        ("size", "quality", "background", "output_format"), STRING
    ),
}
"""Type -> the members that some of its events have."""


def _member(event: str, name: str) -> Schema:
    plain = INTEGER if name.endswith("_index") else STRING
    return _MEMBERS.get(f"{event} {name}") or _MEMBERS.get(name) or plain


def _events(more: Mapping[str, Schema], first: Mapping[str, Schema]) -> list[Schema]:
    """Every event of the vocabulary. more: what each may have besides. first: what the first one may."""

    def besides(event: str) -> Mapping[str, Schema]:
        padded = {"obfuscation": OBFUSCATION} if event.endswith(".delta") else {}
        begins = first if event == "response.created" else {}
        return {**padded, **_MORE.get(event, {}), **begins, **more}

    return [
        of(
            {
                "type": {"const": event},
                "sequence_number": INTEGER,
                **{name: _member(event, name) for name in names},
            },
            besides(event),
        )
        for event, names in events.fields().items()
    ]


_STREAM_ID: Schema = {**STRING, "description": "The lane that the frame belongs to."}
_HEADERS = mapped(STRING)
_FAILURE = {"code": or_null(STRING), "message": STRING}


def _sent() -> list[Schema]:
    """The frames of this server."""
    own = {"sequence_number": INTEGER}
    failure = of({**_FAILURE, "type": STRING, "param": or_null(STRING)}, {"headers": _HEADERS})
    headers = {**_HEADERS, "description": "An extension: what headers over HTTP say."}
    return [
        *_events({"stream_id": _STREAM_ID}, {"headers": headers}),
        of(
            {"type": {"const": "error"}, "status": INTEGER, "error": failure},
            {"stream_id": _STREAM_ID},
        ),
        of(
            {"type": {"const": "response.inject.created"}, **own, "response_id": STRING},
            {"stream_id": _STREAM_ID},
        ),
        of(
            {
                "type": {"const": "response.inject.failed"},
                **own,
                "response_id": STRING,
                "input": {},
                "error": of(_FAILURE),
            },
            {"stream_id": _STREAM_ID},
        ),
        of(
            {
                "type": {"const": "response.steer.failed"},
                **own,
                "error": of({**_FAILURE, "type": STRING}),
                "steer": of({"input": {}, "previous_response_id": {}}),
            },
            {"stream_id": _STREAM_ID},
        ),
    ]


def _taken() -> list[Schema]:
    """The frames of clients."""
    create = request_schema("responses", CreateResponse)
    create["properties"] |= {"type": {"const": "response.create"}, "stream_id": or_null(_STREAM_ID)}
    inject = {"type": {"const": "response.inject"}, "response_id": STRING, "input": TOOL_OUTPUTS}
    return [
        {**create, "required": ["type"]},
        of(inject),
        of({"type": {"enum": ["response.steer", "response.processed"]}}),
    ]


def event_components() -> Mapping[str, Schema]:
    """The schemas of events and frames, by name."""
    return {
        "ResponseEvent": {"description": "The `data:` of one event of a stream.", "anyOf": _events({}, {})},
        "Events": page_of(
            ref("ResponseEvent"),
            {
                "times": {
                    **listed(or_null(NUMBER)),
                    "description": "An extension: when each event of `data` was made, in Unix seconds with "
                    "their fractions; null where an earlier version wrote it.",
                }
            },
        ),
        "SocketRequest": {"description": "A frame of a client over a WebSocket.", "anyOf": _taken()},
        "SocketEvent": {"description": "A frame of this server over a WebSocket.", "anyOf": _sent()},
    }
