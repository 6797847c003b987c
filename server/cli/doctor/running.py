"""The server that runs already: what it has left word of, and what it answers."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import httpx
import orjson

from server.admin import AdminError, address_file, asking, is_served
from server.config import Config

ASK_STARTING_S = 5.0
"""Seconds that a server which is starting has for saying so."""


def left_address(config: Config) -> str:
    """Where the server that holds the database listens, as it has left word."""
    try:
        return f" and listens on {orjson.loads(address_file(config).read_bytes())['url']}"
    except (OSError, ValueError):
        return ""


class Running(NamedTuple):
    """A server that is ready: where it listens, and its version where it tells one."""

    url: str
    version: str | None


class Told(NamedTuple):
    """What a server that is not ready says of it; both empty where it is ready, or where none answers so."""

    code: str = ""
    message: str = ""


async def running_server(config: Config) -> Running | None:
    """The server of this database; None where there is none that is ready."""

    def ask() -> Running | None:
        with asking(config) as http:
            del http.headers["authorization"]  # whoever answers there may be another by now
            if http.get("/ready").status_code != 200:
                return None
            try:
                version: str | None = str(orjson.loads(http.get("/version").content)["version"])
            except (ValueError, KeyError, TypeError):
                version = None
            return Running(str(http.base_url).rstrip("/"), version)

    try:
        return await asyncio.to_thread(ask) if is_served(config) else None
    except AdminError:
        return None


def unready(config: Config) -> str | None:
    """Why a server that has left its address in the data folder cannot do its work; None where it can, or
    where none answers."""
    try:
        if is_served(config):
            with asking(config) as http:
                del http.headers["authorization"]
                return _error(http.get("/ready")).message or None
    except AdminError:
        pass
    return None


async def said_at_port(config: Config) -> Told:
    """The error of a server that is not ready and listens where this one would."""
    scheme = "http" if config.ssl_certfile is None else "https"
    url = httpx.URL(scheme=scheme, host=config.host, port=config.port, path="/ready")
    try:  # it is told nothing, so that any certificate will do
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=ASK_STARTING_S) as http:
            return _error(await http.get(url))
    except httpx.HTTPError:
        return Told()


def _error(reply: httpx.Response) -> Told:
    try:
        error = orjson.loads(reply.content)["error"]
        return Told(str(error["code"]), str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return Told()
