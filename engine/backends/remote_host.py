"""Serves the engines of this process to other processes, over a Unix socket.

Requests arrive as token ids and leave as token ids: text is rendered and read by those who ask, so that this
process has next to nothing to do but to compute. One connection carries all that one process asks. What many
requests got in one step leaves in one write.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from engine.admission import Admission, Place
from engine.backends.generation import takes_long
from engine.backends.remote_wire import (
    error_form,
    floats_text,
    merged,
    message,
    output_message,
    read,
    read_ints,
    read_line,
    read_request,
    read_text,
    read_window,
    text_form,
)
from engine.interface import Engine
from engine.pooling import PoolingEngine
from engine.speech import SpeechEngine
from engine.step import RowOutput
from engine.types import Constraint, EngineDead, EngineError, GenerateRequest, RequestFailed

log = logging.getLogger("antiphon.engine")

WINDOW = 1024
"""Tokens that may be on their way to a reader who has not said that it took them; then its request pauses."""

STATS_S = 0.25
"""How often readers are told of the engine's counters, where they have changed."""

GPU_S = 5.0
"""How often the GPU is asked how it is: the driver takes its time."""

HIGH_WATER = 4 << 20
"""Bytes that may wait for a process to read them, before nothing more is written for it."""


class TokenEngine(Engine, Protocol):
    """An engine in this process, whose tokens others read."""

    def outputs(
        self, request: GenerateRequest, place: Place | None = None
    ) -> AsyncGenerator[list[RowOutput]]:
        """See `LocalEngine.outputs`."""
        ...


class EngineHost:
    """Serves engines that have started. path: of the socket, in a folder that only this user may enter."""

    def __init__(
        self,
        path: Path,
        engine: TokenEngine | None,
        others: Sequence[PoolingEngine | SpeechEngine] = (),
    ) -> None:
        self._path = path
        self.engine = engine
        self.others = tuple((_kind(other), other) for other in others)
        self.probation = asyncio.Lock()  # held by the one suspect that the engine works for
        self._clients: set[_Client] = set()
        self._server: asyncio.Server | None = None
        self._telling: asyncio.Task[None] | None = None
        self._gpu: Mapping[str, float] = {}

    async def start(self) -> None:
        """Listen. A socket of this name that an earlier process has left is replaced."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Client(self), self._path)
        os.chmod(self._path, 0o600)
        self._telling = asyncio.create_task(self._tell(), name="engine-stats")

    async def close(self) -> None:
        """Let go of all clients; what they asked ends."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        self.stop()
        await asyncio.gather(*(client.ended() for client in list(self._clients)))

    def stop(self) -> None:
        """Take nothing more, and have everybody see that this process is gone: as when its engine died."""
        if self._server is not None:
            self._server.close()
        for client in self._clients:
            client.abort()

    def joined(self, client: _Client) -> None:
        """A process has connected."""
        self._clients.add(client)
        client.send(message("hello", self._hello()))
        client.send(self._stats())

    def left(self, client: _Client) -> None:
        """A process is gone."""
        self._clients.discard(client)

    def _hello(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "info": None if engine is None else engine.info,
            "max_running": 0 if engine is None else engine.admission.max_running,
            "others": [(kind, each.info, each.admission.max_running) for kind, each in self.others],
        }

    def _stats(self) -> bytes:
        engine = None if self.engine is None else self.engine.stats()
        return message("stats", engine, self._gpu, [(kind, each.stats()) for kind, each in self.others])

    async def _tell(self) -> None:
        """Keep all clients informed of the counters."""
        told, asked_at = b"", -GPU_S
        while True:
            await asyncio.sleep(STATS_S)
            if not self._clients:
                continue
            if self.engine is not None and time.monotonic() - asked_at >= GPU_S:
                self._gpu, asked_at = dict(self.engine.gpu()), time.monotonic()
            if (stats := self._stats()) != told:
                told = stats
                for client in self._clients:
                    client.send(stats)


@dataclass(slots=True)
class _Flow:
    """How many tokens one reader has not taken yet."""

    unread: int = 0
    taken: asyncio.Event = field(default_factory=asyncio.Event)


