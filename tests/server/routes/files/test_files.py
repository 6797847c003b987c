"""/v1/files and /v1/uploads: what clients upload comes back as it was, within limits, and harms nobody."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from server import quota
from server.clock import now_us
from server.process import retention as module
from server.process.retention import Retention
from storage.drivers.blob_folder import IncomingFile
from storage.drivers.blob_rows import IncomingRows
from tests.support.making import is_sqlite, query
from tests.support.postgres import Postgres
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.wire import Json, validate

CONTENT = os.urandom(3_000_000)


async def upload(
    client: httpx.AsyncClient, content: bytes = b"hello", name: str = "a.txt", **fields: str
) -> Json:
    fields = {"purpose": "user_data", **fields}
    reply = await client.post("/v1/files", files={"file": (name, content)}, data=fields)
    assert reply.status_code == 200, reply.text
    made: Json = reply.json()
    validate("OpenAIFile", made)
    return made


def error_of(reply: httpx.Response) -> tuple[int, str, str | None]:
    error = reply.json()["error"]
    return reply.status_code, error["code"], error["param"]


async def test_the_sdk_uploads_lists_reads_and_deletes(sdk: AsyncOpenAI) -> None:
    first = await sdk.files.create(file=("größe.bin", CONTENT), purpose="user_data")
    assert (first.bytes, first.filename, first.status) == (len(CONTENT), "größe.bin", "processed")
    second = await sdk.files.create(
        file=b"two", purpose="assistants", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert second.expires_at == second.created_at + 3600 and first.expires_at is None
    batch = await sdk.files.create(file=("b.jsonl", b"{}"), purpose="batch")
    assert batch.expires_at == batch.created_at + 30 * 86400
    assert [file.id async for file in sdk.files.list(limit=1)] == [batch.id, second.id, first.id]
    assert [file.id async for file in sdk.files.list(purpose="assistants")] == [second.id]
    assert await sdk.files.retrieve(first.id) == first
    assert (await sdk.files.wait_for_processing(first.id)).id == first.id
    content = await sdk.files.content(first.id)
    assert content.content == CONTENT
    deleted = await sdk.files.delete(first.id)
    assert deleted.deleted and deleted.id == first.id and deleted.object == "file"
    for gone in (sdk.files.retrieve, sdk.files.content, sdk.files.delete):
        with pytest.raises(NotFoundError) as caught:
            await gone(first.id)
        assert (caught.value.code, caught.value.param) == ("not_found", "file_id")


async def test_a_full_disk_is_told_to_the_client_and_to_the_log(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(IncomingFile, "write", full)
        patched.setattr(IncomingRows, "write", full)
        sent = {"files": {"file": ("a.txt", b"hello")}, "data": {"purpose": "user_data"}}
        reply, again = [await client.post("/v1/files", **sent) for _ in range(2)]
    assert error_of(reply) == error_of(again) == (503, "storage_unavailable", None)
    assert reply.json()["error"]["message"].startswith("The disk of the server is full")
    assert caplog.text.count("there is no room: the content of a file could not be") == 1
    await upload(client)


async def test_the_sdk_uploads_in_chunks(sdk: AsyncOpenAI, tmp_path: Path) -> None:
    source = tmp_path / "large.bin"
    source.write_bytes(CONTENT)
    upload = await sdk.uploads.upload_file_chunked(
        file=source,
        mime_type="text/plain",
        purpose="user_data",
        part_size=1_000_000,
        md5=hashlib.md5(CONTENT, usedforsecurity=False).hexdigest(),
    )
    assert upload.status == "completed" and upload.file is not None and upload.file.bytes == len(CONTENT)
    assert (await sdk.files.content(upload.file.id)).content == CONTENT
    with pytest.raises(BadRequestError) as caught:
        await sdk.uploads.cancel(upload.id)
    assert caught.value.code == "upload_ended"


async def test_an_upload_is_put_together_in_the_order_that_its_client_says(client: httpx.AsyncClient) -> None:
    begun = {"filename": "x/../u.txt", "purpose": "user_data", "bytes": 6, "mime_type": "text/plain"}

    async def begin(**changes: object) -> Json:
        reply = await client.post("/v1/uploads", json={**begun, **changes})
        assert reply.status_code == 200, reply.text
        made: Json = reply.json()
        return made

    upload = await begin(expires_after={"anchor": "created_at", "seconds": 7200})
    assert (upload["object"], upload["status"], upload["filename"]) == ("upload", "pending", "u.txt")
    assert upload["expires_at"] == upload["created_at"] + 3600
    path = f"/v1/uploads/{upload['id']}"
    parts = [
        (await client.post(f"{path}/parts", files={"data": ("blob", data)})).json()
        for data in (b"def", b"abc", b"a stray part")
    ]
    assert {part["object"] for part in parts} == {"upload.part"}
    second, first, stray = (part["id"] for part in parts)
    for part_ids, md5, wrong in (
        ([first], None, "part_ids"),
        ([first, stray], None, "part_ids"),
        ([first, "part_none"], None, "part_ids[1]"),
        ([first, first], None, "part_ids[1]"),
        ([first, second], "0" * 32, "md5"),
        ([first, second], "0", "md5"),
        (None, None, "part_ids"),
    ):
        refused = await client.post(f"{path}/complete", json={"part_ids": part_ids, "md5": md5})
        assert refused.status_code == 400 and error_of(refused)[2] == wrong, refused.text
    done = (await client.post(f"{path}/complete", json={"part_ids": [first, second]})).json()
    assert done["status"] == "completed"
    validate("OpenAIFile", done["file"])
    assert done["file"]["expires_at"] == done["file"]["created_at"] + 7200
    assert (await client.get(f"/v1/files/{done['file']['id']}/content")).content == b"abcdef"
    for way, body in (("complete", {"json": {"part_ids": []}}), ("parts", {"files": {"data": b"x"}})):
        assert error_of(await client.post(f"{path}/{way}", **body)) == (400, "upload_ended", "upload_id")
    other = await begin()
    cancelled = (await client.post(f"/v1/uploads/{other['id']}/cancel")).json()
    assert cancelled["status"] == "cancelled" and cancelled["file"] is None
    assert error_of(await client.post("/v1/uploads/upload_no/cancel")) == (404, "not_found", "upload_id")
    for name in begun:
        refused = await client.post("/v1/uploads", json={**begun, name: None})
        assert error_of(refused) == (400, "missing_required_parameter", name)
    assert error_of(await client.post("/v1/uploads", json={**begun, "bytes": 1 << 40}))[2] == "bytes"


async def test_a_download_has_ranges_and_is_nothing_that_a_browser_runs(client: httpx.AsyncClient) -> None:
    name = 'e"vil\r\nset-cookie: a=b/☃.html'
    body = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n--b\r\n'
        b'Content-Disposition: form-data; name="file"; filename="e%22vil;\xe2\x98\x83.html"\r\n'
        b"Content-Type: text/html\r\n\r\n<script>0123456789</script>\r\n--b--\r\n"
    )
    made = await client.post(
        "/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=b"}
    )
    file = made.json()
    assert file["filename"] == 'e"vil;☃.html', made.text
    path = f"/v1/files/{file['id']}/content"
    reply = await client.get(path)
    assert reply.content == b"<script>0123456789</script>"
    assert reply.headers["content-type"] == "application/octet-stream"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["content-disposition"] == (
        "attachment; filename=\"e_vil__.html\"; filename*=UTF-8''e%22vil%3B%E2%98%83.html"
    )
    assert "sandbox" in reply.headers["content-security-policy"]
    etag = reply.headers["etag"]
    for asked, status, expected in (
        ("bytes=8-11", 206, b"0123"),
        ("bytes=18-", 206, b"</script>"),
        ("bytes=-9", 206, b"</script>"),
        ("bytes=0-999", 206, reply.content),
        ("bytes=5-2", 200, reply.content),
        (f"bytes=0-{'9' * 4000}", 206, reply.content),
        (f"bytes={'9' * 4301}-", 200, reply.content),
        ("bytes=0-1,3-4", 200, reply.content),
        ("lines=1-2", 200, reply.content),
    ):
        part = await client.get(path, headers={"range": asked})
        assert (part.status_code, part.content) == (status, expected), asked
        assert part.headers["content-length"] == str(len(expected))
    assert part.headers.get("content-range") is None
    for asked in ("bytes=27-", f"bytes={'9' * 4000}-"):
        beyond = await client.get(path, headers={"range": asked})
        assert error_of(beyond) == (416, "range_not_satisfiable", "Range")
        assert beyond.headers["content-range"] == "bytes */27"
    changed = await client.get(path, headers={"range": "bytes=8-11", "if-range": '"old"'})
    assert changed.status_code == 200
    same = await client.get(path, headers={"range": "bytes=8-11", "if-range": etag})
    assert same.headers["content-range"] == "bytes 8-11/27"
    awkward = await upload(client, b"x", name=name)
    reply = await client.get(f"/v1/files/{awkward['id']}/content")
    assert "set-cookie" not in reply.headers and "\n" not in awkward["filename"]


DISPOSITION = "Content-Disposition"
FORM = {"content-type": "multipart/form-data; boundary=b"}
PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc\r\n'
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        (b"{}", {"content-type": "application/json"}, (415, "unsupported_media_type", "Content-Type")),
        (b"", {"content-type": "multipart/form-data"}, (415, "unsupported_media_type", "Content-Type")),
        (
            b"",
            {"content-type": f"multipart/form-data; boundary={'b' * 300}"},
            (415, "unsupported_media_type", "Content-Type"),
        ),
        (b"", FORM, (400, "invalid_form", "file")),
        (b"no form at all", FORM, (400, "invalid_form", "file")),
        (PURPOSE + PART, FORM, (400, "invalid_form", "file")),  # cut off
        (PURPOSE + PURPOSE + PART + b"--b--\r\n", FORM, (400, "invalid_form", "purpose")),
        (PART + PART.replace(b"file", b"data", 1) + b"--b--\r\n", FORM, (400, "invalid_form", "data")),
        (PURPOSE * 40 + b"--b--\r\n", FORM, (400, "invalid_form", "purpose")),
        (PART.replace(b'name="file"; ', b"") + b"--b--\r\n", FORM, (400, "invalid_form", DISPOSITION)),
        (PURPOSE.replace(b"user_data", b"\xff") + b"--b--\r\n", FORM, (400, "invalid_form", "purpose")),
        (
            PURPOSE.replace(b"user_data", b"a" * 20_000) + b"--b--\r\n",
            FORM,
            (400, "invalid_form", "purpose"),
        ),
        (PART + b"--b--\r\n", FORM, (400, "missing_required_parameter", "purpose")),
        (PURPOSE + b"--b--\r\n", FORM, (400, "missing_required_parameter", "file")),
        (PURPOSE.replace(b"purpose", b"file") + PURPOSE + b"--b--\r\n", FORM, (400, "invalid_value", "file")),
        (PURPOSE.replace(b"user_", b"") + PART + b"--b--\r\n", FORM, (400, "invalid_value", "purpose")),
    ],
)
async def test_a_form_that_is_none_is_told_why(
    client: httpx.AsyncClient, body: bytes, headers: dict[str, str], expected: tuple[int, str, str | None]
) -> None:
    assert error_of(await client.post("/v1/files", content=body, headers=headers)) == expected
    assert (await client.get("/v1/files")).json()["data"] == []


async def test_what_expires_and_what_is_ignored(client: httpx.AsyncClient) -> None:
    for fields, param in (
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after.anchor"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}, "expires_after.seconds"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "1h"}, "expires_after[seconds]"),
        ({"expires_after[anchor]": "created_at"}, "expires_after.seconds"),
    ):
        data = {"purpose": "user_data", **fields}
        refused = await client.post("/v1/files", files={"file": ("a", b"x")}, data=data)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    data = {"purpose": "user_data", "colour": "blue"}
    reply = await client.post("/v1/files", files={"file": ("a", b"x")}, data=data)
    assert reply.headers["x-antiphon-ignored"] == "colour"
    for wrong in ("limit=0", "limit=10001", "order=up", "limit=x"):
        assert (await client.get(f"/v1/files?{wrong}")).status_code == 400


async def test_sizes_are_bounded_by_the_setting_and_by_what_the_owner_may_store(tmp_path: Path) -> None:
    settings = {"max_file_bytes": 1000, "max_bytes_per_owner": 2500}
    async with running_app(tmp_path, **settings) as running, http_client(running) as client:
        await upload(client, b"a" * 1000)

        async def slowly(size: int) -> AsyncIterator[bytes]:
            yield PURPOSE + PART.replace(b"abc\r\n", b"")
            yield b"x" * size
            yield b"\r\n--b--\r\n"

        for content in (b"x" * 1001, b"x" * 3_000_000):
            large = await client.post("/v1/files", files={"file": ("a", content)}, data={"purpose": "vision"})
            assert error_of(large) == (413, "request_too_large", "file")
            assert large.json()["error"]["message"] == "A file, or a part of one, may have 1000 bytes."
        chunked = await client.post("/v1/files", content=slowly(1001), headers=FORM)
        assert error_of(chunked) == (413, "request_too_large", "file")
        full = await client.post("/v1/files", content=slowly(1000), headers=FORM)
        assert full.status_code == 200, full.text
        full = await client.post("/v1/files", content=slowly(1000), headers=FORM)
        assert error_of(full)[:2] == (429, "insufficient_quota")
        full = await client.post("/v1/files", files={"file": ("a", b"x" * 900)}, data={"purpose": "vision"})
        assert error_of(full)[:2] == (429, "insufficient_quota")


async def test_what_is_refused_or_deleted_takes_no_room(
    server_app: Running, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """However many come at once: their bytes are gone with the reply, and those of a file with the file."""

    async def refused(number: int) -> None:
        data = {} if number % 2 else {"purpose": "user_data", "expires_after[anchor]": "now"}
        reply = await client.post("/v1/files", files={"file": ("a", b"x" * number)}, data=data)
        assert reply.status_code == 400, reply.text

    await asyncio.gather(*(refused(number) for number in range(1, 40)))
    broken = await client.post("/v1/files", content=PURPOSE + PART + b"--c", headers=FORM)
    assert error_of(broken) == (400, "invalid_form", "file")
    assert contents(server_app, tmp_path) == []
    begun = {"filename": "u", "purpose": "user_data", "bytes": 6, "mime_type": "text/plain"}
    path = f"/v1/uploads/{(await client.post('/v1/uploads', json=begun)).json()['id']}"
    ids = [
        (await client.post(f"{path}/parts", files={"data": ("blob", data)})).json()["id"]
        for data in (b"abc", b"def")
    ]
    body = {"part_ids": ids, "md5": "0" * 32}
    assert error_of(await client.post(f"{path}/complete", json=body))[2] == "md5"
    assert len(contents(server_app, tmp_path)) == 2, "the parts alone"
    body = {"part_ids": ids}
    both = await asyncio.gather(*(client.post(f"{path}/complete", json=body) for _ in range(2)))
    assert sorted(reply.status_code for reply in both) == [200, 400]
    files = [reply.json()["file"]["id"] for reply in both if reply.status_code == 200]
    files += [(await upload(client, b"abcdef"))["id"], (await upload(client, b"other"))["id"]]
    assert len(contents(server_app, tmp_path)) == 2, "one for the same bytes"
    for number, id in enumerate(files):
        assert (await client.delete(f"/v1/files/{id}")).status_code == 200
        assert len(contents(server_app, tmp_path)) == (2, 1, 0)[number]


async def test_what_is_coming_in_counts_before_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age in ("FRESH_S", "REFUSED_S"):  # each look measures anew, and what is coming in is in no row
        monkeypatch.setattr(quota, age, -1.0)
    settings = {"max_bytes_per_owner": 2500, "max_store_bytes": 2600}
    async with running_app(tmp_path, **settings) as running, http_client(running) as client:
        halfway, go_on = asyncio.Event(), asyncio.Event()

        async def slowly(end: bytes) -> AsyncIterator[bytes]:
            yield PURPOSE + PART.replace(b"abc\r\n", b"x" * 2000)
            halfway.set()
            await go_on.wait()
            yield end

        for end, status in ((b"\r\n--no", 400), (b"\r\n--b--\r\n", 200)):
            halfway.clear()
            go_on.clear()
            coming = asyncio.create_task(client.post("/v1/files", content=slowly(end), headers=FORM))
            await halfway.wait()
            form = {"files": {"file": ("a", b"y" * 500)}, "data": {"purpose": "vision"}}
            assert error_of(await client.post("/v1/files", **form))[:2] == (429, "insufficient_quota")
            go_on.set()
            assert (await coming).status_code == status
        assert error_of(await client.post("/v1/files", **form))[:2] == (429, "insufficient_quota")
        (file,) = (await client.get("/v1/files")).json()["data"]
        assert (await client.delete(f"/v1/files/{file['id']}")).status_code == 200
        assert (await client.post("/v1/files", **form)).status_code == 200


async def test_a_repeat_by_its_key_gets_the_first_file(client: httpx.AsyncClient) -> None:
    async def post(content: bytes, key: str = "k") -> httpx.Response:
        return await client.post(
            "/v1/files",
            files={"file": ("a.txt", content)},
            data={"purpose": "user_data"},
            headers={"idempotency-key": key},
        )

    first, again, other = await post(b"one"), await post(b"one"), await post(b"two")
    assert again.content == first.content and again.headers["idempotent-replayed"] == "true"
    assert error_of(other) == (409, "idempotency_key_reused", "Idempotency-Key")
    assert len((await client.get("/v1/files")).json()["data"]) == 1
    assert (await post(b"one", "another")).json()["id"] != first.json()["id"]


async def test_a_repeat_is_known_under_another_root_path_too(tmp_path: Path) -> None:
    async with running_app(tmp_path, root_path="/api") as running, http_client(running) as client:
        form = {
            "files": {"file": ("a", b"x")},
            "data": {"purpose": "vision"},
            "headers": {"idempotency-key": "k"},
        }
        first, again = [await client.post("/api/v1/files", **form) for _ in range(2)]
        assert first.status_code == 200 and again.content == first.content, first.text


async def test_files_are_their_owners_alone(server_app: Running, client: httpx.AsyncClient) -> None:
    async def key(owner: str) -> dict[str, str]:
        admin = {"authorization": f"Bearer {server_app.life.admin_token}"}
        made = (await client.post("/admin/keys", json={"owner": owner}, headers=admin)).json()
        return {"authorization": f"Bearer {made['key']}"}

    ann, bob = await key("ann"), await key("bob")
    form = {"files": {"file": ("a", b"secret")}, "data": {"purpose": "user_data"}}
    id = (await client.post("/v1/files", **form, headers=ann)).json()["id"]
    begun = {"filename": "u", "purpose": "user_data", "bytes": 1, "mime_type": "text/plain"}
    upload = (await client.post("/v1/uploads", json=begun, headers=ann)).json()["id"]
    part = {"type": "input_file", "file_id": id}
    for method, path, body in (
        ("GET", f"/v1/files/{id}", {}),
        ("GET", f"/v1/files/{id}/content", {}),
        ("DELETE", f"/v1/files/{id}", {}),
        ("GET", f"/v1/files?after={id}", {}),
        ("POST", f"/v1/uploads/{upload}/parts", {"files": {"data": b"x"}}),
        ("POST", f"/v1/uploads/{upload}/complete", {"json": {"part_ids": []}}),
        ("POST", f"/v1/uploads/{upload}/cancel", {}),
        ("POST", "/v1/responses", {"json": {"input": [{"role": "user", "content": [part]}]}}),
    ):
        foreign = await client.request(method, path, headers=bob, **body)
        assert error_of(foreign)[:2] == (404, "not_found"), (path, foreign.text)
    assert (await client.get("/v1/files", headers=bob)).json()["data"] == []
    assert (await client.get(f"/v1/files/{id}/content", headers=ann)).content == b"secret"


async def test_a_clock_that_is_ahead_of_the_databases_ends_no_upload(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = await postgres.fresh()
    async with live_app(tmp_path, db=db) as server, http_client(server) as client:
        begun = {"purpose": "user_data", "filename": "u.txt", "bytes": 1, "mime_type": "text/plain"}
        path = f"/v1/uploads/{(await client.post('/v1/uploads', json=begun)).json()['id']}"
        monkeypatch.setattr("server.routes.files.uploads.now_us", lambda: now_us() + 2 * 3_600_000_000)
        part = await client.post(f"{path}/parts", files={"data": b"x"})
        assert part.status_code == 200, part.text
        whole = await client.post(f"{path}/complete", json={"part_ids": [part.json()["id"]]})
        assert whole.json()["status"] == "completed"
    await postgres.give_back(db)


async def test_a_sweep_removes_what_has_expired(
    server_app: Running, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    await upload(client, **ends)
    kept = await upload(client)
    retention = Retention(server_app.context.storage, server_app.context.config)

    def num_files() -> float:
        [numbers] = [one.numbers for one in retention.readings() if one.prefix == "retention"]
        assert isinstance(numbers, dict)
        return float(numbers["files_total"])

    await retention.sweep()
    assert num_files() == 0
    monkeypatch.setattr(module, "now_us", lambda: now_us() + 3_600_000_000)
    await retention.sweep()
    assert num_files() == 1
    assert [file["id"] for file in (await client.get("/v1/files")).json()["data"]] == [kept["id"]]


async def test_a_large_file_goes_through_without_being_in_memory(tmp_path: Path) -> None:
    """64 MiB in and out of a real socket."""
    size, piece = 64 << 20, bytes(1 << 18)

    async def body() -> AsyncIterator[bytes]:
        yield PURPOSE + PART.replace(b"abc\r\n", b"")
        for _ in range(size // len(piece)):
            yield piece
        yield b"\r\n--b--\r\n"

    async with live_app(tmp_path) as running, http_client(running) as client:
        await upload(client)
        tracemalloc.start()
        made = await client.post("/v1/files", content=body(), headers=FORM)
        assert made.json()["bytes"] == size
        received = 0
        async with client.stream("GET", f"/v1/files/{made.json()['id']}/content") as reply:
            async for data in reply.aiter_bytes():
                received += len(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert received == size and peak < 24 << 20


def contents(running: Running, folder: Path) -> Sequence[object]:
    """What there is of contents, whole or not."""
    if is_sqlite(running.context.storage.url):
        blobs = folder / "antiphon.db.blobs"
        return list(blobs.iterdir()) if blobs.exists() else []
    return query(running.context.storage.url, "SELECT content FROM blob_parts")


async def test_a_client_that_leaves_in_the_middle_leaves_nothing(
    live_server: Running, live_client: httpx.AsyncClient, tmp_path: Path
) -> None:
    halfway = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield PURPOSE + PART.replace(b"abc\r\n", b"")
        yield bytes(2_000_000)
        await halfway.wait()

    await upload(live_client)
    before = contents(live_server, tmp_path)
    sending = asyncio.create_task(live_client.post("/v1/files", content=body(), headers=FORM))
    async with asyncio.timeout(20):
        while contents(live_server, tmp_path) == before:
            await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        while contents(live_server, tmp_path) != before:
            await asyncio.sleep(0.01)
    assert len((await live_client.get("/v1/files")).json()["data"]) == 1
