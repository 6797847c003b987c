"""The hosted tool `web_search`, over a web on loopback: searches, pages, what is told and what is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import GenerateRequest, Say, ScriptedEngine
from server.web_settings import WebSettings
from tests.support.loopback_web import LoopbackWeb, loopback_web
from tests.support.owners import two_owners
from tests.support.running import Running, http_client, running_app
from tests.support.talk import Api, Gate, loose, prompts, saying, text, wrote
from tests.support.wire import Json
from tools.documents import Document, DocumentPage
from tools.web import pages

WEB: Json = {"type": "web_search"}
KEPT_ALONE: Json = {**WEB, "external_web_access": False}
SOURCES, RESULTS = "web_search_call.action.sources", "web_search_call.results"


def searches(*queries: str) -> str:
    return wrote("web_search", queries=[*queries])


@pytest.fixture
async def web() -> AsyncIterator[LoopbackWeb]:
    async with loopback_web() as web:
        yield web


@asynccontextmanager
async def searching(
    folder: Path, web: LoopbackWeb, engine: ScriptedEngine | None = None, **settings: Any
) -> AsyncIterator[tuple[Running, Api]]:
    """A server that searches this web, and may read its pages."""
    given = {"egress_allow": (web.host,), **settings}
    table = WebSettings(provider="searxng", url=f"http://{web.host}", open=given.pop("opens", "seen"))
    async with (
        running_app(folder, engine, registry=None, web=table, **given) as running,
        http_client(running) as http,
    ):
        yield running, Api(http)


def made(response: Json) -> list[Json]:
    return [item for item in response["output"] if item["type"] == "web_search_call"]


async def test_a_search_is_offered_made_and_told(tmp_path: Path, web: LoopbackWeb) -> None:
    engine = ScriptedEngine(saying(searches("spring tide", "harbour"), "It is high."))
    async with searching(tmp_path, web, engine) as (_, api):
        stream = await api.stream("When is it?", tools=[{**WEB, "user_location": {"city": "Brest"}}])
        own = [kind for kind in stream.types if "web_search" in kind or kind.startswith("output_item")]
        assert own == [
            "output_item.added", "web_search_call.in_progress", "web_search_call.searching",
            "web_search_call.completed", "output_item.done", "output_item.added", "output_item.done",
        ]  # fmt: skip
        call = made(stream.response)[0]
        queries = {"queries": ["spring tide", "harbour"], "query": "spring tide"}
        assert (call["status"], call["action"]) == ("completed", {"type": "search", **queries})
        assert {path.partition("&")[0] for path in web.asked} == {
            "/search?q=spring+tide",
            "/search?q=harbour",
        }
        offered, told = prompts(engine)
        assert "open_page" in offered and "find_in_page" in offered and "The user is in Brest." in offered
        assert f"【1】 /p/tides.html\n{web.url('/p/tides.html')}\nabout" in told and "<b>" not in told

        stored = await api.http.get(f"/v1/responses/{stream.response['id']}")
        assert stored.json()["output"] == stream.response["output"]
        assert b"snippet" not in stored.content, "what the model was shown is not the client's"
        again = await api.http.get(f"/v1/responses/{stream.response['id']}", params={"stream": "true"})
        assert again.content == stream.raw


async def test_include_shows_sources_and_results_at_once_or_later(tmp_path: Path, web: LoopbackWeb) -> None:
    script = saying(searches("tide"), "one")
    async with searching(tmp_path, web, ScriptedEngine(script)) as (_, api):
        late = await api.create("hi", tools=[WEB])
        assert "sources" not in made(late)[0]["action"]
        shown = {"include[]": [SOURCES, RESULTS]}
        reply = await api.http.get(f"/v1/responses/{late['id']}", params=shown)
        assert "x-antiphon-ignored" not in reply.headers
        filled = made(api.response(reply))[0]
        assert filled["action"]["sources"] == [
            {"type": "url", "url": web.url(path)} for path in ("/p/tides.html",)
        ]
        assert filled["results"][0]["title"] == "/p/tides.html"
        at_once = await api.stream("hi", tools=[WEB], include=[SOURCES])
        call = made(at_once.response)[0]
        assert (call["action"], "results" in call) == (filled["action"], False)
        page = await api.http.get(f"/v1/responses/{at_once.response['id']}/input_items", params=shown)
        assert page.status_code == 200
        stream = await api.http.get(f"/v1/responses/{late['id']}", params={**shown, "stream": "true"})
        assert stream.headers["x-antiphon-ignored"] == "?include[]", "events come again as they were"
        assert b'"sources"' not in stream.content


async def test_pages_are_opened_by_number_and_searched(tmp_path: Path, web: LoopbackWeb) -> None:
    script = saying(
        searches("spring tide moon"), wrote("open_page", ref=2), wrote("find_in_page", ref=2, pattern="BUOY"),
        wrote("find_in_page", ref=2, pattern="Important"),
        wrote("open_page", ref=1), wrote("open_page", url=web.url("/p/harbour.html")), "done",
    )  # fmt: skip
    engine = ScriptedEngine(script)
    async with searching(tmp_path, web, engine) as (_, api):
        response = (await api.stream("hi", tools=[WEB])).response
        actions = [item["action"] for item in made(response)]
        moon, tides = web.url("/p/moon.html"), web.url("/p/tides.html")
        assert [action.get("url") for action in actions[1:]] == [
            moon, moon, moon, tides, web.url("/p/harbour.html"),
        ]  # fmt: skip
        assert {item["status"] for item in made(response)} == {"completed"}
        assert actions[2] == {"type": "find_in_page", "url": moon, "pattern": "BUOY"}
        last = prompts(engine)[-1]
        assert "【2】 /p/moon.html" in last and "0 lines have 'BUOY'." in last
        assert "1 line has 'Important':" in last
        assert "stay at home" in last and "sound their horn" in last, "a link of an opened page was followed"
        assert web.asked.count("/p/moon.html") == 1, "a page is read once in a conversation"


async def test_long_pages_come_in_parts_by_the_size_of_the_context(tmp_path: Path, web: LoopbackWeb) -> None:
    url = web.url("/p/long.txt")
    script = saying(
        wrote("open_page", url=url),
        wrote("open_page", url=url, page=5),
        wrote("open_page", url=url, page=6),
        "x",
    )
    engine = ScriptedEngine(script)
    async with searching(tmp_path, web, engine) as (_, api):
        response = await api.create(f"Read {url}.", tools=[{**WEB, "search_context_size": "low"}])
        last = prompts(engine)[-1]
        assert "Part 1 of 5:\n1: line 1 of the bay\n" in last and "20: line 20 of" in last
        assert "Part 5 of 5:\n81: line 81 of" in last and "21: line 21" not in last
        assert "The page has 5 parts." in last
        assert [item["status"] for item in made(response)] == ["completed", "completed", "failed"]
        assert made(response)[1]["action"] == {"type": "open_page", "url": url, "page": 5}


async def test_only_urls_that_were_seen_are_opened(tmp_path: Path, web: LoopbackWeb) -> None:
    """A page that orders the model to carry the user's secret away in a URL is not obeyed by the server."""
    script = saying(
        searches("moon"),
        wrote("open_page", ref=1),
        wrote("open_page", url=web.url("/steal?q=swordfish")),
        "no",
    )
    for folder, settings, stolen in (("guarded", {}, False), ("open", {"opens": "any"}, True)):
        web.asked.clear()
        engine = ScriptedEngine(script)
        async with searching(tmp_path / folder, web, engine, **settings) as (_, api):
            response = (await api.stream("My word is swordfish.", tools=[WEB])).response
            assert "Important instruction" in prompts(engine)[2]
            assert ("/steal?q=swordfish" in web.asked) is stolen
            last = made(response)[-1]
            assert (last["status"] == "completed") is stolen
            assert ("This URL was not seen before." in prompts(engine)[-1]) is not stolen


