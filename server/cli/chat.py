"""`antiphon chat`: a conversation in the terminal.

It speaks the public API over HTTP like any other client, and goes on after a cut connection by asking for the
events that it has not seen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import httpx

from server.cli.connection import (
    ChatError,
    add_server_arguments,
    server_client,
    trouble,
)
from server.cli.encodings import as_text
from server.cli.exit_codes import FAILED, REFUSED
from server.cli.resuming import pick
from server.cli.session import Session, call_words
from server.cli.terminal import drop_typed, remember, terminal_reader
from server.masking import one_line

HELP = "/help lists commands, /quit leaves, Ctrl-C stops an answer, Alt-Enter adds a line"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own flags; it talks to a server, so the server's settings are none of its business."""
    parser.add_argument(
        "MODEL", nargs="?", type=as_text, help="a name from /v1/models (default: the server's default)"
    )
    add_server_arguments(parser)
    parser.add_argument("--model", type=as_text, default=None, help="the same as MODEL")
    parser.add_argument("--instructions", type=as_text, default=None, help="a system message for every turn")
    history = parser.add_mutually_exclusive_group()
    history.add_argument(
        "--resume",
        nargs="?",
        const="",
        default=None,
        metavar="ID",
        help="go on with the conversation or the response of this id; without one a list is shown to pick "
        "from, and where nobody can pick the latest is taken",
    )
    history.add_argument(
        "--conversation",
        default=None,
        metavar="ID",
        help="keep turns in this conversation; `new` says which one it makes",
    )
    history.add_argument("--previous", default=None, metavar="ID", help="go on after this response")
    parser.add_argument("--tools", action="store_true", help="offer the tools that the server runs itself")
    parser.add_argument(
        "--approve",
        choices=("ask", "always", "never"),
        default="ask",
        help="what becomes of calls that need an approval (default: ask, where somebody can be asked)",
    )


def chat(options: argparse.Namespace) -> int:
    """Talk until the user has had enough.

    `FAILED` when the server cannot be reached, or where nobody watches (input is piped) and a turn went
    wrong; `REFUSED` where the flags contradict each other.
    """
    interactive = sys.stdin.isatty()
    try:
        _take_model(options)
        http = server_client(options)
    except ValueError as exc:
        print(f"antiphon: {exc}", file=sys.stderr)
        return REFUSED
    with http:
        read = terminal_reader() if interactive else input
        ask = partial(_ask_anew, read) if interactive else None
        approve = Approval(options.approve, ask).of_policy()
        output = None if ask is None else partial(_ask_for_output, ask)
        session = Session(
            http, options, sys.stdout, colour=sys.stdout.isatty(), approve=approve, output=output
        )
        try:
            session.begin()
            if options.resume is not None:
                session.go_on(options.resume or pick(http, sys.stdout, read if interactive else None))
        except (httpx.HTTPError, ChatError) as exc:
            print(f"antiphon: {trouble(exc, options.url)}", file=sys.stderr)
            return FAILED
        except EOFError:
            print()
            return 0
        all_went_well = Chat(session, http, read, interactive=interactive).run()
    return 0 if interactive or all_went_well else FAILED


def _ask_anew(read: Callable[[str], str], question: str) -> str:
    """Ask what was not foreseen: what was typed before is no answer to it. A model has worded some of it."""
    drop_typed()
    return read(one_line(question))


def _ask_for_output(ask: Callable[[str], str], call: dict[str, Any]) -> str:
    """What a person says that a call of the client's gave."""
    return ask(f"What did {call_words(call)} give? ")


def _take_model(options: argparse.Namespace) -> None:
    """Take the argument for the flag. Raises ValueError where both are given and differ."""
    if options.MODEL is not None and options.model not in (None, options.MODEL):
        raise ValueError(f"MODEL is {options.MODEL!r}, and --model {options.model!r}: give one of them")
    options.model = options.MODEL or options.model


