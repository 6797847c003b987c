"""Views of the engine beside the runs: chat and text completions, messages, generations of tokens."""

from __future__ import annotations

from server.stateless.chat import ChatWriter, offer_of, prepare_chat, rendered
from server.stateless.choices import Completion, begin
from server.stateless.completions import prepare_completion
from server.stateless.generate import prepare_generation
from server.stateless.live_completions import LiveCompletions
from server.stateless.messages import (
    MessageWriter,
    count_message_tokens,
    opened,
    prepare_message,
    read_inputs,
)
from server.stateless.moderated import Moderated
from server.stateless.tool_runs import runs_tools, start_tool_run

__all__ = [
    "ChatWriter",
    "Completion",
    "LiveCompletions",
    "MessageWriter",
    "Moderated",
    "begin",
    "count_message_tokens",
    "offer_of",
    "opened",
    "prepare_chat",
    "prepare_completion",
    "prepare_generation",
    "prepare_message",
    "read_inputs",
    "rendered",
    "runs_tools",
    "start_tool_run",
]
