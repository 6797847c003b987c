"""`antiphon prompts`: the prompt templates of a running server, over its public API."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson

from server.admin import Columns, table
from server.cli.connection import (
    ChatError,
    add_server_arguments,
    read_json,
    server_client,
    trouble,
)
from server.cli.encodings import as_text
from server.cli.exit_codes import FAILED, REFUSED

PATH = "/v1/prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verbs of the command, and their flags."""
    verbs = parser.add_subparsers(dest="verb", metavar="create|list|show|update|delete", required=True)
    create = verbs.add_parser("create", help="store a template as a new prompt and print its id")
    listing = verbs.add_parser("list", help="show all prompts, newest first")
    listing.add_argument("--json", action="store_true", help="print a JSON array instead of a table")
    show = verbs.add_parser("show", help="print one version of a prompt as JSON")
    update = verbs.add_parser("update", help="add a version, choose the default one, or change the name")
    delete = verbs.add_parser("delete", help="remove a prompt, or one version of it")
    for verb in (create, update):
        source = verb.add_mutually_exclusive_group(required=verb is create)
        source.add_argument(
            "--instructions", type=as_text, help="the template: a text in which {{name}} is a variable"
        )
        source.add_argument(
            "--template", metavar="FILE", help="the template: a file of JSON, or - for standard input"
        )
        verb.add_argument("--name", type=as_text, default=None, help="what people call it")
    for verb in (show, update, delete):
        verb.add_argument("id", help="the prompt's id, as `antiphon prompts list` shows it")
    for verb in (show, delete):
        which = "the default one" if verb is show else "all of them"
        verb.add_argument("--version", default=None, metavar="N", help=f"which version (default: {which})")
    update.add_argument(
        "--default-version", default=None, metavar="N", help="what requests get that name no version"
    )
    for verb in (create, listing, show, update, delete):
        add_server_arguments(verb)


def run(options: argparse.Namespace) -> int:
    """Carry out one verb; returns the exit code."""
    try:
        with server_client(options) as http:
            for line in _VERBS[options.verb](http, options):
                print(line)
    except ValueError as exc:
        print(f"antiphon: {exc}", file=sys.stderr)
        return REFUSED
    except BrokenPipeError:  # of who reads our output, which is no file of a template
        raise
    except OSError as exc:
        print(f"antiphon: {options.template}: {exc.strerror or exc}", file=sys.stderr)
        return REFUSED
    except (httpx.HTTPError, ChatError) as exc:
        print(f"antiphon: {trouble(exc, options.url)}", file=sys.stderr)
        return FAILED
    return 0


def _create(http: httpx.Client, options: argparse.Namespace) -> Iterator[str]:
    made = read_json(http.post(PATH, json=_said(options)))
    yield made["id"]


def _list(http: httpx.Client, options: argparse.Namespace) -> Iterator[str]:
    prompts = list(_all(http))
    if options.json:
        yield orjson.dumps(prompts, option=orjson.OPT_INDENT_2).decode()
        return
    yield from table(COLUMNS, prompts)


def _all(http: httpx.Client) -> Iterator[dict[str, Any]]:
    after: dict[str, str] = {}
    while True:
        page = read_json(http.get(PATH, params={"limit": "100", **after}))
        yield from page["data"]
        if not page["has_more"]:
            return
        after = {"after": page["last_id"]}


def _show(http: httpx.Client, options: argparse.Namespace) -> Iterator[str]:
    version = options.version or read_json(http.get(f"{PATH}/{options.id}"))["default_version"]
    shown = read_json(http.get(f"{PATH}/{options.id}/versions/{version}"))
    yield orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode()


def _update(http: httpx.Client, options: argparse.Namespace) -> Iterator[str]:
    said = _said(options)
    if options.default_version is not None:
        said["default_version"] = options.default_version
    changed = read_json(http.post(f"{PATH}/{options.id}", json=said))
    yield f"latest version {changed['latest_version']}, default {changed['default_version']}"


def _delete(http: httpx.Client, options: argparse.Namespace) -> Iterator[str]:
    version = "" if options.version is None else f"/versions/{options.version}"
    read_json(http.delete(f"{PATH}/{options.id}{version}"))
    what = f"prompt {options.id}" if not version else f"version {options.version} of prompt {options.id}"
    yield f"{what} is removed"


def _said(options: argparse.Namespace) -> dict[str, Any]:
    """What the flags say of a prompt. Raises OSError for a file that cannot be read, ValueError for one that
    is no JSON."""
    said: dict[str, Any] = {}
    if options.name is not None:
        said["name"] = options.name
    if options.instructions is not None:
        said["template"] = {"instructions": options.instructions}
    elif options.template is not None:
        file = options.template
        written = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        try:
            said["template"] = orjson.loads(written)
        except orjson.JSONDecodeError as exc:
            raise ValueError(f"{file} is no JSON: {exc}") from None
    return said


_VERBS = {"create": _create, "list": _list, "show": _show, "update": _update, "delete": _delete}

COLUMNS: Columns = {
    "ID": lambda prompt: prompt["id"],
    "DEFAULT": lambda prompt: str(prompt["default_version"]),
    "LATEST": lambda prompt: str(prompt["latest_version"]),
    "NAME": lambda prompt: prompt["name"] or "",
}
