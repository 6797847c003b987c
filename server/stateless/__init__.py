"""Chat completions and text completions, which store nothing."""

from __future__ import annotations

from server.stateless.chat import offer_of, prepare_chat, rendered
from server.stateless.choices import Completion, begin
from server.stateless.completions import prepare_completion

__all__ = ["Completion", "begin", "offer_of", "prepare_chat", "prepare_completion", "rendered"]
