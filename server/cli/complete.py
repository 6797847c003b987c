"""`antiphon complete`: one text completion by a running server, shown as it comes."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import httpx

from server.cli.connection import (
    ChatError,
    add_server_arguments,
    complaint,
    read_events,
    read_json,
    server_client,
    trouble,
)
from server.cli.encodings import as_text
from server.cli.exit_codes import FAILED, REFUSED
from server.masking import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own flags."""
    parser.add_argument(
        "MODEL", nargs="?", type=as_text, help="a name from /v1/models (default: the server's default)"
    )
    add_server_arguments(parser)
    parser.add_argument(
        "--prompt",
        type=as_text,
        default="-",
        help="the text to go on from, or - for standard input (the default)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=None, metavar="N", help="tokens at most (default: the server's)"
    )
    parser.add_argument(
        "--temperature", type=float, default=None, metavar="T", help="0 takes the likeliest token each time"
    )
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="draws the same tokens again")
    parser.add_argument(
        "--stop",
        action="append",
        type=as_text,
        default=None,
        metavar="TEXT",
        help="a text that ends it (repeatable)",
    )


def complete(options: argparse.Namespace) -> int:
    """Print what follows the prompt; `FAILED` where the server could not be asked, or said no."""
    try:
        http = server_client(options)
    except ValueError as exc:
        print(f"antiphon: {exc}", file=sys.stderr)
        return REFUSED
    body: dict[str, Any] = {
        "model": options.MODEL,
        "prompt": sys.stdin.read() if options.prompt == "-" else options.prompt,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
        "stop": options.stop,
        "stream": True,
    }
    sent = {name: value for name, value in body.items() if value is not None}
    try:
        with http, http.stream("POST", "/v1/completions", json=sent) as reply:
            if reply.status_code != 200:
                reply.read()
                read_json(reply)
            _show(reply)
    except (httpx.HTTPError, ChatError) as exc:
        print(f"\nantiphon: {trouble(exc, options.url)}", file=sys.stderr)
        return FAILED
    return 0


def _show(reply: httpx.Response) -> None:
    """Print the pieces of a stream. Raises ChatError for one that ends too soon."""
    whole = False
    for chunk in read_events(reply):
        if "error" in chunk:
            raise ChatError(complaint(chunk))
        for choice in chunk["choices"]:
            print(printable(choice["text"]), end="", flush=True)
            whole = whole or choice.get("finish_reason") is not None
    if not whole:
        raise ChatError("the stream ended before the completion did")
    print()
