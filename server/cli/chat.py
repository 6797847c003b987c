"""`antiphon chat`: a conversation in the terminal, over HTTP like any other client.

Owns what a person sees and types. Refuses to know the server's inside: it speaks the public API only, and
goes on after a cut connection by asking for the events it has not seen.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

import httpx
import orjson

from server.config import masked

TERMINAL_EVENTS = frozenset(f"response.{end}" for end in ("completed", "incomplete", "failed", "cancelled"))
MAX_RESUMES = 8
RETRY_S = 0.25  # before the first resume; doubled for each further one, up to 4 s
DIM, BOLD, RED, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[31m", "\x1b[0m"
HELP = "/new begins anew, /quit ends, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own flags; it talks to a server, so the server's settings are none of its business."""
    url = os.environ.get("ANTIPHON_URL", "http://127.0.0.1:8000")
    parser.add_argument("--url", default=url, help=f"the server (or ANTIPHON_URL; default {masked(url)})")
    parser.add_argument("--api-key", default=os.environ.get("ANTIPHON_CHAT_KEY"), help="or ANTIPHON_CHAT_KEY")
    parser.add_argument("--model", default=None, help="a name from /v1/models (default: the first)")
    parser.add_argument("--instructions", default=None, help="a system message for every turn")
    parser.add_argument(
        "--conversation", default=None, metavar="ID", help="keep turns in this conversation; `new` makes one"
    )
    parser.add_argument("--tools", action="store_true", help="offer the tools that the server runs itself")


def chat(options: argparse.Namespace) -> int:
    """Talk until the user has had enough; 1 when the server cannot be reached."""
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    with httpx.Client(
        base_url=options.url.rstrip("/"), headers=headers, timeout=httpx.Timeout(10, read=60)
    ) as http:
        session = Session(http, options, sys.stdout, colour=sys.stdout.isatty())
        try:
            session.begin()
        except (httpx.HTTPError, ChatError) as exc:
            print(f"antiphon: {masked(options.url)}: {exc}", file=sys.stderr)
            return 1
        return _converse(session)


def _converse(session: Session) -> int:
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing and history for input())

        print(f"{session.model}. {HELP}.")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if line in ("/quit", "/exit"):
            return 0
        try:
            if line == "/new":
                session.begin()
            elif line.startswith("/"):
                print(HELP)
            elif line:
                session.say(line)
        except (httpx.HTTPError, ChatError) as exc:
            print(f"antiphon: {exc}", file=sys.stderr)


class ChatError(Exception):
    """The server said no; the message is its own."""


class Session:
    """One conversation with a server."""

    def __init__(self, http: httpx.Client, options: argparse.Namespace, out: TextIO, *, colour: bool) -> None:
        self._http = http
        self._options = options
        self._out = out
        self._colour = colour
        self._previous: str | None = None
        self._conversation: str | None = None
        self._style = PLAIN
        self.model: str = options.model or ""

    def begin(self) -> None:
        """Forget what was said; find the model, and the conversation if one is to be kept."""
        self._previous = None
        if not self.model:
            self.model = self._json(self._http.get("/v1/models"))["data"][0]["id"]
        wanted = self._options.conversation
        if wanted == "new":
            self._conversation = self._json(self._http.post("/v1/conversations", json={}))["id"]
            self._print(f"conversation {self._conversation}\n", DIM)
        elif wanted:
            self._conversation = self._json(self._http.get(f"/v1/conversations/{wanted}"))["id"]

    def say(self, text: str) -> None:
        """One turn: send, show what comes, remember the response to go on from."""
        body: dict[str, Any] = {"model": self.model, "input": text, "stream": True, "store": True}
        if self._options.instructions:
            body["instructions"] = self._options.instructions
        if self._options.tools:
            body["tools"] = [{"type": "mcp", "server_label": "antiphon", "server_url": "builtin:"}]
        if self._conversation:
            body["conversation"] = self._conversation
        elif self._previous:
            body["previous_response_id"] = self._previous
        response_id = ""
        try:
            for event in self._events(body):
                response_id = response_id or event.get("response", {}).get("id", "")
                self._show(event)
        except KeyboardInterrupt:
            if response_id:
                self._http.post(f"/v1/responses/{response_id}/cancel")
            self._print("\n(stopped)\n", DIM)
        if response_id:
            self._previous = response_id

    # -- events ----------------------------------------------------------------------------------------------

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The turn's events, each once, over as many connections as it takes."""
        response_id, seen = "", -1
        for attempt in range(MAX_RESUMES + 1):
            try:
                if not response_id:
                    stream = self._http.stream("POST", "/v1/responses", json=body)
                else:
                    params = {"stream": "true", "starting_after": str(seen)}
                    stream = self._http.stream("GET", f"/v1/responses/{response_id}", params=params)
                with stream as reply:
                    if reply.status_code != 200:
                        reply.read()
                        self._json(reply)
                    for event in _parse(reply):
                        response_id = response_id or event["response"]["id"]
                        seen = event["sequence_number"]
                        yield event
                        if event["type"] in TERMINAL_EVENTS:
                            return
            except httpx.TransportError:
                if not response_id:
                    raise
            self._print(" (connection lost, resuming) ", DIM)
            time.sleep(min(RETRY_S * 2**attempt, 4.0))
        raise ChatError(f"response {response_id} could not be followed to its end")

    def _show(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "response.output_text.delta" | "response.refusal.delta":
                self._print(event["delta"], PLAIN)
            case "response.reasoning_text.delta" | "response.reasoning_summary_text.delta":
                self._print(event["delta"], DIM)
            case "response.output_item.done":
                self._show_item(event["item"])
            case "response.completed":
                self._print("\n", PLAIN)
            case "response.incomplete":
                self._print(f"\n(incomplete: {event['response']['incomplete_details']['reason']})\n", DIM)
            case "response.failed":
                self._print(f"\n({event['response']['error']['message']})\n", RED)
            case "response.cancelled":
                self._print("\n(cancelled)\n", DIM)

    def _show_item(self, item: dict[str, Any]) -> None:
        if item["type"] == "reasoning":
            self._print("\n", DIM)
        elif item["type"] in ("function_call", "mcp_call"):
            self._print(f"{item['name']}({item['arguments']})", BOLD)
            outcome = _told(item.get("error")) or item.get("output")
            self._print(f" -> {outcome}\n" if outcome is not None else "\n", DIM)

    def _print(self, text: str, style: str) -> None:
        if self._colour and style != self._style:
            text = (PLAIN if style == PLAIN else PLAIN + style) + text
            self._style = style
        self._out.write(text)
        self._out.flush()

    def _json(self, reply: httpx.Response) -> dict[str, Any]:
        try:
            body: dict[str, Any] = orjson.loads(reply.content)
        except ValueError:
            raise ChatError(f"this is no Antiphon: {reply.status_code} without JSON") from None
        if reply.status_code != 200:
            raise ChatError(body.get("error", {}).get("message", f"status {reply.status_code}"))
        return body


def _told(error: dict[str, Any] | None) -> str:
    """What a call's error says."""
    parts = (error or {}).get("content", ())
    return "\n".join(part["text"] for part in parts if part.get("type") == "text")


def _parse(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream; comments and names are skipped, since the data repeats the type."""
    for line in reply.iter_lines():
        if line.startswith("data: "):
            yield orjson.loads(line[6:])
