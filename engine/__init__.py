"""The engine's door: tokens in, deltas out; knows nothing of HTTP or SQL.

Owns: the names that others may import. Refuses to load torch, numpy, tokenizers or llguidance until an engine
is asked for by name, so that `antiphon --help`, migrations and API tests start fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.admission import Admission, Place
from engine.beams import MAX_BEAMS, BeamParams, Picked, beam_search, best_of
from engine.checks import check_request
from engine.closed import closed_schema
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
    from engine.llm import LLM, Call, Result
    from engine.machine import describe_machine
    from engine.options import Options
    from engine.random_weights import SIZES, write_random_model
    from engine.script import Fail, Say, Tick, Wait
    from engine.scripted import ScriptedEngine
    from engine.upstream import UpstreamEngine

_LATE = {
    "LocalEngine": "engine.engine",
    "LLM": "engine.llm",
    "Call": "engine.llm",
    "Options": "engine.options",
    "describe_machine": "engine.machine",
    "Result": "engine.llm",
    "SIZES": "engine.random_weights",
    "write_random_model": "engine.random_weights",
    "ScriptedEngine": "engine.scripted",
    "UpstreamEngine": "engine.upstream",
    "Say": "engine.script",
    "Wait": "engine.script",
    "Fail": "engine.script",
    "Tick": "engine.script",
}

__all__ = [
    "LLM",
    "MAX_BEAMS",
    "SIZES",
    "Admission",
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
    "Place",
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
    "check_request",
    "closed_schema",
    "describe_machine",
    "load_late_modules",
    "write_random_model",
]


def load_late_modules() -> None:
    """Import what an engine imports when a request needs it: templates, and grammars. Takes half a second.

    Whoever serves does this ahead of time: a process that has no descriptor left can import nothing.
    """
    for name in ("jinja2.ext", "jinja2.meta", "jinja2.sandbox", "engine.grammar"):
        import_module(name)


def __getattr__(name: str) -> Any:
    """Import an engine when it is first asked for (PEP 562)."""
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
