"""/v1/containers: containers, their files, and whose they are; through the official client, too."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import AsyncOpenAI, NotFoundError

from tests.support.running import http_client, live_app, running_app


async def test_the_official_client_finds_its_way(tmp_path: Path) -> None:
    async with (
        live_app(tmp_path) as running,
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
        running_app(tmp_path, api_key=keys) as running,
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
        ({"name": "n", "file_ids": ["file-none"]}, "file_ids[0]", "file_not_found"),
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
    async with running_app(tmp_path) as running, http_client(running) as http:
        reply = await http.post("/v1/containers", json=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, param, code), error


async def test_files_of_a_container_are_bounded(tmp_path: Path) -> None:
    async with running_app(tmp_path, max_container_bytes=100) as running, http_client(running) as http:
        made = (await http.post("/v1/containers", json={"name": "mine"})).json()
        url = f"/v1/containers/{made['id']}/files"
        assert (await http.post(url, files={"file": ("a", b"a" * 60)})).status_code == 200
        assert (await http.post(url, files={"file": ("b", b"a" * 60)})).status_code == 413
        assert (await http.post(url, files={"file": ("a", b"a" * 90)})).status_code == 200
        assert [file["bytes"] for file in (await http.get(url)).json()["data"]] == [90]
