"""A database that the first release wrote is brought to this version's schema, with everything in it.

`first_release.sql` is the dump of a database of SQLite at revision 0001, as the first release left it: its
server was killed while it made the last response.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import httpx
import pytest

from server.cli.commands import main
from storage.migrate import HEAD
from tests.support.running import Running, http_client, running_app
from tests.support.talk import Api

DUMP = Path(__file__).parent / "first_release.sql"
CONVERSATION = "conv_f73e20499e7b15d681b9d65c6ac5ac75c3092f6677677a53"
THOUGHT = "resp_cc6e890fc8649ac0f4fe50a9c7c75f1d2aabb9721d38b8c0"
CONTINUED = "resp_bd07cc55315c31ef991b2b4d38dabf2c7cd2516b3a041a14"
CALLED = "resp_d997f6783114be193409f3c9db0ef86b565a1287d31802c4"
CUT = "resp_62f36b8636f79128c7cc43fde98aab4c85e140be4c2a5a6e"
KEY = "sk-antiphon-KUtg7Wro89-nMOQUcxwvMIOgHDTEusLjpFDDaI24YT4"


def first_release(folder: Path) -> Path:
    """The database, in a file."""
    file = folder / "first.db"
    with sqlite3.connect(file) as connection:
        connection.executescript(DUMP.read_text())
    connection.close()
    file.chmod(0o600)
    return file


def one(file: Path, query: str) -> object:
    connection = sqlite3.connect(file)
    try:
        return connection.execute(query).fetchone()[0]
    finally:
        connection.close()


def test_migrate_brings_it_to_this_versions_schema_and_keeps_every_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "antiphon.storage")
    file = first_release(tmp_path)
    tables = (
        "responses",
        "items",
        "response_items",
        "conversations",
        "conversation_items",
        "records",
        "runs",
    )
    before = {table: one(file, f"SELECT count(*) FROM {table}") for table in tables}
    assert one(file, "SELECT version_num FROM alembic_version") == "0001"
    argv = ["migrate", "--db", f"sqlite:///{file}", "--data", str(tmp_path)]
    assert main(argv) == 0
    assert one(file, "SELECT version_num FROM alembic_version") == HEAD
    assert {table: one(file, f"SELECT count(*) FROM {table}") for table in tables} == before
    assert main(argv) == 0, "again: nothing"
    (told,) = [text for text in caplog.messages if "the schema was brought" in text]
    assert told.startswith(f"the schema was brought from 0001 to {HEAD} in ")


async def test_what_it_holds_is_served_and_gone_on_with(tmp_path: Path) -> None:
    # What is kept for a while would go in time, and this test with it.
    kept = {"retention_s": 0.0, "event_retention_s": 0.0}
    db = f"sqlite+aiosqlite:///{first_release(tmp_path)}"
    async with running_app(tmp_path / "data", db=db, **kept) as running:
        async with http_client(running, authorization=f"Bearer {KEY}") as http:
            assert (await http.get("/v1/models")).status_code == 200
        token = {"authorization": f"Bearer {running.life.admin_token}"}
        async with http_client(running, **token) as admin:
            made = (await admin.post("/admin/keys", json={"owner": "local"})).json()["key"]
        async with http_client(running, authorization=f"Bearer {made}") as http:
            await _of_the_first_owner(running, http)


async def _of_the_first_owner(running: Running, http: httpx.AsyncClient) -> None:
    api = Api(http)
    thought = await api.get(THOUGHT)
    assert thought["metadata"] == {"n": "1"} and [item["type"] for item in thought["output"]] == [
        "reasoning",
        "message",
    ]
    for path, id in (
        ("responses?metadata[n]=1", THOUGHT),
        ("conversations?metadata[topic]=first release", CONVERSATION),
    ):
        assert [one["id"] for one in (await http.get(f"/v1/{path}")).json()["data"]] == [id]
    events = await http.get(f"/v1/responses/{THOUGHT}?stream=true")
    assert "event: response.completed" in events.text
    page = (await http.get(f"/v1/responses/{THOUGHT}/events")).json()
    assert page["data"] and page["times"] == [None] * len(page["data"])
    history = (await http.get(f"/v1/responses/{CONTINUED}/input_items?scope=all&order=asc")).json()["data"]
    assert history[0]["content"][0]["text"] == "think why then say one"
    more = await api.create("say on", previous_response_id=CONTINUED)
    assert more["status"] == "completed"
    assert (await http.get(f"/v1/conversations/{CONVERSATION}")).json()["metadata"] == {
        "topic": "first release"
    }
    assert len(await api.conversation_items(CONVERSATION)) == 3
    await api.create("say more", conversation=CONVERSATION)
    call_id = (await api.get(CALLED))["output"][0]["call_id"]
    body = {"tool_outputs": [{"call_id": call_id, "output": "sunny"}]}
    assert (await http.post(f"/v1/responses/{CALLED}/tool_outputs", json=body)).status_code == 200
    # A run goes on with the model that began it, and this version's scripted model is another one: what a
    # crash had cut is ended, says why, and has what was made of it.
    ended = (await http.get(f"/v1/responses/{CUT}?wait=30")).json()
    assert (
        ended["status"] == "failed" and "has changed since this response began" in ended["error"]["message"]
    )
    said = ended["output"][0]["content"][0]["text"].split()
    assert said == [str(number) for number in range(1, len(said) + 1)] and len(said) > 10
