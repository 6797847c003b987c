"""Search providers: how each is asked, how its answer is read, and what is said of one that fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from tools import SearchFailed, WebSearch, search_once
from tools.web.providers import PROVIDERS, Query
from tools.web.search import Hit, search_all

RESULT = {"url": "https://a.example/1", "title": "<b>One</b> &amp; two"}
ANSWERS: dict[str, Any] = {
    "searxng": {"results": [{**RESULT, "content": "text\nof it"}]},
    "brave": {"web": {"results": [{**RESULT, "description": "<strong>text</strong> of it"}]}},
    "tavily": {"results": [{**RESULT, "content": "text of it", "raw_content": None}]},
}


class Provider:
    """Answers every request the same way, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answer: Any = {}
        self.status = 200
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = (await reader.readline()).decode()
        headers = {}
        while header := (await reader.readline()).decode().strip():
            name, _, value = header.partition(": ")
            headers[name.lower()] = value
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.requests.append((line.split()[1], headers, body))
        said = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
        head = f"HTTP/1.1 {self.status} X\r\ncontent-length: {len(said)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + said)
        writer.close()


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    provider = Provider()
    async with await asyncio.start_server(provider.serve, "127.0.0.1", 0) as server:
        provider.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield provider


@pytest.mark.parametrize("name", PROVIDERS)
async def test_a_provider_is_asked_and_read(provider: Provider, name: str) -> None:
    provider.answer = ANSWERS[name]
    web = WebSearch(name, provider.url, "k3y")
    asked = Query("high tide", 5, ("a.example", "b.example"), "fr")
    assert await web.find(asked) == [Hit("https://a.example/1", "One & two", "text of it")]
    target, headers, body = provider.requests[0]
    sent = f"{target} {headers} {body.decode()}".replace("+", " ").replace("%3A", ":")
    assert "high tide" in sent and "a.example" in sent and "b.example" in sent and "k3y" in sent
    assert "k3y" not in target and "k3y" not in repr(web)
    if name == "brave":
        assert "country=FR" in target and headers["x-subscription-token"] == "k3y"


@pytest.mark.parametrize(
    ("status", "hint"), [(403, "add json to search.formats"), (429, "limiter"), (500, "")]
)
async def test_what_an_operator_can_do_is_said(provider: Provider, status: int, hint: str) -> None:
    provider.status = status
    with pytest.raises(SearchFailed, match=f"status {status}") as failed:
        await search_once(WebSearch("searxng", provider.url))
    assert hint in failed.value.hint and bool(hint) is bool(failed.value.hint)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b"<html>", None),
        (b"[" * 200_000, None),  # deeper than any reader goes
        ({"results": {}}, 0),
        ({"results": [None, 1, {"url": 3}, {"url": "ftp://x/"}, {"url": "https://x/" + "y" * 2000}]}, 0),
        ({"results": [{"url": "https://x/", "title": None, "content": 7}]}, 1),
        ({"results": [{"url": "http://[x"}, {"url": "https://x:99999/"}, {"url": "https:///x"}]}, 0),
        ({"results": [{"url": "https://x/\ud800"}, {"url": "https://x/a b"}, {"url": "https://x/\n"}]}, 0),
    ],
)
async def test_a_strange_answer_is_no_fault_of_ours(
    provider: Provider, answer: Any, found: int | None
) -> None:
    provider.answer = answer
    web = WebSearch("searxng", provider.url)
    if found is None:
        with pytest.raises(SearchFailed, match="not answer with JSON"):
            await search_once(web)
    else:
        assert await search_once(web) == found


@pytest.mark.parametrize("name", PROVIDERS)
async def test_json_of_something_else_is_not_an_answer_without_results(provider: Provider, name: str) -> None:
    for provider.answer in ([], None, "results"):
        with pytest.raises(SearchFailed, match="not answer with a JSON object"):
            await search_once(WebSearch(name, provider.url, "k3y"))


async def test_engines_that_did_not_answer_are_no_search_without_results(provider: Provider) -> None:
    silent = [["google", "CAPTCHA"], ["bing", "too many\nrequests"], "qwant", [], None, [7, "x"]]
    provider.answer = {"results": [], "unresponsive_engines": silent}
    web = WebSearch("searxng", provider.url)
    with pytest.raises(
        SearchFailed, match=r"answer: google \(CAPTCHA\), bing \(too many requests\), qwant\.$"
    ) as of:
        await search_once(web)
    assert "engines" in of.value.hint
    provider.answer = {"results": [RESULT], "unresponsive_engines": silent}  # the others have found something
    assert await search_once(web) == 1
    provider.answer = {"results": [], "unresponsive_engines": []}
    assert await search_once(web) == 0
    provider.answer = {
        "results": [],
        "unresponsive_engines": [[f"engine{number}", ""] for number in range(9)],
    }
    with pytest.raises(SearchFailed, match="engine3, engine4 and 4 more"):
        await search_once(web)


async def test_an_answer_that_is_too_deep_leaves_the_other_queries(provider: Provider) -> None:
    class Other:
        async def find(self, query: Query) -> Sequence[Hit]:
            if query.text == "good":
                return [Hit("https://a.example/", "a", "")]
            return await WebSearch("searxng", provider.url).find(query)

    provider.answer = b"[" * 200_000
    hits, failed = await search_all(Other(), [Query("good", 1), Query("deep", 1)], 5)
    assert len(hits) == 1 and [*failed] == ["deep"]


async def test_texts_of_strangers_are_plain(provider: Provider) -> None:
    strange = {"url": "https://x/", "title": "a\ud800b\x00\u202ec", "content": "d\n\x1b[31me"}
    provider.answer = {"results": [strange]}
    (hit,) = await WebSearch("searxng", provider.url).find(Query("q", 1))
    assert (hit.title, hit.snippet) == ("a b c", "d [31me")


async def test_queries_take_turns_and_a_url_comes_once() -> None:
    class Both:
        async def find(self, query: Query) -> list[Hit]:
            if query.text == "down":
                raise SearchFailed("no")
            return [
                Hit(f"https://{path}", path, "") for path in (f"{query.text}.org/1", "Same.org/x", "c.org")
            ]

    def urls(hits: list[Hit]) -> list[str]:
        return [hit.url.removeprefix("https://") for hit in hits]

    found, failed = await search_all(Both(), [Query("a", 9), Query("b", 9), Query("down", 9)], 9)
    assert urls(found) == ["a.org/1", "b.org/1", "Same.org/x", "c.org"] and failed == {"down": "no"}
    only, _ = await search_all(Both(), [Query("a", 9, ("same.org", "b.org"))], 9)
    assert urls(only) == ["Same.org/x"]
    with pytest.raises(SearchFailed):
        await search_all(Both(), [Query("down", 9)], 9)
