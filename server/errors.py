"""Errors as clients see them: one exception, one wire shape, one table from the leaves' errors to both.

It holds the official error object, and the status, type and code of every error of `engine` and `storage`.
Whoever catches one asks `to_api_error`. The shape is the OpenAPI document's `ErrorResponse`; all four keys
are always there, and `code` is a string or null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine import (
    ConstraintError,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    EngineUnavailable,
    LoadError,
    ModelChanged,
    PromptTooLong,
    QueueFull,
    RenderError,
    RequestError,
    RequestFailed,
)
from storage import (
    BadText,
    BatchEnded,
    BlobTooLarge,
    ChatCompletionKnown,
    ContainerFull,
    ConversationArchived,
    ConversationFull,
    ConversationLocked,
    ConversationMoved,
    DefaultVersion,
    EventsExpired,
    FolderHeld,
    ForeignDatabase,
    ItemConflict,
    KeyEnded,
    NotFound,
    NotWaiting,
    OutputConflict,
    OwnerArchived,
    OwnerPurged,
    PathTaken,
    RequestKnown,
    ResponseKnown,
    RunEnded,
    SchemaTooNew,
    StorageError,
    StorageUnavailable,
    TooManyBatches,
    TooManyForks,
    TooManyQueued,
    UnknownCall,
    UploadEnded,
    VectorStoreFull,
)


class ApiError(Exception):
    """An answer that is an error.

    status: HTTP status. code: what programs test for. param: the field at fault, as a dotted or bracketed
    path. type: derived from the status unless given. A 409 tells SDKs not to retry unless `headers` say
    otherwise.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.type = type or _type_of(status)
        self.headers = dict(headers or {})
        if status == 409:
            self.headers.setdefault("x-should-retry", "false")

    def error(self) -> dict[str, Any]:
        """The inner error object, as it stands in bodies and in the error events of streams."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    @property
    def retry_after_s(self) -> int | None:
        """Seconds after which the same request may succeed; None where waiting does not help."""
        if self.headers.get("x-should-retry") == "false" or "retry-after" not in self.headers:
            return None
        return int(self.headers["retry-after"])

    def in_stream(self) -> dict[str, Any]:
        """The error object behind the headers of a reply: `retry_after`, in seconds, says what the header
        would have said."""
        wait_s = self.retry_after_s
        return self.error() if wait_s is None else {**self.error(), "retry_after": wait_s}

    def body(self) -> bytes:
        """The whole body, `{"error": {...}}`, as UTF-8 JSON."""
        return orjson.dumps({"error": self.error()})

    def response(self) -> Response:
        """The reply to send."""
        return Response(self.body(), self.status, self.headers, media_type="application/json")


MESSAGES = "/v1/messages"
"""The path of the Messages API, whose errors have a form of their own."""
_SHARED = ("/v1/files", "/v1/models")
"""Paths that both APIs have."""

_MESSAGES_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status -> type of an error there; of others 4xx is as 400, and 5xx an `api_error`."""


def is_of_messages(scope: Mapping[str, Any]) -> bool:
    """Whether a request, as an ASGI scope, is one of the Messages API: by its path, or because it asks for
    models or files and names a version of that API, as its clients do in every request."""
    path = f"{scope['path']}/"
    if path.startswith(f"{MESSAGES}/"):
        return True
    is_shared = any(path.startswith(f"{shared}/") for shared in _SHARED)
    return is_shared and any(name == b"anthropic-version" for name, _ in scope["headers"])


def names_of(request_id: str, scope: Mapping[str, Any]) -> Iterator[tuple[bytes, bytes]]:
    """The headers that name a request, an ASGI scope, in its reply."""
    yield b"x-request-id", request_id.encode()
    if is_of_messages(scope):
        yield b"request-id", request_id.encode()


