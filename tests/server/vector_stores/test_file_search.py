"""The hosted tool `file_search`: what the model is shown, what the client is, and what is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine import ScriptedEngine
from server.access import LOCAL_OWNER
from server.clock import now_us
from server.items import type_of_calls
from server.vector_stores import Hit, Searcher
from storage import UsageFilter
from tests.support import documents
from tests.support.libraries import TIDES, new_store, put_file, read_through
from tests.support.running import http_client, running_app
from tests.support.talk import Api, prompts, saying, text, wrote
from tests.support.wire import Json

RESULTS = "file_search_call.results"
ASKS = wrote("file_search", query="spring tide")


def searching(store: str, **fields: object) -> Json:
    return {"type": "file_search", "vector_store_ids": [store], **fields}


def made(response: Json) -> list[Json]:
    return [item for item in response["output"] if item["type"] == "file_search_call"]


async def test_a_search_is_offered_made_told_and_cited(tmp_path: Path) -> None:
    first = saying(ASKS, "Two days after the full moon 【1】. So be it【1】【9】.")
    again = saying("Still 【1】")  # the next turn knows the source
    engine = ScriptedEngine(lambda request, told: (again if "Again?" in told else first)(request, told))
    async with running_app(tmp_path, engine) as running, http_client(running) as http:
        store = await new_store(running, http, tides_md=TIDES)
        file = (await http.get(f"/v1/vector_stores/{store}/files")).json()["data"][0]["id"]
        api = Api(http)
        stream = await api.stream("When is it highest?", tools=[searching(store)])
        kinds = [kind for kind in stream.types if "file_search" in kind or kind.startswith("output_item")]
        assert kinds == [
            "output_item.added", "file_search_call.in_progress", "file_search_call.searching",
            "file_search_call.completed", "output_item.done", "output_item.added", "output_item.done",
        ]  # fmt: skip
        [call] = made(stream.response)
        assert (call["status"], call["queries"], call["results"]) == ("completed", ["spring tide"], None)
        offered, told = prompts(engine)
        assert "Search the user's files" in offered
        assert "【1】 tides.md\n> # Tides of the bay" in told and "second buoy" in told
        answer = "Two days after the full moon. So be it."
        assert text(stream.response) == answer
        part = stream.response["output"][-1]["content"][0]
        cited = {"type": "file_citation", "file_id": file, "filename": "tides.md"}
        assert part["annotations"] == [
            {**cited, "index": answer.index(".")},
            {**cited, "index": answer.rindex(".")},
        ]
        assert "【" not in "".join(e["delta"] for e in stream.events if e["type"].endswith("text.delta"))

        stored = await http.get(f"/v1/responses/{stream.response['id']}")
        assert stored.json()["output"] == stream.response["output"]
        assert b"second buoy" not in stored.content, "what the model was shown is not the client's"
        replayed = await http.get(f"/v1/responses/{stream.response['id']}", params={"stream": "true"})
        assert replayed.content == stream.raw
        later = await http.get(f"/v1/responses/{stream.response['id']}", params={"include[]": RESULTS})
        [result] = made(later.json())[0]["results"]
        assert (result["file_id"], result["filename"], result["score"]) == (file, "tides.md", 1.0)
        assert result["text"].startswith("# Tides of the bay")

        more = await api.create("Again?", previous_response_id=stream.response["id"], include=[RESULTS])
        assert more["output"][-1]["content"][0]["annotations"] == [{**cited, "index": len("Still")}]
        assert "【1】 tides.md" in prompts(engine)[-1]


async def test_what_is_found_is_what_was_asked_for(tmp_path: Path) -> None:
    engine = ScriptedEngine(saying(ASKS, "x"))
    async with running_app(tmp_path, engine) as running, http_client(running) as http:
        store, api = await new_store(running, http), Api(http)
        for number in range(4):
            file = await put_file(running, f"{number}.txt", f"The spring tide of note {number}.")
            await http.post(
                f"/v1/vector_stores/{store}/files", json={"file_id": file, "attributes": {"n": number}}
            )
        assert (await read_through(http, store))["file_counts"]["completed"] == 4

        async def names(**fields: object) -> list[str]:
            response = await api.create("hi", tools=[searching(store, **fields)], include=[RESULTS])
            return sorted(result["filename"] for result in made(response)[0]["results"])

        assert await names() == ["0.txt", "1.txt", "2.txt", "3.txt"]
        assert len(await names(max_num_results=2)) == 2
        wanted = {"type": "gte", "key": "n", "value": 2}
        assert await names(filters=wanted) == ["2.txt", "3.txt"]
        assert await names(filters={**wanted, "value": 9}) == []
        assert "Nothing was found." in prompts(engine)[-1]
        await api.create("hi", tools=[searching(store)], tool_choice={"type": "file_search"})


async def test_the_model_is_told_on_which_page_a_text_stands(tmp_path: Path) -> None:
    engine = ScriptedEngine(saying(wrote("file_search", query="plums"), "Ripe in autumn 【1】."))
    pages = ["Apples are ripe in summer.", "Pears have no stones.", "[page 9] Plums are ripe in autumn."]
    async with running_app(tmp_path, engine) as running, http_client(running) as http:
        store = await new_store(running, http, fruit_pdf=documents.pdf(pages))
        response = await Api(http).create("hi", tools=[searching(store)], include=[RESULTS])
        told = prompts(engine)[-1]
        assert (
            "【1】 fruit.pdf, pages 1-3\n[page 1]\n> Apples are ripe in summer.\n[page 2]\n> Pears have no "
            "stones.\n[page 3]\n> [page 9] Plums are ripe in autumn."
        ) in told
        [result] = made(response)[0]["results"]
        assert result.keys() == {"file_id", "filename", "text", "score", "attributes"}
        assert "[page 1]" not in result["text"] and result["text"].startswith("Apples")
        single = await new_store(running, http, one_pdf=documents.pdf(["Plums."]))
        await Api(http).create("hi", tools=[searching(single)])
        assert "【1】 one.pdf, page 1\n> Plums." in prompts(engine)[-1]


async def test_a_file_in_two_stores_is_two_sources(tmp_path: Path) -> None:
    """Each store has cut it in its own way: the same positions are not the same passage."""
    engine = ScriptedEngine(saying(ASKS, "x"))
    async with running_app(tmp_path, engine) as running, http_client(running) as http:
        one = await new_store(running, http, tides_md=TIDES)
        file = (await http.get(f"/v1/vector_stores/{one}/files")).json()["data"][0]["id"]
        other = (await http.post("/v1/vector_stores", json={"file_ids": [file]})).json()["id"]
        await read_through(http, other)
        both = {**searching(one), "vector_store_ids": [one, other]}
        await Api(http).create("hi", tools=[both])
        told = prompts(engine)[-1]
        assert told.count("【1】 tides.md") == told.count("【2】 tides.md") == 1


async def test_one_of_two_weights_is_more_than_nothing(tmp_path: Path) -> None:
    engine = ScriptedEngine(saying(ASKS, "x"))
    async with running_app(tmp_path, engine) as running, http_client(running) as http:
        store, api = await new_store(running, http, tides_md=TIDES), Api(http)

        def weighed(vectors: float, words: float) -> list[Json]:
            mix = {"embedding_weight": vectors, "text_weight": words}
            return [searching(store, ranking_options={"hybrid_search": mix})]

        error = await api.refused(400, "hi", tools=weighed(0, 0.0))
        assert (error["param"], error["code"]) == ("tools[0].ranking_options.hybrid_search", "invalid_value")
        assert made(await api.create("hi", tools=weighed(0, 0.1)))


async def test_a_store_must_be_there_when_it_is_asked_for_and_may_go_later(tmp_path: Path) -> None:
    engine = ScriptedEngine(saying(ASKS, "x"))
    async with running_app(tmp_path, engine) as running, http_client(running) as http:
        store, api = await new_store(running, http, tides_md=TIDES), Api(http)
        error = await api.refused(404, "hi", tools=[searching("vs_none")])
        assert error["param"] == "tools[0].vector_store_ids[0]"
        assert error["message"] == "Vector store with id 'vs_none' not found."
        await api.refused(400, "hi", tools=[searching(store, filters={"type": "x"})])
        await http.delete(f"/v1/vector_stores/{store}")
        await api.refused(404, "hi", tools=[searching(store)])


async def test_an_unstored_search_comes_back_sealed_and_one_of_elsewhere_as_it_says(tmp_path: Path) -> None:
    engine = ScriptedEngine(saying(ASKS, "x"))
    async with running_app(tmp_path, engine) as running, http_client(running) as http:
        store, api = await new_store(running, http, tides_md=TIDES), Api(http)
        sealed = {"store": False, "include": ["reasoning.encrypted_content"]}
        first = await api.create("hi", tools=[searching(store)], **sealed)
        [call] = made(first)
        assert "antiphon_sealed" in call and "buoy" not in str(call)
        await api.create([*first["output"], {"role": "user", "content": "And?"}], store=False)
        assert "second buoy" in prompts(engine)[-1]
        foreign = {
            "type": "file_search_call", "id": "fs_x", "status": "completed", "queries": ["q"],
            "results": [{"file_id": "f", "filename": "far.txt", "text": "far away", "score": 1}],
        }  # fmt: skip
        await api.create([foreign, {"role": "user", "content": "And?"}], store=False)
        assert "far.txt:\nfar away" in prompts(engine)[-1]


async def test_chat_completions_make_searches_too(tmp_path: Path) -> None:
    engine = ScriptedEngine(saying(ASKS, "It is high 【1】."))
    async with running_app(tmp_path, engine) as running, http_client(running) as http:
        store = await new_store(running, http, tides_md=TIDES)
        body = {"model": "antiphon-scripted", "messages": [{"role": "user", "content": "When?"}]}
        reply = await http.post("/v1/chat/completions", json={**body, "tools": [searching(store)]})
        message = reply.json()["choices"][0]["message"]
        assert message["content"] == "It is high."
        assert message["annotations"] == [], "the official ones are of the web alone"
        [cited] = message["file_citations"]
        assert (cited["type"], cited["filename"], cited["index"]) == ("file_citation", "tides.md", 10)
        again = [*body["messages"], message, {"role": "user", "content": "Sure?"}]
        reply = await http.post("/v1/chat/completions", json={**body, "messages": again})
        assert reply.status_code == 200 and "x-antiphon-ignored" not in reply.headers
        assert message["server_tool_calls"][0]["queries"] == ["spring tide"]


async def test_a_search_that_is_cut_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process ends in the midst of a search: the next one makes it again, and the model sees one result."""
    begun = asyncio.Event()

    async def never(*_: object) -> list[Hit]:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with (
        running_app(tmp_path, ScriptedEngine(saying(ASKS, "x 【1】"))) as running,
        http_client(running) as http,
    ):
        store = await new_store(running, http, tides_md=TIDES)
        with monkeypatch.context() as patched:
            patched.setattr(Searcher, "search", never)
            response = await Api(http).create("hi", tools=[searching(store)], background=True)
            await begun.wait()
            await running.life.close()
    engine = ScriptedEngine(saying(ASKS, "x 【1】"))
    async with running_app(tmp_path, engine) as running, http_client(running) as http:
        ended = await Api(http).ended(response["id"])
        assert [item["status"] for item in ended["output"]] == ["completed", "completed"]
        assert prompts(engine)[-1].count("【1】 tides.md") == 1
        assert ended["output"][-1]["content"][0]["annotations"][0]["filename"] == "tides.md"


