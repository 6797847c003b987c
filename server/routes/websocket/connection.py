"""One WebSocket of /v1/responses: reads its frames, keeps its lanes and its limits, and ends it.

A frame that makes no sense is answered with an error and changes nothing else. When the process drains, or
the connection has lasted long enough, no new work is taken; what is under way ends, and then the connection.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from server.config import THREADED_BYTES
from server.errors import ApiError
from server.http import POLICY_VIOLATION, parse_object, principal
from server.routes.websocket.chains import Chains
from server.routes.websocket.frames import error_frame, own_frame, stream_id_of
from server.routes.websocket.injecting import inject
from server.routes.websocket.lanes import Lane
from server.routes.websocket.turns import Turn
from server.threads import aside

if TYPE_CHECKING:
    from server.http import Context, ServerState

MAX_ACTIVE = 16
"""Responses of one connection that are made at once; others wait for one of these to end."""

MAX_LANES = 32
"""Lanes with a name that one connection may have in its life."""

MAX_WAITING = 64
"""Frames that wait for their turn on all lanes of one connection, or for the response that they feed. They
may have `max_body_bytes` together, as each alone may."""

OWNER_WAITING = 4
"""Times that bound, for the bytes of frames that wait on all connections of one owner."""

LAST_TURNS_S = 300.0
"""How long a connection that has lasted long enough goes on for the sake of what is under way."""

GOING_AWAY, SERVICE_RESTART = 1001, 1012
"""Codes of closes after which a client connects again."""

MAX_REASON = 123
"""Bytes of a close's reason (RFC 6455, 5.5)."""


