"""The connection of a server process with the process of its engine, made again when that is started again.

What was asked of an engine that has ended comes back as `LineLost`: whoever asked knows whether to ask again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from engine.backends.generation import Mailbox
from engine.backends.remote_wire import message, read, read_error, read_line, read_output
from engine.pooling import PoolingInfo, PoolingStats
from engine.speech import SpeechInfo, SpeechStats
from engine.step import RowOutput
from engine.types import EngineDead, EngineError, EngineStats, EngineUnavailable, ModelChanged, ModelInfo

log = logging.getLogger("antiphon.engine")

RETRY_S = 0.1
"""Between two looks whether the engine's process listens again."""


_OTHERS: Mapping[str, tuple[type[PoolingInfo | SpeechInfo], type[PoolingStats | SpeechStats]]] = {
    "pooling": (PoolingInfo, PoolingStats),
    "speech": (SpeechInfo, SpeechStats),
}
"""Kinds of models beside the one that generates: what is told of them."""


class Other(NamedTuple):
    """A model beside the one that generates. max_running: requests that it works for side by side."""

    info: PoolingInfo | SpeechInfo
    max_running: int


Begin = Callable[[], object]
"""Called when the engine begins with what was asked."""


class LineLost(EngineError):
    """The engine's process has ended, or the connection with it."""


class Reception:
    """What came for one request, and whether an engine that ends may have ended under it."""

    def __init__(self, *, begun: bool, begin: Begin) -> None:
        self.mailbox = Mailbox(begin)
        self.begun = begun


class Question(NamedTuple):
    """A question, and its answer once it is there."""

    answer: asyncio.Future[Any]
    begin: Begin


