"""WebSockets below the routes: their bytes on the wire, which ones are open, their memory, and tickets."""

from __future__ import annotations

from server.http.websocket.open_sockets import OpenSocket, OpenSockets
from server.http.websocket.protocol import MAX_HEADER_LINE, MAX_HEADERS, BoundedWebSocket
from server.http.websocket.tickets import LIFETIME_S, PROTOCOL, issue, offered_ticket, redeem

__all__ = [
    "LIFETIME_S",
    "MAX_HEADERS",
    "MAX_HEADER_LINE",
    "PROTOCOL",
    "BoundedWebSocket",
    "OpenSocket",
    "OpenSockets",
    "issue",
    "offered_ticket",
    "redeem",
]
