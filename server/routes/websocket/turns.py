"""Carries out a `response.create`: the parse, run and feed of a POST, with frames in place of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.websockets import WebSocketDisconnect

from server.config import THREADED_BYTES
from server.event_profiles import View
from server.http import actor, limited, owner, principal
from server.ignored import Ignored, collecting, ignore
from server.routes.chosen_model import with_model
from server.routes.responses import creating, name_in_vain, unstored, with_prompt
from server.routes.websocket.frames import error_frame, event_frame
from server.routes.websocket.lanes import Lane
from server.routes.websocket.requests import asked_by, one_request
from server.routes.websocket.session import Session
from server.runs import Started, interrupted
from server.runs.events import Events, ReaderLagged
from server.schema import CreateResponse, Item, refuse
from server.sse_frame import event_type
from server.threads import aside, begin_large_request, in_large_request
from storage import EventsExpired

TRY_AGAIN_LATER = 1013
ENVELOPE = ("type", "stream_id", "stream")
"""Members of a frame that are no fields of a request. `stream` goes without saying, and clients say it."""

FAILED = "failed"

T = TypeVar("T")


class Turn:
    """One `response.create` of a connection, on its lane."""

    def __init__(
        self, connection: Session, lane: Lane, body: dict[str, Any], size: int, held: ExitStack
    ) -> None:
        """size: of the frame. held: given back when it was read."""
        self.lane = lane
        self._connection = connection
        self._here = connection.here
        self._body = {name: value for name, value in body.items() if name not in ENVELOPE}
        self._size = size
        self._unstreamed = body.get("stream") is False
        self._held = held
        self._previous = body.get("previous_response_id")
        self._num_purges = 0  # of the owner, when this began

    async def carry_out(self) -> None:
        """Make the response and send its events, or an error; raises nothing but the cancellation."""
        connection = self._connection
        with self._held:
            await connection.at_work.acquire()
        try:
            with one_request(connection, "response.create") as told:
                await self._make()
            if told.error is not None:
                self._evict()
                with suppress(WebSocketDisconnect):
                    await connection.send(error_frame(told.error, self.lane.stream_id))
        finally:
            connection.at_work.release()

    async def _make(self) -> None:
        with ExitStack() as stack:
            ignored = stack.enter_context(collecting())
            asked = await asked_by(self._connection)
            parsed, items = await self._read(asked)
            self._num_purges = self._connection.chains.num_purges
            past = self._connection.chains.find(parsed.previous_response_id)
            if past is not None and parsed.store:
                # What it goes on from is not stored, so it keeps all of that as its own input.
                items = [*past.items, *items]
                parsed, past = parsed.model_copy(update={"previous_response_id": None}), None
            subjects = limited(asked, self._here.models.get(parsed.model).name)
            stack.enter_context(self._here.limiter.stream(subjects))
            creating = self._here.runs.create(
                principal(asked), parsed, items, planning=self._while_open, by=actor(asked), past=past
            )
            started = await self._begun(creating)
            stack.callback(started.reader.close)
            await self._tell(asked, parsed, started, ignored)

    async def _read(self, asked: HTTPConnection) -> tuple[CreateResponse, list[Item]]:
        """The frame as a request and its input's items. Raises ApiError, QueueFull."""
        here, body, who = self._here, self._body, principal(asked)
        if body.get("background"):
            message = "Responses in the background are not made over a WebSocket: POST them."
            refuse("background", message, "unsupported_parameter")
        if body.get("model") is not None or body.get("prompt") is None:  # else a template may name the model
            here.models.require_room(body, who.owner, who.service.weight)
        if self._unstreamed:
            ignore("stream")
        if self._size > THREADED_BYTES:
            begin_large_request()
        parse = creating(asked)
        filled = await with_prompt(asked, "responses", {**body, "stream": True})
        parsed, items = await aside(in_large_request(), parse, filled)
        self._body = {}
        parsed = await with_model(asked, parsed)
        name_in_vain(asked, parsed, items)
        return parsed if here.config.store else unstored(parsed), items

    async def _begun(self, creating: Coroutine[Any, Any, Started]) -> Started:
        """The run, begun. What has been planned is begun even if the connection ends meanwhile."""
        task = asyncio.create_task(creating)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is None:
                task.result().reader.close()
            raise

    async def _while_open(self, work: Coroutine[Any, Any, T]) -> T:
        """Await what leads to a plan, which is given up when the connection ends."""
        planning = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._connection.gone.wait())
        try:
            await asyncio.wait((planning, gone), return_when=asyncio.FIRST_COMPLETED)
            if not planning.done():
                raise ClientDisconnect
            return planning.result()
        finally:
            for each in (planning, gone):
                each.cancel()
            await asyncio.gather(planning, gone, return_exceptions=True)

    # -- telling ---------------------------------------------------------------------------------------------

    async def _tell(
        self, asked: HTTPConnection, parsed: CreateResponse, started: Started, ignored: Ignored
    ) -> None:
        """Send the events as they come, to the last one. ApiError where they end before."""
        headers = self._headers(asked, parsed, ignored)
        key = started.secret if parsed.stream_options.include_obfuscation else None
        view = View("openai", key=key)
        ended = False
        self.lane.response_id = started.response_id
        self.lane.resumable = started.response_id if parsed.store else None
        try:
            async with aclosing(started.reader.events()) as stream:
                async for events in stream:
                    if ended := events.terminal:
                        await self._keep(parsed, started, events)
                    shown = await view.shown(events.first_seq, events.bodies)
                    await self._send(shown, headers)
                    headers = {}
        except (ReaderLagged, EventsExpired):
            self._connection.close(TRY_AGAIN_LATER, f"slow_reader {started.response_id}")
            return
        if ended:
            self.lane.resumable = None
            return
        if self._connection.life.phase != "ready":
            self._connection.interrupt()
            return
        self.lane.resumable = None
        if parsed.store and not started.reader.removed:  # NotFound when it was deleted elsewhere:
            await self._here.runs.views.get(owner(asked), started.response_id)
        raise interrupted(started.reader)

    async def _send(self, events: Sequence[tuple[int, bytes]], headers: dict[str, str]) -> None:
        async with self.lane.sending:
            for number, event in events:
                await self._connection.send(event_frame(event, self.lane.stream_id, headers))
                self.lane.last_seq = number
                headers = {}

    def _headers(self, asked: HTTPConnection, parsed: CreateResponse, ignored: Ignored) -> dict[str, str]:
        """What the headers of a reply over HTTP would say."""
        found = {**self._here.models.headers(parsed.model), **ignored.headers("")}
        return {**found, **dict(asked.state.standing.headers())}

    async def _keep(self, parsed: CreateResponse, started: Started, events: Events) -> None:
        """Remember what a response leads to that is not stored; before its client hears that it has ended."""
        status = event_type(events.bodies[-1]).decode().removeprefix("response.")
        if status == FAILED:
            self._evict()
        elif not parsed.store:
            past = await aside(in_large_request(), started.past, status)
            if self._connection.chains.num_purges == self._num_purges:
                self._connection.chains.keep(started.response_id, self.lane.stream_id, past)

    def _evict(self) -> None:
        if isinstance(self._previous, str):
            self._connection.chains.evict(self._previous, self.lane.stream_id)
