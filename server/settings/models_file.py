"""The models of a server that has several: `models.toml`, or the tables `[[models]]` of `antiphon.toml`."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from server.settings.table import Bytes, Seconds, SettingsTable, read_table

FILE_NAME = "models.toml"
TABLE = "models"

EntryUse = Literal["text", "embedding", "rerank", "classification", "speech"]

_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Canary(SettingsTable):
    """Requests for a model that another one answers. to: its name. percent: of all requests, 0 to 100.
    owners: whose requests go there in any case."""

    to: str = Field(min_length=1)
    percent: float = Field(0.0, ge=0, le=100)
    owners: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> Canary:
        if not self.percent and not self.owners:
            raise ValueError("it leads nobody anywhere: give percent or owners")
        return self


class ModelEntry(SettingsTable):
    """One model of the file.

    name: what requests call it, with the version behind it where it has one. engine, path: as the settings
    `engine` and `model`. use: what it is for. child: whether it runs in a process of its own, by
    default where this server computes it. deprecation_date: from then on it may be gone. default: it answers
    requests that name no model. preload: it is loaded at the start. pin: it is never unloaded to make room,
    nor for being idle. idle_s: seconds without a request after which it is unloaded. memory_bytes: what it
    takes, where that is known better than by its files. fallback: names of models that are asked where this
    one cannot answer, in their order. settings: settings of the server that it has otherwise, by their names.
    """

    name: str = Field(min_length=1, max_length=200)
    engine: Literal["local", "scripted", "upstream"] = "local"
    path: str | None = Field(None, min_length=1)
    use: EntryUse = "text"
    child: bool | None = None
    aliases: tuple[str, ...] = ()
    version: str | None = None
    deprecation_date: date | None = None
    default: bool = False
    preload: bool = False
    pin: bool = False
    idle_s: Seconds | None = Field(None, gt=0)
    memory_bytes: Bytes | None = Field(None, gt=0)
    fallback: tuple[str, ...] = ()
    canary: Canary | None = None
    settings: dict[str, Any] = Field(default_factory=dict, repr=False)

    @field_validator("version")
    @classmethod
    def _plain(cls, value: str | None) -> str | None:
        if value is not None and not _VERSION.fullmatch(value):
            raise ValueError(f"{value!r} is no version: give letters, digits, dots and dashes")
        return value

    @model_validator(mode="after")
    def _whole(self) -> ModelEntry:
        if self.engine != "scripted" and self.path is None:
            read = " with its tokenizer" if self.engine == "upstream" else ""
            raise ValueError(f"which model? Give path, a folder or a Hugging Face id{read}")
        if self.engine == "upstream" and self.child:
            raise ValueError("an upstream computes elsewhere already: child has no effect with it")
        if self.use != "text" and self.engine != "local":
            raise ValueError(f"a model for {self.use} is computed here: engine {self.engine} cannot be one")
        if self.use != "text" and (self.default or self.canary or self.fallback):
            raise ValueError("default, canary and fallback are of models that generate text")
        if self.pin and self.idle_s is not None:
            raise ValueError("a model that is pinned is never idle: give pin or idle_s")
        return self

    @property
    def in_child(self) -> bool:
        """Whether a process of its own computes it."""
        return self.engine == "local" if self.child is None else self.child

    @property
    def id(self) -> str:
        """The one name by which runs remember it."""
        return self.name if self.version is None else f"{self.name}-{self.version}"

    @property
    def _versioned(self) -> tuple[str, ...]:
        """The names that have its version."""
        return () if self.version is None else (self.id, f"{self.name}@{self.version}")

    @property
    def names(self) -> tuple[str, ...]:
        """All names that mean this very model, its id first; a bare name of several versions is none."""
        return (*(self._versioned or (self.id,)), *self.aliases)

    def canary_for(self, name: str | None) -> Canary | None:
        """The canary of requests for this name; None where they name the version that they want."""
        return None if name in self._versioned else self.canary


class ModelsFile(SettingsTable):
    """All entries, in their order."""

    models: tuple[ModelEntry, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> ModelsFile:
        counts = Counter(name for entry in self.models for name in {*entry.names})
        for name, number in counts.items():
            if number > 1:
                raise ValueError(f"two models are named {name!r}")
        for entry in self.models:
            if entry.version is not None and entry.name in counts:
                raise ValueError(f"{entry.name!r} is both a model and the name of several versions")
        if len([entry for entry in self.models if entry.default]) > 1:
            raise ValueError("more than one model is the default")
        inside = [entry.id for entry in self.models if entry.engine == "local" and not entry.in_child]
        if len(inside) > 1:
            raise ValueError(f"of {' and '.join(inside)} one can be in this process: give child = true")
        generating = {entry.id for entry in self.models if entry.use == "text"}
        for entry in self.models:
            leads = (*entry.fallback, *([entry.canary.to] if entry.canary else []))
            for name in leads:
                if self.find(name) not in generating:
                    raise ValueError(f"{entry.id!r} leads to {name!r}, which is no model of the file")
        return self

    def find(self, name: str) -> str | None:
        """The id of the entry that a name means; of several versions of a name, the latest."""
        for entry in self.models:
            if name in entry.names:
                return entry.id
        versions = [entry for entry in self.models if entry.name == name and entry.version is not None]
        return max(versions, key=lambda entry: _sorted_by(entry.version or "")).id if versions else None

    def named(self) -> Mapping[str, str]:
        """Every name that a request may give, and the id that it means."""
        found = {name: entry.id for entry in self.models for name in entry.names}
        for entry in self.models:
            if entry.name not in found and (id := self.find(entry.name)) is not None:
                found[entry.name] = id
        return found

    def __iter__(self) -> Iterator[ModelEntry]:  # type: ignore[override]  # pydantic's gives its fields
        return iter(self.models)

    def __len__(self) -> int:
        return len(self.models)


def _sorted_by(version: str) -> list[tuple[int, str]]:
    """So that version 10 comes behind version 9, and dates in their order."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"[._-]", version)]


def read_entries(tables: Any, env: Mapping[str, str]) -> ModelsFile:
    """The tables `[[models]]` as they stand in a file. Raises ValueError, which names the place."""
    if not isinstance(tables, list):
        raise ValueError(f"{TABLE}: expected tables [[{TABLE}]]")
    entries = []
    for index, table in enumerate(tables):
        place = f"{TABLE}.{index}"
        if not isinstance(table, dict):
            raise ValueError(f"{place}: expected a table")
        own = {name: value for name, value in table.items() if name in ModelEntry.model_fields}
        beside = {name: value for name, value in table.items() if name not in own}
        if "settings" in own:
            raise ValueError(f"{place}.settings: settings stand in the table itself, such as max_model_len")
        entries.append(read_table(ModelEntry, place, {**own, "settings": beside}, env))
    try:
        return ModelsFile.model_validate({TABLE: entries})
    except ValueError as error:
        told = error.errors(include_url=False, include_input=False)[0]["msg"]  # type: ignore[attr-defined]
        raise ValueError(f"{TABLE}: {told.removeprefix('Value error, ')}") from None


def entries_beside(folder: Path) -> Path | None:
    """The file of models in a data folder, if it is there and the folder may be entered."""
    file = folder / FILE_NAME
    return file if os.path.isfile(file) else None
