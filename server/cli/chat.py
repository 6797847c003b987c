"""`antiphon chat`: a conversation in the terminal.

It speaks the public API over HTTP like any other client, and goes on after a cut connection by asking for the
events that it has not seen.
"""

from __future__ import annotations

import argparse
import os
import select
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import httpx
import orjson

from server.config import masked
from storage import TERMINAL_STATUSES

DEFAULT_URL = "http://127.0.0.1:8000"
TERMINAL_EVENTS = frozenset(f"response.{status}" for status in TERMINAL_STATUSES)
MAX_RESUMES = 8
RETRY_S = 0.25  # before the first resume; doubled for each further one, up to 4 s
PASTE_S = 0.02  # the lines of one paste follow each other more closely than a person can type
DIM, BOLD, RED, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[31m", "\x1b[0m"
HELP = "/new begins anew, /quit leaves, Ctrl-C stops an answer, Alt-Enter adds a line"


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own flags; it talks to a server, so the server's settings are none of its business."""
    add_server_arguments(parser)
    parser.add_argument("--model", default=None, help="a name from /v1/models (default: the first)")
    parser.add_argument("--instructions", default=None, help="a system message for every turn")
    history = parser.add_mutually_exclusive_group()
    history.add_argument(
        "--conversation", default=None, metavar="ID", help="keep turns in this conversation; `new` makes one"
    )
    history.add_argument("--previous", default=None, metavar="ID", help="go on after this response")
    parser.add_argument("--tools", action="store_true", help="offer the tools that the server runs itself")


def server_client(options: argparse.Namespace) -> httpx.Client:
    """A client of the server that the flags name. Raises ValueError, with what to do about it, where its URL
    is none."""
    if not options.url.lower().startswith(("http://", "https://")):
        told, rest = masked(options.url), masked(options.url.rpartition("://")[2])
        raise ValueError(f"{told!r} is no URL of a server: give --url http://{rest}")
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        return httpx.Client(base_url=root(options.url), headers=headers, timeout=httpx.Timeout(10, read=60))
    except httpx.InvalidURL as exc:
        raise ValueError(trouble(exc, options.url)) from None


def chat(options: argparse.Namespace) -> int:
    """Talk until the user has had enough.

    1 when the server cannot be reached, or where nobody watches (input is piped) and a turn went wrong.
    """
    try:
        http = server_client(options)
    except ValueError as exc:
        print(f"antiphon: {exc}", file=sys.stderr)
        return 1
    with http:
        session = Session(http, options, sys.stdout, colour=sys.stdout.isatty())
        try:
            session.begin()
        except (httpx.HTTPError, ChatError) as exc:
            print(f"antiphon: {trouble(exc, options.url)}", file=sys.stderr)
            return 1
        interactive = sys.stdin.isatty()
        all_went_well = _converse(session, interactive=interactive)
    return 0 if interactive or all_went_well else 1


def root(url: str) -> str:
    """A server's URL without the path of its API, which every request names."""
    return url.rstrip("/").removesuffix("/v1")


def trouble(error: Exception, url: str) -> str:
    """What went wrong with a server, and what its user can do about it."""
    at = masked(url)
    match error:
        case ChatError():
            return f"{at}: {error}"
        case httpx.ConnectError() if "[SSL" in str(error) and "VERIFY" not in str(error):
            return f"{at}: {error}; does the server speak http:// instead?"
        case httpx.ConnectError() | httpx.ConnectTimeout():
            told = f"no server answers at {at} ({error})"
            return f"{told}: start one with `antiphon serve`, or name another with --url"
        case httpx.TimeoutException():
            return f"the server at {at} did not answer in time; `antiphon serve` prints what holds it up"
        case httpx.TransportError():
            other = "http" if at.startswith("https") else "https"
            return f"the connection to {at} broke ({error}); does the server speak {other} instead?"
    return f"{at}: {error}"


def _converse(session: Session, *, interactive: bool) -> bool:
    """Turn after turn, to the end of the input; whether none was refused and none failed."""
    all_went_well = True
    if interactive:
        print(f"{session.model}. {HELP}.")
    read = _terminal_reader() if interactive else input
    while True:
        try:
            text = read("> " if interactive else "").strip()
        except KeyboardInterrupt:
            print()  # what was typed is dropped, as in a shell
            continue
        except EOFError:
            print()
            break
        if text in ("/quit", "/exit"):
            break
        try:
            if text == "/new":
                session.begin(anew=True)
            elif text.startswith("/") and "\n" not in text:
                print(HELP)
            elif text:
                all_went_well = session.say(text) and all_went_well
        except (httpx.HTTPError, ChatError) as exc:
            print(f"antiphon: {trouble(exc, session.url)}", file=sys.stderr)
            all_went_well = False
    if interactive and (command := session.command_to_return()):
        print(f"To go on: {command}")
    return all_went_well


def _terminal_reader() -> Callable[[str], str]:
    """What reads a turn from a terminal, with line editing and history; pasted lines stay together."""
    try:
        import readline
    except ImportError:
        return _read_together
    if "libedit" in (readline.__doc__ or ""):
        return _read_together
    # A terminal marks what is pasted, and readline then takes its line breaks for text.
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')  # Alt-Enter: a line break, as it is
    return input


def _read_together(prompt: str) -> str:
    """A line, and the lines that came with it at once, which no person can have typed."""
    lines = [input(prompt)]
    while select.select([sys.stdin], [], [], PASTE_S)[0]:
        try:
            lines.append(input())
        except EOFError:
            break
    return "\n".join(lines)


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
        self.url: str = options.url

    def begin(self, *, anew: bool = False) -> None:
        """Find the model, and what is to be gone on from. anew: what was said before is left behind."""
        self._previous = None
        if not self.model:
            self.model = read_json(self._http.get("/v1/models"))["data"][0]["id"]
        conversation, previous = self._options.conversation, self._options.previous
        if conversation == "new" or (conversation and anew):
            self._conversation = read_json(self._http.post("/v1/conversations", json={}))["id"]
            self._print(f"conversation {self._conversation}\n", DIM)
        elif conversation:
            self._conversation = read_json(self._http.get(f"/v1/conversations/{conversation}"))["id"]
        elif previous and not anew:
            self._previous = read_json(self._http.get(f"/v1/responses/{previous}"))["id"]
        self._print("", PLAIN)

    def command_to_return(self) -> str | None:
        """The command line that goes on where this session stands; None where nothing was said."""
        if self._previous is None:
            return None
        words = ["antiphon", "chat"]
        if root(self._options.url) != root(os.environ.get("ANTIPHON_URL", DEFAULT_URL)):
            words += ["--url", masked(self._options.url)]
        for flag in ("model", "instructions"):
            if getattr(self._options, flag):
                words += [f"--{flag}", getattr(self._options, flag)]
        if self._options.tools:
            words.append("--tools")
        if self._conversation:
            words += ["--conversation", self._conversation]
        else:
            words += ["--previous", self._previous]
        return shlex.join(words)

    def say(self, text: str) -> bool:
        """One turn: send, show what comes, remember the response to go on from. False where it failed."""
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
        failed = False
        try:
            for event in self._events(body):
                failed = failed or event["type"] == "response.failed"
                response_id = response_id or event.get("response", {}).get("id", "")
                self._show(event)
        except KeyboardInterrupt:
            if response_id:
                self._http.post(f"/v1/responses/{response_id}/cancel")
            self._print("\n(stopped)\n", DIM)
        finally:
            self._print("", PLAIN)  # the prompt that follows has no colour
            if response_id:
                self._previous = response_id
        return not failed

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
                        read_json(reply)
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
            outcome = _error_text(item.get("error")) or item.get("output")
            self._print(f" -> {outcome}\n" if outcome is not None else "\n", DIM)
        elif item["type"] == "mcp_approval_request":
            self._print(f"{item['name']}({item['arguments']})", BOLD)
            self._print(" -> not made: it needs an approval, which this chat does not give\n", DIM)

    def _print(self, text: str, style: str) -> None:
        """Write text in a style, which stays until another one is written; at once, as it comes."""
        if self._colour and style != self._style:
            text = (PLAIN if style == PLAIN else PLAIN + style) + text
            self._style = style
        self._out.write(text)
        self._out.flush()


def read_json(reply: httpx.Response) -> dict[str, Any]:
    """A server's reply. Raises ChatError for one that is no success."""
    try:
        body: dict[str, Any] = orjson.loads(reply.content)
    except ValueError:
        raise ChatError(
            f"the server does not speak this API: status {reply.status_code} without JSON"
        ) from None
    if reply.status_code != 200:
        told = body.get("error", {}).get("message", f"status {reply.status_code}")
        if reply.status_code == 401:
            told += " Give a key with --api-key or ANTIPHON_CHAT_KEY; `antiphon keys create` makes one."
        raise ChatError(told)
    return body


def _error_text(error: dict[str, Any] | None) -> str:
    """What a call's error says."""
    parts = (error or {}).get("content", ())
    return "\n".join(part["text"] for part in parts if part.get("type") == "text")


def _parse(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream; comments and names are skipped, since the data repeats the type."""
    for line in reply.iter_lines():
        if line.startswith("data: "):
            yield orjson.loads(line[6:])
