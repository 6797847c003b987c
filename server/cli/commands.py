"""The command `antiphon`.

Owns the grammar of the command line and the exit codes: 0 done, 1 a check failed, 2 refused. Refuses to know
what a command does: each imports its own module when it is chosen, so that `--help` stays quick.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from server import __version__

if TYPE_CHECKING:
    from server.config import Loaded

BEGAN = time.monotonic()
REFUSED = 2

COMMANDS = {
    "serve": "run the server",
    "chat": "talk to a running server in the terminal",
    "migrate": "bring the database to this version's schema",
    "config": "show every setting, its value and where it came from",
    "doctor": "check that this machine can serve",
    "bench": "measure an engine in this process, or servers over HTTP",
    "collect-env": "print what a bug report should say of this machine",
    "eval-tiny": "score the shipped model at what it was made for",
    "keys": "create, list and revoke API keys",
    "backup": "copy the database to a file, also while a server runs",
    "export": "write all that an owner can read as JSON lines",
    "purge": "remove everything of an owner",
    "webhooks": "add, list, remove and test webhooks",
    "sealing": "list the keys that seal reasoning, and rotate them",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="antiphon", description="A self-hosted, stateful server for language models."
    )
    parser.add_argument("--version", action="version", version=f"antiphon {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((arg for arg in args if arg in COMMANDS), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            add_help=name not in _PASSED_ON,
        )
        if name == chosen:
            _ARGUMENTS[name](command)
    options, rest = parser.parse_known_args(args)
    if chosen in _PASSED_ON:
        options.rest = rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return _RUN[options.command](options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        return 0


def _refuse(message: object) -> int:
    print(f"antiphon: {message}", file=sys.stderr)
    return REFUSED


# ------------------------------------------------------------------------------------------------------------
# Settings as flags


def _add_settings(parser: argparse.ArgumentParser, only: Sequence[str] = ()) -> None:
    from server.config import settings

    group = parser.add_argument_group("settings")
    for row in settings():
        if only and row.name not in only:
            continue
        unit = f" [{row.unit}]" if row.unit else ""
        default = "" if row.default == "-" else f" (default {row.default})"
        group.add_argument(
            row.flag,
            dest=row.name,
            action="append" if row.repeatable else "store",
            nargs="?" if row.switch else None,
            const="true" if row.switch else None,
            default=None,
            choices=row.choices or None,
            metavar=None if row.choices else (row.unit or row.name.rpartition("_")[2]).upper(),
            help=f"{row.help}{unit}{default}".replace("%", "%%"),
        )


def _load(options: argparse.Namespace) -> Loaded | int:
    """The configuration, or the exit code of a refusal."""
    from server.config import Config, ConfigError, load

    try:
        return load({name: getattr(options, name, None) for name in Config.model_fields})
    except ConfigError as exc:
        return _refuse(exc)


# ------------------------------------------------------------------------------------------------------------
# Commands


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    _add_settings(parser)
    parser.add_argument(
        "--workers", type=int, default=1, help="only 1: the engine lives in the server's process"
    )


def _serve(options: argparse.Namespace) -> int:
    loaded = _load(options)
    if isinstance(loaded, int):
        return loaded
    if options.workers != 1:
        return _refuse("--workers: one process serves, because the engine and its KV cache live in it")
    from server.config import Config, load
    from server.process import serve, set_up_logging

    set_up_logging(loaded.config.log_level)

    def reread() -> Config:
        return load({name: getattr(options, name, None) for name in Config.model_fields}).config

    code = serve(loaded.config, began=BEGAN, reread=reread)
    # Everything is closed and on the disk by now. A thread that still loads a model would make the
    # interpreter's own end abort the process from inside torch.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _config(options: argparse.Namespace) -> int:
    loaded = _load(options)
    if isinstance(loaded, int):
        return loaded
    from server.config import settings, shown

    rows = [
        (row.name, shown(getattr(loaded.config, row.name)), row.unit, loaded.sources[row.name], row.env)
        for row in settings()
    ]
    head = ("SETTING", "VALUE", "UNIT", "FROM", "VARIABLE")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(4)]
    for row in (head, *rows):
        print("  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4])))
    for name in loaded.strangers:
        print(f"antiphon: {name} is in the environment but no setting", file=sys.stderr)
    return 0


def _storage_arguments(parser: argparse.ArgumentParser) -> None:
    _add_settings(parser, only=("data", "db"))


def _migrate(options: argparse.Namespace) -> int:
    loaded = _load(options)
    if isinstance(loaded, int):
        return loaded
    import asyncio

    from server.config import shown
    from storage import StorageError, open_storage

    async def run() -> None:
        storage = await open_storage(loaded.config.db, runner="migrate")
        await storage.close()

    try:
        asyncio.run(run())
    except (StorageError, ValueError) as exc:
        return _refuse(exc)
    print(f"{shown(loaded.config.db)} has this version's schema")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    loaded = _load(options)
    if isinstance(loaded, int):
        return loaded
    from server.cli.doctor import examine

    return examine(loaded.config)


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    from server.bench import add_arguments

    for verb in add_arguments(parser):
        _add_settings(verb)


def _bench(options: argparse.Namespace) -> int:
    from server.bench import run

    if options.verb not in ("latency", "throughput"):
        return run(options, None)
    loaded = _load(options)
    return loaded if isinstance(loaded, int) else run(options, loaded.config)


def _collect_env(options: argparse.Namespace) -> int:
    loaded = _load(options)
    if isinstance(loaded, int):
        return loaded
    from server.environment import describe

    for line in describe(loaded):
        print(line)
    return 0


def _eval_tiny(options: argparse.Namespace) -> int:
    import subprocess

    return subprocess.call([sys.executable, "-m", "engine.tiny.evaluate", *options.rest])


def _keys_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="create|list|revoke", required=True)
    create = verbs.add_parser("create", help="make a key and print it, this once")
    create.add_argument("--name", default="", help="what the key is for")
    create.add_argument("--owner", default=None, help="whose rows it may see (default: a new owner)")
    listing = verbs.add_parser("list", help="show all keys, never the keys themselves")
    revoke = verbs.add_parser("revoke", help="end a key")
    revoke.add_argument("id", help="the key's id, as `list` shows it")
    for verb in (create, listing, revoke):
        _storage_arguments(verb)


def _keys(options: argparse.Namespace) -> int:
    loaded = _load(options)
    if isinstance(loaded, int):
        return loaded
    from server.admin import keys

    return _print(keys.run(loaded.config, options))


def _webhooks_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="add|list|remove|test", required=True)
    add = verbs.add_parser("add", help="add an endpoint and print its signing secret, this once")
    add.add_argument("url", help="where notices are sent: https://..., or http:// on this machine")
    add.add_argument(
        "--owner",
        default="local",
        help="whose responses it is told of, as `antiphon keys list` shows it (default: local, the owner on "
        "a server without keys)",
    )
    add.add_argument(
        "--event",
        action="append",
        default=[],
        help="an event that it wants, such as response.failed (repeatable; default: all)",
    )
    add.add_argument("--allow-http", action="store_true", help="let a http:// URL lead to another machine")
    listing = verbs.add_parser("list", help="show all endpoints, never their secrets")
    remove = verbs.add_parser("remove", help="forget an endpoint and what it was still to be told")
    test = verbs.add_parser("test", help="send an endpoint a sample notice, once")
    for verb in (remove, test):
        verb.add_argument("id", help="the endpoint's id, as `list` shows it")
    for verb in (add, listing, remove, test):
        _storage_arguments(verb)


def _webhooks(options: argparse.Namespace) -> int:
    loaded = _load(options)
    if isinstance(loaded, int):
        return loaded
    from server.admin import webhooks

    return _print(webhooks.run(loaded.config, options))


def _sealing_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="list|rotate", required=True)
    listing = verbs.add_parser("list", help="show all keys, never the keys themselves")
    rotate = verbs.add_parser("rotate", help="have a new key seal from now on; the old ones still open")
    for verb in (listing, rotate):
        _storage_arguments(verb)


def _sealing(options: argparse.Namespace) -> int:
    loaded = _load(options)
    if isinstance(loaded, int):
        return loaded
    from server.admin import sealing_keys

    return _print(sealing_keys.run(loaded.config, options))


def _backup_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="where the copy goes; it must not exist yet")
    _storage_arguments(parser)


def _backup(options: argparse.Namespace) -> int:
    loaded = _load(options)
    if isinstance(loaded, int):
        return loaded
    from server.admin import run

    return _print(run(loaded.config, options))


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--owner", required=True, help="whose, as `antiphon keys list` shows it")
    _storage_arguments(parser)


def _export(options: argparse.Namespace) -> int:
    loaded = _load(options)
    if isinstance(loaded, int):
        return loaded
    from server.admin import AdminError, tenants

    try:
        tenants.export(loaded.config, options.owner, sys.stdout.buffer)
    except AdminError as exc:
        return _refuse(exc)
    return 0


def _purge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--owner", required=True, help="whose, as `antiphon keys list` shows it")
    parser.add_argument("--keys", action="store_true", help="revoke the owner's keys, too")
    parser.add_argument("--yes", action="store_true", help="do it: nothing of it comes back")
    _storage_arguments(parser)


def _purge(options: argparse.Namespace) -> int:
    loaded = _load(options)
    if isinstance(loaded, int):
        return loaded
    from server.admin import tenants

    return _print(tenants.run_purge(loaded.config, options))


def _print(lines: Iterable[str]) -> int:
    """Print what an operator's command has to say."""
    from server.admin import AdminError

    try:
        for line in lines:
            print(line)
    except AdminError as exc:
        return _refuse(exc)
    return 0


