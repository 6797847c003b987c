"""`antiphon usage`: what was used, in sums by owner, key, model, tier, person or day."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
GROUP_BY = {
    "owner": "project_id",
    "key": "api_key_id",
    "model": "model",
    "tier": "service_tier",
    "identifier": "safety_identifier",
}
"""What the command can tell apart besides days, and what the API calls it."""
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
    by = tuple(dict.fromkeys(options.by or ("owner", "model")))
    prices = Prices(config)
    wanted = _wanted(config, options, by)
    sums = _summed(_buckets(config, wanted), by, prices)
    if wanted.owners and not sums:
        known_owner_id(config, wanted.owners[0])
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


def _wanted(config: Config, options: argparse.Namespace, by: tuple[str, ...]) -> Asked:
    """What the command line asks for, as days. Raises AdminError."""
    now = now_us() // 1_000_000
    start = _time(options.since or SINCE, now)
    end = now + 1 if options.until is None else _time(options.until, now)
    if end <= start:
        in_future = f"--since {options.since} lies in the future"
        raise AdminError(in_future if options.until is None else "--until must be later than --since")
    owner = None if options.owner is None else owner_id(config, options.owner)
    return Asked(
        start,
        end,
        DAY,
        MOST,
        start,
        open=options.until is None,
        # models in any case, because they have prices of their own
        group_by=tuple(field for name, field in GROUP_BY.items() if name in by or name == "model"),
        owners=(owner,) if owner else (),
        persons=_persons(owner, options.identifier),
    )


def _persons(owner: str | None, identifiers: Sequence[str]) -> tuple[str, ...]:
    """The digests of an owner's persons. Raises AdminError."""
    if not identifiers:
        return ()
    if not owner:
        raise AdminError("--identifier needs --owner: each owner's persons are its own")
    from server.telemetry import end_user  # 40 ms, which the command has no other use for

    return tuple(person for said in identifiers if (person := end_user(owner, said)) is not None)


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


def _buckets(config: Config, asked: Asked) -> Iterator[dict[str, Any]]:
    """The days of a range, as the API shows them, page after page."""
    query: list[tuple[str, object]] = [
        ("start_time", asked.start),
        *([] if asked.open else [("end_time", asked.end)]),
        ("limit", MOST),
        *(("group_by[]", name) for name in asked.group_by),
        *(("project_ids[]", owner) for owner in asked.owners),
        *(("safety_identifiers[]", person) for person in asked.persons),
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
            key = tuple((day if name == "day" else result[GROUP_BY[name]]) or "" for name in by)
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
