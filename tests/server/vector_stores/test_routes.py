"""Vector stores over HTTP: what is refused, what is shown, and what becomes of files that cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest

from server.access import LOCAL_OWNER
from server.clock import now_us
from server.vector_stores import Kind, Payer
from tests.support import documents
from tests.support.libraries import TIDES, WordVectors, new_store, put_file, read_through
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.wire import Json, validate, validate_error


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Running, httpx.AsyncClient]]:
    async with running_app(tmp_path) as running, http_client(running) as http:
        yield running, http


async def ask(http: httpx.AsyncClient, method: str, path: str, shape: str, **request: object) -> Json:
    """A reply of the official shape."""
    reply = await http.request(method, f"/v1/vector_stores{path}", **request)  # type: ignore[arg-type]
    assert reply.status_code == 200, reply.text
    found: Json = reply.json()
    validate(shape, found)
    return found


async def refused(http: httpx.AsyncClient, status: int, path: str, body: object) -> str | None:
    reply = await http.post(f"/v1/vector_stores{path}", json=body)
    assert reply.status_code == status, reply.text
    param: str | None = validate_error(reply.json())["param"]
    return param


async def test_a_member_that_is_not_known_has_one_code(served: tuple[Running, httpx.AsyncClient]) -> None:
    _, http = served
    store = await ask(http, "POST", "", "VectorStoreObject", json={})
    bodies: tuple[Json, ...] = ({"limit": 3}, {"ranking_options": {"hybrid_search": {}}})
    for body in bodies:
        reply = await http.post(f"/v1/vector_stores/{store['id']}/search", json={"query": "x", **body})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unknown_parameter")


async def test_a_store_is_made_changed_listed_and_deleted(
    served: tuple[Running, httpx.AsyncClient],
) -> None:
    _, http = served
    body = {
        "name": "shelf",
        "metadata": {"a": "b"},
        "expires_after": {"anchor": "last_active_at", "days": 7},
    }
    made = await ask(http, "POST", "", "VectorStoreObject", json=body)
    assert made["expires_at"] == made["last_active_at"] + 7 * 86400
    assert made["status"] == "completed" and made["file_counts"]["total"] == 0
    path = f"/{made['id']}"
    assert await ask(http, "GET", path, "VectorStoreObject") == made
    changed = await ask(http, "POST", path, "VectorStoreObject", json={"expires_after": None, "name": "x"})
    assert (changed["name"], changed["expires_at"], changed["metadata"]) == ("x", None, {"a": "b"})
    second = await ask(http, "POST", "", "VectorStoreObject")
    page = await ask(http, "GET", "", "ListVectorStoresResponse", params={"limit": 1})
    assert (page["first_id"], page["has_more"]) == (second["id"], True)
    gone = await ask(http, "DELETE", path, "DeleteVectorStoreResponse")
    assert gone["deleted"] is True
    assert (await http.get(f"/v1/vector_stores{path}")).status_code == 404


async def test_files_are_read_shown_searched_and_taken_out(
    served: tuple[Running, httpx.AsyncClient],
) -> None:
    running, http = served
    store = await ask(http, "POST", "", "VectorStoreObject", json={})
    path = f"/{store['id']}"
    pages = ["Nothing of interest.", "The spring tide is highest after the full moon."]
    file = await put_file(running, "tides.pdf", documents.pdf(pages))
    made = await http.post(
        f"/v1/vector_stores{path}/files", json={"file_id": file, "attributes": {"year": 2024}}
    )
    assert made.json()["status"] == "in_progress" and int(made.headers["openai-poll-after-ms"]) < 1000
    assert (await read_through(http, store["id"]))["file_counts"]["completed"] == 1
    read = await ask(http, "GET", f"{path}/files/{file}", "VectorStoreFileObject")
    assert (read["status"], read["last_error"], read["attributes"]) == ("completed", None, {"year": 2024})
    assert read["chunking_strategy"]["static"] == {"max_chunk_size_tokens": 800, "chunk_overlap_tokens": 400}
    content = await ask(http, "GET", f"{path}/files/{file}/content", "VectorStoreFileContentResponse")
    assert "full moon" in content["data"][-1]["text"]
    found = await ask(
        http, "POST", f"{path}/search", "VectorStoreSearchResultsPage", json={"query": "full moon"}
    )
    assert [(hit["filename"], hit["attributes"], hit["score"]) for hit in found["data"]] == [
        ("tides.pdf", {"year": 2024}, 1.0)
    ]
    changed = await ask(
        http, "POST", f"{path}/files/{file}", "VectorStoreFileObject", json={"attributes": {"year": 2025}}
    )
    assert changed["attributes"] == {"year": 2025}
    nothing = await http.post(f"/v1/vector_stores{path}/files/{file}", json={})
    assert nothing.status_code == 400 and nothing.json()["error"]["code"] == "missing_required_parameter"
    kept = await ask(http, "GET", f"{path}/files/{file}", "VectorStoreFileObject")
    assert kept["attributes"] == {"year": 2025}
    listed = await ask(
        http, "GET", f"{path}/files", "ListVectorStoreFilesResponse", params={"filter": "completed"}
    )
    assert [each["id"] for each in listed["data"]] == [file]
    keyed = {"json": {"query": "full moon"}, "headers": {"idempotency-key": "once"}}
    replies = [await http.post(f"/v1/vector_stores{path}/search", **keyed) for _ in range(2)]
    assert "full moon" in replies[1].text and replies[1].content == replies[0].content
    await ask(http, "DELETE", f"{path}/files/{file}", "DeleteVectorStoreFileResponse")
    again = await http.post(f"/v1/vector_stores{path}/search", **keyed)
    assert (again.status_code, validate_error(again.json())["code"]) == (409, "idempotency_reply_not_kept")
    found = await ask(
        http, "POST", f"{path}/search", "VectorStoreSearchResultsPage", json={"query": ["full", "moon"]}
    )
    assert (found["data"], found["search_query"]) == ([], ["full", "moon"])


async def test_files_that_cannot_be_read_say_why(served: tuple[Running, httpx.AsyncClient]) -> None:
    running, http = served
    files = {
        "unsupported_file": await put_file(running, "photo.png", b"\x89PNG\r\n\x1a\n" + bytes(64)),
        "invalid_file": await put_file(running, "broken.pdf", b"%PDF-1.7 and nothing more"),
    }
    made = await ask(http, "POST", "", "VectorStoreObject", json={"file_ids": [*files.values()]})
    assert (await read_through(http, made["id"]))["file_counts"]["failed"] == 2
    for code, file in files.items():
        found = await ask(http, "GET", f"/{made['id']}/files/{file}", "VectorStoreFileObject")
        assert (found["status"], found["last_error"]["code"]) == ("failed", code)
        assert found["usage_bytes"] == 0


async def test_batches_are_made_watched_and_cancelled(served: tuple[Running, httpx.AsyncClient]) -> None:
    running, http = served
    store = await ask(http, "POST", "", "VectorStoreObject", json={})
    path = f"/{store['id']}/file_batches"
    files = [await put_file(running, f"{number}.md", TIDES) for number in range(3)]
    each = [{"file_id": id, "attributes": {"n": n}} for n, id in enumerate(files)]
    made = await ask(http, "POST", path, "VectorStoreFileBatchObject", json={"files": each})
    assert made["file_counts"]["total"] == 3
    await read_through(http, store["id"])
    done = await ask(http, "GET", f"{path}/{made['id']}", "VectorStoreFileBatchObject")
    assert (done["status"], done["file_counts"]["completed"]) == ("completed", 3)
    listed = await ask(http, "GET", f"{path}/{made['id']}/files", "ListVectorStoreFilesResponse")
    assert sorted(file["attributes"]["n"] for file in listed["data"]) == [0, 1, 2]
    assert (await ask(http, "POST", f"{path}/{made['id']}/cancel", "VectorStoreFileBatchObject")) == done


async def test_what_is_wrong_is_named(served: tuple[Running, httpx.AsyncClient]) -> None:
    running, http = served
    store = await new_store(running, http, tides_md=TIDES)
    file = await put_file(running, "a.md", TIDES)
    theirs = await put_file(running, "b.md", TIDES, owner="somebody-else")
    static = {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 51}
    cases: list[tuple[int, str, object, str]] = [
        (400, "", {"nam": "x"}, "nam"),
        (400, "", {"expires_after": {"anchor": "created_at", "days": 1}}, "expires_after.anchor"),
        (404, "", {"file_ids": [file, theirs]}, "file_ids[1]"),
        (400, f"/{store}/files", {}, "file_id"),
        (404, f"/{store}/files", {"file_id": theirs}, "file_id"),
        (400, f"/{store}/files", {"file_id": file, "attributes": {"a": []}}, "attributes.a"),
        (
            400,
            f"/{store}/files",
            {"file_id": file, "chunking_strategy": {"type": "static", "static": static}},
            "chunking_strategy.static.chunk_overlap_tokens",
        ),
        (400, f"/{store}/file_batches", {}, "file_ids"),
        (400, f"/{store}/file_batches", {"file_ids": [file], "files": [{"file_id": file}]}, "file_ids"),
        (400, f"/{store}/search", {}, "query"),
        (400, f"/{store}/search", {"query": "x", "limit": 3}, "limit"),
        (400, f"/{store}/search", {"query": "x", "max_num_results": 51}, "max_num_results"),
        (400, f"/{store}/search", {"query": "x", "filters": {"type": "eq"}}, "filters.key"),
        (400, f"/{store}/search", {"query": "x", "ranking_options": {"score_threshold": 2}},
         "ranking_options.score_threshold"),
    ]  # fmt: skip
    for status, path, body, param in cases:
        assert await refused(http, status, path, body) == param, (path, body)
    assert (await http.get("/v1/vector_stores/vs_none/files")).status_code == 404
    assert (await http.get(f"/v1/vector_stores/{store}/files/file-none")).status_code == 404


async def test_an_expired_store_says_so_and_is_emptied(
    served: tuple[Running, httpx.AsyncClient],
) -> None:
    running, http = served
    store = await new_store(running, http, tides_md=TIDES)
    await http.post(
        f"/v1/vector_stores/{store}", json={"expires_after": {"anchor": "last_active_at", "days": 1}}
    )
    stores = running.context.storage.vector_stores
    await stores.change(LOCAL_OWNER, store, now_us() - 2 * 86_400_000_000, {})
    shown = (await http.get(f"/v1/vector_stores/{store}")).json()
    assert shown["status"] == "expired"
    assert await refused(http, 400, f"/{store}/search", {"query": "x"}) == "vector_store_id"
    running.context.library.ingester.wake()
    while (await http.get(f"/v1/vector_stores/{store}")).json()["file_counts"]["total"]:
        await stores.due(0)


async def test_the_chunks_of_an_expired_file_are_shown_no_more(
    served: tuple[Running, httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it stays in its stores until the next sweep."""
    running, http = served
    store = await new_store(running, http)
    lasting = {
        "purpose": "assistants",
        "expires_after[anchor]": "created_at",
        "expires_after[seconds]": "3600",
    }
    made = await http.post("/v1/files", data=lasting, files={"file": ("tides.md", TIDES)})
    file = made.json()["id"]
    await http.post(f"/v1/vector_stores/{store}/files", json={"file_id": file})
    await read_through(http, store)
    content = f"/v1/vector_stores/{store}/files/{file}/content"
    assert (await http.get(content)).json()["data"]
    end = now_us() + 3_600_000_000
    monkeypatch.setattr("server.routes.vector_stores.files.now_us", lambda: end)
    assert (await http.get(content)).status_code == 404


