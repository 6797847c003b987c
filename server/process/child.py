"""One process of several: the engine's, or a server's. `server.process.supervisor` starts them.

What a process is to be comes as a line on its standard input, which stays open for as long as its parent
lives: when that has ended, in whatever way, so does the process.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import orjson
import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from engine import Engine, EngineError, EngineHost, PoolingEngine, SpeechEngine, load_late_modules
from server.config import Config, load
from server.model_registry import build_engine, build_others, generates_here, is_hosted, note_model
from server.process.log_lines import set_up_logging
from server.process.process_ends import ENGINE_DIED, reasons, tune_process
from server.process.seat import (
    ENGINE,
    HandedConnections,
    Seat,
    announce,
    announce_refusal,
    engine_socket,
    tell_metrics,
)

log = logging.getLogger("antiphon")

PARENT_DIED = 1


def main() -> int:
    """Be what the first line of the standard input says, until a signal or the parent's end."""
    told: dict[str, Any] = orjson.loads(sys.stdin.buffer.readline())
    folder = Path(told["folder"])
    threading.Thread(target=_end_with_parent, args=(folder,), name="parent", daemon=True).start()
    flags: Mapping[str, Any] = told.get("flags", {})
    # A server that keeps several models says what each is to be; its own settings say it of all others.
    config = Config(**told["settings"]) if "settings" in told else load(flags).config
    set_up_logging(config.log_level, config.log_format, told.get("label", told["name"]))
    if told["name"] == ENGINE:
        return host(config.saving_for(told["database"]) if "database" in told else config, folder)
    from server.process.serve import serve  # an engine's process has no use for all that a server is

    seat = Seat(
        index=told["index"],
        num_servers=config.api_server_count,
        folder=folder,
        url=told["url"],
        admin_token=told["admin_token"],
        handed=HandedConnections(socket.socket(fileno=told["channel"])),
        hosted=is_hosted(config),
    )
    return serve(config, began=told["began"], reread=lambda: load(flags).config, seat=seat)


def _end_with_parent(folder: Path) -> None:
    """Nothing more comes on the standard input; it ends with the parent, who holds the other end and can no
    longer remove the folder."""
    while os.read(0, 64):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(PARENT_DIED)


# ------------------------------------------------------------------------------------------------------------
# The engine's process


def host(config: Config, folder: Path) -> int:
    """Serve the configured engines to the server processes of a folder, until a signal; returns the exit
    code: 0, 2 where they cannot be served, 70 where one of them died."""
    tune_process()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_host(config, folder))


async def _host(config: Config, folder: Path) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait())
    async with AsyncExitStack() as stack:
        starting = asyncio.create_task(_start(config, stack))
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        if (failure := starting.exception()) is not None:
            return announce_refusal(*reasons(failure, EngineError))
        engine, others = starting.result()
        gc.freeze()
        serving = EngineHost(engine_socket(folder), cast(Any, engine), others)
        await serving.start()
        stack.push_async_callback(serving.close)
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        telling = await tell_metrics(folder, ENGINE, lambda: generate_latest(registry))
        stack.callback(telling.close)
        announce("")
        await asyncio.to_thread(load_late_modules)
        gc.freeze()
        if engine is not None:
            await engine.prepare()
        mortal: list[Engine | PoolingEngine | SpeechEngine] = [*([] if engine is None else [engine]), *others]
        deaths = {asyncio.create_task(each.dead()): each for each in mortal}
        done, _ = await asyncio.wait((stopped, *deaths), return_when=asyncio.FIRST_COMPLETED)
        for death in done - {stopped}:
            cause = cast(BaseException, death.result())
            log.critical("the model %s has died: %r", deaths[cast(Any, death)].info.name, cause)
            serving.stop()
        for death in deaths:
            death.cancel()
        return 0 if stop.is_set() else ENGINE_DIED


async def _start(
    config: Config, stack: AsyncExitStack
) -> tuple[Engine | None, list[PoolingEngine | SpeechEngine]]:
    """Load what is to be served; it is closed with the stack. Raises EngineError."""
    # With other servers as the engine each server process asks them itself.
    engine = await asyncio.to_thread(build_engine, config) if generates_here(config) else None
    served = await asyncio.to_thread(build_others, config)
    for each in served:
        stack.push_async_callback(each.close)
        note_model(await each.start())
    if engine is not None:
        stack.push_async_callback(engine.close)
        await engine.start()
    return engine, served


if __name__ == "__main__":
    code = main()
    # See `server.cli.commands`: the interpreter's own end could abort the process from inside torch.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
