"""Bodies of the Messages API of Anthropic, read as what a chat completion asks of the engine.

Content blocks become items, so that the same history gives the same prompt in all APIs.
"""

from __future__ import annotations

from server.schema.anthropic.blocks import ASSISTANT_BLOCK, SYSTEM_BLOCK, USER_BLOCK, Place
from server.schema.anthropic.request import (
    MessagesBody,
    MessagesRequest,
    in_words_of_messages,
    output_config_shape,
    parse_count,
    parse_messages,
    thinking_shape,
    words_of_messages,
)
from server.schema.anthropic.tools import CHOICE, message_tool

__all__ = [
    "ASSISTANT_BLOCK",
    "CHOICE",
    "SYSTEM_BLOCK",
    "USER_BLOCK",
    "MessagesBody",
    "MessagesRequest",
    "Place",
    "in_words_of_messages",
    "message_tool",
    "output_config_shape",
    "parse_count",
    "parse_messages",
    "thinking_shape",
    "words_of_messages",
]
