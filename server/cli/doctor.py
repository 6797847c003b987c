"""`antiphon doctor`: would this machine serve?

Owns the checks and what they print. Refuses to repair anything; it opens the database as `serve` would, which
makes or migrates it.
"""

from __future__ import annotations

import asyncio
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from engine import EngineError
from server import __version__
from server.config import Config, shown
from server.model_registry import build_engine
from storage import FolderHeld, StorageError, open_storage

Verdict = Literal["ok", "note", "FAIL"]
Finding = tuple[Verdict, str]
Check = Callable[[Config], Awaitable[Finding]]


def examine(config: Config) -> int:
    """Run every check, print a line each; 1 when one failed."""
    return asyncio.run(_examine(config))


async def _examine(config: Config) -> int:
    failed = False
    for name, check in CHECKS.items():
        verdict, words = await check(config)
        print(f"{verdict:5} {name:9} {words}", flush=True)
        failed = failed or verdict == "FAIL"
    return int(failed)


async def _python(config: Config) -> Finding:
    new_enough = sys.version_info >= (3, 11)
    words = f"{platform.python_version()} on {platform.system()} {platform.machine()}, antiphon {__version__}"
    return ("ok" if new_enough else "FAIL"), words


async def _data(config: Config) -> Finding:
    try:
        config.data.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.data):
            pass
    except OSError as exc:
        return "FAIL", f"{config.data} cannot be written: {exc.strerror or exc}"
    return "ok", f"{config.data} can be written"


async def _database(config: Config) -> Finding:
    try:
        storage = await open_storage(config.db, runner="doctor")
    except FolderHeld as exc:
        return "note", str(exc)
    except (StorageError, ValueError) as exc:
        return "FAIL", str(exc)
    try:
        await storage.ready()
        keys = sum(key.revoked_at is None for key in await storage.list_keys())
    except StorageError as exc:
        return "FAIL", str(exc)
    finally:
        await storage.close()
    use = "shared by several servers" if storage.shared else "held by nobody"
    return "ok", f"{shown(config.db)} has this version's schema, is {use} and has {keys} keys"


async def _port(config: Config) -> Finding:
    from server.process import bind

    try:
        bind(config.host, config.port).close()
    except OSError as exc:
        return "note", f"{config.host}:{config.port} cannot be listened on: {exc.strerror or exc}"
    if not config.loopback and not config.api_key:
        return "note", f"{config.host}:{config.port} is free; an address like this needs keys"
    return "ok", f"{config.host}:{config.port} is free"


async def _model(config: Config) -> Finding:
    began = time.perf_counter()
    try:
        engine = await asyncio.to_thread(build_engine, config)
        info = await engine.start()
    except (EngineError, ImportError) as exc:
        return "FAIL", str(exc)
    seconds = time.perf_counter() - began
    await engine.close()
    return "ok", f"{info.name} loads in {seconds:.1f} s: {info.max_model_len} tokens, dialect {info.dialect}"


async def _device(config: Config) -> Finding:
    # What torch sees is the engine's business; it says so in the model's line. Only its version is asked
    # here.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return "ok", f"torch {version('torch')}, device {config.device}, dtype {config.dtype}"
    except PackageNotFoundError:
        return ("FAIL" if config.engine == "local" else "note"), "torch is not installed"


CHECKS: dict[str, Check] = {
    "python": _python,
    "torch": _device,
    "data": _data,
    "database": _database,
    "port": _port,
    "model": _model,
}
