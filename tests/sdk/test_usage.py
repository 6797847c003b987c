"""The official SDK, unmodified, reads usage and costs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, PermissionDeniedError

from server.access import ADMIN, OPERATOR
from server.admin import keys
from server.clock import now_us
from server.telemetry import end_user
from server.usage import KINDS
from storage import Account, Counts, Spent
from tests.sdk.test_admin import MODEL, client_of
from tests.support.running import Running, running_app

DAY = 86400
START = 1_772_323_200  # 2026-03-01, a Sunday
ONE = Counts(1, 100, 40, 10, 3)
PRICES = (f"{MODEL}=2/0.5/8", "*=1/1/1")


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with running_app(tmp_path, price=PRICES, currency="EUR") as server:
        yield server


async def key_of(running: Running, *scopes: str, owner: str | None = None) -> tuple[str, AsyncOpenAI]:
    """The id of a new key, and the SDK with it."""
    made = await keys.make(
        running.context.storage, OPERATOR, name="k", scopes=scopes or ("all",), owner=owner
    )
    running.life.keys.forget()
    return made.stored.id, client_of(running, made.key)


async def note(running: Running, at: int, counts: Counts = ONE, **fields: Any) -> None:
    """Usage of a time in the past, in unix seconds."""
    account = Account(**{"owner": "ann", "key_id": "key_a", "model": "m", "tier": "default", **fields})
    await running.context.storage.add_usage([Spent(at * 1_000_000, account, counts)])


async def test_what_is_used_is_counted_by_whoever_used_it(running: Running) -> None:
    _, admin = await key_of(running, ADMIN)
    ann_id, ann = await key_of(running, owner="ann")
    bob_id, bob = await key_of(running, owner="bob")
    since = now_us() // 1_000_000 - 60
    usages: list[Any] = []
    for sdk in (ann, ann, bob):
        usages.append((await sdk.responses.create(model=MODEL, input="say one two")).usage)
    unstored = await bob.responses.create(model=MODEL, input="say one two three", store=False)
    chat = await bob.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "say four"}], service_tier="flex"
    )
    text = await bob.completions.create(model=MODEL, prompt="say five")
    assert chat.usage and text.usage and unstored.usage

    page = await admin.admin.organization.usage.completions(
        start_time=since, bucket_width="1d", group_by=["project_id", "api_key_id", "model", "service_tier"]
    )
    found: list[Any] = [result for bucket in page.data for result in bucket.results]
    by_group = {(one.project_id, one.api_key_id, one.service_tier): one for one in found}
    assert by_group.keys() == {
        ("ann", ann_id, "default"),
        ("bob", bob_id, "default"),
        ("bob", bob_id, "flex"),
    }
    assert {one.model for one in found} == {MODEL} and {one.object for one in found} == {
        "organization.usage.completions.result"
    }
    of_ann = by_group["ann", ann_id, "default"]
    assert of_ann.num_model_requests == 2
    assert of_ann.input_tokens == usages[0].input_tokens + usages[1].input_tokens
    assert of_ann.output_tokens == usages[0].output_tokens + usages[1].output_tokens
    of_bob = by_group["bob", bob_id, "default"]
    assert of_bob.num_model_requests == 3
    assert of_bob.output_tokens == (
        usages[2].output_tokens + unstored.usage.output_tokens + text.usage.completion_tokens
    )
    assert by_group["bob", bob_id, "flex"].input_tokens == chat.usage.prompt_tokens

    whole: Any = await admin.admin.organization.usage.completions(start_time=since)
    [total] = [result for bucket in whole.data for result in bucket.results]
    assert total.num_model_requests == 6
    assert (total.project_id, total.api_key_id, total.model, total.batch) == (None,) * 4

    mine: Any = await ann.admin.organization.usage.completions(start_time=since, group_by=["project_id"])
    [own] = [result for bucket in mine.data for result in bucket.results]
    assert (own.project_id, own.num_model_requests) == ("ann", 2)
    theirs = await ann.admin.organization.usage.completions(start_time=since, project_ids=["bob"])
    assert [bucket.results for bucket in theirs.data] == [[]] * len(theirs.data)
    _, reader = await key_of(running, "responses", owner="ann")
    with pytest.raises(PermissionDeniedError, match=r"Missing scopes: usage\.read"):
        await reader.admin.organization.usage.completions(start_time=since)
    _, viewer = await key_of(running, "usage.read", owner="ann")
    assert (await viewer.admin.organization.usage.completions(start_time=since)).data


async def test_buckets_and_pages(running: Running) -> None:
    for at in (0, DAY - 1, DAY, 5 * DAY + 61):
        await note(running, START + at)
    _, admin = await key_of(running, ADMIN)
    completions = admin.admin.organization.usage.completions
    pages: list[Any] = [await completions(start_time=START, end_time=START + 6 * DAY, limit=4)]
    assert (pages[0].object, pages[0].has_more) == ("page", True)
    while pages[-1].has_more:
        pages.append(
            await completions(start_time=START, end_time=START + 6 * DAY, limit=4, page=pages[-1].next_page)
        )
    assert pages[-1].next_page is None
    buckets = [bucket for page in pages for bucket in page.data]
    assert [(each.start_time, each.end_time) for each in buckets] == [
        (START + day * DAY, START + (day + 1) * DAY) for day in range(6)
    ]
    assert [sum(one.num_model_requests for one in each.results) for each in buckets] == [2, 1, 0, 0, 0, 1]

    minutes = await completions(start_time=START + 5 * DAY, bucket_width="1m", limit=3)
    assert [bool(bucket.results) for bucket in minutes.data] == [False, True, False]
    hours = await completions(start_time=START + DAY - 1800, end_time=START + DAY + 1800, bucket_width="1h")
    assert [(each.start_time, each.end_time, len(each.results)) for each in hours.data] == [
        (START + DAY - 1800, START + DAY, 1),
        (START + DAY, START + DAY + 1800, 1),
    ]
    parts = [
        await completions(start_time=START + begin, end_time=START + end)
        for begin, end in ((0, DAY + 30), (DAY + 30, 5 * DAY + 90), (5 * DAY + 90, 6 * DAY))
    ]
    assert [
        sum(one.num_model_requests for bucket in part.data for one in cast(Any, bucket.results))
        for part in parts
    ] == [2, 1, 1], "ends are rounded down to the minute: nothing counts twice, nothing is left out"
    assert len((await completions(start_time=START)).data) == 7
    far = await completions(start_time=0, end_time=10**11, bucket_width="1m")
    assert len(far.data) == 60 and far.has_more
    assert len((await completions(start_time=START, bucket_width="1h")).data) == 24
    assert len((await completions(start_time=START, bucket_width="1m")).data) == 60


async def test_groups_and_filters(running: Running) -> None:
    await note(running, START)
    await note(running, START, key_id=None, model="n", tier="flex")
    await note(running, START, owner="bob", batch=True)
    await note(running, START, kind="embeddings", counts=Counts(2, 50))
    _, admin = await key_of(running, ADMIN)
    usage = admin.admin.organization.usage

    async def num(**asked: Any) -> int:
        page: Any = await usage.completions(start_time=START, end_time=START + DAY, **asked)
        return sum(one.num_model_requests for bucket in page.data for one in bucket.results)

    assert await num() == 3
    assert await num(models=["n", "o"]) == 1
    assert await num(api_key_ids=["key_a"]) == 2
    assert await num(project_ids=["bob"], batch=True) == 1
    assert await num(batch=False) == 2
    assert await num(user_ids=["user_1"]) == 0
    page: Any = await usage.completions(
        start_time=START, end_time=START + DAY, group_by=["batch", "api_source", "user_id"]
    )
    assert [
        (one.batch, one.api_source, one.user_id, one.num_model_requests) for one in page.data[0].results
    ] == [(False, "unlabeled", None, 2), (True, "unlabeled", None, 1)]
    [one] = (await usage.completions(start_time=START, end_time=START + DAY, models=["n"])).data[0].results
    raw = one.model_dump()
    assert (raw["input_tokens"], raw["input_cached_tokens"]) == (100, 40)
    assert (raw["output_tokens"], raw["output_reasoning_tokens"]) == (10, 3)

    others: Any = await usage.embeddings(start_time=START, end_time=START + DAY)
    [embedded] = others.data[0].results
    assert (embedded.input_tokens, embedded.num_model_requests) == (50, 2)
    for kind in KINDS.keys() - {"completions", "embeddings"}:
        empty = await getattr(usage, kind)(start_time=START, end_time=START + DAY, group_by=["project_id"])
        assert [bucket.results for bucket in empty.data] == [[]], kind


async def test_persons_are_told_apart_by_digests(running: Running) -> None:
    _, admin = await key_of(running, ADMIN)
    ann_id, ann = await key_of(running, owner="ann")
    since = now_us() // 1_000_000 - 60
    for person in ("carol", "carol", "dan", None):
        await ann.responses.create(model=MODEL, input="say one", safety_identifier=person or openai.omit)
    await ann.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "say one"}], user="carol"
    )
    carol = end_user("ann", "carol")
    apart: Any = {"group_by[]": "safety_identifier"}

    async def found(sdk: AsyncOpenAI, query: Any, **asked: Any) -> list[Any]:
        page: Any = await sdk.admin.organization.usage.completions(
            start_time=since, extra_query=query, **asked
        )
        return [result for bucket in page.data for result in bucket.results]

    results = await found(ann, apart)
    told = {one.safety_identifier: one.num_model_requests for one in results}
    assert told == {None: 1, carol: 3, end_user("ann", "dan"): 1}
    assert {one.safety_identifier for one in await found(admin, {})} == {None}
    [one] = await found(admin, {"safety_identifiers[]": carol}, group_by=["project_id", "api_key_id"])
    assert (one.project_id, one.api_key_id, one.num_model_requests) == ("ann", ann_id, 3)
    [one] = await found(admin, {"safety_identifiers": [carol, "0" * 16]})
    assert one.num_model_requests == 3
    _, bob = await key_of(running, owner="bob")
    assert await found(bob, {"safety_identifiers[]": carol}) == []
    page: Any = await admin.admin.organization.usage.costs(start_time=since, extra_query=apart)
    costs = {one.safety_identifier: one.amount.value for bucket in page.data for one in bucket.results}
    assert costs.keys() == told.keys() and costs[carol] > costs[None] > 0

    usage = admin.admin.organization.usage.completions
    for param, width, query in (
        ("bucket_width", "1m", apart),
        ("bucket_width", "1m", {"safety_identifiers[]": carol}),
        ("safety_identifiers", "1h", {"safety_identifiers[]": "carol"}),
    ):
        with pytest.raises(BadRequestError) as refused:
            await usage(start_time=since, bucket_width=cast(Any, width), extra_query=query)
        assert refused.value.param == param, query


async def test_ranges_with_persons_count_whole_hours_once(running: Running) -> None:
    for at in (1800, 3599, 3600, 5400):
        await note(running, START + at, person="0123456789abcdef")
        await note(running, START + at)
    _, admin = await key_of(running, ADMIN)
    apart: Any = {"group_by[]": "safety_identifier"}
    ends = ((0, 1800), (1800, 3600), (3600, 5000), (5000, 7200))
    counted = []
    for begin, end in ends:
        page: Any = await admin.admin.organization.usage.completions(
            start_time=START + begin, end_time=START + end, bucket_width="1h", extra_query=apart
        )
        counted.append(
            [(one.safety_identifier, one.num_model_requests) for each in page.data for one in each.results]
        )
    both = [(None, 2), ("0123456789abcdef", 2)]
    assert counted == [[], both, [], both]


async def test_costs(running: Running, tmp_path: Path) -> None:
    await note(running, START, model=MODEL, counts=Counts(1, 3_000_000, 1_000_000, 500_000))
    await note(running, START + DAY, owner="bob", counts=Counts(1, 2_000_000, 0, 1_000_000))
    _, admin = await key_of(running, ADMIN)
    usage = admin.admin.organization.usage
    page: Any = await usage.costs(start_time=START, end_time=START + 3 * DAY)
    assert [[one.amount.value for one in bucket.results] for bucket in page.data] == [[8.5], [3.0], []]
    first = page.data[0].results[0]
    assert (first.object, first.amount.currency) == ("organization.costs.result", "eur")
    assert (first.project_id, first.line_item, first.quantity) == (None, None, None)
    page = await usage.costs(start_time=START, end_time=START + DAY, group_by=["line_item", "project_id"])
    assert [
        (one.project_id, one.line_item, one.quantity, one.quantity_unit, one.amount.value)
        for one in page.data[0].results
    ] == [
        ("ann", f"{MODEL}, input_tokens", 2_000_000, "tokens", 4.0),
        ("ann", f"{MODEL}, cached_input_tokens", 1_000_000, "tokens", 0.5),
        ("ann", f"{MODEL}, output_tokens", 500_000, "tokens", 4.0),
    ]
    page = await usage.costs(start_time=START, end_time=START + DAY, line_items=[f"{MODEL}, output_tokens"])
    assert [one.amount.value for one in page.data[0].results] == [4.0]
    assert len((await usage.costs(start_time=START, limit=180)).data) <= 180
    async with running_app(tmp_path / "free") as free:
        await note(free, START)
        _, admin = await key_of(free, ADMIN)
        page = await admin.admin.organization.usage.costs(start_time=START, end_time=START + DAY)
        assert [bucket.results for bucket in page.data] == [[]]


async def test_bad_questions_are_told(running: Running) -> None:
    _, admin = await key_of(running, ADMIN)
    usage = admin.admin.organization.usage
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("end_time", {"end_time": START}),
        ("bucket_width", {"bucket_width": "1w"}),
        ("group_by", {"group_by": ["color"]}),
        ("limit", {"limit": 32}),
        ("limit", {"bucket_width": "1m", "limit": 1441}),
        ("page", {"page": "page_1"}),
        ("page", {"page": f"page_{START + 1}"}),
        ("page", {"page": "x"}),
        ("batch", {"batch": "perhaps"}),
        ("start_time", {"start_time": "yesterday"}),
    ]
    for param, asked in wrong:
        with pytest.raises(BadRequestError) as refused:
            await usage.completions(**{"start_time": START, **asked})
        assert refused.value.param == param, asked
    with pytest.raises(BadRequestError) as refused:
        await admin.get("/organization/usage/completions", cast_to=object)
    assert (refused.value.param, refused.value.code) == ("start_time", "missing_required_parameter")
    with pytest.raises(BadRequestError, match="group_by"):
        await usage.vector_stores(start_time=START, group_by=["model"])  # type: ignore[list-item]
    with pytest.raises(NotFoundError):
        await admin.get(f"/organization/usage/dreams?start_time={START}", cast_to=object)
