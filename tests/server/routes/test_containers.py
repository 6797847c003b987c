"""/v1/containers: containers, their files, and whose they are; through the official client, too."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, NotFoundError

from server.clock import now_us
from server.containers import new_file
from storage import ContainerChange
from tests.support.making import is_sqlite, query
from tests.support.running import http_client, live_app, running_app, used_database
from tests.support.sandboxes import with_sandbox


async def test_the_official_client_finds_its_way(tmp_path: Path) -> None:
    async with (
        live_app(tmp_path, sandbox="monty", sandbox_memory_bytes=4 << 30) as running,
        AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="unused", max_retries=0) as client,
    ):
        uploaded = await client.files.create(file=("a.csv", b"1,2"), purpose="user_data")
        made = await client.containers.create(
            name="mine",
            file_ids=[uploaded.id],
            expires_after={"anchor": "last_active_at", "minutes": 5},
            memory_limit="4g",
        )
        assert (made.object, made.name, made.status, made.memory_limit) == (
            "container", "mine", "running", "4g",
        )  # fmt: skip
        assert made.expires_after is not None and made.expires_after.minutes == 5
        assert (await client.containers.retrieve(made.id)).id == made.id
        assert [one.id async for one in client.containers.list(name="mine")] == [made.id]
        files = client.containers.files
        sent = await files.create(made.id, file=("b.txt", b"second"))
        copied = await files.create(made.id, file_id=uploaded.id)
        assert (sent.path, sent.source, sent.bytes) == ("/mnt/data/b.txt", "user", 6)
        listed = [file async for file in files.list(made.id, limit=1, order="asc")]
        assert [file.path for file in listed] == ["/mnt/data/b.txt", "/mnt/data/a.csv"]
        assert (await files.retrieve(copied.id, container_id=made.id)).bytes == 3
        content = await files.content.retrieve(sent.id, container_id=made.id)
        assert content.content == b"second"
        await files.delete(sent.id, container_id=made.id)
        with pytest.raises(NotFoundError):
            await files.retrieve(sent.id, container_id=made.id)
        await client.containers.delete(made.id)
        with pytest.raises(NotFoundError):
            await client.containers.retrieve(made.id)


async def test_a_container_of_another_owner_is_unknown(tmp_path: Path) -> None:
    keys = ("sk-a", "sk-b")
    async with (
        running_app(tmp_path, api_key=keys, sandbox="monty") as running,
        http_client(running, authorization="Bearer sk-a") as a,
        http_client(running, authorization="Bearer sk-b") as b,
    ):
        made = (await a.post("/v1/containers", json={"name": "mine"})).json()
        sent = await a.post(f"/v1/containers/{made['id']}/files", files={"file": ("a.txt", b"a")})
        url = f"/v1/containers/{made['id']}"
        file = f"{url}/files/{sent.json()['id']}"
        assert (await a.get(file)).status_code == 200
        for path in (url, f"{url}/files", file, f"{file}/content"):
            assert (await b.get(path)).status_code == 404
        assert (await b.delete(url)).status_code == (await b.delete(file)).status_code == 404
        sent = await b.post(f"{url}/files", files={"file": ("b.txt", b"b")})
        assert sent.status_code == 404
        assert (await b.get("/v1/containers")).json()["data"] == []


@pytest.mark.parametrize(
    "body, param, code",
    [
        ({}, "name", "missing_required_parameter"),
        ({"name": "n", "memory_limit": "3g"}, "memory_limit", "invalid_value"),
        (
            {"name": "n", "expires_after": {"anchor": "last_active_at", "minutes": 0}},
            "expires_after.minutes",
            "integer_below_min_value",
        ),
        ({"name": "n", "skills": [{}]}, "skills", "unsupported_parameter"),
        (
            {"name": "n", "network_policy": {"type": "allowlist", "allowed_domains": ["a"]}},
            "network_policy",
            "unsupported_parameter",
        ),
    ],
)
async def test_what_a_container_cannot_be_is_refused(
    tmp_path: Path, body: dict[str, object], param: str, code: str
) -> None:
    async with running_app(tmp_path, sandbox="monty") as running, http_client(running) as http:
        reply = await http.post("/v1/containers", json=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, param, code), error


@with_sandbox
async def test_an_unknown_file_is_no_copy(client: httpx.AsyncClient) -> None:
    made = (await client.post("/v1/containers", json={"name": "mine"})).json()
    for path, body, param in (
        ("/v1/containers", {"name": "n", "file_ids": ["file-none"]}, "file_ids[0]"),
        (f"/v1/containers/{made['id']}/files", {"file_id": "file-none"}, "file_id"),
    ):
        reply = await client.post(path, json=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (404, "not_found", param), reply.text


async def test_files_of_a_container_are_bounded(tmp_path: Path) -> None:
    async with (
        running_app(tmp_path, max_container_bytes=100, sandbox="monty") as running,
        http_client(running) as http,
    ):
        made = (await http.post("/v1/containers", json={"name": "mine"})).json()
        url = f"/v1/containers/{made['id']}/files"
        assert (await http.post(url, files={"file": ("a", b"a" * 60)})).status_code == 200
        assert (await http.post(url, files={"file": ("b", b"a" * 60)})).status_code == 413
        assert (await http.post(url, files={"file": ("a", b"a" * 90)})).status_code == 200
        assert [file["bytes"] for file in (await http.get(url)).json()["data"]] == [90]


async def test_copies_are_bounded_and_no_file_stands_beside_its_folder(tmp_path: Path) -> None:
    async with (
        running_app(tmp_path, max_container_bytes=100, sandbox="monty") as running,
        http_client(running) as http,
    ):
        ids = []
        for name in ("a", "b", "d"):
            sent = await http.post(
                "/v1/files", files={"file": (name, name.encode() * 60)}, data={"purpose": "user_data"}
            )
            ids.append(sent.json()["id"])
        for body, status, param in (
            ({"name": "n", "file_ids": ids[:2]}, 413, "file_ids"),
            ({"name": "n", "file_ids": ["file-none"]}, 404, "file_ids[0]"),
        ):
            reply = await http.post("/v1/containers", json=body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text
        assert (await http.get("/v1/containers")).json()["data"] == []
        made = (await http.post("/v1/containers", json={"name": "n", "file_ids": ids[:1]})).json()
        url = f"/v1/containers/{made['id']}/files"
        assert (await http.post(url, json={"file_id": ids[1]})).status_code == 413
        assert (await http.post(url, json={"file_id": "file-none"})).json()["error"]["param"] == "file_id"
        storage, now = running.context.storage, now_us()
        below = new_file(made["id"], "local", "d/e", 1, "0" * 64, now, "assistant", "")
        await storage.containers.change(ContainerChange(made["id"], "local", now, None, (below,)))
        refused = await http.post(url, files={"file": ("d", b"d")})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "file", refused.text


async def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    async with running_app(tmp_path, sandbox="monty") as running, http_client(running) as http:
        purpose = {"purpose": "user_data"}
        sent = [
            await http.post("/v1/files", files={"file": ("d.csv", data)}, data=purpose)
            for data in (b"1", b"2")
        ]
        ids = [reply.json()["id"] for reply in sent]
        refused = await http.post("/v1/containers", json={"name": "n", "file_ids": ids})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "file_ids[1]"), refused.text
        twice = await http.post("/v1/containers", json={"name": "n", "file_ids": [ids[0]] * 2})
        assert twice.status_code == 200, "one file, named twice"


async def test_contents_that_were_replaced_or_deleted_leave_the_disk_at_once(tmp_path: Path) -> None:
    def contents() -> set[bytes]:
        where = used_database(tmp_path)
        if is_sqlite(where):
            return {file.read_bytes()[:1] for file in tmp_path.glob("antiphon.db.blobs/*")}
        return {content[:1] for (content,) in query(where, "SELECT content FROM blob_parts")}

    async with running_app(tmp_path, sandbox="monty") as running, http_client(running) as http:
        one, other = [(await http.post("/v1/containers", json={"name": name})).json() for name in "ab"]
        uploaded = {"files": {"file": ("u", b"0" * 300)}, "data": {"purpose": "user_data"}}
        file = (await http.post("/v1/files", **uploaded)).json()
        for url in (f"/v1/containers/{box['id']}/files" for box in (one, other)):
            assert (await http.post(url, json={"file_id": file["id"]})).status_code == 200
            for letter in (b"1", b"2"):
                assert (await http.post(url, files={"file": ("a", letter * 300)})).status_code == 200
        await http.delete(f"/v1/files/{file['id']}")
        assert contents() == {b"0", b"2"}, "both containers have these"
        await http.delete(f"/v1/containers/{one['id']}")
        assert contents() == {b"0", b"2"}, "the other has these"
        await http.delete(f"/v1/containers/{other['id']}")
        assert contents() == set()


async def test_a_container_counts_as_one_session(tmp_path: Path) -> None:
    async with running_app(tmp_path, sandbox="monty") as running, http_client(running) as http:
        made = (await http.post("/v1/containers", json={"name": "mine"})).json()
        query = {"start_time": made["created_at"] - 60}
        page = (await http.get("/v1/organization/usage/code_interpreter_sessions", params=query)).json()
        results = [result for bucket in page["data"] for result in bucket["results"]]
        assert [result["num_sessions"] for result in results] == [1], page
        assert results[0]["object"] == "organization.usage.code_interpreter_sessions.result"


async def test_without_a_sandbox_no_container_is_made_and_those_that_are_there_are_read(
    tmp_path: Path,
) -> None:
    async with running_app(tmp_path, sandbox="monty") as running, http_client(running) as http:
        url = f"/v1/containers/{(await http.post('/v1/containers', json={'name': 'n'})).json()['id']}"
        sent = await http.post(f"{url}/files", files={"file": ("a", b"a")})
        content = f"{url}/files/{sent.json()['id']}/content"
    async with running_app(tmp_path) as running, http_client(running) as http:
        refused = await http.post("/v1/containers", json={"name": "other"})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "unsupported_tool"), refused.text
        assert "--sandbox" in error["message"]
        assert len((await http.get("/v1/containers")).json()["data"]) == 1
        assert (await http.get(content)).content == b"a"
        assert (await http.delete(url)).json()["deleted"]


PIXELS = {
    "p.png": (b"\x89PNG\r\n\x1a\nrest", "image/png"),
    "p.html": (b"\xff\xd8\xff\xe0<script>", "image/jpeg"),
    "g": (b"GIF89a...", "image/gif"),
    "w.webp": (b"RIFF\n\0\0\nWEBPVP8 ", "image/webp"),
}
OTHERS = {
    "x.png": b"<html><script>alert(1)</script>",
    "x.svg": b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>",
    "x.gif": b"GIF8",
    "y.png": b" \x89PNG\r\n\x1a\n",
    "empty.png": b"",
}


@with_sandbox
async def test_images_are_shown_and_all_else_is_saved(client: httpx.AsyncClient) -> None:
    """By their first bytes, whatever they are called."""
    made = (await client.post("/v1/containers", json={"name": "mine"})).json()
    url = f"/v1/containers/{made['id']}/files"

    async def content(name: str, data: bytes, **headers: str) -> httpx.Response:
        sent = await client.post(url, files={"file": (name, data)})
        reply = await client.get(f"{url}/{sent.json()['id']}/content", headers=headers)
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["content-security-policy"] == "default-src 'none'; sandbox"
        return reply

    for name, (data, kind) in PIXELS.items():
        for reply in (await content(name, data), await content(name, data, range="bytes=3-")):
            assert reply.headers["content-type"] == kind and data.endswith(reply.content)
            assert reply.headers["content-disposition"].startswith(f'inline; filename="{name}"')
    for name, data in OTHERS.items():
        reply = await content(name, data)
        assert reply.headers["content-type"] == "application/octet-stream" and reply.content == data
        assert reply.headers["content-disposition"].startswith("attachment;")
    sent = {"files": {"file": ("p.png", PIXELS["p.png"][0])}, "data": {"purpose": "user_data"}}
    file = (await client.post("/v1/files", **sent)).json()["id"]
    uploaded = await client.get(f"/v1/files/{file}/content")
    assert uploaded.headers["content-type"] == "application/octet-stream"
    assert uploaded.headers["content-disposition"].startswith("attachment;")
