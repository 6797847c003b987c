"""`antiphon usage`: what was used, in sums by owner, key, model, tier or day."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any
from urllib.parse import urlencode

import orjson

from server.admin.database_access import AdminError, carry_out
from server.admin.durations import seconds_of
from server.admin.listing import Columns, table
from server.admin.owner_names import known_owner_id, owner_id, shown_owner, with_owner_names
from server.clock import now_us
from server.config import Config
from server.usage import WIDTHS, Asked, Prices, usage_page
from storage import Counts

PATH = "/v1/organization/usage/completions"
DAY, _, MOST = WIDTHS["1d"]
GROUP_BY = ("project_id", "api_key_id", "model", "service_tier")
BY = ("owner", "key", "model", "tier")
"""The same, as the command calls them."""
SINCE = "30d"

COUNTED = {
    "requests": "num_model_requests",
    "input_tokens": "input_tokens",
    "cached_tokens": "input_cached_tokens",
    "output_tokens": "output_tokens",
    "reasoning_tokens": "output_reasoning_tokens",
}
"""What a sum says -> what it is called in a result of the API."""

_DAY = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?)?Z?", re.ASCII)


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out `antiphon usage`; yields the lines to print. Raises AdminError."""
    now = now_us() // 1_000_000
    start = _time(options.since or SINCE, now)
    end = None if options.until is None else _time(options.until, now)
    if (now + 1 if end is None else end) <= start:
        raise AdminError("--until must be later than --since")
    prices = Prices(config)
    by = tuple(dict.fromkeys(options.by or ("owner", "model")))
    owner = options.owner and owner_id(config, options.owner)
    sums = _summed(_buckets(config, start, end, owner), by, prices)
    if owner and not sums:
        known_owner_id(config, owner)
    if "owner" in by:
        sums = with_owner_names(config, sums)
    if options.json:
        yield orjson.dumps(sums, option=orjson.OPT_INDENT_2).decode()
        return
    shown: dict[str, Callable[[dict[str, Any]], str]] = {
        **{name.upper(): shown_owner if name == "owner" else partial(_name, name=name) for name in by},
        **{name.removesuffix("_tokens").upper(): partial(_number, name=name) for name in COUNTED},
    }
    if prices:
        shown[f"COST ({prices.currency.upper()})"] = lambda row: f"{row['cost']:.4f}"
    columns: Columns = shown
    yield from table(columns, sums)


def _name(row: Mapping[str, Any], name: str) -> str:
    return row[name] or "-"


def _number(row: Mapping[str, Any], name: str) -> str:
    return str(row[name])


def _time(written: str, now: int) -> int:
    """A time in unix seconds: a day or a minute of UTC, or a duration before `now`. Raises AdminError."""
    if not _DAY.fullmatch(written):
        try:
            return now - seconds_of(written)
        except AdminError:
            raise _no_time(written) from None
    try:
        return int(datetime.fromisoformat(written.removesuffix("Z")).replace(tzinfo=UTC).timestamp())
    except ValueError:
        raise _no_time(written) from None


def _no_time(written: str) -> AdminError:
    return AdminError(f"{written!r} is no time: write 2026-11-30, 2026-11-30T12:00 or 7d")


def _buckets(config: Config, start: int, end: int | None, owner: str | None) -> Iterator[dict[str, Any]]:
    """The days of a range, until now without an end, as the API shows them, page after page."""
    until = now_us() // 1_000_000 + 1 if end is None else end
    owners = (owner,) if owner else ()
    asked = Asked(start, until, DAY, MOST, start, open=end is None, group_by=GROUP_BY, owners=owners)
    query: list[tuple[str, object]] = [
        ("start_time", start),
        *([] if end is None else [("end_time", end)]),
        ("limit", MOST),
        *(("group_by[]", name) for name in GROUP_BY),
        *([("project_ids[]", owner)] if owner else []),
    ]
    page = ""
    while True:
        path = f"{PATH}?{urlencode([*query, ('page', page)])}"
        found = carry_out(config, partial(usage_page, kind="completions", asked=asked), "GET", path)
        yield from found["data"]
        if not found["has_more"]:
            return
        page = found["next_page"]
        asked = asked.at(page)


def _summed(buckets: Iterator[dict[str, Any]], by: tuple[str, ...], prices: Prices) -> list[dict[str, Any]]:
    """The sums, in the order of what they are by."""
    sums: dict[tuple[str, ...], tuple[Counts, Decimal]] = {}
    for bucket in buckets:
        day = datetime.fromtimestamp(bucket["start_time"], UTC).strftime("%Y-%m-%d")
        for result in bucket["results"]:
            of = {name: result[field] for name, field in zip(BY, GROUP_BY, strict=True)}
            key = tuple({**of, "day": day}[name] or "" for name in by)
            counts = Counts(**{name: result[field] for name, field in COUNTED.items()})
            total, cost = sums.get(key, (Counts(), Decimal(0)))
            sums[key] = (total + counts, cost + prices.cost(result["model"], counts))
    return [
        {
            **{name: value or None for name, value in zip(by, key, strict=True)},
            **{name: getattr(counts, name) for name in COUNTED},
            **({"cost": float(cost), "currency": prices.currency} if prices else {}),
        }
        for key, (counts, cost) in sorted(sums.items())
    ]