class Connection:
    """An accepted WebSocket, from its first frame to its close."""

    def __init__(self, socket: WebSocket, life: ServerState, here: Context) -> None:
        self.socket = socket
        self.life = life
        self.here = here
        owner, most = principal(socket).owner, here.config.max_body_bytes
        self.chains = Chains(life.sockets, owner)
        self.at_work = asyncio.Semaphore(MAX_ACTIVE)
        self.gone = asyncio.Event()  # nobody hears any more what is sent
        self._room = {object(): most, owner: OWNER_WAITING * most}  # for the bytes of frames that wait
        self._lanes: dict[str | None, Lane] = {}
        # Answers to waiting responses overtake what waits for these, and those to other responses: each
        # response that is being fed has a lane for it.
        self._feeding: dict[str | None, Lane] = {}
        self._leaving: tuple[int, str] | None = (
            None  # code and reason of the close, once nothing is under way
        )
        self._closing: asyncio.Task[None] | None = None

    # -- life ------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Take frames until the connection ends."""
        loop, lasts_s = asyncio.get_running_loop(), self.here.config.websocket_s
        timers = (
            loop.call_later(lasts_s, self.leave, GOING_AWAY, "websocket_connection_limit_reached"),
            loop.call_later(
                lasts_s + LAST_TURNS_S, self.close, GOING_AWAY, "websocket_connection_limit_reached"
            ),
        )
        self.life.sockets.opened(self)
        try:
            with self.life.held_open.by(principal(self.socket), self._refused):
                await self._receive()
        except WebSocketDisconnect:
            return  # while an error was being told
        finally:
            for timer in timers:
                timer.cancel()
            self.gone.set()
            tasks = [task for lane in self._all_lanes for task in lane.stop()]
            await asyncio.gather(*tasks, return_exceptions=True)
            self._lanes.clear()  # each of which holds the connection
            self.chains.close()
            if self._closing is not None:
                await asyncio.gather(self._closing, return_exceptions=True)
            self.life.sockets.closed(self)

    async def _receive(self) -> None:
        while (message := await self.socket.receive())["type"] != "websocket.disconnect":
            self.life.sockets.num_received += 1
            await self._take(message.get("text"))
            del message  # it may be large, and the next one may take an hour to come

    def _refused(self, error: ApiError) -> None:
        """The key that it was opened with is good no more."""
        self.close(POLICY_VIOLATION, error.code or error.type)

    async def send(self, frame: str) -> None:
        """Send a frame, as soon as the client takes it. WebSocketDisconnect where it cannot any more."""
        if self._closing is not None:
            raise WebSocketDisconnect(GOING_AWAY)
        self.life.sockets.num_sent += 1
        await self.socket.send_text(frame)

    async def refuse(self, error: ApiError, stream_id: str | None = None) -> None:
        """Tell an error that belongs to no response."""
        self.life.telemetry.error(error.code or error.type)
        await self.send(error_frame(error, stream_id))

    def go_away(self) -> None:
        """The process is about to end."""
        self.leave(SERVICE_RESTART, "draining")

    def forget(self, owner: str) -> None:
        """Everything of an owner is removed: so is what is remembered here, if it is the owner's."""
        if principal(self.socket).owner == owner:
            self.chains.purge()

    def leave(self, code: int, reason: str) -> None:
        """Take no new work, and close once nothing is under way."""
        if self._leaving is None:
            self._leaving = code, reason
            self._rested()

    def close(self, code: int, reason: str) -> None:
        """Close, whatever is under way: what is stored goes on without this connection."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(code, reason))

    def interrupt(self) -> None:
        """Close, because the process ends before what is under way. The reason names the stored responses
        among it, as many as it has room for: no lane hears of the end earlier than this."""
        reason = "resume"
        for lane in self._lanes.values():
            if lane.resumable is not None and len(reason) + len(lane.resumable) < MAX_REASON:
                reason += f" {lane.resumable}"
        self.close(SERVICE_RESTART, reason if " " in reason else "interrupted")

    async def _close(self, code: int, reason: str) -> None:
        with suppress(WebSocketDisconnect, RuntimeError):  # the other side was quicker
            await self.socket.close(code, reason[:MAX_REASON])

    def _rested(self) -> None:
        """A lane has nothing left to do."""
        if self._leaving is not None and not any(lane.is_busy for lane in self._all_lanes):
            self.close(*self._leaving)

    @property
    def _all_lanes(self) -> tuple[Lane, ...]:
        return *self._feeding.values(), *self._lanes.values()

    # -- frames ----------------------------------------------------------------------------------------------

    async def _take(self, text: str | None) -> None:
        """Do what a frame asks for, or begin to; answer with an error where that cannot be."""
        stream_id: str | None = None
        try:
            if text is None:
                raise ApiError(400, "Frames are text: one JSON object each.", code="invalid_frame")
            with self.life.arrivals.body() as count:
                count(len(text))
                body = await aside(len(text) > THREADED_BYTES, self._parse, text)
            stream_id = stream_id_of(body)
            if body.get("type") == "response.steer":
                await self._refuse_to_steer(body)
                return
            await asyncio.sleep(0)  # what the frame before asked for has begun, if it can, and waits no more
            self._route(body, len(text), stream_id)
        except ApiError as error:
            await self.refuse(error, stream_id)

    def _parse(self, text: str) -> dict[str, Any]:
        config = self.here.config
        return parse_object(text.encode(), config.max_json_depth, config.max_json_values)

    def _route(self, body: dict[str, Any], size: int, stream_id: str | None) -> None:
        """Hand a frame to whoever carries it out, and count it until it does."""
        kind = body.get("type")
        if kind == "response.processed":  # Codex tells that it has taken note of a response
            return
        if kind not in ("response.create", "response.inject"):
            message = "A frame must have the 'type' 'response.create' or 'response.inject'."
            if kind == "response.cancel":
                message += " POST /v1/responses/{response_id}/cancel cancels a response."
            raise ApiError(400, message, code="invalid_value", param="type")
        if kind == "response.create" and isinstance(body.get("response"), dict):
            message = "The fields of a response stand in the frame itself, beside its 'type'."
            raise ApiError(400, message, code="unsupported_parameter", param="response")
        # What feeds a response waits even where it has begun: until that response waits for it.
        if sum(lane.num_waiting for lane in self._all_lanes) + len(self._feeding) >= MAX_WAITING:
            message = f"{MAX_WAITING} requests wait on this connection already."
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
        with ExitStack() as stack:
            stack.enter_context(self.life.sockets.waiting.frame(size, self._room))
            if kind == "response.create":
                self._require_open()
                lane, held = self._lane(stream_id), stack.pop_all()
                lane.put(Turn(self, lane, body, size, held).carry_out, held)
            else:
                lane, held = self._feeding_lane(body.get("response_id")), stack.pop_all()
                lane.put(partial(inject, self, body, held), held)

    def _require_open(self) -> None:
        """ApiError where no new response is begun on this connection: 503 `draining`, or 400
        `websocket_connection_limit_reached`."""
        self.life.admit("POST", self.socket.scope["path"])
        if self._leaving is not None:
            message = f"A connection lasts {self.here.config.websocket_s:g} s: open another one."
            raise ApiError(400, message, code="websocket_connection_limit_reached")

    def _lane(self, stream_id: str | None) -> Lane:
        """The lane of this name. ApiError 400 `websocket_stream_limit_reached` for one too many."""
        lane = self._lanes.get(stream_id)
        if lane is None:
            if stream_id is not None and len(self._lanes.keys() - {None}) >= MAX_LANES:
                message = "This WebSocket connection has reached its stream limit."
                raise ApiError(400, message, code="websocket_stream_limit_reached", param="stream_id")
            lane = self._lanes[stream_id] = Lane(stream_id, self._rested)
        return lane

    def _feeding_lane(self, response_id: Any) -> Lane:
        """The lane of what feeds this response, which is there as long as something does."""
        key = response_id if isinstance(response_id, str) else None
        if key not in self._feeding:
            self._feeding[key] = Lane(None, partial(self._fed, key))
        return self._feeding[key]

    def _fed(self, key: str | None) -> None:
        del self._feeding[key]
        self._rested()

    def lane_of(self, response_id: object) -> Lane | None:
        """The lane whose last event was of the response that a frame names; None without one."""
        if response_id is None:
            return None
        return next((lane for lane in self._lanes.values() if lane.response_id == response_id), None)

    async def _refuse_to_steer(self, body: dict[str, Any]) -> None:
        """Tell that a response cannot be steered, in the way of the SDKs."""
        message = "This server cannot steer a response: cancel it, and go on from it with other input."
        error = {"type": "invalid_request_error", "code": "steering_not_supported", "message": message}
        response_id = body.get("previous_response_id")
        steer = {"input": body.get("input"), "previous_response_id": response_id}
        lane = self.lane_of(response_id)
        place = (0, None) if lane is None else (lane.last_seq, lane.stream_id)
        await self.send(own_frame("response.steer.failed", *place, error=error, steer=steer))
