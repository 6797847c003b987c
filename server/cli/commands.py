"""The command `antiphon`: its commands as one table, their flags, and the exit codes.

A command ends with 0 when it is done, with 1 when a check failed (an owner that does not exist, a turn of a
piped chat that the server refused) and with 2 when it was refused. Each command
imports the modules that do its work only when it is chosen, so that `--help` stays quick.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from server import __version__
from server.cli.encodings import as_text, replace_what_has_no_character
from server.cli.exit_codes import FAILED, REFUSED
from server.cli.hangups import hung_up

if TYPE_CHECKING:
    from server.config import Loaded

BEGAN = time.monotonic()


class Refusal(Exception):
    """A command cannot do what it was asked; the message says why, on one line. code: the exit code."""

    def __init__(self, why: object, code: int = REFUSED) -> None:
        super().__init__(why)
        self.code = code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    replace_what_has_no_character()
    args = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(
        prog="antiphon",
        description="A self-hosted, stateful server for language models.",
        epilog="`antiphon COMMAND --help` explains a command. To begin: antiphon serve, and in another "
        "terminal: antiphon chat",
    )
    parser.add_argument("--version", action="version", version=f"antiphon {__version__}")
    verbs = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)
    chosen = next((arg for arg in args if arg in COMMANDS), None)
    if args and chosen is None and not args[0].startswith("-"):
        parser.error(_no_command(args[0]))
    for name, command in COMMANDS.items():
        command_parser = verbs.add_parser(
            name,
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=not command.passes_on,
        )
        if name == chosen:
            command.add_arguments(command_parser)
    if chosen is not None:
        args = _with_verb(args, chosen)
    options, rest = parser.parse_known_args(args)
    command = COMMANDS[options.command]
    if command.passes_on:
        options.rest = rest
    elif rest:
        command_parser = verbs.choices[options.command]
        command_parser.error(_unrecognized(rest, _flags_of(command_parser, options)))
    try:
        return command.run(options)
    except Refusal as refusal:
        print(f"antiphon: {refusal}", file=sys.stderr)
        return refusal.code


ALIKE = 0.8
"""How like a flag of ours one must be to be a misspelt one: names of settings share many words."""


def _with_verb(args: Sequence[str], name: str) -> list[str]:
    """The arguments with the verb that a command has where none is given."""
    verb, begin = COMMANDS[name].verb, args.index(name) + 1
    given = args[begin : begin + 1]
    if verb is None or (given and not given[0].startswith("-")) or given in (["-h"], ["--help"]):
        return list(args)
    return [*args[:begin], verb, *args[begin:]]


def _no_command(word: str) -> str:
    from server.settings import nearest

    meant = nearest(word, COMMANDS)
    return f"there is no command {word!r}" + (f"; did you mean {meant!r}?" if meant else "")


def _flags_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Iterator[str]:
    """The flags of a command, and of the verb of it that was chosen."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from _flags_of(action.choices[getattr(options, action.dest)], options)
        yield from action.option_strings


def _unrecognized(arguments: Sequence[str], flags: Iterable[str]) -> str:
    """What is said of arguments that a command does not have: which they are, what those are called here that
    other servers have, and which flags of it are spelt nearly like the rest."""
    from server.settings import counterpart, nearest

    known = [flag for flag in flags if flag.startswith("--")]
    given = [argument.partition("=")[0] for argument in arguments if argument.startswith("-")]
    hints = []
    for flag in dict.fromkeys(given):
        here = counterpart(flag)
        if here is not None and any(ours in here for ours in known):
            hints.append(f"; instead of {flag}: {here}")
        elif (meant := nearest(flag, known, cutoff=ALIKE)) is not None:
            hints.append(f"; did you mean {meant}?")
    return f"unrecognized arguments: {' '.join(arguments)}{''.join(dict.fromkeys(hints))}"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: the usage of a command with all settings would bury them."""

    def error(self, message: str) -> NoReturn:
        """End the process with the message and where to read more."""
        self.exit(REFUSED, f"antiphon: {message} (see `{self.prog} --help`)\n")


# ------------------------------------------------------------------------------------------------------------
# Settings as flags


class _Once(argparse.Action):
    """Keeps the value of a flag that takes one, and refuses a second one instead of dropping the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest, None) is not None:
            if self.dest == "model":
                parser.error(
                    f"{option_string} is given more than once: several models are listed in models.toml, a "
                    "table [[models]] each, in the data folder or where --models says"
                )
            parser.error(f"{option_string} is given more than once, and takes one value")
        setattr(namespace, self.dest, values)


