"""Pages of usage and of costs: how much is on one, and what is on the next."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from server.access import LOCAL_OWNER
from server.config import Config
from server.usage import Asked, Prices, costs_page, report, usage_page
from storage import Account, Counts, Spent, Storage, open_storage
from tests.support.making import OWNER, RUNNER, url
from tests.support.running import Running
from tests.support.schema import lay_schema
from tests.support.wire import Json

HOUR, DAY = 3600, 86400
NOON = 1000 * DAY + 12 * HOUR
BY_PERSON = ("safety_identifier",)
ONE = Counts(requests=1, input_tokens=10, output_tokens=5)


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    await lay_schema(tmp_path)
    opened = await open_storage(url(tmp_path), runner=RUNNER)
    yield opened
    await opened.close()


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MOST_RESULTS", 5)


async def spend(
    storage: Storage, at: int, *persons: str, kind: str = "completions", owner: str = OWNER
) -> None:
    accounts = [
        Account(owner=owner, key_id=None, model="m", tier="default", kind=kind, person=person)
        for person in persons
    ]
    await storage.add_usage([Spent(at * 1_000_000, account, ONE) for account in accounts])


def hours(number: int, **fields: Any) -> Asked:
    return Asked(NOON, NOON + number * HOUR, HOUR, 24, NOON, **fields)


def persons_of(page: Json) -> list[list[str]]:
    return [[result["safety_identifier"] for result in bucket["results"]] for bucket in page["data"]]


async def test_a_page_with_many_results_has_fewer_buckets(storage: Storage, small_pages: None) -> None:
    """And the next one goes on where it ends, so that nothing is missing and nothing comes twice."""
    for hour, persons in enumerate(("ab", "abc", "", "abcd", "a", "")):
        await spend(storage, NOON + hour * HOUR, *persons)
    asked = hours(6, group_by=BY_PERSON)
    pages = [await usage_page(storage, "completions", asked)]
    while pages[-1]["has_more"]:
        asked = asked.at(pages[-1]["next_page"])
        pages.append(await usage_page(storage, "completions", asked))
    assert [persons_of(page) for page in pages] == [
        [["a", "b"], ["a", "b", "c"], []],
        [["a", "b", "c", "d"], ["a"], []],
    ]
    starts = [bucket["start_time"] for page in pages for bucket in page["data"]]
    assert starts == [NOON + hour * HOUR for hour in range(6)] and pages[-1]["next_page"] is None


async def test_a_page_of_costs_with_many_results_has_fewer_days(storage: Storage, small_pages: None) -> None:
    """Also where the results are of several kinds of usage."""
    prices = Prices(Config(price=("*=1/1/1",)))
    await spend(storage, NOON, "a", "b")
    await spend(storage, NOON, "a", "b", kind="embeddings")
    await spend(storage, NOON + DAY, "a")
    await spend(storage, NOON + DAY, "b", kind="embeddings")
    await spend(storage, NOON + 2 * DAY, "a", "b", "c", kind="embeddings")
    asked = Asked(NOON, NOON + 3 * DAY, DAY, 180, NOON, group_by=BY_PERSON)
    first = await costs_page(storage, prices, asked)
    assert persons_of(first) == [["a", "b"]]
    second = await costs_page(storage, prices, asked.at(first["next_page"]))
    assert persons_of(second) == [["a", "b"], ["a", "b", "c"], []]
    values = [
        [round(result["amount"]["value"] * 1e6) for result in bucket["results"]]
        for page in (first, second)
        for bucket in page["data"]
    ]
    assert values == [[30, 30], [15, 15], [15, 15, 15], []]


async def test_a_bucket_with_too_many_results_is_refused(
    server_app: Running, client: httpx.AsyncClient, small_pages: None
) -> None:
    storage = server_app.context.storage
    await spend(storage, NOON, "a", owner=LOCAL_OWNER)
    await spend(storage, NOON + HOUR, *"abcdef", owner=LOCAL_OWNER)
    query: dict[str, Any] = {"start_time": NOON, "end_time": NOON + 2 * HOUR, "bucket_width": "1h"}
    query["group_by[]"] = "safety_identifier"
    path = "/v1/organization/usage/completions"
    first = (await client.get(path, params=query)).json()
    assert persons_of(first) == [["a"]]
    refused = await client.get(path, params=query | {"page": first["next_page"]})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "group_by" and "one bucket has more than 5 results" in error["message"]
    whole = (await client.get(path, params=query | {"models[]": "other"})).json()
    assert persons_of(whole) == [[], []]


async def test_a_long_page_is_made_beside_the_event_loop(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "THREADED_RESULTS", 2)
    threads = []

    class Watched(Prices):
        def lines(self, *args: Any) -> Any:
            threads.append(threading.current_thread())
            return super().lines(*args)

    await spend(storage, NOON, *"abc")
    asked = Asked(NOON, NOON + DAY, DAY, 1, NOON, group_by=BY_PERSON)
    page = await costs_page(storage, Watched(Config(price=("*=1/1/1",))), asked)
    assert len(page["data"][0]["results"]) == len(threads) == 3
    assert threading.main_thread() not in threads


# ------------------------------------------------------------------------------------------------------------
# What stores hold


class Size(int):
    """A number of bytes that counts how often it is added to another one."""

    num_added = 0

    def __add__(self, other: int) -> Size:
        Size.num_added += 1
        return Size(int(self) + int(other))

    __radd__ = __add__


def holding(came: Sequence[tuple[str, int, int]]) -> Storage:
    """Storage whose stores have these files: owner, unix seconds, bytes."""

    async def kept_bytes(owners: Sequence[str], before: int, width: int) -> list[tuple[str, int, int]]:
        return [(owner, at * 1_000_000, Size(size)) for owner, at, size in came]

    return cast(Storage, SimpleNamespace(vector_stores=SimpleNamespace(kept_bytes=kept_bytes)))


def bytes_of(page: Json) -> Iterator[Mapping[str | None, int]]:
    for bucket in page["data"]:
        yield {result["project_id"]: result["usage_bytes"] for result in bucket["results"]}


async def test_bytes_in_stores_are_added_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Size, "num_added", 0)
    came = [("b", NOON, 1), ("a", NOON + HOUR, 2), ("a", NOON - 9 * HOUR, 4), ("b", NOON + 2 * HOUR, 8)]
    asked = hours(4)
    assert list(bytes_of(await usage_page(holding(came), "vector_stores", asked))) == [
        {None: 5}, {None: 7}, {None: 15}, {None: 15},
    ]  # fmt: skip
    assert Size.num_added == len(came)
    by_project = hours(4, group_by=("project_id",))
    assert list(bytes_of(await usage_page(holding(came), "vector_stores", by_project))) == [
        {"a": 4, "b": 1}, {"a": 6, "b": 1}, {"a": 6, "b": 9}, {"a": 6, "b": 9},
    ]  # fmt: skip


async def test_a_page_of_stores_with_many_results_has_fewer_buckets(small_pages: None) -> None:
    storage = holding([("a", NOON, 1), ("b", NOON + HOUR, 2), ("c", NOON + 2 * HOUR, 4)])
    asked = hours(4, group_by=("project_id",))
    first = await usage_page(storage, "vector_stores", asked)
    assert list(bytes_of(first)) == [{"a": 1}, {"a": 1, "b": 2}]
    second = await usage_page(storage, "vector_stores", asked.at(first["next_page"]))
    assert list(bytes_of(second)) == [{"a": 1, "b": 2, "c": 4}]
