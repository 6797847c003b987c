"""The WebSocket of /v1/responses, and the tickets by which a web page may open it."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from server.http import context, json_reply, life, principal
from server.http.websocket import PROTOCOL, issue, offered_ticket
from server.routes.documented import documented
from server.routes.websocket.connection import Connection

responses = APIRouter(prefix="/v1/responses")
tickets = APIRouter(prefix="/v1/ws_tickets", tags=["Responses"])

ROUTERS = (responses, tickets)


@responses.websocket("")
async def converse(socket: WebSocket) -> None:
    """Create responses over one connection, until one of both sides closes it."""
    here = context(socket)
    offered = socket.scope.get("subprotocols", [])
    # A page that offers subprotocols fails the connection unless the server chooses one.
    await socket.accept(PROTOCOL if PROTOCOL in offered else offered_ticket(offered))
    await Connection(socket, life(socket), here).serve()


@tickets.post("", **documented("SocketTicket", "responses.write"))
async def create_ticket(request: Request) -> Response:
    """A ticket for one WebSocket, which a page in a browser sends as a subprotocol (extension)."""
    ticket, expires_at = await issue(context(request).sealing, principal(request))
    shown = {"object": "ws_ticket", "ticket": ticket, "expires_at": expires_at, "protocol": PROTOCOL}
    return json_reply(orjson.dumps(shown))