_ALSO = (
    "Each setting may also be an environment variable (--db is ANTIPHON_DB) or a line of antiphon.toml (db)."
)


def _add_settings(parser: argparse.ArgumentParser, only: Sequence[str] = ()) -> None:
    from server.config import settings

    if not only:
        parser.usage = f"{parser.prog} [FLAGS]"
    rows = [row for row in settings() if not only or row.name in only]
    title = ""
    for row in rows:
        wanted = "settings" if only else f"settings: {row.subject}"
        if wanted != title:
            group = parser.add_argument_group(wanted, None if title else _ALSO)
            title = wanted
        unit = {"": "", "bytes": " [bytes; 64K, 2M, 4G, 1T]"}.get(row.unit, f" [{row.unit}]")
        default = "" if row.default == "-" else f"default {row.default}"
        known_as = f"or {row.env}" if only else ""
        besides = "; ".join(filter(None, (known_as, default)))
        group.add_argument(
            row.flag,
            dest=row.name,
            action="append" if row.repeatable else _Once,
            nargs="?" if row.switch else None,
            const="true" if row.switch else None,
            default=None,
            choices=row.choices or None,
            metavar=None if row.choices else (row.unit or row.name.rpartition("_")[2]).upper(),
            help=f"{row.help}{unit}{f' ({besides})' if besides else ''}".replace("%", "%%"),
        )


def _add_storage_settings(parser: argparse.ArgumentParser) -> None:
    _add_settings(parser, only=("data", "db"))


def _load(options: argparse.Namespace, *, for_engine: bool = False) -> Loaded:
    """The configuration that the flags, the environment and the file make. Raises Refusal.

    for_engine: whether the command has to do with the engine, so that settings without effect on it matter.
    """
    from server.config import Config, ConfigError, load

    try:
        loaded = load({name: getattr(options, name, None) for name in Config.model_fields})
        warnings = [*loaded.warnings(), *(loaded.without_effect() if for_engine else ())]
    except ConfigError as exc:
        raise Refusal(exc) from None
    for warning in warnings:
        print(f"antiphon: {warning}", file=sys.stderr)
    return loaded


def _print(lines: Iterator[str]) -> int:
    """Print what an operator's command has to say. Raises Refusal. A line that cannot be written is an
    OSError also where it was said: that may have something to undo."""
    with _refusing():
        for line in lines:
            try:
                print(line, flush=True)
            except OSError as error:
                if isinstance(lines, Generator):
                    lines.throw(error)
                raise
    return 0


@contextmanager
def _refusing() -> Iterator[None]:
    """Turns an AdminError into a Refusal; an owner that does not exist is a check that failed."""
    from server.admin import AdminError, UnknownOwner

    try:
        yield
    except AdminError as exc:
        raise Refusal(exc, FAILED if isinstance(exc, UnknownOwner) else REFUSED) from None


# ------------------------------------------------------------------------------------------------------------
# Running and looking


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_settings(parser)
    parser.usage = f"{parser.prog} [MODEL] [FLAGS]"
    parser.add_argument(
        "MODEL", nargs="?", help="folder or Hugging Face id of a decoder model, the same as --model"
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="only 1: see --api-server-count for more processes"
    )


