"""Turns items, tools and request fields into what the engine is asked: messages, tools and sampling."""

from __future__ import annotations

from server.prompting.cache_salt import cache_salt, name_unused_key
from server.prompting.context_room import (
    name_capped_limit,
    name_cut_limit,
    require_room,
    words_of_field,
)
from server.prompting.image_options import image_options
from server.prompting.messages import NOTHING_TOLD, Told, longest_result, sampling, to_messages
from server.prompting.tool_offer import (
    Offer,
    check,
    custom_tool_names,
    naming_source,
    offer,
    steady,
    tool_shape,
)
from server.prompting.untold import name_idle_drafts, name_untold

__all__ = [
    "NOTHING_TOLD",
    "Offer",
    "Told",
    "cache_salt",
    "check",
    "custom_tool_names",
    "image_options",
    "longest_result",
    "name_capped_limit",
    "name_cut_limit",
    "name_idle_drafts",
    "name_untold",
    "name_unused_key",
    "naming_source",
    "offer",
    "require_room",
    "sampling",
    "steady",
    "to_messages",
    "tool_shape",
    "words_of_field",
]