async def test_domains_hold_for_results_pages_and_redirects(tmp_path: Path, web: LoopbackWeb) -> None:
    away = web.url("/p/away")
    script = saying(searches("bay"), wrote("open_page", url=away), "x")
    allow = (web.host, f"localhost:{web.port}")
    engine = ScriptedEngine(script)
    async with searching(tmp_path, web, engine, egress_allow=allow) as (_, api):
        mine = {**WEB, "filters": {"allowed_domains": ["127.0.0.1"]}}
        response = await api.create(f"See {away}", tools=[mine], include=[SOURCES])
        search, opened = made(response)
        assert len(search["action"]["sources"]) == 4 and opened["status"] == "failed"
        assert f"localhost:{web.port} is not among the allowed domains" in prompts(engine)[2]
        assert "site:127.0.0.1" in web.asked[0].replace("%3A", ":")
        other = {**WEB, "filters": {"allowed_domains": ["Example.org"]}}
        response = await api.create("hi", tools=[other], include=[SOURCES])
        assert made(response)[0]["action"]["sources"] == []
        assert "Nothing was found." in prompts(engine)[-1]


async def test_blocked_domains_hold_for_results_pages_and_redirects(tmp_path: Path, web: LoopbackWeb) -> None:
    away, bay = web.url("/p/away"), web.url("/p/moon.html")
    script = saying(searches("bay"), wrote("open_page", url=away), wrote("open_page", url=bay), "x")
    allow = (web.host, f"localhost:{web.port}")
    async with searching(tmp_path, web, ScriptedEngine(script), egress_allow=allow) as (_, api):
        mine = {**WEB, "filters": {"allowed_domains": ["127.0.0.1"], "blocked_domains": ["localhost"]}}
        response = await api.create(f"See {away} and {bay}", tools=[mine], include=[SOURCES])
        assert response["tools"] == [mine]
        assert [item["status"] for item in made(response)] == ["completed", "failed", "completed"]
        assert "-site:localhost" in web.asked[0].replace("%3A", ":")
        blocked = {**WEB, "filters": {"blocked_domains": ["127.0.0.1"]}}
        response = await api.create(f"See {bay}", tools=[blocked], previous_response_id=response["id"])
        assert [item["status"] for item in made(response)] == ["completed", "failed", "failed"]
        assert made(response)[0].get("action", {}).get("sources") is None
        response = await api.create("hi", tools=[blocked], include=[SOURCES])
        assert made(response)[0]["action"]["sources"] == []