def _serve(options: argparse.Namespace) -> int:
    if options.MODEL is not None:
        if options.model not in (None, options.MODEL):
            raise Refusal(f"MODEL is {options.MODEL!r}, and --model {options.model!r}: give one of them")
        options.model = options.MODEL
    loaded = _load(options, for_engine=True)
    if options.workers != 1:
        raise Refusal(
            "--workers: each would have an engine and a KV cache of its own; for several processes before "
            "one engine give --api-server-count"
        )
    from server.config import Config, rereading
    from server.process import run_server, set_up_logging, supervise

    set_up_logging(loaded.config.log_level, loaded.config.log_format)
    if loaded.config.db_file is not None and loaded.sources["db"] != "default":
        logging.getLogger("antiphon").info("the database is the file %s", loaded.config.db_file)

    flags = {name: getattr(options, name, None) for name in Config.model_fields}

    reread = rereading(flags, loaded)
    if loaded.config.has_several_processes:
        code = supervise(loaded.config, flags, began=BEGAN, reread=reread)
    else:
        code = run_server(loaded.config, began=BEGAN, reread=reread, hung_up=hung_up)
    # Everything is closed and on the disk by now. A thread that still loads a model would make the
    # interpreter's own end abort the process from inside torch.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    from server.cli.chat import add_arguments

    add_arguments(parser)


def _chat(options: argparse.Namespace) -> int:
    from server.cli.chat import chat

    return chat(options)


def _add_complete(parser: argparse.ArgumentParser) -> None:
    from server.cli.complete import add_arguments

    add_arguments(parser)


def _complete(options: argparse.Namespace) -> int:
    from server.cli.complete import complete

    return complete(options)


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    from server.cli.prompts import add_arguments

    add_arguments(parser)


def _prompts(options: argparse.Namespace) -> int:
    from server.cli.prompts import run

    return run(options)


def _migrate(options: argparse.Namespace) -> int:
    loaded = _load(options)
    import asyncio

    from server.config import shown
    from storage import StorageError, open_storage

    async def run() -> None:
        storage = await open_storage(loaded.config.db, runner="migrate")
        await storage.close()

    from server.progress import Progress

    try:
        with Progress("bringing the database to this version's schema"):
            asyncio.run(run())
    except (StorageError, ValueError) as exc:
        raise Refusal(exc) from None
    print(f"{shown(loaded.config.db)} has this version's schema")
    return 0


