"""Chat completions and text completions, which store nothing."""

from __future__ import annotations

from server.stateless.chat import offer_of, prepare_chat, rendered
from server.stateless.choices import begin
from server.stateless.completions import prepare_completion

__all__ = ["begin", "offer_of", "prepare_chat", "prepare_completion", "rendered"]
