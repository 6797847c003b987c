"""Search providers, one row each: how they are asked, and where in their answer the results stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Query:
    """What is searched for.

    count: how many results are wanted. domains: those that results may come from; any where empty. country:
    two letters, of the user. blocked: the domains that results may not come from.
    """

    text: str
    count: int
    domains: tuple[str, ...] = ()
    country: str | None = None
    blocked: tuple[str, ...] = ()

    def with_sites(self) -> str:
        """The query with its domains in the words that search engines share."""
        sites = " OR ".join(f"site:{domain}" for domain in self.domains)
        if len(self.domains) > 1:
            sites = f"({sites})"
        others = (f"-site:{domain}" for domain in self.blocked)
        return " ".join(filter(None, (self.text, sites, *others)))


@dataclass(frozen=True, slots=True)
class Provider:
    """One provider.

    url: where it answers, where that is the same for everybody. path: behind that URL. needs_key: whether it
    answers only who has a key. params, body: what is sent. headers: what is sent with a key. results: the
    members that lead to the list of results. title, link, snippet: members of a result. hints: what an
    operator can do about a status. silent: the member that lists the provider's own engines that did not
    answer it, each as its name and why. silent_hint: what an operator can do about them.
    """

    path: str
    results: tuple[str, ...]
    snippet: str
    params: Callable[[Query], Mapping[str, Any]] | None = None
    body: Callable[[Query], Mapping[str, Any]] | None = None
    headers: Callable[[str], Mapping[str, str]] = lambda key: {"authorization": f"Bearer {key}"}
    url: str | None = None
    needs_key: bool = False
    title: str = "title"
    link: str = "url"
    hints: Mapping[int, str] = field(default_factory=dict)
    silent: str | None = None
    silent_hint: str = ""


def _searxng(query: Query) -> Mapping[str, Any]:
    return {"q": query.with_sites(), "format": "json"}


def _brave(query: Query) -> Mapping[str, Any]:
    asked = {"q": query.with_sites(), "count": min(query.count, 20)}
    return asked if query.country is None else {**asked, "country": query.country.upper()}


def _tavily(query: Query) -> Mapping[str, Any]:
    asked = {"query": query.text, "max_results": min(query.count, 20)}
    if query.domains:
        asked["include_domains"] = [*query.domains]
    if query.blocked:
        asked["exclude_domains"] = [*query.blocked]
    return asked


_WRONG_KEY = "its api_key is missing or wrong"

PROVIDERS: Mapping[str, Provider] = MappingProxyType(
    {
        "searxng": Provider(
            path="/search",
            params=_searxng,
            results=("results",),
            snippet="content",
            hints={
                403: "JSON is off: add json to search.formats in its settings.yml",
                429: "its limiter is on: set server.limiter to false in its settings.yml",
            },
            silent="unresponsive_engines",
            silent_hint="other engines, or fewer searches: see engines in its settings.yml",
        ),
        "brave": Provider(
            url="https://api.search.brave.com/res/v1/web",
            path="/search",
            needs_key=True,
            params=_brave,
            headers=lambda key: {"x-subscription-token": key},
            results=("web", "results"),
            snippet="description",
            hints={401: _WRONG_KEY, 422: _WRONG_KEY, 429: "its quota is used up"},
        ),
        "tavily": Provider(
            url="https://api.tavily.com",
            path="/search",
            needs_key=True,
            body=_tavily,
            results=("results",),
            snippet="content",
            hints={401: _WRONG_KEY, 429: "its quota is used up", 432: "its quota is used up"},
        ),
    }
)
"""Name -> the provider."""
