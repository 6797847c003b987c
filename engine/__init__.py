"""The engine's door: tokens in, deltas out; knows nothing of HTTP or SQL.

Owns: the names that others may import. Refuses to load torch, numpy, tokenizers or llguidance until an engine
is asked for by name, so that `antiphon --help`, migrations and API tests start fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.types import (
    CallArgs,
    CallEnd,
    CallStart,
    Chunk,
    Constraint,
    ConstraintError,
    DeadlineExceeded,
    Delta,
    Done,
    Engine,
    EngineDead,
    EngineError,
    EngineStats,
    EngineUnavailable,
    GenerateRequest,
    LoadError,
    MediaSpan,
    ModelInfo,
    Prompt,
    PromptTooLong,
    QueueFull,
    ReaderParams,
    Reasoning,
    RenderError,
    RenderInput,
    RequestError,
    RequestFailed,
    SamplingDefaults,
    SamplingParams,
    Shape,
    Text,
    TokenLogprob,
    ToolShape,
)

if TYPE_CHECKING:
    from engine.engine import LocalEngine
    from engine.script import Fail, Say, Tick, Wait
    from engine.scripted import ScriptedEngine
    from engine.upstream import UpstreamEngine

_LATE = {
    "LocalEngine": "engine.engine",
    "ScriptedEngine": "engine.scripted",
    "UpstreamEngine": "engine.upstream",
    "Say": "engine.script",
    "Wait": "engine.script",
    "Fail": "engine.script",
    "Tick": "engine.script",
}

__all__ = [
    "CallArgs",
    "CallEnd",
    "CallStart",
    "Chunk",
    "Constraint",
    "ConstraintError",
    "DeadlineExceeded",
    "Delta",
    "Done",
    "Engine",
    "EngineDead",
    "EngineError",
    "EngineStats",
    "EngineUnavailable",
    "Fail",
    "GenerateRequest",
    "LoadError",
    "LocalEngine",
    "MediaSpan",
    "ModelInfo",
    "Prompt",
    "PromptTooLong",
    "QueueFull",
    "ReaderParams",
    "Reasoning",
    "RenderError",
    "RenderInput",
    "RequestError",
    "RequestFailed",
    "SamplingDefaults",
    "SamplingParams",
    "Say",
    "ScriptedEngine",
    "Shape",
    "Text",
    "Tick",
    "TokenLogprob",
    "ToolShape",
    "UpstreamEngine",
    "Wait",
]


def __getattr__(name: str) -> Any:
    """Import an engine when it is first asked for (PEP 562)."""
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
