"""Reads the closed tables of the curriculum, `phrases.toml`: words, questions and answers, kinds of tools."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("phrases.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Family:
    """A known kind of tool: what it may be called, how people ask for it, what its result sounds like."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[tuple[str, ...], ...]
    kinds: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    results: tuple[str, ...]


@dataclass(frozen=True)
class Records:
    """A kind of thing that texts tell about: its fields by kind, other keys for them, and the texts."""

    name: str
    fields: dict[str, str]
    keys: dict[str, list[str]]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Link:
    """One of the two tools of a chain; `{0}` is a value of the question, `{r}` the first tool's result."""

    names: tuple[str, ...]
    description: str
    parameters: dict[str, str]
    result: str


@dataclass(frozen=True)
class Chain:
    """A question that takes two calls, one after the other."""

    questions: tuple[str, ...]
    kinds: tuple[str, ...]
    first: Link
    second: Link
    answer: str


def listed(table: str, name: str) -> list[str]:
    """A list of strings."""
    return list(_TABLES[table][name])


def paired(table: str) -> dict[str, str]:
    """A table of strings by string."""
    return dict(_TABLES[table])


def families() -> list[Family]:
    """Every known kind of tool; the weather comes first."""
    made = []
    for one in _TABLES["families"]:
        parameters = tuple(tuple(names) for names in one["parameters"])
        made.append(
            Family(
                names=tuple(one["names"]),
                descriptions=tuple(one["descriptions"]),
                parameters=parameters,
                kinds=tuple(one["kinds"]),
                questions=tuple(one["questions"]),
                answer=one["answer"],
                results=tuple(one["results"]),
            )
        )
    return made


def records() -> list[Records]:
    """Every kind of thing that texts tell about."""
    return [
        Records(one["name"], dict(one["fields"]), dict(one["keys"]), tuple(one["texts"]))
        for one in _TABLES["records"]
    ]


def chains() -> list[Chain]:
    """Every known pair of tools that work one after the other."""

    def link(one: dict[str, Any]) -> Link:
        return Link(tuple(one["names"]), one["description"], dict(one["parameters"]), one["result"])

    return [
        Chain(
            tuple(one["question"]),
            tuple(one["kinds"]),
            link(one["first"]),
            link(one["second"]),
            one["answer"],
        )
        for one in _TABLES["chains"]
    ]
