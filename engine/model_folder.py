"""Finds a model's folder, by a path or a hub id, and reads its JSON files."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from engine.shipped import SMALL, packaged_folder, shipped_folder
from engine.types import SAMPLING_RANGES, LoadError, SamplingDefaults

log = logging.getLogger("antiphon.engine")

GENERATION_CONFIG = "generation_config.json"

MOST_COUNTED = 2**31 - 1
"""Tokens that a field of that file may count."""

MOST_NEIGHBOURS = 10
"""Folders that are named where the one that was meant is not there."""

MOST_DRAFTS = 32
"""Draft tokens that one step checks at most; a checkpoint that wants more gets as many."""


def known_folder(model: str | Path) -> Path | None:
    """The local folder of a path, or of a shipped model that lies in the package. None for what is to be put
    together or downloaded first: the other shipped model, and a hub id.

    Raises LoadError where it can be nothing of that.
    """
    name = str(model)
    if name == SMALL:
        return None
    if packaged := packaged_folder(name):
        return packaged
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):
        return path.resolve()
    if os.path.exists(path) or name.startswith((".", "/", "~")) or name.count("/") != 1:
        what = "is a file" if os.path.isfile(path) else "is not a folder"
        raise LoadError(f"{name} {what}, nor a hub id of the form owner/name{_instead(path)}")
    return None


def require_file(model: str | Path, file: str | None) -> None:
    """Raises LoadError for a path that leads to no folder with this file in it, or, for None, to no folder;
    what is to be downloaded first may have it."""
    folder = known_folder(model)
    if folder is not None and file is not None and not (folder / file).is_file():
        raise LoadError(f"{folder} has no {file}{_instead(folder)}")


def find_folder(model: str | Path, *, weights: bool = True) -> Path:
    """A local folder for a path, a shipped model's name or a hub id; downloads the last (`weights` False: all
    but those) when it is not cached.

    Raises LoadError when it is neither a folder nor something the hub (or its local cache) has.
    """
    if (here := known_folder(model)) is not None:
        return here
    name, path = str(model), Path(os.path.expanduser(model))
    if shipped := shipped_folder(name):
        return shipped
    from huggingface_hub import snapshot_download

    log.info("finding %s: what is not here yet is downloaded from the hub", name)
    wanted = ["*.json", "*.txt", "*.model", "*.jinja", "tokenizer*", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # whatever the hub or the network raises becomes one line that says so
        reason = str(error).strip().splitlines() or [type(error).__name__]
        near = _instead(path) if os.path.isdir(path.parent) else ""
        raise LoadError(f"cannot fetch {name} from the hub: {reason[0]}{near}") from error


def _instead(path: Path) -> str:
    """What a message ends with that says that `path` is no model: which models lie there, or beside it."""
    whole = path.absolute()
    # No farther up: what lies somewhere on this machine has nothing to do with what was meant.
    where = next((folder for folder in (whole, whole.parent) if os.path.isdir(folder)), whole)
    models = _models_in(where) if where != where.parent else []
    if not models:
        return ""
    more = ", and others" if len(models) > MOST_NEIGHBOURS else ""
    return f"; {where} has the models {', '.join(models[:MOST_NEIGHBOURS])}{more}"


def _models_in(folder: Path) -> list[str]:
    """Names of the folders in this one that hold a model, or hold folders that do, by name."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return []
    found = []
    for name in names:
        try:
            inner = [""] if (folder / name / "config.json").is_file() else _inner_models(folder / name)
        except OSError:
            continue
        found += [f"{name}/{each}".rstrip("/") for each in inner]
        if len(found) > MOST_NEIGHBOURS:
            break
    return found


def _inner_models(folder: Path) -> list[str]:
    """Of a folder as the hub names an owner's: its models."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir())
    return [name for name in names[:100] if (folder / name / "config.json").is_file()]


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """One JSON object of the folder, None when the file is missing; raises LoadError when it is not an
    object.
    """
    path = folder / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise LoadError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise LoadError(f"{path} is not a JSON object")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """config.json; raises LoadError when it is missing."""
    config = read_json(folder, "config.json")
    if config is None:
        raise LoadError(f"{folder} has no config.json{_instead(folder)}")
    return config


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """What generation_config.json says about sampling and its end; `do_sample: false` is temperature 0.

    A value that no request may have is left out, with a warning: every request that leaves the field open
    would be refused for it.
    """
    config = read_json(folder, GENERATION_CONFIG) or {}

    def number(name: str, least: float, most: float) -> float | None:
        value = config.get(name)
        if value is None:
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most:
            return float(value)
        given, path = json.dumps(value)[:40], folder / GENERATION_CONFIG
        log.warning("%s: %s is left out: %s is no number from %s to %s", path, name, given, least, most)
        return None

    def scale(name: str) -> float | None:
        return number(name, *SAMPLING_RANGES[name])

    def count(name: str, least: int) -> int | None:
        value = number(name, least, MOST_COUNTED)
        return None if value is None else int(value)

    top_k, drafts = count("top_k", -1), count("num_assistant_tokens", 0)
    return SamplingDefaults(
        temperature=0.0 if config.get("do_sample") is False else scale("temperature"),
        top_p=scale("top_p"),
        top_k=0 if top_k == -1 else top_k,  # -1 is off elsewhere, 0 here
        min_p=scale("min_p"),
        repetition_penalty=scale("repetition_penalty"),
        max_new_tokens=count("max_new_tokens", 1),
        num_assistant_tokens=None if drafts is None else min(MOST_DRAFTS, drafts),
    )