@pytest.mark.parametrize("member", ["allowed_domains", "blocked_domains"])
@pytest.mark.parametrize(
    "domain", ["demo.test/harbour", "https://demo.test", "demo.test:8080", "*.demo.test", "", "demo.test?x"]
)
async def test_what_is_no_domain_is_refused(client: httpx.AsyncClient, member: str, domain: str) -> None:
    tool = {**WEB, "filters": {member: ["example.org", domain]}}
    error = await Api(client).refused(400, "hi", tools=[tool])
    assert (error["param"], error["code"]) == (f"tools[0].filters.{member}[1]", "invalid_value")
    assert "without scheme, port and path" in error["message"]


async def test_an_unknown_filter_is_refused(client: httpx.AsyncClient) -> None:
    error = await Api(client).refused(400, "hi", tools=[{**WEB, "filters": {"allowed_domain": ["a"]}}])
    assert error["param"] == "tools[0].filters.allowed_domain" and "'allowed_domains'" in error["message"]


async def test_calls_of_one_turn_number_their_sources_on(tmp_path: Path, web: LoopbackWeb) -> None:
    both = f"{searches('horn')}\n{searches('spring tide')}"
    engine = ScriptedEngine(saying(both, "x【2】"))
    async with searching(tmp_path, web, engine) as (_, api):
        response = (await api.stream("hi", tools=[WEB])).response
        told = prompts(engine)[-1]
        assert f"【1】 /p/harbour.html\n{web.url('/p/harbour.html')}" in told
        assert f"【2】 /p/tides.html\n{web.url('/p/tides.html')}" in told
        note = response["output"][-1]["content"][0]["annotations"][0]
        assert (len(made(response)), note["url"]) == (2, web.url("/p/tides.html"))


