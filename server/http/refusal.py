"""Sends an error to a client in the form that its connection allows.

An HTTP request gets an error reply in the form of its API, a WebSocket that is not yet open is denied with
that reply, and an open WebSocket is closed with a code and a reason.
"""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ApiError, is_of_messages, messages_error
from server.telemetry import current

POLICY_VIOLATION, INTERNAL_ERROR, TRY_AGAIN_LATER = 1008, 1011, 1013
"""Codes of closes, as IANA lists them."""

MAX_REASON = 123
"""Bytes of a close's reason (RFC 6455, 5.5)."""


async def tell(
    error: ApiError, scope: Scope, receive: Receive, send: Send, *, accepted: bool = False
) -> None:
    """Send an error and end with it. accepted: the client has a WebSocket that is open.

    A server that cannot deny a WebSocket with a reply (an ASGI extension) refuses it with a bare 403.
    """
    if (record := current.get()) is not None:
        record.error_code = error.code or error.type
    can_reply = scope["type"] == "http" or "websocket.http.response" in scope.get("extensions", {})
    if can_reply and not accepted:
        await _reply(error, scope)(scope, receive, send)
        return
    reason = error.code or error.type
    close = {"type": "websocket.close", "code": close_code(error), "reason": reason[:MAX_REASON]}
    await send(close)


def _reply(error: ApiError, scope: Scope) -> Response:
    if not is_of_messages(scope):
        return error.response()
    body = messages_error(error, scope.get("state", {}).get("request_id", ""))
    return Response(body, error.status, error.headers, media_type="application/json")


def close_code(error: ApiError) -> int:
    """The code of a close that stands for an error's status."""
    if error.status in (429, 503):
        return TRY_AGAIN_LATER
    return INTERNAL_ERROR if error.status >= 500 else POLICY_VIOLATION