def _config(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from server.config import settings, shown

    rows = [
        (row.name, shown(getattr(loaded.config, row.name)), row.unit, loaded.sources[row.name], row.env)
        for row in settings()
    ]
    head = ("SETTING", "VALUE", "UNIT", "FROM", "VARIABLE")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(4)]
    for row in (head, *rows):
        print("  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4])))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    loaded = _load(options, for_engine=True)
    from server.cli.doctor import examine

    return examine(loaded.config)


def _add_sandbox(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="install", required=True)
    install = verbs.add_parser("install", help="make it, or add packages to it, by pip")
    install.add_argument(
        "--package",
        action="append",
        metavar="NAME",
        help="in the place of numpy, pandas, matplotlib (repeatable)",
    )
    _add_storage_settings(install)


def _sandbox(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from server.cli import sandbox

    return _print(sandbox.run(loaded.config, options))


def _add_bench(parser: argparse.ArgumentParser) -> None:
    from server.bench import add_arguments

    for verb in add_arguments(parser):
        _add_settings(verb)


def _bench(options: argparse.Namespace) -> int:
    from server.bench import run

    if options.verb not in ("latency", "throughput"):
        return run(options, None)
    return run(options, _load(options, for_engine=True).config)


def _collect_env(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from server.environment import describe

    for line in describe(loaded):
        print(line)
    return 0


def _eval_tiny(options: argparse.Namespace) -> int:
    import subprocess

    return subprocess.call([sys.executable, "-m", "engine.tiny.evaluate", *options.rest])


# ------------------------------------------------------------------------------------------------------------
# The operator's commands


def _add_listing(verbs: Any, help: str) -> argparse.ArgumentParser:
    """The verb `list`, which every kind of thing that an operator keeps has."""
    listing: argparse.ArgumentParser = verbs.add_parser("list", help=help)
    listing.add_argument("--json", action="store_true", help="print a JSON array instead of a table")
    return listing


def _add_limit(parser: argparse.ArgumentParser, examples: str) -> None:
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help=f"what may be used, {examples} (repeatable, or with commas; none ends a limit; "
        "concurrent_... hold at each server by itself)",
    )


def _add_keys(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="create|list|rotate|update|revoke", required=True)
    create = verbs.add_parser("create", help="make a key and print it, this once")
    create.add_argument("--name", type=as_text, default="", help="what the key is for")
    create.add_argument(
        "--owner", default=None, help="whose data it may see: an id or a name (default: a new owner)"
    )
    listing = _add_listing(verbs, "show all keys, never the keys themselves")
    listing.add_argument("--owner", help="only keys of this owner, by id or name (default: of all owners)")
    rotate = verbs.add_parser("rotate", help="make a key's successor and print it; both live for a while")
    rotate.add_argument(
        "--grace", default="1d", help="how long the old key is still accepted: 7d, 12h, 0s (default: 1d)"
    )
    update = verbs.add_parser("update", help="change a key's name, scopes, limits or end")
    update.add_argument("--name", type=as_text, default=None, help="what the key is for")
    revoke = verbs.add_parser("revoke", help="end a key at once")
    for verb in (create, update):
        verb.add_argument(
            "--scope",
            action="append",
            default=[],
            help="what it may do, such as responses, files.read, model:NAME, tool:function, admin "
            "(repeatable, or with commas; default: all, which is everything but admin)",
        )
        _add_limit(verb, "such as requests_per_minute=60 or MODEL:tokens_per_day=100000")
    for verb, left_out in ((create, "never"), (rotate, "as long as the old key"), (update, "as it is")):
        ends = f"when it ends: 90d, 12h, 2027-01-31 (UTC), never (default: {left_out})"
        verb.add_argument("--expires", default=None, help=ends)
    for verb in (rotate, update, revoke):
        verb.add_argument("id", help="the key's id, as `antiphon keys list` shows it")
    for verb in (create, listing, rotate, update, revoke):
        _add_storage_settings(verb)


def _keys(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from server.admin import keys

    return _print(keys.run(loaded.config, options))


def _add_owners(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="create|list|rename|archive|limits", required=True)
    create = verbs.add_parser(
        "create", help="make an owner and print its id, for `antiphon keys create --owner`"
    )
    listing = _add_listing(verbs, "show all owners, archived ones too")
    rename = verbs.add_parser("rename", help="give an owner another name; its id stays")
    archive = verbs.add_parser("archive", help="revoke all keys of an owner for good; its data stays")
    limits = verbs.add_parser("limits", help="show what an owner may use, or change it")
    _add_limit(limits, "such as tokens_per_minute=90000 or stored_bytes=none")
    limits.add_argument("--json", action="store_true", help="print a JSON object instead of lines")
    for verb in (rename, archive, limits):
        verb.add_argument("id", help="the owner's id or name, as `antiphon owners list` shows it")
    for verb in (create, rename):
        verb.add_argument("name", type=as_text, help="what people call it")
    for verb in (create, listing, rename, archive, limits):
        _add_storage_settings(verb)


def _owners(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from server.admin import projects

    return _print(projects.run(loaded.config, options))


def _add_tiers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id", help="an owner's id or name, or a key's id; without a flag, what is set is shown"
    )
    parser.add_argument(
        "--weight", help="an owner's share of the tokens, against those of others (default: 1)"
    )
    parser.add_argument(
        "--service-tiers",
        metavar="TIERS",
        help="those that may be used, with commas between; the first is used where a request names none",
    )
    parser.add_argument(
        "--max-priority",
        metavar="N",
        help="the most urgent number that may be asked for, that is, the lowest",
    )
    _add_storage_settings(parser)


def _tiers(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from server.admin import tiers

    return _print(tiers.run(loaded.config, options))


def _add_audit(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="list|verify", required=True)
    listing = _add_listing(verbs, "show the latest entries, the newest last")
    listing.add_argument(
        "--limit", type=int, choices=range(1, 101), default=20, metavar="N", help="how many (default: 20)"
    )
    for flag, help in (
        ("--type", "only entries of this type, such as api_key.created (repeatable)"),
        ("--actor", "only what this key, or `operator`, did (repeatable)"),
        ("--target", "only what was done to the key, owner or webhook of this id (repeatable)"),
        ("--owner", "only what concerns this owner and its keys and webhooks, by id or name (repeatable)"),
    ):
        listing.add_argument(flag, action="append", default=[], help=help)
    verify = verbs.add_parser("verify", help="check that nothing was changed or removed")
    verify.add_argument("--expect", metavar="NUMBER:HASH", help="the last line of an earlier `audit verify`")
    for verb in (listing, verify):
        _add_storage_settings(verb)


def _audit(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from server.admin import audit

    return _print(audit.run(loaded.config, options))


def _add_usage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--owner", help="only what this owner used, by id or name (default: all owners)")
    parser.add_argument(
        "--since", metavar="TIME", help="2026-11-01, 2026-11-01T12:00 (UTC), or 7d ago (default: 30d)"
    )
    parser.add_argument("--until", metavar="TIME", help="the same (default: now)")
    parser.add_argument(
        "--by",
        action="append",
        choices=("owner", "key", "model", "tier", "identifier", "day"),
        help="a sum for each of these (repeatable; default: owner and model)",
    )
    parser.add_argument(
        "--identifier",
        action="append",
        default=[],
        metavar="WHO",
        help="only what this person of the owner used, by the `safety_identifier` or `user` of requests "
        "(repeatable)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_settings(parser, only=("data", "db", "price", "currency"))


def _usage(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from server.admin import usage

    return _print(usage.run(loaded.config, options))


def _add_webhooks(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="add|list|enable|remove|test", required=True)
    add = verbs.add_parser("add", help="add an endpoint and print its signing secret, this once")
    add.add_argument("url", help="where notices are sent: https://..., or http:// on this machine")
    add.add_argument(
        "--owner",
        default="local",
        help="whose responses it is told of: an owner's id or name (default: local, the owner on "
        "a server without keys)",
    )
    add.add_argument(
        "--event",
        action="append",
        default=[],
        help="an event that it wants, such as response.failed (repeatable; default: all)",
    )
    add.add_argument("--allow-http", action="store_true", help="let a http:// URL lead to another machine")
    listing = _add_listing(verbs, "show all endpoints, never their secrets")
    enable = verbs.add_parser("enable", help="tell an endpoint that was gone again what comes and was kept")
    remove = verbs.add_parser("remove", help="forget an endpoint and what it was still to be told")
    test = verbs.add_parser("test", help="send an endpoint a sample notice, once")
    for verb in (enable, remove, test):
        verb.add_argument("id", help="the endpoint's id, as `antiphon webhooks list` shows it")
    for verb in (add, listing, enable, remove, test):
        _add_storage_settings(verb)


def _webhooks(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from server.admin import webhooks

    return _print(webhooks.run(loaded.config, options))


def _add_sealing(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="list|rotate", required=True)
    listing = _add_listing(verbs, "show all keys, never the keys themselves")
    rotate = verbs.add_parser(
        "rotate", help="encrypt with a new key from now on; what old keys encrypted stays readable"
    )
    for verb in (listing, rotate):
        _add_storage_settings(verb)


def _sealing(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from server.admin import sealing_keys

    return _print(sealing_keys.run(loaded.config, options))


def _add_runs(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="list|tail|cancel|fork", required=True)
    listing = _add_listing(
        verbs, "those that are being made, of all owners (what `antiphon runs` alone does)"
    )
    listing.add_argument(
        "--state",
        choices=("queued", "running", "waiting", "unowned"),
        default=None,
        help="only runs in this state; waiting: for outputs of their client's tools, or an approval",
    )
    tail = verbs.add_parser("tail", help="the events of one, to its end")
    tail.add_argument("--json", action="store_true", help="print whole events instead of a line for each")
    cancel = verbs.add_parser("cancel", help="end one")
    cancel.add_argument("--owner", help="whose it is, where several owners have one of this id")
    fork = verbs.add_parser(
        "fork",
        help="make a response that ends where one did, or behind one of its events, and print its id",
    )
    for verb, does in ((tail, "follow"), (fork, "fork")):
        verb.add_argument(
            "--after", type=int, default=-1, metavar="N", help=f"{does} behind the event of this number"
        )
    for verb in (tail, cancel, fork):
        verb.add_argument("id", help="of the run, as `antiphon runs` and the API show it")
    for verb in (listing, tail, cancel, fork):
        _add_storage_settings(verb)


def _runs(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from server.admin import live_runs

    return _print(live_runs.run(loaded.config, options))


def _add_models(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="list|load|unload", required=True)
    listing = _add_listing(verbs, "the models of the file: `antiphon models` alone, too")
    load = verbs.add_parser("load", help="load one ahead of the first request")
    unload = verbs.add_parser("unload", help="unload one; the next request loads it")
    for verb in (load, unload):
        verb.add_argument("name", help="of the model, as `antiphon models` shows it")
    for verb in (listing, load, unload):
        _add_storage_settings(verb)


def _models(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from server.cli import models

    return _print(models.run(loaded.config, options))


def _add_backup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="where the copy goes; it must not exist yet")
    _add_storage_settings(parser)


def _backup(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from server.admin import run

    return _print(run(loaded.config, options))


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--owner", required=True, help="whose data: an owner's id or name")
    _add_storage_settings(parser)


def _export(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from server.admin import tenants

    if sys.stdout is None:
        raise Refusal("the export cannot be written: standard output is closed")
    with _refusing():
        tenants.export(loaded.config, options.owner, sys.stdout.buffer)
    return 0


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what `antiphon export` wrote, or - for standard input")
    parser.add_argument(
        "--owner", default=None, help="whose it is to be, by id or name (default: the owner in the file)"
    )
    parser.add_argument(
        "--check", action="store_true", help="check that the file is whole, and store nothing"
    )
    _add_storage_settings(parser)


def _import(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from server.admin.exports import run

    return _print(run(loaded.config, options))


def _add_purge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--owner", required=True, help="whose data: an owner's id or name")
    parser.add_argument("--keys", action="store_true", help="also revoke the owner's keys")
    parser.add_argument("--yes", action="store_true", help="confirm: nothing that is removed comes back")
    _add_settings(parser, only=("data", "db", "models", "kv_disk_folder"))


def _purge(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from server.admin import tenants

    return _print(tenants.run_purge(loaded.config, options))


# ------------------------------------------------------------------------------------------------------------
# The table


@dataclass(frozen=True, slots=True)
class Command:
    """One command of `antiphon`.

    summary: a phrase that says what it does. run: does it and returns the exit code; raises Refusal.
    examples: lines that its help ends with. passes_on: its arguments, `--help` included, are another
    program's. verb: the one that is meant where none is given.
    """

    summary: str
    run: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None] = _add_settings
    examples: tuple[str, ...] = ()
    passes_on: bool = False
    verb: str | None = None

    @property
    def epilog(self) -> str | None:
        """The end of its help; None where it has no examples."""
        return "\n  ".join(("examples:", *self.examples)) if self.examples else None


COMMANDS = {
    "serve": Command(
        "run the server",
        _serve,
        _add_serve,
        (
            "antiphon serve                                      the shipped model, on http://127.0.0.1:8000",
            "antiphon serve Qwen/Qwen3-0.6B --port 8123          a model of the Hugging Face hub",
            "antiphon serve --model /models/Qwen3-0.6B           a model in a folder",
            "antiphon serve --host 0.0.0.0 --api-key-file keys   for other machines, which need keys",
            "antiphon serve --kv-cache-bytes 4G --log-level debug",
            "antiphon serve --api-server-count 2 --db URL        two server processes before one engine",
        ),
    ),
    "chat": Command(
        "talk to a running server in the terminal",
        _chat,
        _add_chat,
        (
            "antiphon chat                      begin a conversation at http://127.0.0.1:8000",
            "antiphon chat antiphon-tiny        the same with this model",
            "antiphon chat --resume             pick one of the latest, and go on with it",
            "antiphon chat --resume conv_...    go on with a conversation, or after a response",
            "antiphon chat --conversation new   begin one, and print its id",
            "antiphon chat --previous resp_...  go on after a response",
            "antiphon chat --url http://gpu:8000 --model sql --instructions 'Be brief.'",
        ),
    ),
    "complete": Command(
        "have a running server go on from a text, without a conversation",
        _complete,
        _add_complete,
        (
            "antiphon complete antiphon-tiny --prompt 'Once upon a time'",
            "antiphon complete --prompt 'One, two,' --max-tokens 8 --temperature 0",
            "antiphon complete --url http://gpu:8000 --prompt -",
        ),
    ),
    "prompts": Command(
        "create, list, show, change and delete prompt templates",
        _prompts,
        _add_prompts,
        (
            "antiphon prompts create --name greeting --instructions 'Greet {{name}} in {{language}}.'",
            "antiphon prompts update pmpt_... --template template.json --default-version 1",
            "antiphon prompts show pmpt_... --version 2",
        ),
    ),
    "migrate": Command(
        "bring the database to this version's schema",
        _migrate,
        _add_storage_settings,
        ("antiphon migrate", "antiphon migrate --db postgresql+asyncpg://antiphon@db-1/antiphon"),
    ),
    "config": Command(
        "show every setting, its value and where it came from",
        _config,
        examples=("antiphon config", "ANTIPHON_PORT=8123 antiphon config --data /srv/antiphon"),
    ),
    "doctor": Command(
        "check that this machine can serve, and change nothing",
        _doctor,
        examples=("antiphon doctor", "antiphon doctor --model /models/Qwen3-0.6B --port 8123"),
    ),
    "sandbox": Command(
        "make the Python that runs code of models",
        _sandbox,
        _add_sandbox,
        ("antiphon sandbox install", "antiphon sandbox install --package scipy --package pillow"),
    ),
    "bench": Command(
        "measure an engine in this process, or servers over HTTP",
        _bench,
        _add_bench,
        (
            "antiphon bench latency --batch 1,4,16    decoding by the engine in this process",
            "antiphon bench throughput --concurrency 64",
            "antiphon bench serve --url http://127.0.0.1:8000 --concurrency 1,8",
            "antiphon bench serve --compare http://127.0.0.1:8001 --compare-api completions",
        ),
    ),
    "collect-env": Command(
        "print what a bug report should say of this machine",
        _collect_env,
        examples=("antiphon collect-env", "antiphon collect-env --data /srv/antiphon > report.txt"),
    ),
    "eval-tiny": Command(
        "score the shipped model at what it was made for",
        _eval_tiny,
        lambda parser: None,
        (
            "antiphon eval-tiny --count 5                 a quick look",
            "antiphon eval-tiny --skills greet everyday --show 3",
            "antiphon eval-tiny --base-url http://127.0.0.1:8000/v1",
        ),
        passes_on=True,
    ),
    "keys": Command(
        "create, list, rotate, change and revoke API keys",
        _keys,
        _add_keys,
        (
            "antiphon keys create --name laptop       prints the key, this once",
            "antiphon keys create --owner local       for what was made before there were keys",
            "antiphon keys create --owner own_... --scope responses,models --expires 90d",
            "antiphon keys create --scope admin       for the API of administrators",
            "antiphon keys rotate key_... --grace 7d",
            "antiphon keys list --json",
            "antiphon keys revoke key_...",
        ),
    ),
    "owners": Command(
        "create, list, rename and archive owners of data",
        _owners,
        _add_owners,
        (
            "antiphon owners create Sales              prints an id, for: keys create --owner own_...",
            "antiphon owners archive own_...",
        ),
    ),
    "tiers": Command(
        "show and change how requests of owners and keys are served",
        _tiers,
        _add_tiers,
        (
            "antiphon tiers own_... --weight 3",
            "antiphon tiers key_... --service-tiers flex,default --max-priority 0",
            "antiphon tiers key_... --service-tiers none",
        ),
    ),
    "audit": Command(
        "show the audit log, and check that it is whole",
        _audit,
        _add_audit,
        (
            "antiphon audit list --type api_key.created",
            "antiphon audit verify",
            "antiphon audit verify --expect 17:9f86d081...",
        ),
    ),
    "runs": Command(
        "show what is being made; follow, cancel or fork a run",
        _runs,
        _add_runs,
        (
            "antiphon runs",
            "antiphon runs --state waiting",
            "antiphon runs tail resp_...                follow its events, a line each",
            "antiphon runs tail resp_... --after 120 --json",
            "antiphon runs cancel resp_...",
            "antiphon runs fork resp_... --after 120    prints the new response's id",
        ),
        verb="list",
    ),
    "models": Command(
        "show the models of a running server, or load or unload one",
        _models,
        _add_models,
        (
            "antiphon models",
            "antiphon models --data /srv/antiphon   of the server that has this data folder",
            "antiphon models load NAME",
            "antiphon models unload NAME",
        ),
        verb="list",
    ),
    "usage": Command(
        "show what was used, by owner, key, model or day",
        _usage,
        _add_usage,
        (
            "antiphon usage --since 7d --by day",
            "antiphon usage --owner own_... --by key --by model",
            "antiphon usage --since 2026-11-01 --until 2026-12-01 --json",
        ),
    ),
    "backup": Command(
        "copy the database to a file, also while a server runs",
        _backup,
        _add_backup,
        ("antiphon backup /backups/antiphon-monday.db",),
    ),
    "export": Command(
        "write what an owner can read to standard output, as JSON lines",
        _export,
        _add_export,
        ("antiphon export --owner local > local.jsonl",),
    ),
    "import": Command(
        "put back what an export holds, and leave what is there as it is",
        _import,
        _add_import,
        (
            "antiphon import local.jsonl",
            "antiphon import local.jsonl --check",
            "antiphon import ann.jsonl --owner own_... --data /srv/antiphon",
        ),
    ),
    "purge": Command(
        "remove everything of an owner",
        _purge,
        _add_purge,
        ("antiphon purge --owner own_... --keys --yes",),
    ),
    "webhooks": Command(
        "add, list, enable, remove and test webhooks",
        _webhooks,
        _add_webhooks,
        (
            "antiphon webhooks add https://example.org/told --event response.completed",
            "antiphon webhooks list",
            "antiphon webhooks test hook_...",
        ),
    ),
    "sealing": Command(
        "list and rotate the keys that encrypt reasoning",
        _sealing,
        _add_sealing,
        ("antiphon sealing list", "antiphon sealing rotate"),
    ),
}