async def test_what_fails_is_told_to_the_model(tmp_path: Path, web: LoopbackWeb) -> None:
    script = saying(
        searches("bay"), wrote("open_page", ref=7), wrote("find_in_page", pattern="x"),
        wrote("open_page", url=web.url("/p/photo.png")), "sorry",
    )  # fmt: skip
    engine = ScriptedEngine(script)
    web.status = 429
    async with searching(tmp_path, web, engine) as (_, api):
        stream = await api.stream(f"Look at {web.url('/p/photo.png')}", tools=[WEB])
        assert [item["status"] for item in made(stream.response)] == ["failed"] * 4
        assert "web_search_call.completed" not in stream.types
        last = prompts(engine)[-1]
        for words in ("answered with status 429", "no such source", "type image/png, which cannot be read"):
            assert words in last
        assert '{"ref": 7}' in last and '{"pattern": "x"}' in last, "what the model wrote, and no made-up URL"
        assert "source:7" not in last and "about:invalid" not in last
    broken = loose(saying('<tool_call>\n{"name": "web_search", "arguments": {"queries": ["a"', "sorry"))
    async with searching(tmp_path / "broken", web, broken) as (_, api):
        items = made((await api.stream("hi", tools=[WEB])).response)
        assert [(item["status"], item["action"]) for item in items] == [
            ("failed", {"type": "search", "queries": []})
        ]
        assert "The call is not whole" in prompts(broken)[-1]


