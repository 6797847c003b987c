"""The public names of the engine, which turns token ids into text, reasoning and tool calls.

Torch, numpy, tokenizers and llguidance are imported when an engine is first asked for by name, so that
`antiphon --help`, migrations and API tests start fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from engine.admission import Admission, Place
from engine.backends import check_request
from engine.config import EngineConfig
from engine.interface import Engine
from engine.late import late
from engine.model_folder import require_file
from engine.pooling import PoolingConfig, PoolingInfo, PoolingKind, PoolingStats
from engine.search import MAX_BEAMS, BeamParams, Generate, Picked, beam_search, best_of
from engine.shipped import packaged_folder
from engine.speech import (
    SAMPLE_RATE,
    Segment,
    SpeechConfig,
    SpeechInfo,
    SpeechStats,
    SpeechToken,
    Window,
    WindowText,
    Word,
)
from engine.types import (
    CACHED_TOKEN,
    IMAGE_OPTIONS,
    CallArgs,
    CallEnd,
    CallStart,
    Chunk,
    Constraint,
    ConstraintError,
    DeadlineExceeded,
    Delta,
    Done,
    EngineDead,
    EngineError,
    EngineStats,
    EngineUnavailable,
    GenerateRequest,
    LoadError,
    MediaSpan,
    ModelChanged,
    ModelInfo,
    Picture,
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
    TierStats,
    Timing,
    TokenLogprob,
    ToolShape,
    path_of,
    readable_size,
)

if TYPE_CHECKING:
    from engine.backends import (
        EngineHost,
        EngineLine,
        Fail,
        LocalEngine,
        RemoteEngine,
        RemotePooling,
        RemoteSpeech,
        Say,
        ScriptedEngine,
        Tick,
        UpstreamEngine,
        Wait,
    )
    from engine.benchmark import SIZES, describe_machine, write_random_model
    from engine.llm import LLM, Call, Result
    from engine.llm_options import Options
    from engine.models import require_headers
    from engine.pooling import PoolingEngine, TextInput
    from engine.speech import SpeechEngine, Transcriber, transcribe
    from engine.structured import Unheeded, closed_schema, unheeded
    from engine.tiers import ForeignFolder, SavedKV, database_of
else:
    __getattr__ = late(
        __name__,
        {
            "engine.backends": (
                "EngineHost",
                "EngineLine",
                "Fail",
                "LocalEngine",
                "RemoteEngine",
                "RemotePooling",
                "RemoteSpeech",
                "Say",
                "ScriptedEngine",
                "Tick",
                "UpstreamEngine",
                "Wait",
            ),
            "engine.benchmark": ("SIZES", "describe_machine", "write_random_model"),
            "engine.llm": ("LLM", "Call", "Result"),
            "engine.llm_options": ("Options",),
            "engine.models": ("require_headers",),
            "engine.pooling": ("PoolingEngine", "TextInput"),
            "engine.speech": ("SpeechEngine", "Transcriber", "transcribe"),
            "engine.structured": ("Unheeded", "closed_schema", "unheeded"),
            "engine.tiers": ("ForeignFolder", "SavedKV", "database_of"),
        },
    )

__all__ = [
    "CACHED_TOKEN",
    "IMAGE_OPTIONS",
    "LLM",
    "MAX_BEAMS",
    "SAMPLE_RATE",
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
    "EngineConfig",
    "EngineDead",
    "EngineError",
    "EngineHost",
    "EngineLine",
    "EngineStats",
    "EngineUnavailable",
    "Fail",
    "ForeignFolder",
    "Generate",
    "GenerateRequest",
    "LoadError",
    "LocalEngine",
    "MediaSpan",
    "ModelChanged",
    "ModelInfo",
    "Options",
    "Picked",
    "Picture",
    "Place",
    "PoolingConfig",
    "PoolingEngine",
    "PoolingInfo",
    "PoolingKind",
    "PoolingStats",
    "Prompt",
    "PromptTooLong",
    "QueueFull",
    "ReaderParams",
    "Reasoning",
    "RemoteEngine",
    "RemotePooling",
    "RemoteSpeech",
    "RenderError",
    "RenderInput",
    "RequestError",
    "RequestFailed",
    "Result",
    "SamplingDefaults",
    "SamplingParams",
    "SavedKV",
    "Say",
    "ScriptedEngine",
    "Segment",
    "Shape",
    "SpeechConfig",
    "SpeechEngine",
    "SpeechInfo",
    "SpeechStats",
    "SpeechToken",
    "Text",
    "TextInput",
    "Tick",
    "TierStats",
    "Timing",
    "TokenLogprob",
    "ToolShape",
    "Transcriber",
    "Unheeded",
    "UpstreamEngine",
    "Wait",
    "Window",
    "WindowText",
    "Word",
    "beam_search",
    "best_of",
    "check_request",
    "closed_schema",
    "database_of",
    "describe_machine",
    "load_late_modules",
    "packaged_folder",
    "path_of",
    "readable_size",
    "require_file",
    "require_headers",
    "transcribe",
    "unheeded",
    "write_random_model",
]


def load_late_modules() -> None:
    """Import what an engine imports when a request needs it: templates, arrays, grammars. Half a second.

    Whoever serves does this ahead of time: a process that has no descriptor left can import nothing.
    """
    templates = ("jinja2.ext", "jinja2.meta", "jinja2.sandbox")
    for name in (*templates, "engine.step", "engine.structured.isolation.constraints"):
        import_module(name)
