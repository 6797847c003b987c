"""`antiphon models`: the models of a running server's file, and how one is loaded and unloaded."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import orjson

from server.admin import AdminError, Columns, answer_of, asking, is_served, table
from server.config import Config

PATH = "/admin/models"


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon models ...`; yields the lines to print. Raises AdminError."""
    if options.verb == "list":
        found = _ask(config, "GET", PATH)["data"]
        if options.json:
            yield orjson.dumps(found, option=orjson.OPT_INDENT_2).decode()
        elif found:
            yield from table(COLUMNS, found)
            yield from (f"{model['id']}: {model['failure']}" for model in found if model["failure"])
        else:
            yield "the server has one model, and no file of models"
        return
    done = _ask(config, "POST", f"{PATH}/{quote(options.name, safe='')}/{options.verb}")
    yield f"{done['id']} is {done['state']}"


def _ask(config: Config, method: str, path: str) -> dict[str, Any]:
    if not is_served(config):
        raise AdminError(
            f"no server runs with {config.data}: start one with `antiphon serve`, or give --data as it has it"
        )
    with asking(config) as http:
        return answer_of(http.request(method, path, timeout=config.model_load_s + 30))


def _memory(model: dict[str, Any]) -> str:
    return "-" if model["memory_bytes"] is None else f"{model['memory_bytes'] / 2**20:.0f} MiB"


COLUMNS: Columns = {
    "MODEL": lambda model: f"{model['id']}{' (default)' if model['default'] else ''}",
    "STATE": lambda model: model["state"],
    "ENGINE": lambda model: f"{model['engine']}{' (child)' if model['child'] else ''}",
    "USE": lambda model: model["use"],
    "MEMORY": _memory,
    "WAITING": lambda model: str(model["waiting"]),
    "ALSO": lambda model: ", ".join(model["aliases"]) or "-",
}