async def test_owners_take_turns_where_pages_are_read(
    tmp_path: Path, web: LoopbackWeb, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: list[str] = []

    async def read(*_: Any, owner: str = "", **__: Any) -> Document:
        owners.append(owner)
        return Document("html", (DocumentPage(None, "High water"),))

    monkeypatch.setattr(pages, "read_document", read)
    url = web.url("/p/tides.html")
    engine = ScriptedEngine(saying(wrote("open_page", url=url), "done"))
    async with searching(tmp_path, web, engine) as (running, _), two_owners(running) as clients:
        for client in clients:
            response = await Api(client).create(f"Look at {url}", tools=[WEB])
            assert [item["status"] for item in made(response)] == ["completed"]
    assert owners == ["ann", "bob"]


def _says(request: GenerateRequest, prompt: str) -> str:
    if "and now?" in prompt:
        return "so"
    return "It is high." if request.generation else searches("spring tide")


@pytest.mark.parametrize(
    ("name", "arguments", "action"),
    [
        ("web_search", '{"queries": ["\\ud800", " a ", ""]}', {"queries": ["?", "a"], "query": "?"}),
        ("web_search", '{"queries": "tide"}', {"queries": ["tide"], "query": "tide"}),
        ("web_search", '{"queries": [1, null, {}]}', {"queries": []}),
        ("web_search", '["tide"]', {"queries": []}),
        ("open_page", '{"ref": true, "page": 1e3}', {"url": None}),
        ("open_page", f'{{"ref": 1{"0" * 30}, "page": 1{"0" * 30}}}', {"url": None, "page": 100000}),
        ("open_page", '{"url": "example.org/a"}', {"url": "https://example.org/a"}),
        ("open_page", '{"ref": 7}', {"url": "source:7"}),
        ("find_in_page", '{"ref": 7, "pattern": "a"}', {"url": "source:7", "pattern": "a"}),
        ("find_in_page", '{"ref": -1}', {"url": "about:invalid", "pattern": ""}),
        ("find_in_page", "{}", {"url": "about:invalid", "pattern": ""}),
        ("find_in_page", f'{{"ref": {"[" * 5000}{"]" * 5000}}}', {"url": "about:invalid", "pattern": ""}),
    ],
)
async def test_whatever_the_model_writes_becomes_an_item(
    tmp_path: Path, web: LoopbackWeb, name: str, arguments: str, action: Json
) -> None:
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    async with searching(tmp_path, web, loose(saying(call, "done"))) as (_, api):
        response = (await api.stream("hi", tools=[WEB])).response
        kind = "search" if name == "web_search" else name
        assert [item["action"] for item in made(response)] == [{"type": kind, **action}]
        assert (response["status"], text(response)) == ("completed", "done")


async def test_later_turns_are_told_the_same(tmp_path: Path, web: LoopbackWeb) -> None:
    """By a chain, by a conversation, by items that the client sends back, and after a restart."""
    engine = ScriptedEngine(lambda request, prompt: [Say(_says(request, prompt))])
    async with searching(tmp_path, web, engine) as (_, api):
        conversation = (await api.http.post("/v1/conversations", json={})).json()["id"]
        first = await api.create("hi", tools=[WEB], conversation=conversation)
        told = "【1】 /p/tides.html"
        turn = [{"role": "user", "content": "and now?"}]
        await api.create(turn, tools=[WEB], previous_response_id=first["id"])
        chained = prompts(engine)[-1]
        assert told in chained
        await api.create(turn, tools=[WEB], conversation=conversation)
        assert prompts(engine)[-1] == chained
        history = [{"role": "user", "content": "hi"}, *first["output"]]
        reply = await api.http.post(
            "/v1/responses", json={"input": [*history, *turn], "tools": [WEB], "store": False}
        )
        assert api.response(reply) and "x-antiphon-ignored" not in reply.headers
        assert prompts(engine)[-1] == chained
        shown = await api.http.get(f"/v1/responses/{first['id']}", params={"include[]": [SOURCES, RESULTS]})
        history = [{"role": "user", "content": "hi"}, *shown.json()["output"]]
        await api.create([*history, *turn], tools=[WEB])
        assert prompts(engine)[-1] == chained, "as an include has shown it"
        stranger = {**made(first)[0], "id": "ws_elsewhere"}
        reply = await api.http.post("/v1/responses", json={"input": [*turn, stranger], "tools": [WEB]})
        assert api.response(reply) and reply.headers["x-antiphon-ignored"] == "input[1]"
        assert told not in prompts(engine)[-1]
    async with searching(tmp_path, web, engine) as (_, api):
        await api.create(turn, tools=[WEB], previous_response_id=first["id"])
        assert prompts(engine)[-1] == chained


async def test_an_answer_cites_its_sources_in_its_stream(tmp_path: Path, web: LoopbackWeb) -> None:
    engine = ScriptedEngine(saying(searches("spring tide"), "It is highest then【1】, they say【7】."))
    async with searching(tmp_path, web, engine) as (_, api):
        stream = await api.stream("hi", tools=[WEB], include=["message.output_text.logprobs"])
        assert "【" not in "".join(event.get("delta", "") for event in stream.events)
        part = stream.response["output"][-1]["content"][0]
        link = f"([{web.host}]({web.url('/p/tides.html')}))"
        assert part["text"] == f"It is highest then {link}, they say."
        note = {"type": "url_citation", "url": web.url("/p/tides.html"), "title": "/p/tides.html"}
        assert part["annotations"] == [{**note, "start_index": 19, "end_index": 19 + len(link)}]
        added = stream.types.index("output_text.annotation.added")
        assert stream.types.index("output_text.done") > added
        stored = f"/v1/responses/{stream.response['id']}"
        again = await api.http.get(stored, params={"stream": "true"})
        assert again.content == stream.raw
        rest = await api.http.get(stored, params={"stream": "true", "starting_after": added})
        assert stream.raw.endswith(rest.content) and rest.content
        await api.create("and now?", tools=[WEB], previous_response_id=stream.response["id"])
        assert link in prompts(engine)[-2]

        shaped = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "string"}}}
        response = await api.create("hi", tools=[WEB], text=shaped)
        assert "http" not in text(response), "a shape has no room for links"