def _chat_arguments(parser: argparse.ArgumentParser) -> None:
    from server.cli.chat import add_arguments

    add_arguments(parser)


def _chat(options: argparse.Namespace) -> int:
    from server.cli.chat import chat

    return chat(options)


_ARGUMENTS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "serve": _serve_arguments,
    "chat": _chat_arguments,
    "migrate": _storage_arguments,
    "config": _add_settings,
    "doctor": _add_settings,
    "bench": _bench_arguments,
    "collect-env": _add_settings,
    "eval-tiny": lambda parser: None,
    "keys": _keys_arguments,
    "backup": _backup_arguments,
    "export": _export_arguments,
    "purge": _purge_arguments,
    "webhooks": _webhooks_arguments,
    "sealing": _sealing_arguments,
}
_PASSED_ON = frozenset({"eval-tiny"})
"""Commands whose arguments are another program's, `--help` included."""
_RUN: dict[str, Callable[[Any], int]] = {
    "serve": _serve,
    "chat": _chat,
    "migrate": _migrate,
    "config": _config,
    "doctor": _doctor,
    "bench": _bench,
    "collect-env": _collect_env,
    "eval-tiny": _eval_tiny,
    "keys": _keys,
    "backup": _backup,
    "export": _export,
    "purge": _purge,
    "webhooks": _webhooks,
    "sealing": _sealing,
}
