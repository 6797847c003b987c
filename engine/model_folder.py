"""Finds a model's folder, by a path or a hub id, and reads its JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.types import LoadError, SamplingDefaults

MOST_DRAFTS = 32
"""Draft tokens that one step checks at most; a checkpoint that wants more gets as many."""


def find_folder(model: str | Path, *, weights: bool = True) -> Path:
    """A local folder for a path or a hub id; downloads the latter (`weights` False: all but those) when it
    is not cached.

    Raises LoadError when it is neither a folder nor something the hub (or its local cache) has.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    name = str(model)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise LoadError(f"{name} is not a folder, nor a hub id of the form owner/name")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.txt", "*.model", "*.jinja", "tokenizer*", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # whatever the hub or the network raises becomes one line that says so
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise LoadError(f"cannot fetch {name} from the hub: {reason[0]}") from error


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
        raise LoadError(f"{folder} has no config.json")
    return config


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """What generation_config.json says about sampling and its end; `do_sample: false` is temperature 0."""
    config = read_json(folder, "generation_config.json") or {}

    def number(name: str) -> float | None:
        value = config.get(name)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    top_k, most, drafts = number("top_k"), number("max_new_tokens"), number("num_assistant_tokens")
    temperature = number("temperature")
    if config.get("do_sample") is False:
        temperature = 0.0
    return SamplingDefaults(
        temperature=temperature,
        top_p=number("top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
        max_new_tokens=int(most) if most is not None and most >= 1 else None,
        num_assistant_tokens=None if drafts is None else max(0, min(MOST_DRAFTS, int(drafts))),
    )
