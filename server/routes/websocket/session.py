"""What a frame that is carried out may ask of its connection."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from starlette.websockets import WebSocket

from server.routes.websocket.chains import Chains
from server.routes.websocket.lanes import Lane

if TYPE_CHECKING:
    from server.http import Context, ServerState


class Session(Protocol):
    """An open connection.

    at_work: held while a response is made. gone: nobody hears any more what is sent.
    """

    socket: WebSocket
    life: ServerState
    here: Context
    chains: Chains
    at_work: asyncio.Semaphore
    gone: asyncio.Event

    async def send(self, frame: str) -> None:
        """Send a frame, as soon as the client takes it. WebSocketDisconnect where it cannot any more."""

    def leave(self, code: int, reason: str) -> None:
        """Take no new work, and close once nothing is under way."""

    def close(self, code: int, reason: str) -> None:
        """Close, whatever is under way."""

    def interrupt(self) -> None:
        """Close, because the process ends before what is under way."""

    def lane_of(self, response_id: object) -> Lane | None:
        """The lane whose last event was of the response that a frame names; None without one."""
