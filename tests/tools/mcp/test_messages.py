"""Messages that the SDK would take long to judge."""

from __future__ import annotations

from typing import Any

import pytest
from mcp.shared._context_streams import create_context_streams
from mcp.shared.message import SessionMessage
from mcp_types.jsonrpc import JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse
from mcp_types.methods import validate_server_result
from pydantic import ValidationError

from tools.mcp.messages import MAX_FAULTS, MAX_MEMBERS, Messages, first_fault

MANY: dict[str, Any] = {"messages": [{"role": "user"}] * MAX_MEMBERS}


async def test_of_too_many_members_a_reply_becomes_an_error_and_the_rest_is_dropped() -> None:
    free = {"structuredContent": MANY, "tools": [{"inputSchema": MANY}], "_meta": MANY}
    sent = [
        JSONRPCNotification(jsonrpc="2.0", method="notifications/message", params=MANY),
        JSONRPCRequest(jsonrpc="2.0", id=1, method="sampling/createMessage", params=MANY),
        JSONRPCRequest(jsonrpc="2.0", id=2, method="ping"),
        JSONRPCResponse(jsonrpc="2.0", id=3, result=MANY),
        JSONRPCError.model_validate(
            {"jsonrpc": "2.0", "id": 4, "error": {"code": 1, "message": "no", "data": MANY}}
        ),
        JSONRPCResponse(jsonrpc="2.0", id=5, result=free),
    ]
    write, read = create_context_streams[SessionMessage | Exception](len(sent) + 1)
    fault = ValueError("no JSON")
    for message in sent:
        await write.send(SessionMessage(message))
    await write.send(fault)
    write.close()
    async with Messages(read) as messages:
        ping, result, error, last, told = [message async for message in messages]
    assert told is fault
    assert isinstance(ping, SessionMessage) and ping.message == sent[2]
    assert isinstance(last, SessionMessage) and last.message == sent[5]
    for item, number in ((result, 3), (error, 4)):
        assert isinstance(item, SessionMessage) and isinstance(item.message, JSONRPCError)
        assert (item.message.id, item.message.error.code) == (number, -32700)
        assert item.message.error.message == f"its answer has more than {MAX_MEMBERS} members"


@pytest.mark.parametrize(
    ("num_parts", "told"),
    [(1, "content.0.TextContent: Input should be"), (MAX_FAULTS, f"it has {5 * MAX_FAULTS} faults")],
)
def test_of_many_faults_only_their_number_is_told(num_parts: int, told: str) -> None:
    with pytest.raises(ValidationError) as raised:
        validate_server_result("tools/call", "2025-06-18", {"content": [1] * num_parts})
    assert first_fault(raised.value).startswith(told)
