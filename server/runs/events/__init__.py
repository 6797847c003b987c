"""Makes the events of a run, stores them, and shows them to readers."""

from __future__ import annotations

from server.runs.events.assembler import (
    UNMADE,
    Assembler,
    Draft,
    derived_id,
    encoded,
    fold,
    item_logprob,
)
from server.runs.events.channel import Channel, Events
from server.runs.events.feed import Feed, Reader, ReaderLagged
from server.runs.events.journal import RETRY_S, Journal, RunLog, Tokens, stamped
from server.runs.events.snapshot import (
    POLL_AFTER_MS,
    Snapshot,
    echo_members,
    join_response,
    short_members,
    snapshot,
    terminal_response,
)

__all__ = [
    "POLL_AFTER_MS",
    "RETRY_S",
    "UNMADE",
    "Assembler",
    "Channel",
    "Draft",
    "Events",
    "Feed",
    "Journal",
    "Reader",
    "ReaderLagged",
    "RunLog",
    "Snapshot",
    "Tokens",
    "derived_id",
    "echo_members",
    "encoded",
    "fold",
    "item_logprob",
    "join_response",
    "short_members",
    "snapshot",
    "stamped",
    "terminal_response",
]
