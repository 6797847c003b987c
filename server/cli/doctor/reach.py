"""What requests lead to: tools, addresses, MCP servers, a search provider, a server of images."""

from __future__ import annotations

import asyncio
import shutil

from server.cli.doctor.findings import Finding, Verdict
from server.config import Config
from server.masking import masked
from server.mcp_servers import server_of
from tools import (
    BUILTIN,
    PAGE,
    ConnectionPool,
    Connections,
    EgressError,
    McpSearch,
    SearchFailed,
    ToolsError,
    operator_tools,
    prepare_egress,
    prepare_mcp,
    reads_html,
    search_once,
)

ASK_MCP_S = 10.0
"""Seconds that an MCP server has for starting and listing its tools."""


async def check_tools(config: Config) -> Finding:
    try:
        own = operator_tools(config.tools, BUILTIN)
    except ToolsError as exc:
        return "FAIL", str(exc)
    packaged = operator_tools(None, BUILTIN)
    sources = {str(config.tools): own.keys() - packaged.keys(), "installed packages": packaged.keys()}
    besides = [
        f", and the operator's of {source}: {', '.join(name for name in own if name in names)}"
        for source, names in sources.items()
        if names
    ]
    return "ok", f"{', '.join(BUILTIN)}{''.join(besides)}"


async def check_egress(config: Config) -> Finding:
    reached = {
        "off": "requests lead nowhere",
        "public": "requests lead to public addresses, at ports 80 and 443",
        "any": "requests lead to every address, also of this machine and its networks",
    }[config.egress]
    besides = " but " if config.egress == "off" else ", and to "
    allowed = besides + ", ".join(config.egress_allow) if config.egress_allow else ""
    return ("note" if config.egress == "any" else "ok"), f"{config.egress}: {reached}{allowed}"


async def check_mcp(config: Config) -> Finding:
    servers = config.mcp.servers.items()
    places = [f"{name} ({masked(server.url or server.command[0])})" for name, server in servers]
    approved = {
        "request": "",
        "always": "; every call of an MCP tool needs approval",
        "never": "; no call of an MCP tool needs approval, whatever requests say",
    }[config.mcp.approval]
    verdict: Verdict = "note" if config.mcp.approval == "never" else "ok"
    if servers:  # what loading takes is not the servers' time
        await asyncio.to_thread(prepare_egress)
        await asyncio.to_thread(prepare_mcp)
    found = await asyncio.gather(*(_listed(config, name) for name in config.mcp.servers))
    told = [f"{place}: {each}" for place, (_, each) in zip(places, found, strict=True)]
    if any(each == "note" for each, _ in found):
        verdict = "note"
    return verdict, (", ".join(told) or "no MCP server is configured") + approved


async def _listed(config: Config, name: str) -> Finding:
    """How many tools an MCP server lists, or why it lists none."""
    server = server_of(name, config.mcp.servers[name])
    if server.command and shutil.which(server.command[0], path=server.env.get("PATH")) is None:
        told = f"the program {server.command[0]!r} cannot be run: it is not there, or not executable"
        return "note", told
    pool = ConnectionPool(config.egress_policy)
    connections = Connections(pool, owner="")
    try:
        async with asyncio.timeout(ASK_MCP_S):
            listing = await connections.list_tools(name, server)
    except TimeoutError:
        return "note", f"it does not list its tools within {ASK_MCP_S:g} s"
    finally:
        connections.close()
        await pool.close()
    if listing.error is not None:
        return "note", listing.error
    return "ok", f"{len(listing.tools)} tool{'' if len(listing.tools) == 1 else 's'}"


async def check_web(config: Config) -> Finding:
    from server.process import read_web

    try:
        tools = await asyncio.to_thread(read_web, config)
    except ToolsError as exc:
        return "FAIL", str(exc)
    if config.demo_web is not None:
        return "ok", f"the documents in {config.demo_web} stand in for the web"
    if (search := config.web.search(config.mcp)) is None:
        return "ok", "no search provider is configured, so web_search is not offered"
    where = f"{search.provider} at {masked(search.address)}"
    try:
        found = await search_once(search)
    except SearchFailed as why:
        return "note", f"{where}: {why}{f' What helps: {why.hint}.' if why.hint else ''}"
    except EgressError as why:
        return "note", f"{where}: {why}"
    finally:
        if isinstance(search, McpSearch):
            await search.close()
    if PAGE not in tools:
        return "note", f"{where} answers; pages are not opened, because egress is off"
    if not reads_html():
        return "note", f"{where} answers; pages cannot be read: pip install -e '.[web]'"
    return "ok" if found else "note", f"{where} answers with {found} results"


async def check_images(config: Config) -> Finding:
    if (generator := config.images.generator(config.max_item_bytes)) is None:
        return "ok", "no server of images is configured, so image_generation is not offered"
    model = f"{generator.model} of " if generator.model else ""
    where = f"{model}{masked(generator.address)}"
    try:
        status = await generator.look()  # an image would cost money
    except EgressError as why:
        return "note", f"{where}: {why}"
    if status in (401, 403):
        return "note", f"{where} answers with status {status}: its api_key is missing or wrong"
    again = "made again" if generator.idempotent else "not made again"
    return "ok", f"{where} answers; an image that a crash cut short is {again}"