async def test_searches_and_bytes_are_counted(tmp_path: Path) -> None:
    engine = ScriptedEngine(saying(ASKS, "x"))
    async with running_app(tmp_path, engine) as running, http_client(running) as http:
        store, api, storage = (
            await new_store(running, http, tides_md=TIDES),
            Api(http),
            running.context.storage,
        )
        size = (await http.get(f"/v1/vector_stores/{store}")).json()["usage_bytes"]
        assert (await storage.usage(LOCAL_OWNER)).held == size + len(TIDES.encode()), (
            "the file, and its chunks"
        )
        await api.create("hi", tools=[searching(store)])
        await running.context.meter.flush()
        sums = await storage.usage_sums(
            UsageFilter(kind="file_search_calls", since=0, before=now_us() + 60_000_000),
            ("model",),
            60_000_000,
        )
        assert [(one.by["model"], one.counts.requests) for one in sums] == [(store, 1)]


async def test_what_has_no_room_is_not_read(tmp_path: Path) -> None:
    async with (
        running_app(tmp_path, owner_limit=("stored_bytes=250",)) as running,
        http_client(running) as http,
    ):
        file = await put_file(running, "a.md", TIDES)
        made = (await http.post("/v1/vector_stores", json={"file_ids": [file]})).json()
        await read_through(http, made["id"])
        found = (await http.get(f"/v1/vector_stores/{made['id']}/files/{file}")).json()
        assert found["status"] == "failed" and found["last_error"]["code"] == "server_error"
        assert "250" in found["last_error"]["message"]


def test_a_query_that_is_enforced_has_a_character() -> None:
    row = type_of_calls("file_search")
    assert row is not None and row.call is not None
    [offered] = row.call.offers({"type": "file_search"}, {}, "tools[0]")
    properties = offered["parameters"]["properties"]
    assert properties["query"]["minLength"] == 1
    assert (properties["other_queries"]["minItems"], properties["other_queries"]["items"]["minLength"]) == (
        1,
        1,
    )
