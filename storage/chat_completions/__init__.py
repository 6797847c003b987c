"""Chat completions that their clients asked to be stored, with the messages that they answer.

The values are here at once; the verbs, which need SQLAlchemy, are in the module `verbs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from storage.chat_completions.records import (
    ChatCompletionKnown,
    NewChatCompletion,
    OwnerPurged,
    StoredChatCompletion,
)

if TYPE_CHECKING:
    from storage.chat_completions.verbs import ChatCompletions

__all__ = [
    "ChatCompletionKnown",
    "ChatCompletions",
    "NewChatCompletion",
    "OwnerPurged",
    "StoredChatCompletion",
]


def __getattr__(name: str) -> Any:
    if name == "ChatCompletions":
        from storage.chat_completions.verbs import ChatCompletions

        return ChatCompletions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