@pytest.mark.parametrize("cut", ["It is high【", "It is high【1", "It is high【1】", "It is high【1】."])
async def test_a_cited_answer_goes_on_after_a_restart(tmp_path: Path, web: LoopbackWeb, cut: str) -> None:
    """The events that were made before and after are those of an answer that nothing has cut."""
    whole = "It is high【1】. So【1】."

    def script(gate: Gate | None) -> Any:
        def says(request: GenerateRequest, prompt: str) -> Any:
            if not request.generation:
                yield Say(searches("spring tide"))
                return
            yield Say(cut)
            if gate is not None:
                yield gate.wait()
            yield Say(whole[len(cut) :])

        return says

    gate = Gate()
    async with searching(tmp_path, web, ScriptedEngine(script(gate))) as (running, api):
        body: Json = {"input": "hi", "tools": [WEB], "background": True}
        body["include"] = ["message.output_text.logprobs"]
        begun = (await api.http.post("/v1/responses", json=body)).json()["id"]
        await gate.reached.wait()
        await running.context.runs.drain(0)
    async with searching(tmp_path, web, ScriptedEngine(script(None))) as (_, api):
        reply = await api.http.get(f"/v1/responses/{begun}", params={"stream": "true"})
        stream = api.whole(reply)
        assert stream.response["status"] == "completed"
        part = stream.response["output"][-1]["content"][0]
        link = f"([{web.host}]({web.url('/p/tides.html')}))"
        assert part["text"] == f"It is high {link}. So {link}."
        cited = [part["text"][note["start_index"] : note["end_index"]] for note in part["annotations"]]
        assert cited == [link, link] and len(web.asked) == 1
        again = await api.http.get(f"/v1/responses/{begun}", params={"stream": "true"})
        assert again.content == reply.content


async def test_what_is_kept_goes_with_the_response(tmp_path: Path, web: LoopbackWeb) -> None:
    async with searching(tmp_path, web, ScriptedEngine(saying(searches("tide"), "x"))) as (running, api):
        response = await api.create("hi", tools=[WEB])
        call = made(response)[0]["id"]
        storage = running.context.storage
        assert (await storage.get_items("local", [call]))[call].private is not None
        await api.http.delete(f"/v1/responses/{response['id']}")
        assert await storage.get_items("local", [call]) == {}


async def ignored(http: httpx.AsyncClient, tool: Json) -> str | None:
    reply = await http.post("/v1/responses", json={"input": "say hi", "tools": [tool]})
    assert reply.status_code == 200, reply.text
    named: str | None = reply.headers.get("x-antiphon-ignored")
    return named


async def test_where_it_cannot_be_run_it_is_refused_or_left_out(tmp_path: Path, web: LoopbackWeb) -> None:
    engine = ScriptedEngine()
    async with searching(tmp_path, web, engine) as (_, api):
        assert await ignored(api.http, KEPT_ALONE) == "tools[0]"
        assert "web_search" not in prompts(engine)[-1]
        assert await ignored(api.http, {"type": "web_search_preview"}) is None
        assert "web_search" in prompts(engine)[-1]
        forced = {"input": "hi", "tools": [WEB], "tool_choice": {"type": "web_search"}}
        assert made((await api.http.post("/v1/responses", json=forced)).json())
    async with searching(tmp_path, web, engine, egress_allow=()) as (_, api):
        assert await ignored(api.http, WEB) is None
        assert "web_search" in prompts(engine)[-1] and "open_page" not in prompts(engine)[-1]
    async with running_app(tmp_path, engine, registry=None) as running, http_client(running) as http:
        reply = await http.post("/v1/responses", json={"input": "say hi", "tools": [WEB]})
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_tool", "tools[0].type")
        assert "no search provider is configured" in error["message"]
        assert await ignored(http, KEPT_ALONE) == "tools[0]"
        chat = {"messages": [{"role": "user", "content": "say hi"}], "tools": [KEPT_ALONE]}
        reply = await http.post("/v1/chat/completions", json=chat)
        assert reply.json()["choices"][0]["message"]["content"] == "hi"
        assert reply.headers["x-antiphon-ignored"] == "tools[0]"
    left_out = running_app(tmp_path, engine, registry=None, unsupported_tools="ignore")
    async with left_out as running, http_client(running) as http:
        assert await ignored(http, WEB) == "tools[0]"