async def test_attributes_count_for_each_file_that_has_them(tmp_path: Path) -> None:
    limits = {"owner_limit": ("stored_bytes=50000",)}
    async with running_app(tmp_path, **limits) as running, http_client(running) as http:
        store = (await http.post("/v1/vector_stores", json={})).json()["id"]
        path = f"/v1/vector_stores/{store}"
        files = [await put_file(running, f"{number}.md", TIDES) for number in range(10)]
        large = {f"k{number}": "\x01" * 512 for number in range(2)}  # more than 6000 bytes as JSON
        for taken, status in ((10, 429), (7, 200)):
            body = {"file_ids": files[:taken], "attributes": large}
            reply = await http.post(f"{path}/file_batches", json=body)
            assert reply.status_code == status, reply.text
        more = {"attributes": large | {"k": "\x01" * 512}}
        reply = await http.post(f"{path}/files/{files[0]}", json=more)
        assert (reply.status_code, validate_error(reply.json())["code"]) == (429, "insufficient_quota")


async def test_what_stores_hold_is_told_as_usage(served: tuple[Running, httpx.AsyncClient]) -> None:
    running, http = served
    store = await new_store(running, http, tides_md=TIDES)
    held = (await http.get(f"/v1/vector_stores/{store}")).json()["usage_bytes"]
    now = now_us() // 1_000_000
    asked = {"start_time": now - 7200, "bucket_width": "1h", "group_by[]": "project_id"}

    async def buckets(**more: str | int) -> list[list[Json]]:
        page = await http.get("/v1/organization/usage/vector_stores", params=asked | more)
        return [bucket["results"] for bucket in page.json()["data"]]

    result = {"object": "organization.usage.vector_stores.result", "usage_bytes": held}
    assert held and (await buckets())[-1] == [result | {"project_id": LOCAL_OWNER}]
    assert (await buckets())[0] == [], "it was not there then"
    assert [each for each in await buckets(**{"project_ids[]": "other"}) if each] == []
    await http.delete(f"/v1/vector_stores/{store}")
    assert not any(await buckets())


async def test_a_search_is_paid_for_by_whoever_asks_and_ends_when_they_leave(tmp_path: Path) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    class Slow(WordVectors):
        async def embed(self, texts: Sequence[str], kind: Kind, *, payer: Payer) -> list[list[float]]:
            self.payers.append(payer)
            if kind == "document":
                return await super().embed(texts, kind, payer=payer)
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError

    model = Slow(["tide"])
    async with live_app(tmp_path) as running, http_client(running) as http:
        stores = running.context.storage.vector_stores
        store = await new_store(running, http, tides_md=TIDES)
        await stores.adopt(model.identity, model.dimensions)
        searcher = running.context.library.searcher
        searcher._embedder = model
        leaving = asyncio.create_task(http.post(f"/v1/vector_stores/{store}/search", json={"query": "moon"}))
        async with asyncio.timeout(30):
            await begun.wait()
            leaving.cancel()
            await ended.wait()
        assert model.payers[-1].owner == LOCAL_OWNER and model.payers[-1].subjects
