"""Asks a search provider, and reads what it answers."""

from __future__ import annotations

import asyncio
import html
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

from tools.egress import Caps, Egress, guarded_client
from tools.spec import ToolError
from tools.web.plain_text import one_line
from tools.web.providers import PROVIDERS, Provider, Query
from tools.web.urls import host_of, is_within, key

log = logging.getLogger("antiphon.tools")

CAPS = Caps(max_bytes=2 << 20, total_s=10.0)
"""Of one answer of a provider."""

MAX_URL, MAX_TITLE, MAX_SNIPPET = 2000, 300, 1000
"""Characters of a result; a result with a longer URL is left out, and the rest is cut."""

MAX_REASON, MAX_SILENT = 80, 5
"""Characters of the name of an engine that did not answer its provider, and of why; how many are named."""

_TAG = re.compile(r"<[^<>]{0,100}>")


class SearchFailed(ToolError):
    """A provider did not answer as it should. hint: what its operator can do about it, empty where nothing is
    known."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Hit:
    """One result."""

    url: str
    title: str
    snippet: str


class Searching(Protocol):
    """Something that can be searched."""

    async def find(self, query: Query) -> Sequence[Hit]:
        """The results of a query, the best first. Raises ToolError."""


@dataclass(frozen=True, slots=True)
class WebSearch:
    """A provider as the operator has configured it. url: None for the provider's own."""

    provider: str
    url: str | None = None
    api_key: str | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        """Where it is asked."""
        row = PROVIDERS[self.provider]
        return f"{(self.url or row.url or '').rstrip('/')}{row.path}"

    async def find(self, query: Query) -> Sequence[Hit]:
        """The results of a query, the best first. Raises SearchFailed, EgressError."""
        row = PROVIDERS[self.provider]
        headers = {} if self.api_key is None else dict(row.headers(self.api_key))
        # The operator has named the provider: what requests may reach is no matter here.
        async with guarded_client(Egress().allowing(self.address), CAPS, headers=headers) as client:
            if row.body is not None:
                answer = await client.post(self.address, json=dict(row.body(query)))
            else:
                assert row.params is not None, "a provider takes parameters or a body"
                answer = await client.get(self.address, params=dict(row.params(query)))
        if answer.status_code != 200:
            hint = row.hints.get(answer.status_code, "")
            raise SearchFailed(f"The search provider answered with status {answer.status_code}.", hint)
        try:
            said = json.loads(answer.content)
        except (ValueError, RecursionError):
            raise SearchFailed("The search provider did not answer with JSON.") from None
        if not isinstance(said, dict):
            raise SearchFailed("The search provider did not answer with a JSON object.")
        found = _hits(said, row.results, (row.link, row.title, row.snippet))
        if not found and (silent := _silent(said, row)):
            raise SearchFailed(
                f"The search provider's own engines did not answer: {silent}.", row.silent_hint
            )
        return found


def _silent(said: Mapping[str, Any], row: Provider) -> str:
    """The engines behind a provider that did not answer it, with why; empty where there is none."""
    engines = said.get(row.silent) if row.silent else None
    named = []
    for each in engines if isinstance(engines, list) else ():
        name, *why = each if isinstance(each, list) and each else (each,)
        if isinstance(name, str):
            told = one_line(why[0], MAX_REASON) if why and isinstance(why[0], str) else ""
            named.append(f"{one_line(name, MAX_REASON)} ({told})" if told else one_line(name, MAX_REASON))
    more = f" and {len(named) - MAX_SILENT} more" if len(named) > MAX_SILENT else ""
    return f"{', '.join(named[:MAX_SILENT])}{more}"


def _hits(said: Any, results: Iterable[str], names: tuple[str, str, str]) -> list[Hit]:
    for name in results:
        said = said.get(name) if isinstance(said, dict) else None
    found = []
    for each in said if isinstance(said, list) else ():
        if isinstance(each, dict) and (hit := hit_of(*(each.get(name) for name in names))) is not None:
            found.append(hit)
    return found


def hit_of(url: Any, title: Any, snippet: Any) -> Hit | None:
    """A result, cleaned; None where its URL is none of the web."""
    if not isinstance(url, str) or not _is_of_the_web(url):
        return None
    return Hit(url, _plain(title, MAX_TITLE) or url, _plain(snippet, MAX_SNIPPET))


def _is_of_the_web(url: str) -> bool:
    whole = url.startswith(("http://", "https://")) and len(url) <= MAX_URL
    # Where there is no host, or no such port, nothing can be opened, and a citation would have no words.
    return whole and url.isprintable() and " " not in url and bool(host_of(url))


def _plain(text: Any, most: int) -> str:
    """A text of a result without markup, on one line."""
    bare = html.unescape(_TAG.sub("", text[: 10 * most])) if isinstance(text, str) else ""
    return one_line(bare, most)


async def search_all(
    web: Searching, queries: Sequence[Query], count: int
) -> tuple[list[Hit], dict[str, str]]:
    """The best results of several queries in turn, each URL once, within the queries' domains; and the
    queries that were not answered, with why.

    Raises the first query's ToolError where none was answered.
    """
    answers = await asyncio.gather(*(web.find(query) for query in queries), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, ToolError):
            raise answer
    lists = [answer for answer in answers if not isinstance(answer, BaseException)]
    failed = {
        query.text: answer
        for query, answer in zip(queries, answers, strict=True)
        if isinstance(answer, ToolError)
    }
    for fault in failed.values():
        log.warning("a search failed: %s %s", fault, getattr(fault, "hint", ""))
        if not lists:
            raise fault
    found: dict[str, Hit] = {}
    for hit in (hit for turn in zip_longest(*lists) for hit in turn if hit is not None):
        if is_within(hit.url, queries[0].domains, queries[0].blocked):
            found.setdefault(key(hit.url), hit)
    return [*found.values()][:count], {query: str(fault) for query, fault in failed.items()}


async def search_once(web: Searching) -> int:
    """One search, to see whether it works; how many results it has. Raises SearchFailed, EgressError."""
    return len(await web.find(Query("test", 1)))
