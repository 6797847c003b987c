"""Usage and costs in the official shapes: pages of buckets of time, each with a result for each group.

Buckets begin on whole minutes, hours or days of UTC. The first one begins where the range that is asked for
begins, and the last one ends where that ends, so that ranges that follow each other count nothing twice.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from operator import attrgetter
from typing import Any

from server.limits import PAID_KINDS
from server.threads import aside
from server.usage.prices import Prices
from storage import Dimension, Storage, UsageFilter, UsageSum

SECOND = 1_000_000
MINUTE, HOUR = 60, 3600

WIDTHS: Mapping[str, tuple[int, int, int]] = {
    "1m": (60, 60, 1440),
    "1h": (3600, 24, 168),
    "1d": (86400, 7, 31),
}
"""Width of a bucket -> its seconds, and how many buckets a page has by default and at most."""

COST_BUCKETS = (7, 180)
"""The same of costs, whose buckets are days."""

MOST_RESULTS = 50_000
"""That a page has; one with more, of some 300 bytes each, has fewer buckets than it was asked for."""

THREADED_RESULTS = 500
"""Pages with more results are made in the thread pool; each takes some 5 us, and some 30 us where it has a
cost."""

DIMENSIONS: Mapping[str, Dimension] = {
    "project_id": "owner",
    "api_key_id": "key_id",
    "model": "model",
    "batch": "batch",
    "service_tier": "tier",
    "vector_store_id": "model",  # of a search, which is counted under its store
    "safety_identifier": "person",  # an extension: the official `user_id` is of somebody who has API keys
}
"""What a group is told apart by here. Whatever else the official API groups by has one value, or none."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of usage. object: of its results. counted: fields of a result -> what they are called among
    `Counts`. group_by: what it may be grouped by."""

    object: str
    counted: Mapping[str, str]
    group_by: tuple[str, ...] = ("project_id", "user_id", "api_key_id", "model", "safety_identifier")


_OF_ANSWERS = (
    *("project_id", "user_id", "api_key_id", "model", "batch", "service_tier", "api_source"),
    "safety_identifier",
)
_TOKENS = {"input_tokens": "input_tokens", "num_model_requests": "requests"}

KINDS: Mapping[str, Kind] = {
    "completions": Kind(
        "organization.usage.completions.result",
        {
            **_TOKENS,
            "input_cached_tokens": "cached_tokens",
            "output_tokens": "output_tokens",
            "output_reasoning_tokens": "reasoning_tokens",  # an extension
        },
        _OF_ANSWERS,
    ),
    "embeddings": Kind("organization.usage.embeddings.result", _TOKENS),
    "moderations": Kind("organization.usage.moderations.result", _TOKENS),
    "decisions": Kind(
        "organization.usage.decisions.result",
        {},
        _OF_ANSWERS,
    ),
    "images": Kind(
        "organization.usage.images.result",
        {"images": "requests", "num_model_requests": "requests"},
        ("project_id", "user_id", "api_key_id", "model", "size", "source", "safety_identifier"),
    ),
    "audio_speeches": Kind("organization.usage.audio_speeches.result", {}),
    "audio_transcriptions": Kind(
        "organization.usage.audio_transcriptions.result",
        # what is counted as the input of sound are its seconds
        {"seconds": "input_tokens", "num_model_requests": "requests"},
    ),
    "vector_stores": Kind("organization.usage.vector_stores.result", {}, ("project_id",)),
    "code_interpreter_sessions": Kind(
        "organization.usage.code_interpreter_sessions.result", {"num_sessions": "requests"}, ("project_id",)
    ),
    "file_search_calls": Kind(
        "organization.usage.file_searches.result",
        {"num_requests": "requests"},
        ("project_id", "user_id", "api_key_id", "vector_store_id", "safety_identifier"),
    ),
    "web_search_calls": Kind(
        "organization.usage.web_searches.result",
        {"num_requests": "requests", "num_model_requests": "requests"},
        ("project_id", "user_id", "api_key_id", "model", "context_level", "api_source", "safety_identifier"),
    ),
}
"""By the last part of their paths. Of a kind that counts nothing, every bucket is empty."""

_PAGE = re.compile(r"page_([0-9]{1,12})", re.ASCII)

COSTS_GROUP_BY = ("project_id", "user_id", "line_item", "api_key_id", "api_source", "safety_identifier")


@dataclass(frozen=True, slots=True)
class Asked:
    """A page that is asked for. Times are unix seconds; `start` is included, `end` is not.

    width: seconds of a bucket. first: where the first bucket of the page begins. open: nobody named an end,
    so that the last bucket is shown whole. nothing: it is asked for what nothing here has, such as a user.
    """

    start: int
    end: int
    width: int
    limit: int
    first: int
    open: bool = False
    nothing: bool = False
    group_by: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    key_ids: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    batch: bool | None = None
    line_items: tuple[str, ...] = ()
    persons: tuple[str, ...] = ()

    @property
    def by_person(self) -> bool:
        """Whether persons are told apart, or looked for: what they used is counted by the hour."""
        return bool(self.persons) or "safety_identifier" in self.group_by

    def at(self, page: str) -> Asked:
        """The page of this name, which an earlier one says under `next_page`. ValueError for what is none."""
        found = _PAGE.fullmatch(page)
        if found is None or not self.start < int(found[1]) < self.end or int(found[1]) % self.width:
            raise ValueError("expected the 'next_page' of an earlier page of the same range")
        return replace(self, first=int(found[1]))

    def starts(self) -> list[int]:
        """Where the buckets of the page would begin if all of them were whole."""
        first = self.first - self.first % self.width
        return list(range(first, self.end, self.width)[: self.limit])

    def ending(self, start: int) -> Asked:
        """The page without the bucket that begins here and all behind it. TooManyResults if none is left."""
        whole = [one for one in self.starts() if one < start]
        if not whole:
            raise TooManyResults
        return replace(self, limit=len(whole))

    def filter(self, kind: str) -> UsageFilter:
        """What storage is asked for: the page's buckets. Ends count as the minute, or with persons the hour,
        that they lie in, rounded down; that of now is in an open range."""
        since = max(self.first, self.start)
        before = min(self.starts()[-1] + self.width, self.end)
        unit = HOUR if self.by_person else MINUTE
        if self.open:
            before += unit - 1
        return UsageFilter(
            kind=kind,
            since=(since - since % unit) * SECOND,
            before=(before - before % unit) * SECOND,
            owners=self.owners,
            key_ids=self.key_ids,
            models=self.models,
            batch=self.batch,
            persons=self.persons,
        )


class TooManyResults(ValueError):
    """A single bucket has more results than a page may have."""

    def __init__(self) -> None:
        super().__init__(
            f"one bucket has more than {MOST_RESULTS} results: group by less, or ask for shorter buckets or "
            "fewer projects, keys or models"
        )


async def usage_page(storage: Storage, kind: str, asked: Asked) -> dict[str, Any]:
    """A page of one of KINDS. TooManyResults."""
    row = KINDS[kind]
    if kind == "vector_stores":
        return await _stores_page(storage, row, asked)
    by = tuple(DIMENSIONS[name] for name in asked.group_by if name in DIMENSIONS)
    found, asked = await _sums(storage, (kind,) if row.counted else (), by, asked)

    def page() -> dict[str, Any]:
        results = []
        for one in found:
            counted = {name: getattr(one.counts, of) for name, of in row.counted.items()}
            result = {"object": row.object, **counted, **_groups(row.group_by, asked, one)}
            results.append((one.start, result))
        return _page(asked, results)

    return await aside(len(found) > THREADED_RESULTS, page)


async def _sums(
    storage: Storage, kinds: Sequence[str], by: tuple[Dimension, ...], asked: Asked
) -> tuple[list[UsageSum], Asked]:
    """What was used of some kinds, and the page that has it all: the one that is asked for, or as many of its
    buckets as have no more than MOST_RESULTS sums together. TooManyResults."""
    found: list[UsageSum] = []
    for kind in () if asked.nothing else kinds:
        width = asked.width * SECOND
        found += await storage.usage_sums(asked.filter(kind), by, width, limit=MOST_RESULTS + 1)
    if len(found) > MOST_RESULTS:
        # Of each kind the first sums are here, so none is missing that is before the first one too many.
        start = sorted(found, key=attrgetter("start"))[MOST_RESULTS].start
        asked = asked.ending(start // SECOND)
        found = [one for one in found if one.start < start]
    return found, asked


async def _stores_page(storage: Storage, row: Kind, asked: Asked) -> dict[str, Any]:
    """A page of the bytes in vector stores: in each bucket those of files that had come by its end, and that
    are still there."""
    starts, width = asked.starts(), asked.width
    came: Sequence[tuple[str, int, int]] = ()
    if not (asked.nothing or asked.key_ids or asked.models or asked.persons):
        before = min(starts[-1] + width, asked.end + width)
        came = await storage.vector_stores.kept_bytes(asked.owners, before * SECOND, width * SECOND)

    def page() -> dict[str, Any]:
        by_time = sorted(((at, owner, size) for owner, at, size in came), reverse=True)
        totals: dict[str | None, int] = defaultdict(int)
        results: list[tuple[int, dict[str, Any]]] = []
        for start in starts:
            while by_time and by_time[-1][0] <= start * SECOND:
                _, owner, size = by_time.pop()
                totals[owner if "project_id" in asked.group_by else None] += size
            if len(results) + len(totals) > MOST_RESULTS:
                return _page(asked.ending(start), results)
            for project, total in sorted(totals.items(), key=lambda pair: pair[0] or ""):
                if total:
                    result = {"object": row.object, "usage_bytes": total, "project_id": project}
                    results.append((start * SECOND, result))
        return _page(asked, results)

    return await aside(len(starts) * len(came) > THREADED_RESULTS, page)


async def costs_page(storage: Storage, prices: Prices, asked: Asked) -> dict[str, Any]:
    """A page of what was used, at the prices of today. TooManyResults."""
    by = tuple(DIMENSIONS[name] for name in asked.group_by if name in DIMENSIONS)
    found, asked = await _sums(storage, PAID_KINDS if prices else (), (*by, "model"), asked)
    return await aside(len(found) > THREADED_RESULTS, _costs, found, prices, by, asked)


def _costs(
    found: Sequence[UsageSum], prices: Prices, by: tuple[Dimension, ...], asked: Asked
) -> dict[str, Any]:
    lines: dict[tuple[Any, ...], _Line] = {}
    for one in found:
        model = str(one.by["model"])
        for line, (tokens, cost) in prices.lines(model, one.counts).items():
            item = f"{model}, {line}"
            if asked.line_items and item not in asked.line_items:
                continue
            named = item if "line_item" in asked.group_by else None
            key = (one.start, *(one.by[name] for name in by), named)
            entry = lines.setdefault(key, _Line(_groups(COSTS_GROUP_BY, asked, one) | {"line_item": named}))
            entry.tokens += tokens
            entry.cost += cost

    def result(line: _Line) -> dict[str, Any]:
        by_line = line.groups["line_item"] is not None
        return {
            "object": "organization.costs.result",
            "amount": {"value": float(line.cost), "currency": prices.currency},
            "quantity": line.tokens if by_line else None,
            "quantity_unit": "tokens" if by_line else None,
            **line.groups,
        }

    return _page(asked, [(key[0], result(line)) for key, line in lines.items()])


@dataclass(slots=True)
class _Line:
    """A result of costs while it is summed up."""

    groups: dict[str, Any]
    tokens: int = 0
    cost: Decimal = field(default_factory=Decimal)


def _groups(names: Iterable[str], asked: Asked, one: UsageSum) -> dict[str, Any]:
    """What a result says of its group: null where it is not grouped by that, or nothing here has it."""
    groups: dict[str, Any] = dict.fromkeys(names)
    for name in asked.group_by:
        if name in DIMENSIONS:
            groups[name] = one.by[DIMENSIONS[name]]
        elif name == "api_source":
            groups[name] = "unlabeled"
    return groups


def _page(asked: Asked, results: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    starts = asked.starts()
    buckets: dict[int, list[dict[str, Any]]] = {start: [] for start in starts}
    for start, result in results:
        buckets[start // SECOND].append(result)
    behind = starts[-1] + asked.width
    more = behind < asked.end
    return {
        "object": "page",
        "data": [
            {
                "object": "bucket",
                "start_time": max(start, asked.start),
                "end_time": start + asked.width if asked.open else min(start + asked.width, asked.end),
                "results": found,
            }
            for start, found in buckets.items()
        ],
        "has_more": more,
        "next_page": f"page_{behind}" if more else None,
    }
