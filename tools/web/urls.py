"""URLs as people and pages write them: found in texts, compared, and judged by their domain."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from urllib.parse import urlsplit

# It begins where a word does, and a label is as long as one may be: a long word is looked at once.
_URL = re.compile(
    r"(?<![\w-])(?:https?://)?(?:[\w-]{1,63}\.)+[\w-]{1,63}(?::\d+)?(?:[/?#][^\s<>\"'`|\\^{}\[\]【】]*)?",
    re.IGNORECASE,
)
_WITH_SCHEME = re.compile(r"https?://[^\s<>\"'`|\\^{}【】]+", re.IGNORECASE)
_SCHEME = re.compile(r"\A\s*https?://", re.IGNORECASE)
_TRAILING = ".,;:!?*_)]"
_MOST_TRAILING = 8
"""Of the signs behind a URL that may be the sentence's; where there are more, they are."""


def urls_in(text: str) -> set[str]:
    """The keys of all URLs in a text, those without `https://` among them."""
    found = (match[0] for pattern in (_WITH_SCHEME, _URL) for match in pattern.finditer(text))
    return {key(form) for url in found for form in _without_the_end(url)}


def _without_the_end(url: str) -> Iterator[str]:
    """A URL as it stands in a text, and without each of the signs behind it that may be the sentence's."""
    bare = url.rstrip(_TRAILING)
    for length in range(len(bare), min(len(url), len(bare) + _MOST_TRAILING) + 1):
        yield url[:length]


def key(url: str) -> str:
    """What two spellings of one URL have in common: without scheme and fragment, its host in lower case."""
    bare = _SCHEME.sub("", url.partition("#")[0])
    host, slash, path = bare.partition("/")
    name, query, more = host.partition("?")
    return f"{name.lower()}{query}{more}{slash}{path}".rstrip("/")


def host_of(url: str) -> str:
    """The host of a URL in lower case, with its port where it names one; empty where it has none."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port is not None else ""
    except ValueError:
        return ""
    return f"{(parts.hostname or '').lower()}{port}"


def is_within(url: str, domains: Collection[str], blocked: Collection[str] = ()) -> bool:
    """Whether a URL's host is one of some domains or lies under one, and is and lies under none that is
    blocked; everything is within no domains."""
    host = _reached(url)
    return (not domains or _lies_in(host, domains)) and not _lies_in(host, blocked)


@lru_cache(1024)
def _reached(url: str) -> str:
    """The host that a request for a URL goes to, as it is looked up: one host has many spellings, with a dot
    behind it, with letters and dots of other scripts."""
    from httpx2 import URL, InvalidURL  # it loads slowly

    try:
        return URL(url).raw_host.decode("ascii").lower().rstrip(".")
    except InvalidURL:  # nothing can be sent there
        return host_of(url).partition(":")[0]


def _lies_in(host: str, domains: Iterable[str]) -> bool:
    wanted = (_reached(f"http://{domain_of(domain)}") for domain in domains)
    return any(host == domain or host.endswith(f".{domain}") for domain in wanted)


def domain_of(text: str) -> str:
    """A domain as it is meant, where it was written as a URL, with a port or in capitals."""
    bare = text.strip().lower().partition("://")[2] or text.strip().lower()
    return bare.partition("/")[0].partition(":")[0].strip(".")