class _Client(asyncio.Protocol):
    """One process that asks."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._partial: list[bytes] = []
        self._unsent: list[bytes] = []
        self._writable = asyncio.Event()
        self._writable.set()
        self._flows: dict[int, _Flow] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._words: Mapping[str, Callable[..., None]] = {
            "generate": self._generate,
            "abort": self._abort,
            "credit": self._credit,
            "call": self._call,
            "note": self._note,
        }

    # -- the connection --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say what there is."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class
        self._transport.set_write_buffer_limits(HIGH_WATER)
        self._host.joined(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever asked is gone, and wants nothing any more."""
        self._transport = None
        self._writable.set()
        self._host.left(self)
        for task in self._tasks.values():
            task.cancel()

    def pause_writing(self) -> None:
        """The process does not read; what generates for it waits."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """It reads again."""
        self._writable.set()

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()

    async def ended(self) -> None:
        """Wait until what this process asked has ended."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), *self._ending, return_exceptions=True)

    def send(self, line: bytes) -> None:
        """Send a message with all others of this turn of the loop."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(line)

    def _flush(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if self._transport is not None:
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Carry out what has arrived in whole."""
        lines = data.split(b"\n")
        if len(lines) == 1:
            self._partial.append(data)
            return
        lines[0] = b"".join([*self._partial, lines[0]])
        self._partial = [lines.pop()]
        try:
            for line in lines:
                word, *parts = read_line(line)
                self._words[word](*parts)
        except Exception:  # only a fault of ours can send such a thing
            log.exception("a server process sent what cannot be read; its connection is cut")
            self.abort()

    def _run(self, id: int, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[id] = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._forget(id, task))

    def _forget(self, id: int, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if self._tasks.get(id) is task:
            del self._tasks[id]
        self._flows.pop(id, None)

    # -- generation ------------------------------------------------------------------------------------------

    def _generate(self, id: int, form: Mapping[str, Any], suspect: bool) -> None:
        """suspect: an engine has ended while it worked for this request, which may have been the cause."""
        self._flows[id] = _Flow()
        self._run(id, self._pump(id, form, suspect=suspect))

    async def _pump(self, id: int, form: Mapping[str, Any], *, suspect: bool) -> None:
        """Send what one request gets, to its end. Suspects come one after the other: the next one when one
        has got something, so that whichever ends the engine has no other beside it."""
        try:
            request = read_request(form)
            if suspect:
                await self._host.probation.acquire()
                self.send(message("begun", id))
                self._flush()  # it may be the last that this process says
            await self._outputs(id, request, alone=suspect)
        except EngineDead:
            self._host.stop()
        except EngineError as error:
            self.send(output_message(id, RowOutput(id, error=error)))
        except Exception as error:  # one request's failure is that request's
            log.exception("request %d failed", id)
            failed = RequestFailed(f"{type(error).__name__}: {error}")
            self.send(output_message(id, RowOutput(id, error=failed)))

    async def _outputs(self, id: int, request: GenerateRequest, *, alone: bool) -> None:
        engine, flow = self._host.engine, self._flows[id]
        assert engine is not None
        try:
            # Whoever asks has given it a place in a queue of its own.
            with self._place(engine.admission, id, request.owner, request.weight) as place:
                async with aclosing(engine.outputs(request, place)) as stream:
                    async for outputs in stream:
                        if isinstance(outputs[-1].error, EngineDead):
                            raise outputs[-1].error
                        if alone:
                            alone = False
                            self._host.probation.release()
                        output = merged(outputs)
                        write = partial(output_message, id, output)
                        self.send(await asyncio.to_thread(write) if takes_long(output) else write())
                        flow.unread += len(output.token_ids)
                        await self._room(flow)
        finally:
            if alone:
                self._host.probation.release()

    def _place(self, admission: Admission, id: int, owner: str, weight: float) -> Place:
        """A place for what was asked. Whoever asked is told when the engine begins with it."""
        begun = partial(self.send, message("begun", id))
        return admission.enter(owner, weight, promised=True, on_begin=begun)

    async def _room(self, flow: _Flow) -> None:
        """Wait until the reader, and its process, have taken enough of what was sent."""
        await self._writable.wait()
        while flow.unread > WINDOW and self._transport is not None:
            flow.taken.clear()
            await flow.taken.wait()

    def _credit(self, id: int, num_tokens: int) -> None:
        """A reader has taken tokens."""
        if (flow := self._flows.get(id)) is not None:
            flow.unread -= num_tokens
            flow.taken.set()

    def _abort(self, id: int) -> None:
        """Nobody wants the rest."""
        if (task := self._tasks.get(id)) is not None:
            self._ending.add(task)
            task.cancel()

    # -- KV --------------------------------------------------------------------------------------------------

    def _note(self, what: str, *parts: Any) -> None:
        """Something of which no answer is awaited, behind the ends of requests that were aborted before."""
        if self._ending:
            task = self._loop.create_task(self._note_later(what, parts))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        else:
            self._carry_out(what, *parts)

    async def _note_later(self, what: str, parts: Sequence[Any]) -> None:
        earlier = [task for task in self._ending if task is not asyncio.current_task()]
        await asyncio.gather(*earlier, return_exceptions=True)
        self._carry_out(what, *parts)

    def _carry_out(self, what: str, *parts: Any) -> None:
        engine = self._host.engine
        assert engine is not None
        match what, parts:
            case "keep", (name, form, output, seconds):
                engine.keep(name, read_request(form), read_ints(output), seconds)
            case "let_go", (name,):
                engine.let_go(name)
            case "save", (name, form, output, until):
                engine.save(name, read_request(form), read_ints(output), until)
            case "forget", (names,):
                engine.forget(names)
            case "forget_owner", (owner,):
                engine.forget_owner(owner)
            case _:
                raise ValueError(f"{what!r} is nothing that could be done")

    # -- questions -------------------------------------------------------------------------------------------

    def _call(self, id: int, what: str, *parts: Any) -> None:
        self._run(id, self._answer(id, what, parts))

    async def _answer(self, id: int, what: str, parts: Sequence[Any]) -> None:
        try:
            answer = await self._ask(id, what, *parts)
        except EngineDead:
            self._host.stop()
        except EngineError as error:
            self.send(message("failed", id, error_form(error)))
        except Exception as error:  # the question fails, and nothing else
            log.exception("%r could not be answered", what)
            self.send(message("failed", id, error_form(RequestFailed(f"{type(error).__name__}: {error}"))))
        else:
            self.send(message("answer", id, answer))

    async def _ask(self, id: int, what: str, *parts: Any) -> Any:
        engine = self._host.engine
        match what, parts:
            case "check", (constraint, owner):
                assert engine is not None
                await engine.check(read(Constraint, constraint), owner)
            case "saved_names", ():
                assert engine is not None
                return await engine.saved_names()
            case "encode", (index, texts, prompt, cut, owner):
                words = [text if isinstance(text, str) else tuple(text) for text in texts]
                model = self._pooling(index)
                found = await model.encode(words, prompt=prompt, cut=cut, owner=owner)
                return [text_form(text) for text in found]
            case "pool", (index, texts, owner, weight, deadline):
                model = self._pooling(index)
                with self._place(model.admission, id, owner, weight) as place:
                    vectors, cached = await model.pool(
                        [read_text(text) for text in texts],
                        owner=owner,
                        weight=weight,
                        place=place,
                        deadline=deadline,
                    )
                return [[floats_text(vector) for vector in vectors], cached]
            case "hear", (index, form, owner, weight, deadline):
                _, speech = self._host.others[index]
                assert isinstance(speech, SpeechEngine)
                return await speech.read(read_window(form), owner=owner, weight=weight, deadline=deadline)
            case _:
                raise ValueError(f"{what!r} is nothing that could be asked")
        return None

    def _pooling(self, index: int) -> PoolingEngine:
        _, model = self._host.others[index]
        assert isinstance(model, PoolingEngine)
        return model


def _kind(other: PoolingEngine | SpeechEngine) -> str:
    return "speech" if isinstance(other, SpeechEngine) else "pooling"
