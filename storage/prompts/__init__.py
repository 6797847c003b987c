"""Prompt templates: their versions, which never change, and which of them is the default.

The values are here at once; the verbs, which need SQLAlchemy, are in the module `verbs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from storage.prompts.records import (
    DefaultVersion,
    PromptChange,
    StoredPrompt,
    StoredPromptVersion,
)

if TYPE_CHECKING:
    from storage.prompts.rows import put_back
    from storage.prompts.verbs import Prompts

__all__ = ["DefaultVersion", "PromptChange", "Prompts", "StoredPrompt", "StoredPromptVersion", "put_back"]


def __getattr__(name: str) -> Any:
    if name == "Prompts":
        from storage.prompts.verbs import Prompts

        return Prompts
    if name == "put_back":
        from storage.prompts.rows import put_back

        return put_back
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
