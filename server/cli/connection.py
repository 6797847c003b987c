"""How commands reach a running server over its public API: flags, a client, and what went wrong."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import httpx
import orjson

from server.config import bearer, is_loopback
from server.masking import masked, printable

DEFAULT_URL = "http://127.0.0.1:8000"


class ChatError(Exception):
    """The server said no; the message is its own. status: that of its reply, 0 where there was none."""

    def __init__(self, told: str, status: int = 0) -> None:
        super().__init__(told)
        self.status = status


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that name a running server."""
    url = os.environ.get("ANTIPHON_URL", DEFAULT_URL)
    parser.add_argument(
        "--url", default=url, help=f"the server, with or without /v1 (or ANTIPHON_URL; default {masked(url)})"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("ANTIPHON_CHAT_KEY"),
        help="a key of the server (or ANTIPHON_CHAT_KEY)",
    )


def server_client(options: argparse.Namespace) -> httpx.Client:
    """A client of the server that the flags name. Raises ValueError, with what to do about it, where its URL
    is none, and where its key is none, which is not repeated."""
    if not options.url.lower().startswith(("http://", "https://")):
        told, rest = masked(options.url), masked(options.url.rpartition("://")[2])
        raise ValueError(f"{told!r} is no URL of a server: give --url http://{rest}")
    headers = bearer(options.api_key)
    try:
        url = httpx.URL(root(options.url))
        # A transport of its own keeps a client from the proxies that the environment names: the key is for
        # this machine alone.
        direct = httpx.HTTPTransport() if is_loopback(url.host) else None
        timeout = httpx.Timeout(10, read=60)
        return httpx.Client(base_url=url, headers=headers, timeout=timeout, transport=direct)
    except httpx.InvalidURL as exc:
        raise ValueError(trouble(exc, options.url)) from None


def root(url: str) -> str:
    """A server's URL without the path of its API, which every request names."""
    return url.rstrip("/").removesuffix("/v1")


def trouble(error: Exception, url: str) -> str:
    """What went wrong with a server, and what its user can do about it."""
    at = masked(url)
    match error:
        case ChatError():
            return printable(f"{at}: {error}")
        case httpx.ConnectError() if "[SSL" in str(error) and "VERIFY" not in str(error):
            return f"{at}: {error}; does the server speak http:// instead?"
        case httpx.ConnectError() | httpx.ConnectTimeout():
            told = f"no server answers at {at} ({error})"
            return f"{told}: start one with `antiphon serve`, or name another with --url"
        case httpx.TimeoutException():
            return f"the server at {at} did not answer in time; `antiphon serve` prints what holds it up"
        case httpx.LocalProtocolError():  # whose words repeat the header, which may hold a key
            return f"what is asked of {at} cannot be written as HTTP"
        case httpx.TransportError():
            other = "http" if at.startswith("https") else "https"
            return f"the connection to {at} broke ({error}); does the server speak {other} instead?"
    return f"{at}: {error}"


def read_json(reply: httpx.Response) -> dict[str, Any]:
    """A server's reply. Raises ChatError for one that is no success."""
    try:
        body = _object(reply.content)
    except ValueError:
        told = f"the server does not speak this API: status {reply.status_code} without a JSON object"
        raise ChatError(told, reply.status_code) from None
    if reply.status_code != 200:
        told = complaint(body) or f"status {reply.status_code}"
        if reply.status_code == 401:
            told += " Give a key with --api-key or ANTIPHON_CHAT_KEY; `antiphon keys create` makes one."
        raise ChatError(told, reply.status_code)
    return body


def complaint(body: dict[str, Any]) -> str:
    """What a server says is wrong, in the official form or in that of another program; empty for nothing."""
    error = body.get("error") or ""
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def read_events(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream; comments and names are skipped, since the data repeats the type. Raises
    ChatError for data that are no JSON object."""
    for line in _lines(reply):
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            try:
                event = _object(data)
            except ValueError:
                raise ChatError("the server does not speak this API: an event is no JSON object") from None
            yield event


def _lines(reply: httpx.Response) -> Iterator[bytes]:
    """The whole lines of a stream. A line feed ends one, and so does a carriage return, with an empty line
    between the two of a pair; neither stands in JSON. httpx and `str.splitlines` also split at characters
    that do, such as U+2028."""
    held: list[bytes] = []  # of a line that is not whole: an image stands on one of megabytes
    for part in reply.iter_bytes():
        first, *others = part.replace(b"\r", b"\n").split(b"\n")
        held.append(first)
        for start in others:
            yield b"".join(held)
            held = [start]


def _object(text: bytes) -> dict[str, Any]:
    """A JSON object. Raises ValueError for what is none."""
    value = orjson.loads(text)
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value
