"""Tools that are HTTP endpoints: arguments are posted as JSON, and the reply's body is the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.egress import GATEWAY_STATUSES, Caps, Egress, EgressError, guarded_client
from tools.encodings import read_text
from tools.spec import Function, ToolError

MAX_REPLY = 1 << 20
"""Bytes of a reply; of these the model is shown what the runtime allows."""

MAX_COMPLAINT = 2000
"""Characters that the model is shown of a reply that is an error."""


def endpoint_tool(url: str, headers: Mapping[str, str], timeout_s: float) -> Function:
    """A function that posts to one URL, which the operator has named and which may be anywhere.

    Redirects are not followed. A status other than 2xx is a ToolError with the beginning of the body. Raises
    EgressError for a URL that cannot be requested.
    """
    egress = Egress().allowing(url)
    egress.check(url)
    caps = Caps(max_bytes=MAX_REPLY, total_s=timeout_s)

    async def run(**arguments: Any) -> str:
        try:
            async with guarded_client(egress, caps, headers=headers) as client:
                reply = await client.post(url, json=arguments)
        except EgressError as exc:
            exc.fault = f"its endpoint: {exc.kind}"  # the words may repeat what the endpoint sent
            raise
        text = read_text(reply.content, reply.charset_encoding)
        if not reply.is_success:
            told = f"the endpoint replied {reply.status_code}"
            told += ", and redirects are not followed" if reply.is_redirect else ""
            told += f": {text[:MAX_COMPLAINT]}" if text else ""
            uncertain, fault = reply.status_code in GATEWAY_STATUSES, f"HTTP status {reply.status_code}"
            raise ToolError(told, uncertain=uncertain, fault=fault)
        return text

    return run
