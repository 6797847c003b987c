"""The messages of a server on their way to the SDK, which would take long to judge some of them.

It holds each one against types with a fault for every member that is wrong, and for each type that the member
might be: a list of 100,000 numbers in the place of a result's parts is a gigabyte of faults.
"""

from __future__ import annotations

from contextvars import Context
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from anyio import EndOfStream

if TYPE_CHECKING:
    from mcp.shared._stream_protocols import ReadStream
    from mcp.shared.message import SessionMessage

MAX_MEMBERS = 20_000
"""Of the lists and objects of a message, together: twenty for each of the most tools that are listed."""

MAX_FAULTS = 100
"""Of a reply, of which the first one is named."""

TOO_MANY = f"its answer has more than {MAX_MEMBERS} members"

_FREE = frozenset({"_meta", "inputSchema", "outputSchema", "structuredContent"})
"""Members that hold what they like, or nearly so."""


class Messages:
    """A stream of messages without those of too many members: in the place of such a reply there is an error,
    and requests and notices are dropped."""

    def __init__(self, stream: ReadStream[SessionMessage | Exception]) -> None:
        self._stream = stream

    @property
    def last_context(self) -> Context | None:
        """The sender's, of the last message."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        """The next message. Raises what the stream does at its end."""
        while (message := _bounded(await self._stream.receive())) is None:
            pass
        return message

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stream.__aexit__(kind, error, trace)


def _bounded(item: SessionMessage | Exception) -> SessionMessage | Exception | None:
    """A message, or what stands in its place."""
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc

    if isinstance(item, Exception):
        return item
    message = item.message
    match message:
        case jsonrpc.JSONRPCResponse():
            said: Any = message.result
        case jsonrpc.JSONRPCError():
            said = message.error.data
        case _:
            said = message.params
    if not _has_too_many(said):
        return item
    if isinstance(message, jsonrpc.JSONRPCRequest | jsonrpc.JSONRPCNotification):
        return None
    error = jsonrpc.ErrorData(code=jsonrpc.PARSE_ERROR, message=TOO_MANY)
    return SessionMessage(jsonrpc.JSONRPCError(jsonrpc="2.0", id=message.id, error=error))


def _has_too_many(said: Any) -> bool:
    left, waiting = MAX_MEMBERS, [said]
    while waiting and left >= 0:
        each = waiting.pop()
        inner = [each[name] for name in each.keys() - _FREE] if isinstance(each, dict) else each
        if isinstance(inner, list):
            left -= len(inner)
            waiting += inner
    return left < 0


def first_fault(error: Any) -> str:
    """What the SDK finds in a reply that is not as the protocol says, and where, on one line; only how many
    faults there are where they are many, because none of them is written without the others. Of an error that
    is not pydantic's, what it is."""
    if not hasattr(error, "error_count"):
        return repr(error)
    if error.error_count() > MAX_FAULTS:
        return f"it has {error.error_count()} faults"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
