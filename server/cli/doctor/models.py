"""Python, torch, and the models that are to be loaded."""

from __future__ import annotations

import asyncio
import platform
import sys
import time
from collections.abc import Collection

from engine import EngineError, LoadError, ModelInfo, require_headers
from server import __version__
from server.cli.doctor.findings import Finding
from server.config import Config
from server.loading import too_large
from server.model_registry import (
    build_engine,
    build_pooling,
    build_speech,
    expected_bytes,
    first_of,
    is_needed,
    lacking,
    served_names,
)
from server.runs.planning import planned_model
from server.settings import ModelEntry
from storage import StorageError, unfinished_plans
from tools import BUILTIN, ToolsError, operator_tools

MOST_PLANS = 10_000
"""Responses that have not ended which are looked at: it costs some milliseconds for a thousand."""


async def check_python(config: Config) -> Finding:
    new_enough = sys.version_info >= (3, 11)
    words = f"{platform.python_version()} on {platform.system()} {platform.machine()}, antiphon {__version__}"
    return ("ok" if new_enough else "FAIL"), words


async def check_device(config: Config) -> Finding:
    # What torch sees is the engine's business; it says so in the model's line. Only its version is asked
    # here.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return "ok", f"torch {version('torch')}, device {config.device}, dtype {config.dtype}"
    except PackageNotFoundError:
        return ("FAIL" if config.engine == "local" else "note"), "torch is not installed"


async def check_model(config: Config) -> Finding:
    from server.process import unenforced

    began = time.perf_counter()
    names: Collection[str] | None = served_names(config) if len(config.entries) else None
    if not config.serves_own_model:
        texts = [entry for entry in config.entries if entry.use == "text"]
        chosen = next((entry for entry in texts if entry.default), texts[0])
        names, config = {chosen.id}, config.of_entry(chosen)
    try:
        # Without its disk: that may be a running server's.
        engine = await asyncio.to_thread(build_engine, config.model_copy(update={"kv_disk_bytes": 0}))
        info = await engine.start()
    except (EngineError, ImportError) as exc:
        return "FAIL", str(exc)
    seconds = time.perf_counter() - began
    try:
        loose = await unenforced(operator_tools(config.tools, BUILTIN), engine)
    except ToolsError:  # the line of the tools has told it
        loose = {}
    await engine.close()
    told = f"{info.name} loads in {seconds:.1f} s: {info.max_model_len} tokens, dialect {info.dialect}"
    reasons = [
        f"; arguments of the tool {name} are checked, and not enforced: {why}" for name, why in loose.items()
    ]
    if info.shortened:
        reasons.append(f"; {info.shortened}")
    if num := await _num_of_another_model(config, info, names):
        reasons.append(
            f"; {num} responses in flight or waiting would fail, because they were begun with another model: "
            "let them end first, with the version and the settings that they were begun with"
        )
    return "note" if reasons else "ok", told + "".join(reasons)


async def _num_of_another_model(config: Config, info: ModelInfo, names: Collection[str] | None) -> int:
    """How many runs that have not ended were begun with a model of another fingerprint. names: of the model;
    None where it is the only one, which then ends the runs of all names."""
    try:
        plans = await unfinished_plans(config.db, MOST_PLANS)
    except (StorageError, ValueError):  # the line of the database has told it
        return 0
    adapters = dict(info.adapters)
    num = 0
    for plan in plans:
        model, fingerprint = planned_model(plan) or (None, "")
        if model is None or not (names is None or model in names or model in adapters):
            continue
        num += fingerprint != adapters.get(model, info.fingerprint)
    return num


async def check_models(config: Config) -> Finding:
    """The models of the file: their names, and whether what they name is there and its headers can be read.
    None is loaded here."""
    if not len(config.entries):
        return "ok", "no file of several models"
    told: list[str] = []
    missing: list[str] = []
    away: list[str] = []
    first = first_of(config)
    for entry in config.entries:
        kind = "in a process of its own" if entry.in_child else f"engine {entry.engine}"
        default = ", the default" if entry.default else ""
        told.append(f"{entry.id} ({kind}{default})")
        own = config.of_entry(entry)
        if (why := await asyncio.to_thread(_unloadable, entry, own)) is not None:
            # The server starts without those that it loads when they are wanted.
            needed = entry.id == first or not entry.in_child
            (missing if needed else away).append(f"{entry.id}: {why}")
        needs = expected_bytes(entry, own) if entry.in_child else 0
        if (why := too_large(entry.id, needs, config.models_memory_bytes)) is not None:
            (missing if is_needed(entry, first) else away).append(why)
    without = f"the server starts, and cannot load: {'; '.join(away)}"
    if missing:
        return "FAIL", "; ".join([*missing, *([f"beside that, {without}"] if away else [])])
    return ("note", f"{', '.join(told)}; {without}") if away else ("ok", ", ".join(told))


def _unloadable(entry: ModelEntry, config: Config) -> str | None:
    """Why a model of the file cannot be loaded, as far as its folders and the headers of its files tell. None
    where they do not. config: as it is for the entry."""
    if (why := lacking(entry, config)) is not None:
        return why
    if entry.engine != "local" or entry.use != "text" or entry.path is None:
        return None
    try:
        require_headers(entry.path)
    except (LoadError, ImportError) as exc:
        return str(exc)
    return None


async def check_texts(config: Config) -> Finding:
    told = []
    try:
        for engine in await asyncio.to_thread(build_pooling, config):
            try:
                info = await engine.start()
            finally:
                await engine.close()
            how = f"{'+'.join(info.pooling)} ({info.pooling_source})"
            told.append(f"{info.name} for {info.kind}: {how}, {info.max_model_len} tokens")
        for speech in await asyncio.to_thread(build_speech, config):
            try:
                heard = await speech.start()
            finally:
                await speech.close()
            told.append(f"{heard.name} for speech: {len(heard.languages) or 1} languages")
    except (EngineError, ImportError) as exc:
        return "FAIL", str(exc)
    return "ok", "; ".join(told) or "no model for vectors, scores, labels or speech is configured"
