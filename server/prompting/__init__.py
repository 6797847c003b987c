"""Turns items, tools and request fields into what the engine is asked: messages, tools and sampling."""

from __future__ import annotations

from server.prompting.context_room import name_capped_limit, name_cut_limit, require_room
from server.prompting.messages import sampling, to_messages
from server.prompting.tool_offer import Offer, check, custom_tool_names, offer, steady

__all__ = [
    "Offer",
    "check",
    "custom_tool_names",
    "name_capped_limit",
    "name_cut_limit",
    "offer",
    "require_room",
    "sampling",
    "steady",
    "to_messages",
]
