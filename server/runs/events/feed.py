"""Reads the events of a run: first those in the log, then those that appear while it runs.

A reader follows a response from any event to its terminal one. A reader that falls behind what memory keeps
reads on from the log. The feed also counts who reads what, so that a run without readers is noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from server.runs.events.channel import Channel, Events

if TYPE_CHECKING:
    from storage import Storage


class ReaderLagged(Exception):
    """An unstored run's reader fell behind what memory keeps; there is no log to go back to."""


class Feed:
    """The channels and readers of all responses in this process."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._channels: dict[str, Channel] = {}
        self._running: set[str] = set()
        self.stirred = asyncio.Event()  # set whenever a run or a reader has come
        self.on_left: Callable[[str], None] = lambda response_id: None  # a response's last reader has left

    def open(self, response_id: str, echo: bytes, *, stored: bool, next_seq: int = 0) -> Channel:
        """The channel of a run that is about to write here; readers that wait already keep theirs."""
        self._running.add(response_id)
        channel = self._channels.get(response_id)
        if channel is None:
            channel = self._channels[response_id] = Channel(
                response_id, echo, stored=stored, next_seq=next_seq
            )
        elif channel.next_seq is None:
            channel.next_seq = next_seq
        channel.cut = False
        self.stirred.set()
        return channel

    def release(self, response_id: str) -> None:
        """The run writes no more for now; its channel goes when its readers have gone."""
        self._running.discard(response_id)
        if (channel := self._channels.get(response_id)) is not None:
            channel.rest()
        self._drop_if_idle(response_id)

    def lose(self, response_id: str) -> None:
        """The run is another's by now, or was deleted. Readers follow it there, or are cut where nobody else
        can have it."""
        channel = self._channels.get(response_id)
        if channel is not None and not (channel.stored and self._storage.shared):
            channel.stop()

    def elsewhere(self) -> list[Channel]:
        """What is read here and written, if at all, by another process."""
        return [
            channel
            for id, channel in self._channels.items()
            if channel.readers and channel.stored and id not in self._running
            if not (channel.ended or channel.over or channel.cut)
        ]

    def join(self, response_id: str, echo: bytes = b"") -> Reader:
        """Begin to read a response; the caller closes the reader.

        echo: the response's, for one that nobody writes here.
        """
        channel = self._channels.get(response_id)
        if channel is None:
            channel = self._channels[response_id] = Channel(response_id, echo, stored=True, next_seq=None)
        self.stirred.set()
        return Reader(self, self._storage, channel)

    def num_readers(self, response_id: str) -> int:
        """How many follow the response in this process."""
        channel = self._channels.get(response_id)
        return len(channel.readers) if channel else 0

    @property
    def total_readers(self) -> int:
        """How many follow any response in this process."""
        return sum(len(channel.readers) for channel in self._channels.values())

    def stop(self) -> None:
        """Cut all streams without a terminal event."""
        for channel in list(self._channels.values()):
            channel.stop()

    def remove(self, response_id: str) -> None:
        """Cut the streams of a response that is in the database no more."""
        if (channel := self._channels.get(response_id)) is not None:
            channel.removed = not channel.ended
            channel.stop()

    def left(self, channel: Channel) -> None:
        """A reader has gone."""
        if not channel.readers:
            self.on_left(channel.response_id)
            self._drop_if_idle(channel.response_id)

    def _drop_if_idle(self, response_id: str) -> None:
        channel = self._channels.get(response_id)
        if channel is not None and response_id not in self._running and not channel.readers:
            del self._channels[response_id]


class Reader:
    """One reader of one response; counted from its creation until `close`."""

    def __init__(self, feed: Feed, storage: Storage, channel: Channel) -> None:
        self._feed, self._storage, self._channel = feed, storage, channel
        self._changed = asyncio.Event()
        self._rests_seen = channel.num_rests
        channel.readers.add(self._changed)

    def close(self) -> None:
        """Leave; twice is harmless."""
        if self._changed in self._channel.readers:
            self._channel.readers.discard(self._changed)
            self._feed.left(self._channel)

    async def events(self, after: int = -1, *, ended: bool = False) -> AsyncGenerator[Events]:
        """Every event above `after`, in order, until the terminal one has come or the stream is cut.

        ended: the response is terminal, so the log is whole and there is nothing to wait for. Join before
        asking storage whether it is. Raises ReaderLagged, for an unstored run only, and EventsExpired.
        """
        channel = self._channel
        while True:
            self._changed.clear()
            whole = ended or channel.over
            covered = channel.covers(after)
            found = [live] if covered and (live := channel.read(after)) is not None else []
            # What has ended in the log may still be on its way to the channel.
            if not found and (whole or not covered):
                if not channel.stored:
                    raise ReaderLagged(channel.response_id)
                found = await self._logged(after)
            for events in found:
                after = events.last_seq
                yield events
                if events.terminal:
                    return
            if found:
                continue
            if whole or channel.ended or channel.cut:
                return
            await self._changed.wait()

    async def _logged(self, after: int) -> list[Events]:
        """One page of the log above `after`."""
        channel = self._channel
        records = await self._storage.records(channel.response_id, after=after)
        return [Events.of(record, channel.echo).after(after) for record in records]

    @property
    def cut(self) -> bool:
        """Whether the stream was stopped without its end."""
        return self._channel.cut

    @property
    def response_id(self) -> str:
        """Of the response that is read."""
        return self._channel.response_id

    @property
    def removed(self) -> bool:
        """Whether what has come to no end will come to none, because the response was removed."""
        return self._channel.removed or self._channel.over

    @property
    def final(self) -> bool:
        """Whether whoever comes back will read no more of it: it was removed, or it was made by this process,
        which stops, and is not stored."""
        return self.removed or (self.cut and not self._channel.stored)

    async def rested(self, *, patient: bool = False) -> None:
        """Wait until the run was left to rest since the last time (or the joining), or the stream is over.
        patient: as in `_change`."""
        channel = self._channel
        while not (channel.ended or channel.over or channel.cut or channel.num_rests > self._rests_seen):
            await self._change(patient)
        self._rests_seen = channel.num_rests

    async def finished(self) -> Events | None:
        """Wait for the end of a run: the events whose last is the terminal one.

        None when the stream was cut, or the response was deleted. ApiError 503 while nothing can be stored.
        """
        channel = self._channel
        while not (channel.ended or channel.over or channel.cut):
            await self._change()
        if channel.ended or channel.cut:
            return channel.last if channel.ended else None
        # Another process has ended it, so only the log has its end.
        seen = channel.last.last_seq if channel.last is not None else -1
        found = [events async for events in self.events(seen, ended=True)]
        return found[-1] if found and found[-1].terminal else None

    async def _change(self, patient: bool = False) -> None:
        """Wait until something has changed. ApiError 503, unless patient, while nothing can be stored."""
        if self._channel.stalled.is_set() and not patient:
            raise self._channel.stall_error()
        self._changed.clear()
        await self._changed.wait()