def messages_error(error: ApiError, request_id: str) -> bytes:
    """The body of an error in the form of the Messages API, as UTF-8 JSON."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    told: dict[str, Any] = {"type": _MESSAGES_TYPES.get(error.status, other), "message": error.message}
    if error.code is not None:
        told["details"] = {"error_code": error.code, "param": error.param}
    return orjson.dumps({"type": "error", "error": told, "request_id": request_id})


def insufficient_quota(status: int, message: str, headers: Mapping[str, str] | None = None) -> ApiError:
    """What is allowed is used up, for longer than a client waits: SDKs are told not to try again.

    status: 429, or 403 where nothing of it ever comes back.
    """
    return ApiError(
        status,
        message,
        code="insufficient_quota",
        type="insufficient_quota",
        headers={**(headers or {}), "x-should-retry": "false"},
    )


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_exceeded"
    return "server_error" if status >= 500 else "invalid_request_error"


@dataclass(frozen=True, slots=True)
class _Row:
    """How one leaf error looks outside. `message` is None where the error's own words are fit for a
    client."""

    status: int
    code: str | None
    message: Callable[[Any], str] | None = None
    headers: Mapping[str, str] | Callable[[Any], Mapping[str, str]] | None = None
    param: str | None = None


def waits_for_outputs(response_id: str) -> str:
    """What a client is told of a response that has not ended because it waits for that client; without a full
    stop."""
    return f"It waits for tool outputs: send them to POST /v1/responses/{response_id}/tool_outputs"


class PromptOverLimit(PromptTooLong):
    """`num_tokens` prompt tokens are more than `max_prompt_tokens`, the `limit`, allows."""


WHILE_LOADING = {"retry-after": "3"}
"""A start takes some five seconds, and official clients try twice more."""

_SOON = {"retry-after": "1"}
_LATER = {"retry-after": "5"}

_TABLE: Mapping[type[BaseException], _Row] = {
    # The engine's. Looked up along the class hierarchy, so a new subclass falls back to its parent's row.
    PromptTooLong: _Row(
        400,
        "context_length_exceeded",
        lambda e: (
            f"This model's maximum context length is {e.limit} tokens. However, your input resulted in "
            f"{e.count} tokens. Please reduce the length of the input."
        ),
    ),
    PromptOverLimit: _Row(
        400,
        "context_length_exceeded",
        lambda e: (
            f"This model's maximum context length is {e.limit} tokens, as this server's `max_prompt_tokens` "
            f"has it. However, your input resulted in {e.count} tokens. Please reduce the length of the "
            "input."
        ),
    ),
    ConstraintError: _Row(400, "invalid_schema"),
    RenderError: _Row(400, "invalid_prompt"),
    RequestError: _Row(400, "invalid_request"),
    QueueFull: _Row(
        429,
        "queue_full",
        lambda e: f"Too many requests are waiting. Try again in {e.retry_after_s} s.",
        lambda e: {"retry-after": str(e.retry_after_s)},
    ),
    DeadlineExceeded: _Row(
        408, "deadline_exceeded", lambda _: "The request's deadline passed before it ended."
    ),
    RequestFailed: _Row(500, "server_error", lambda _: "The request failed inside the engine."),
    EngineDead: _Row(
        503, "engine_dead", lambda _: "The engine has stopped; the server is restarting.", _LATER
    ),
    EngineUnavailable: _Row(
        503, "engine_unavailable", lambda _: "No engine can be reached now. Try again shortly.", _LATER
    ),
    ModelChanged: _Row(
        503,
        "model_changed",
        lambda e: f"The model '{e.model}' has changed since this response began.",
        _LATER,
    ),
    LoadError: _Row(
        503,
        "model_not_loaded",
        lambda error: f"The model {f'{error.model!r} ' if error.model else ''}could not be loaded.",
        _LATER,
    ),
    EngineError: _Row(
        500, "server_error", lambda _: "The engine had an error while processing your request."
    ),
    # Storage's.
    EventsExpired: _Row(
        400,
        "events_expired",
        lambda e: (
            f"The events of response '{e.response_id}' were kept for a limited time and are gone since "
            f"{datetime.fromtimestamp(e.erased_at // 1_000_000, UTC).isoformat()}. The response itself is "
            "still there: retrieve it without 'stream'."
        ),
        param="stream",
    ),
    RunEnded: _Row(
        409, "run_ended", lambda e: f"Run '{e.id}' is {e.status} already.", {"x-should-retry": "false"}
    ),
    NotFound: _Row(404, "not_found", lambda e: f"{e.kind.capitalize()} with id '{e.id}' not found."),
    ConversationLocked: _Row(
        400,
        "conversation_locked",
        lambda e: (
            f"Conversation '{e.conversation_id}' is in use by response '{e.holder}'. "
            f"{waits_for_outputs(e.holder) if e.waits else 'Wait until it ends'}, or cancel it."
        ),
        param="conversation",
    ),
    ConversationMoved: _Row(
        503, "conversation_moved", lambda _: "The conversation is being changed. Try again shortly.", _SOON
    ),
    ConversationArchived: _Row(
        400,
        "conversation_archived",
        lambda e: (
            f"Conversation '{e.conversation_id}' is archived and takes nothing new. Set its 'status' to "
            "'active' first, or fork it."
        ),
        param="conversation",
    ),
    ConversationFull: _Row(
        400,
        "conversation_full",
        lambda e: (
            f"Conversation '{e.conversation_id}' would have more than {e.limit} items. Delete some of "
            "them, or go on in another conversation."
        ),
        param="conversation",
    ),
    TooManyForks: _Row(
        400, "too_many_forks", lambda e: f"{e} Begin a new conversation with the items that it is to have."
    ),
    ItemConflict: _Row(
        400,
        "item_id_taken",
        lambda e: (
            f"There is an item with id '{e.item_id}' and other content. Leave the id out, or give another."
        ),
        param="items",
    ),
    BadText: _Row(400, "invalid_string", lambda _: "An id or a name must not contain NUL characters."),
    NotWaiting: _Row(
        400,
        "response_not_waiting",
        lambda _: (
            "The response does not wait for tool outputs. Its 'status' says whether it has ended, and "
            "'pending_tool_calls' what it waits for."
        ),
    ),
    UnknownCall: _Row(
        400,
        "unknown_call_id",
        lambda e: f"No call with id '{e.call_id}' waits for an output in this response.",
        param="tool_outputs",
    ),
    OutputConflict: _Row(
        409,
        "tool_output_conflict",
        lambda e: f"Call '{e.call_id}' was answered already, with another output.",
        param="tool_outputs",
    ),
    BatchEnded: _Row(
        400, "batch_not_cancellable", lambda e: f"Batch '{e.id}' has ended (status {e.status})."
    ),
    ChatCompletionKnown: _Row(
        400,
        "request_id_taken",
        lambda e: f"There is a chat completion with id '{e.id}'. Give another request_id, or none.",
        param="request_id",
    ),
    OwnerPurged: _Row(
        503,
        "response_interrupted",
        lambda e: "Everything of this owner was removed while the completion was made.",
        {"x-should-retry": "false"},
    ),
    ResponseKnown: _Row(
        400,
        "request_id_taken",
        lambda e: f"There is a response with id '{e.id}'. Give another request_id, or none.",
        param="request_id",
    ),
    TooManyBatches: _Row(
        429,
        "too_many_batches",
        lambda e: f"There are {e.limit} batches that have not ended. Wait until one ends, or cancel one.",
        {"retry-after": "60"},
    ),
    KeyEnded: _Row(400, "key_ended", lambda e: f"Key '{e.key_id}' has expired or is revoked."),
    OwnerArchived: _Row(
        400, "project_archived", lambda e: f"Owner '{e.owner}' is archived and cannot be changed any more."
    ),
    RequestKnown: _Row(
        409,
        "idempotency_in_progress",
        lambda _: "A request with this idempotency key is being worked on. Try again shortly.",
        {**_SOON, "x-should-retry": "true"},
    ),
    FolderHeld: _Row(503, "storage_unavailable", lambda _: "Storage is held by another server.", _LATER),
    SchemaTooNew: _Row(
        503, "storage_unavailable", lambda _: "Storage was written by a newer version.", _LATER
    ),
    ForeignDatabase: _Row(
        503, "storage_unavailable", lambda _: "Storage is that of another program.", _LATER
    ),
    StorageUnavailable: _Row(
        503,
        "storage_unavailable",
        lambda e: (
            "The disk of the server is full: nothing more can be stored until its operator makes room."
            if e.full
            else "The file of the database was removed or replaced: nothing more can be stored until the "
            "operator of the server mends that."
            if e.moved
            else "The database can be read alone: nothing more can be stored until its operator mends that."
            if e.read_only
            else "Storage cannot be reached now. Try again shortly."
        ),
        _SOON,
    ),
    TooManyQueued: _Row(
        429,
        "queue_full",
        lambda e: f"{e.limit} of your responses are queued already. Try again once some have begun.",
        _SOON,  # whoever knows how fast they begin says it better
    ),
    BlobTooLarge: _Row(
        413, "request_too_large", lambda e: f"A file, or a part of one, may have {e.limit} bytes."
    ),
    ContainerFull: _Row(413, "request_too_large", str),
    PathTaken: _Row(
        400,
        "invalid_value",
        lambda e: f"The container has '{e.path}' as a file and as a folder then: remove one of them first.",
    ),
    VectorStoreFull: _Row(
        400,
        "vector_store_full",
        lambda e: f"Vector store '{e.id}' has taken {e.limit} files in its life, and takes no more.",
    ),
    DefaultVersion: _Row(
        400,
        "default_version",
        lambda e: (
            f"Version {e.version} is what requests for prompt '{e.prompt_id}' get that name none. Make "
            "another one the default first."
        ),
        param="version",
    ),
    UploadEnded: _Row(
        400, "upload_ended", lambda e: f"Upload '{e.id}' is {e.status}: it takes nothing more."
    ),
    StorageError: _Row(500, "server_error", lambda _: "Storage had an error while processing your request."),
}


def to_api_error(exc: BaseException, *, param: str | None = None) -> ApiError:
    """The answer for any exception; what no row names is a 500 that tells nothing of its cause. param: the
    field at fault, where that is known better than the row says it."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, HTTPException):
        return ApiError(exc.status_code, exc.detail, headers=exc.headers)
    for kind in type(exc).__mro__:
        row = _TABLE.get(kind)
        if row is not None:
            message = row.message(exc) if row.message else str(exc)
            param = param or row.param or getattr(exc, "param", None)
            headers = row.headers(exc) if callable(row.headers) else row.headers
            return ApiError(row.status, message, code=row.code, param=param, headers=headers)
    return ApiError(500, "The server had an error while processing your request.", code="server_error")


def invalid_value(param: str, message: str) -> ApiError:
    """400 `invalid_value`: `param` is there, and its value cannot be taken."""
    return ApiError(400, message, code="invalid_value", param=param)
