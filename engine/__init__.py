"""The engine's door: tokens in, deltas out; knows nothing of HTTP or SQL.

Owns: the names that others may import. Refuses to load torch, numpy, tokenizers or llguidance until an engine
is asked for by name, so that `antiphon --help`, migrations and API tests start fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.search import MAX_BEAMS, BeamParams, Picked, beam_search, best_of
from engine.structured.close_schema import closed_schema
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
    from engine.backends.local import LocalEngine
    from engine.backends.script import Fail, Say, Tick, Wait
    from engine.backends.scripted import ScriptedEngine
    from engine.backends.upstream import UpstreamEngine
    from engine.benchmark.environment import describe_machine
    from engine.benchmark.random_weights import SIZES, write_random_model
    from engine.llm import LLM, Call, Result
    from engine.llm_options import Options

_LATE = {
    "LocalEngine": "engine.backends.local",
    "LLM": "engine.llm",
    "Call": "engine.llm",
    "Options": "engine.llm_options",
    "describe_machine": "engine.benchmark.environment",
    "Result": "engine.llm",
    "SIZES": "engine.benchmark.random_weights",
    "write_random_model": "engine.benchmark.random_weights",
    "ScriptedEngine": "engine.backends.scripted",
    "UpstreamEngine": "engine.backends.upstream",
    "Say": "engine.backends.script",
    "Wait": "engine.backends.script",
    "Fail": "engine.backends.script",
    "Tick": "engine.backends.script",
}

__all__ = [
    "LLM",
    "MAX_BEAMS",
    "SIZES",
    "BeamParams",
    "Call",
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
    "Options",
    "Picked",
    "Prompt",
    "PromptTooLong",
    "QueueFull",
    "ReaderParams",
    "Reasoning",
    "RenderError",
    "RenderInput",
    "RequestError",
    "RequestFailed",
    "Result",
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
    "beam_search",
    "best_of",
    "closed_schema",
    "describe_machine",
    "write_random_model",
]


def __getattr__(name: str) -> Any:
    """Import an engine when it is first asked for (PEP 562)."""
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