class EngineLine:
    """One connection for everything that one process asks of its engines. All methods are called on one
    asyncio loop.

    on_wanted: told when somebody waits for an engine that is away, for whoever can bring it back.
    on_replaced: told when the process is back with another model, to which the line leads from then on;
    without it the line is dead then.
    """

    def __init__(
        self,
        path: Path,
        on_wanted: Callable[[], None] | None = None,
        on_replaced: Callable[[], None] | None = None,
    ) -> None:
        self._path = path
        self._wire: _Wire | None = None
        self._joining: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # replaced by another at every change
        self._receptions: dict[int, Reception] = {}
        self._questions: dict[int, Question] = {}
        self._owed: list[bytes] = []  # notes that must arrive, whoever is there to read them
        self._next = 0
        self._closed = False
        self._on_wanted = on_wanted
        self._on_replaced = on_replaced
        self._resting = False
        self._refusal: str | None = None
        self._died: asyncio.Future[BaseException] | None = None
        self.info: ModelInfo | None = None
        self.max_running = 0
        self.others: tuple[Other, ...] = ()
        self.num_replaced = 0
        """Models that it has led to before this one; who asks says for which of them."""
        self.stats = EngineStats()
        self.gpu: Mapping[str, float] = {}
        self.other_stats: tuple[PoolingStats | SpeechStats, ...] = ()
        self.on_stats: list[Callable[[], None]] = []

    # -- life ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect, for the first time: waits until the engine has loaded its model."""
        if self._joining is None:
            self._died = asyncio.get_running_loop().create_future()
            self._joining = asyncio.create_task(self._join(), name="engine-line")
        await self.ready()

    async def close(self) -> None:
        """End everything that is under way with EngineDead."""
        if self._closed:
            return
        self._closed = True
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)
        if self._wire is not None:
            self._wire.close()
        self._lose(EngineDead("the engine was closed"))
        self._change()

    async def dead(self) -> BaseException:
        """Wait until there is another engine than this process began with; what it is."""
        assert self._died is not None
        return await asyncio.shield(self._died)

    @property
    def is_up(self) -> bool:
        """Whether the engine's process answers."""
        return self._wire is not None

    async def ready(self, number: int | None = None) -> None:
        """Wait until it does. Raises EngineDead where it never will, EngineUnavailable where nobody expects
        it for now, and ModelChanged where its model is not the one of this number (`num_replaced`)."""
        while self._wire is None:
            self._require_open(number)
            if self._refusal is not None:
                raise EngineUnavailable(self._refusal)
            if self._on_wanted is not None:
                self._on_wanted()
            await self._changed.wait()
        self._require_open(number)

    def rest(self) -> None:
        """The engine is about to be ended on purpose; whoever waits for it all the same says so again."""
        self._resting = True
        self._change()

    def expect(self) -> None:
        """The engine is about to be back: whoever asks waits for it."""
        self._resting, self._refusal = False, None

    def refuse(self, why: str) -> None:
        """Nobody expects the engine back: whoever waits for it is told why."""
        self._refusal = why
        self._change()

    def _require_open(self, number: int | None) -> None:
        if self._closed:
            raise EngineDead("the engine was closed")
        if self._died is None or self._died.done():
            raise EngineDead(
                "the engine was not started" if self._died is None else "the engine was replaced"
            )
        if number not in (None, self.num_replaced):
            raise ModelChanged((self.info or self.others[0].info).name)

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _join(self) -> None:
        """Connect whenever there is no connection."""
        loop = asyncio.get_running_loop()
        while True:
            with suppress(OSError):  # it has not started yet, or is gone
                _, wire = await loop.create_unix_connection(lambda: _Wire(self), str(self._path))
                await wire.lost.wait()
            await asyncio.sleep(RETRY_S)

    # -- what comes ------------------------------------------------------------------------------------------

    def joined(self, wire: _Wire, hello: Mapping[str, Any]) -> None:
        """The engine's process has said what it serves."""
        info = read(ModelInfo, hello["info"])
        others = tuple(
            Other(read(_OTHERS[kind][0], info), max_running) for kind, info, max_running in hello["others"]
        )
        is_first = self.info is None and not self.others
        is_other = not is_first and (info, others) != (self.info, self.others)
        if is_other and self._on_replaced is None:
            # Runs are bound to the model that they began with: only a process that starts anew may change it.
            assert self._died is not None
            if not self._died.done():
                self._died.set_result(EngineDead("the engine serves another model than before"))
                self._change()
            return
        self.info, self.others = info, others
        self.max_running = hello["max_running"]
        self._wire = wire
        for line in self._owed:
            wire.send(line)
        self._owed.clear()
        if is_other and self._on_replaced is not None:
            self.num_replaced += 1
            self.on_stats.clear()  # of those who ask the model before
            self._on_replaced()
        self._change()

    def left(self, wire: _Wire) -> None:
        """The connection is gone."""
        if self._wire is wire:
            self._wire = None
            if not self._closed and not self._resting:
                log.warning("the engine's process is gone; requests wait until it is back")
            self._lose(LineLost("the engine's process has ended"))
            self._change()

    def _lose(self, error: EngineError) -> None:
        receptions, self._receptions = self._receptions, {}
        for handle, reception in receptions.items():
            reception.mailbox.put(RowOutput(handle, error=error))
        questions, self._questions = self._questions, {}
        for answer, _ in questions.values():
            if not answer.done():
                answer.set_exception(error)

    def got_output(self, *parts: Any) -> None:
        """Tokens, or an end, of a request."""
        output = read_output(parts)
        ended = output.finish is not None or output.error is not None
        find = self._receptions.pop if ended else self._receptions.get
        if (reception := find(output.handle, None)) is not None:
            reception.begun = True
            reception.mailbox.put(output)

    def got_begun(self, id: int) -> None:
        """The engine has begun with a request or a question, or is about to begin with a suspect."""
        if (reception := self._receptions.get(id)) is not None:
            reception.begun = True
            reception.mailbox.begin()
        elif (question := self._questions.get(id)) is not None:
            question.begin()

    def got_stats(self, engine: Any, gpu: Mapping[str, float], others: Sequence[Any]) -> None:
        """The engine's counters."""
        self.stats = EngineStats() if engine is None else read(EngineStats, engine)
        self.gpu = gpu
        self.other_stats = tuple(read(_OTHERS[kind][1], stats) for kind, stats in others)
        for notify in self.on_stats:
            notify()

    def got_answer(self, id: int, answer: Any) -> None:
        """The answer to a question."""
        if (question := self._questions.pop(id, None)) is not None and not question.answer.done():
            question.answer.set_result(answer)

    def got_failed(self, id: int, error: Mapping[str, Any]) -> None:
        """Why a question has none."""
        if (question := self._questions.pop(id, None)) is not None and not question.answer.done():
            question.answer.set_exception(read_error(error))

    # -- what goes -------------------------------------------------------------------------------------------

    def _send(self, line: bytes) -> None:
        if self._wire is None:
            raise LineLost("the engine's process is away")
        self._wire.send(line)

    def generate(
        self, form: Mapping[str, Any], *, suspect: bool, begin: Begin = lambda: None
    ) -> tuple[int, Reception]:
        """Have a request generated; `end` says that nobody waits for it any more. Raises LineLost."""
        handle, self._next = self._next, self._next + 1
        self._send(message("generate", handle, form, suspect))
        reception = self._receptions[handle] = Reception(begun=not suspect, begin=begin)
        return handle, reception

    def credit(self, handle: int, num_tokens: int) -> None:
        """So many tokens of a request were taken."""
        if handle in self._receptions:
            self._send(message("credit", handle, num_tokens))

    def end(self, handle: int) -> None:
        """Abort a request, where it still runs."""
        if self._receptions.pop(handle, None) is not None and self._wire is not None:
            self._send(message("abort", handle))

    def note(self, *parts: object, owed: bool = False) -> None:
        """Tell the engine something that it need not answer. owed: once it is back, where it is away."""
        line = message("note", *parts)
        if self._wire is not None:
            self._send(line)
        elif owed and not self._closed:
            self._owed.append(line)

    async def ask(self, *parts: object, begin: Begin = lambda: None) -> Any:
        """The answer to a question. Raises LineLost, and what the engine says of it."""
        id, self._next = self._next, self._next + 1
        self._send(message("call", id, *parts))
        question = self._questions[id] = Question(asyncio.get_running_loop().create_future(), begin)
        try:
            return await question.answer
        finally:
            if self._questions.pop(id, None) is not None and self._wire is not None:
                self._send(message("abort", id))


class _Wire(asyncio.Protocol):
    """One connection with one life of the engine's process."""

    def __init__(self, line: EngineLine) -> None:
        self._line = line
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._partial: list[bytes] = []
        self._unsent: list[bytes] = []
        self.lost = asyncio.Event()
        self._words: Mapping[str, Callable[..., None]] = {
            "hello": lambda hello: line.joined(self, hello),
            "output": line.got_output,
            "begun": line.got_begun,
            "stats": line.got_stats,
            "answer": line.got_answer,
            "failed": line.got_failed,
        }

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The other side speaks first."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine's process has ended."""
        self._transport = None
        self.lost.set()
        self._line.left(self)

    def close(self) -> None:
        """Take leave: what was sent still arrives."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def send(self, line: bytes) -> None:
        """Send a message with all others of this turn of the loop."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(line)

    def _flush(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if self._transport is not None and data:
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Hand on what has arrived in whole."""
        lines = data.split(b"\n")
        if len(lines) == 1:
            self._partial.append(data)
            return
        lines[0] = b"".join([*self._partial, lines[0]])
        self._partial = [lines.pop()]
        for line in lines:
            word, *parts = read_line(line)
            self._words[word](*parts)
