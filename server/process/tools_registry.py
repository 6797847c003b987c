"""The tools that a server runs itself: those that come with it, and the operator's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from engine import Constraint, ConstraintError, Engine, ToolShape, closed_schema
from server.config import Config
from server.containers import cell_limits
from tools import (
    BUILTIN,
    Found,
    Registry,
    ToolsError,
    ToolSpec,
    find_sandbox,
    folder_tools,
    image_tools,
    operator_tools,
    read_folder,
    reads_html,
    web_tools,
)

log = logging.getLogger("antiphon")


def read_registry(config: Config) -> Registry:
    """All tools by their names; raises ToolsError for the first that cannot be offered."""
    return {**BUILTIN, **operator_tools(config.tools, BUILTIN), **read_web(config), **read_images(config)}


def read_web(config: Config) -> dict[str, ToolSpec]:
    """The tools of the web, where it can be searched; raises ToolsError."""
    if config.demo_web is not None:
        if config.web.provider is not None:
            raise ToolsError(
                "--demo-web stands in for a search provider: take the table [web] out, or the flag"
            )
        try:
            return folder_tools(asyncio.run(read_folder(config.demo_web)))
        except ToolsError as fault:
            raise ToolsError(f"--demo-web: {fault}") from None
    try:
        search = config.web.search(config.mcp)
    except ValueError as fault:
        raise ToolsError(str(fault)) from None
    if search is None:
        return {}
    if not reads_html():
        log.warning("web pages cannot be read before this is installed: pip install -e '.[web]'")
    return web_tools(search, config.egress_policy, config.web.open)


def read_images(config: Config) -> dict[str, ToolSpec]:
    """The tool that makes images, where a server for it is configured."""
    generator = config.images.generator(config.max_item_bytes)
    return {} if generator is None else image_tools(generator)


def _secrets(config: Config) -> Iterator[Path | None]:
    """What no code of a model may read."""
    yield from (config.data, config.db_file, config.api_key_file, config.sealing_key_file, config.tools)
    yield config.ssl_keyfile or config.ssl_certfile


async def look_for_sandbox(config: Config) -> Found:
    """What runs code, by the settings, after a trial; and a line of the log that says so."""
    found = await find_sandbox(
        config.sandbox,
        cell_limits(config),
        python=config.code_python,
        command=config.sandbox_command,
        hidden=[path for path in _secrets(config) if path is not None],
    )
    for why in found.passed_over:
        log.warning("no sandbox by %s", why)
    if found.sandbox is not None:
        log.info("code runs in a sandbox: %s", found.for_operators)
    return found


async def enforceable(registry: Registry, engine: Engine) -> Registry:
    """The same tools; those whose schemas the engine cannot hold a model to are not strict.

    Their arguments are then checked before a call, and a misfit is told to the model. Without this every
    request that offers such a tool would be refused.
    """
    tools = dict(registry)
    for name, why in (await unenforced(registry, engine)).items():
        log.warning("arguments of the tool %s are checked, and not enforced: %s", name, why)
        tools[name] = replace(registry[name], strict=False)
    return tools


async def unenforced(registry: Registry, engine: Engine) -> dict[str, str]:
    """The strict tools whose schemas the engine cannot hold a model to: name -> why."""
    found = {}
    for spec in registry.values():
        if spec.name in BUILTIN or not spec.strict:
            continue
        try:
            await engine.check(Constraint((ToolShape(spec.name, closed_schema(spec.parameters)),)))
        except ConstraintError as error:
            found[spec.name] = str(error)
    return found
