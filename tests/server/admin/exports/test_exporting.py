"""`antiphon export`: what it has of what was deleted, and what it has not."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from server.access import Actor
from server.admin.exports import exported
from server.clock import now_us
from storage import Storage
from tests.support.running import Running
from tests.support.talk import WEATHER, Api, call


async def read(storage: Storage) -> dict[str, Any]:
    """The lines of responses in an export, by their ids."""
    async with aclosing(exported(storage, "local")) as pieces:
        whole = b"".join([piece async for piece in pieces])
    found = [json.loads(line) for line in whole.splitlines()]
    return {line["response"]["id"]: line for line in found if line["type"] == "response"}


def deleted(line: dict[str, Any]) -> list[str]:
    return [one["id"] for one in line["kept"].get("deleted", {"responses": []})["responses"]]


async def test_no_text_of_a_deleted_response_is_exported_that_nothing_needs(
    server_app: Running, client: httpx.AsyncClient
) -> None:
    api, storage = Api(client), server_app.context.storage
    alone = (await api.create("say alone"))["id"]
    first = (await api.create("say first"))["id"]
    second = (await api.create("say second", previous_response_id=first))["id"]
    waiting = {"tools": [WEATHER], "await_tool_outputs": True, "background": True}
    held = (await api.create("say held"))["id"]
    flying = (await api.create(call(), previous_response_id=held, **waiting))["id"]
    for id in (alone, first, held):
        await client.delete(f"/v1/responses/{id}")
    found = await read(storage)
    assert deleted(found[second]) == [first] and deleted(found[flying]) == []
    text = json.dumps(found)
    assert "say first" in text and "say alone" not in text and "say held" not in text
    await client.delete(f"/v1/responses/{second}")
    assert "say first" not in json.dumps(await read(storage))


@pytest.mark.parametrize("in_conversation", [False, True])
async def test_what_a_purge_has_promised_to_erase_is_not_exported(
    server_app: Running, client: httpx.AsyncClient, in_conversation: bool
) -> None:
    """A purge is stopped half-way: what it has hidden is still there, and what came since stands on it."""
    api, storage = Api(client), server_app.context.storage
    field = {"conversation": await api.conversation()} if in_conversation else {}
    first = (await api.create("say first", **field))["id"]
    second = (await api.create("say second", **(field or {"previous_response_id": first})))["id"]
    await client.delete(f"/v1/responses/{first}")
    before = now_us()
    third = (await api.create("say third", previous_response_id=second))["id"]
    if in_conversation:
        await client.delete(f"/v1/conversations/{field['conversation']}")
    entry = Actor("operator").did("project.purged", "local", "local", before=before, keys=False)
    async with aclosing(storage.purge("local", before, entry=entry)) as steps:
        await anext(steps)
    found = await read(storage)
    assert list(found) == [third] and "deleted" not in found[third]["kept"]
    assert "say second" not in json.dumps(found)
    # What is deleted after it is none of what it promised.
    fourth = (await api.create("say fourth", previous_response_id=third))["id"]
    await client.delete(f"/v1/responses/{third}")
    assert deleted((await read(storage))[fourth]) == [third]