class Approval:
    """Who says whether a call may be made that needs an approval."""

    def __init__(self, policy: str, ask: Callable[[str], str] | None) -> None:
        """policy: ask, always or never. ask: reads an answer; None where nobody can be asked."""
        self._policy = policy
        self._ask = ask
        self._always: set[tuple[str, str]] = set()

    def of_policy(self) -> Callable[[dict[str, Any]], tuple[bool, str | None]] | None:
        """What answers; None where such calls are left as they are, because nobody can be asked."""
        if self._policy == "ask":
            return None if self._ask is None else self._asked
        approved = self._policy == "always"
        return lambda request: (approved, None)

    def _asked(self, request: dict[str, Any]) -> tuple[bool, str | None]:
        assert self._ask is not None
        tool = (request["server_label"], request["name"])
        if tool in self._always:
            return True, None
        question = f"May {tool[1]} of {tool[0]} be called? yes, no, always, or why not: "
        answer = self._ask(question).strip()
        if answer.lower() in ("a", "always"):
            self._always.add(tool)
        if answer.lower() in ("y", "yes", "a", "always"):
            return True, None
        return False, None if answer.lower() in ("", "n", "no") else answer


class Chat:
    """Turn after turn, to the end of the input."""

    def __init__(
        self, session: Session, http: httpx.Client, read: Callable[[str], str], *, interactive: bool
    ) -> None:
        self._session = session
        self._http = http
        self._read = read
        self._interactive = interactive
        self._over = False

    def run(self) -> bool:
        """Whether no turn was refused and none failed."""
        all_went_well = True
        if self._interactive:
            print(f"{self._session.model}. {HELP}.")
        while not self._over:
            try:
                text = self._read("> " if self._interactive else "").strip()
            except KeyboardInterrupt:
                print()  # what was typed is dropped, as in a shell
                continue
            except EOFError:
                print()
                break
            try:
                all_went_well = self._take(text) and all_went_well
            except KeyboardInterrupt:  # a second one, while the answer was being stopped
                print()
            except (httpx.HTTPError, ChatError) as exc:
                print(f"antiphon: {trouble(exc, self._session.url)}", file=sys.stderr)
                all_went_well = False
        if self._interactive and (command := self._session.command_to_return()):
            print(f"To go on: {command}")
        return all_went_well

    def _take(self, text: str) -> bool:
        """Do what was typed; False where a turn failed."""
        if not text:
            return True
        if self._interactive:
            remember(text)
        if not text.startswith("/") or "\n" in text:
            return self._session.say(text)
        name, _, rest = text[1:].partition(" ")
        command = COMMANDS.get(ALIASES.get(name, name))
        if command is None:
            print(f"There is no /{name}. {HELP}.")
            return True
        command[1](self, rest.strip())
        return True

    # -- commands --------------------------------------------------------------------------------------------

    def _help(self, rest: str) -> None:
        for name, (words, _) in COMMANDS.items():
            print(f"/{name:14} {words}")

    def _new(self, rest: str) -> None:
        self._session.begin(anew=True)

    def _resume(self, rest: str) -> None:
        try:
            self._session.go_on(
                rest or pick(self._http, sys.stdout, self._read if self._interactive else None)
            )
        except (EOFError, KeyboardInterrupt):
            print()

    def _model(self, rest: str) -> None:
        if rest:
            self._session.take_model(rest)
        for name in () if rest else self._session.models():
            print(f"{'*' if name == self._session.model else ' '} {name}")

    def _tools(self, rest: str) -> None:
        if rest in ("on", "off"):
            self._session.tools = rest == "on"
        print(f"the server's tools are {'offered' if self._session.tools else 'not offered'}; /tools on, off")

    def _instructions(self, rest: str) -> None:
        if rest:
            self._session.instructions = None if rest == "none" else rest
        print(self._session.instructions or "no instructions")

    def _fork(self, rest: str) -> None:
        self._session.fork()

    def _quit(self, rest: str) -> None:
        self._over = True


COMMANDS: Mapping[str, tuple[str, Callable[[Chat, str], None]]] = {
    "help": ("lists these commands", Chat._help),
    "new": ("begins anew; what was said stays stored", Chat._new),
    "resume": ("goes on with another conversation: a list, or an ID", Chat._resume),
    "fork": ("goes on in a copy from here; what was said stays as it is", Chat._fork),
    "model": ("lists the models, or takes the one that is named", Chat._model),
    "tools": ("offers the tools of the server, or no longer: on, off", Chat._tools),
    "instructions": ("shows the system message, or sets it; none ends it", Chat._instructions),
    "quit": ("leaves, as Ctrl-D does, and says how to come back", Chat._quit),
}
"""What can be typed in place of a turn: what it does, in words and in deed."""

ALIASES = {"exit": "quit", "?": "help"}
