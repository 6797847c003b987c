"""Responses that are not stored, for as long as they are made: how they stand, and their events.

The database knows nothing of them, so only the process that makes one can show it, and nobody can once it has
ended.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import orjson

from server.runs.events import POLL_AFTER_MS, Feed, Snapshot, join_response, terminal_response
from server.runs.execution.run import Run


def as_it_stands(run: Run) -> Snapshot:
    """The Response object, with the items that have closed; at its end, the one in its last event."""
    channel = run.entry.channel
    if channel.ended and channel.last is not None:
        return Snapshot(terminal_response(channel.last.bodies[-1]))
    head = orjson.dumps(run.head("in_progress"))
    output = [orjson.dumps(item) for item in run.assembler.closed]
    return Snapshot(join_response(head, output, channel.echo), POLL_AFTER_MS["in_progress"])


async def at_its_end(run: Run, feed: Feed, wait_s: float) -> Snapshot:
    """The same once it has ended, or after so many seconds."""
    reader = feed.join(run.plan.response_id)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await reader.finished()
        return as_it_stands(run)
    finally:
        reader.close()
