"""An approval is good at the MCP server that the call was asked for at, whatever has its label later."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine import ScriptedEngine
from server.mcp_servers import read_mcp_settings
from tests.server.runs.execution.test_mcp_approvals import (
    ASKING,
    BOOK,
    approve,
    decline,
    made,
    requests,
)
from tests.server.runs.execution.test_mcp_servers import kinds
from tests.support.lines import line
from tests.support.making import query
from tests.support.mcp_servers import Seen, mcp_server
from tests.support.running import Running, http_client, live_app, used_database
from tests.support.talk import BUILTIN, Api, text
from tests.support.wire import Json

OTHER: Json = {**ASKING, "server_url": "builtin:other"}
ADDED: Json = {"type": "additional_tools", "role": "developer"}
KEPT_BY_CLIENT: Json = {"store": False, "include": ["reasoning.encrypted_content"]}
HERE: Json = {**BUILTIN, "require_approval": "always"}
SUM = 'call calculator {"expression": "2+3"}'


@dataclass
class Desks:
    """A server with two MCP servers beside it, which have the same tools, and their addresses."""

    api: Api
    url: str
    other_url: str
    desk: Seen
    other: Seen
    running: Running


@asynccontextmanager
async def desks(folder: Path, **servers: Any) -> AsyncIterator[Desks]:
    """servers: what is set of each besides its URL."""
    desk, other = Seen(), Seen()
    async with mcp_server(desk) as url, mcp_server(other) as other_url:
        tables = {"desk": {"url": url}, "other": {"url": other_url}}
        for name, more in servers.items():
            tables[name] |= more
        known = read_mcp_settings({"servers": tables}, {})
        async with (
            live_app(folder, ScriptedEngine(), mcp=known, egress="any") as server,
            http_client(server) as client,
        ):
            yield Desks(Api(client), url, other_url, desk, other, server)


def at(url: str, **more: Any) -> Json:
    """The tool of a server under the label `desk`."""
    return {"type": "mcp", "server_label": "desk", "server_url": url, **more}


def refused_at(error: Json, request: Json, *, param: str = "input[0]") -> None:
    """An error is that of an approval for another server."""
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")
    assert error["param"] == f"{param}.approval_request_id"
    assert f"'{request['id']}'" in error["message"] and "stands for another one" in error["message"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda _: ASKING, lambda _: OTHER),
        (lambda _: ASKING, lambda here: at(here.url)),
        (lambda here: at(here.url), lambda _: OTHER),
        (lambda here: at(here.url), lambda here: at(here.other_url)),
        (lambda _: {**HERE, "server_label": "desk"}, lambda _: OTHER),
        (
            lambda _: {"type": "mcp", "server_label": "desk", "connector_id": "connector_gmail"},
            lambda _: {"type": "mcp", "server_label": "desk", "connector_id": "connector_dropbox"},
        ),
    ],
    ids=["names", "a name and a url", "a url and a name", "urls", "this server's own", "connectors"],
)
async def test_an_approval_is_not_good_at_another_server_with_the_label(
    tmp_path: Path, first: Callable[[Desks], Json], second: Callable[[Desks], Json]
) -> None:
    connectors = {"desk": {"connector": "connector_gmail"}, "other": {"connector": "connector_dropbox"}}
    async with desks(tmp_path, **connectors) as here:
        tool, another = first(here), second(here)
        ours = tool.get("server_url") == "builtin:"
        asked = await here.api.create(SUM if ours else BOOK, tools=[tool])
        [request] = requests(asked)
        assert request.keys() == {"id", "type", "server_label", "name", "arguments"}, "nothing more is shown"
        chain: Json = {"previous_response_id": asked["id"]}
        error = await here.api.refused(400, [approve(request["id"])], tools=[another], **chain)
        refused_at(error, request)
        for each in (tool, another):
            assert repr(each.get("server_url") or each["connector_id"]) in error["message"]
        assert (len(here.desk.listings), len(here.other.listings)) == (not ours, 0), "nothing has begun"
        declined = await here.api.create([decline(request["id"])], tools=[another], **chain)
        assert text(declined).endswith("the user declined it.")
        done = await here.api.create([approve(request["id"])], tools=[tool], **chain)
    assert made(done)[0]["status"] == "completed" and here.other.called == []


@pytest.mark.parametrize("stream", [False, True])
async def test_the_label_may_have_changed_hands_before(tmp_path: Path, stream: bool) -> None:
    """Both servers are listed in the chain, and the label leads to each of them in turn."""
    async with desks(tmp_path) as here:
        first = await here.api.create(BOOK, tools=[ASKING])
        [request] = requests(first)
        moved = await here.api.create("say hi", tools=[OTHER], previous_response_id=first["id"])
        assert kinds(moved) == ["mcp_list_tools", "message"]
        chain: Json = {"previous_response_id": moved["id"], "stream": stream}
        error = await here.api.refused(400, [approve(request["id"])], tools=[OTHER], **chain)
        refused_at(error, request)
        again = await here.api.create(BOOK, tools=[OTHER], previous_response_id=moved["id"])
        [newer] = requests(again)
        both = [approve(newer["id"]), approve(request["id"])]
        chain["previous_response_id"] = again["id"]
        error = await here.api.refused(400, both, tools=[OTHER], **chain)
        refused_at(error, request, param="input[1]")
        assert (here.desk.called, here.other.called) == ([], [])
        done = await here.api.create([approve(newer["id"])], tools=[OTHER], previous_response_id=again["id"])
        back = await here.api.create(
            [approve(request["id"])], tools=[ASKING], previous_response_id=done["id"]
        )
    assert (here.desk.called, here.other.called) == (["book"], ["book"])
    assert text(done) == text(back) == "The tool said: booked 3"


async def test_in_a_conversation_and_its_fork(tmp_path: Path) -> None:
    async with desks(tmp_path) as here:
        conversation = await here.api.conversation()
        [request] = requests(await here.api.create(BOOK, tools=[ASKING], conversation=conversation))
        reply = await here.api.http.post(f"/v1/conversations/{conversation}/fork")
        for chain in (conversation, reply.json()["id"]):
            error = await here.api.refused(400, [approve(request["id"])], tools=[OTHER], conversation=chain)
            refused_at(error, request)
            done = await here.api.create([approve(request["id"])], tools=[ASKING], conversation=chain)
            assert text(done) == "The tool said: booked 3"
    assert (here.desk.called, here.other.called) == (["book", "book"], [])


async def test_behind_a_fork_of_a_response(tmp_path: Path) -> None:
    async with desks(tmp_path) as here:
        first = await here.api.create(f"{BOOK}\n{BOOK}", tools=[ASKING])
        [request, _] = requests(first)
        reply = await here.api.http.post(f"/v1/responses/{first['id']}/fork", json={"after": request["id"]})
        chain: Json = {"previous_response_id": reply.json()["id"]}
        error = await here.api.refused(400, [approve(request["id"])], tools=[OTHER], **chain)
        refused_at(error, request)
        done = await here.api.create([approve(request["id"])], tools=[ASKING], **chain)
    assert kinds(done) == ["mcp_call", "message"]
    assert (here.desk.called, here.other.called) == (["book"], [])


async def test_another_key_in_the_query_or_the_header_makes_no_other_server(tmp_path: Path) -> None:
    async with desks(tmp_path) as here:
        first = await here.api.create(BOOK, tools=[at(f"{here.url}?key=one", authorization="one")])
        [request] = requests(first)
        done = await here.api.create(
            [approve(request["id"])],
            tools=[at(f"{here.url}?key=two", authorization="two")],
            previous_response_id=first["id"],
        )
    assert (text(done), here.desk.called) == ("The tool said: booked 3", ["book"])


async def test_a_restart_keeps_the_server_and_what_was_asked_before_it_was_kept_goes_on(
    tmp_path: Path,
) -> None:
    desk, other = Seen(), Seen()
    async with mcp_server(desk) as url, mcp_server(other) as other_url:
        known = read_mcp_settings({"servers": {"desk": {"url": url}, "other": {"url": other_url}}}, {})
        async with live_app(tmp_path, mcp=known) as server, http_client(server) as client:
            first = await Api(client).create(BOOK, tools=[ASKING])
        [request] = requests(first)
        asked: Json = {"input": [approve(request["id"])], "previous_response_id": first["id"]}
        async with live_app(tmp_path, mcp=known) as server, http_client(server) as client:
            error = await Api(client).refused(400, **asked, tools=[OTHER])
        refused_at(error, request)
        forget = "UPDATE items SET private = NULL WHERE kind = 'mcp_approval_request'"
        query(used_database(tmp_path), forget)
        async with live_app(tmp_path, mcp=known) as server, http_client(server) as client:
            done = await Api(client).create(**asked, tools=[OTHER])
    assert text(done) == "The tool said: booked 3"
    assert (desk.called, other.called) == ([], ["book"])


# ------------------------------------------------------------------------------------------------------------
# Items that the client sends again


async def test_a_stored_item_that_is_sent_again_is_known(tmp_path: Path) -> None:
    async with desks(tmp_path) as here:
        first = await here.api.create(BOOK, tools=[ASKING])
        [request] = requests(first)
        for store in (True, False):
            sent = [*first["output"], approve(request["id"])]
            error = await here.api.refused(400, sent, tools=[OTHER], store=store)
            refused_at(error, request, param="input[2]")
        reference = {"type": "item_reference", "id": request["id"]}
        error = await here.api.refused(400, [reference, approve(request["id"])], tools=[OTHER])
        refused_at(error, request, param="input[1]")
    assert (here.desk.called, here.other.called) == ([], [])


async def test_a_client_that_keeps_the_items_is_given_the_server_sealed(tmp_path: Path) -> None:
    async with desks(tmp_path) as here:
        first = await here.api.stream(BOOK, tools=[ASKING], **KEPT_BY_CLIENT)
        [request] = requests(first.response)
        assert request["antiphon_sealed"] and "builtin:desk" not in str(request)
        sent = [*first.response["output"], approve(request["id"])]
        error = await here.api.refused(400, sent, tools=[OTHER], store=False)
        refused_at(error, request, param="input[2]")
        changed = [{**request, "antiphon_sealed": f"{request['antiphon_sealed'][:-6]}AAAAAA"}, sent[-1]]
        error = await here.api.refused(400, changed, tools=[ASKING], store=False)
        assert error["code"] == "invalid_encrypted_content"
        done = await here.api.create(sent, tools=[ASKING], store=False)
        assert (text(done), here.other.called) == ("The tool said: booked 3", [])
        stored = await here.api.create(sent[:-1], tools=[ASKING])
        items = await here.api.input_items(stored["id"])
        assert "antiphon_sealed" not in str(items), "from here on the server keeps it"
        chain: Json = {"previous_response_id": stored["id"]}
        refused_at(await here.api.refused(400, sent[-1:], tools=[OTHER], **chain), request)


async def test_without_a_seal_nobody_knows_the_server_of_an_item_that_is_not_stored(tmp_path: Path) -> None:
    async with desks(tmp_path) as here:
        first = await here.api.create(BOOK, tools=[ASKING], store=False)
        [request] = requests(first)
        assert "antiphon_sealed" not in request
        done = await here.api.create([request, approve(request["id"])], tools=[OTHER], store=False)
    assert (kinds(done), here.other.called) == (["mcp_list_tools", "mcp_call", "message"], ["book"])


async def test_over_a_websocket_the_server_is_known_without_being_stored(tmp_path: Path) -> None:
    """Also where the item is sent again beside the response that it is of."""
    async with desks(tmp_path) as here, line(here.running.base_url) as socket:
        first = await socket.turn(BOOK, tools=[ASKING], store=False)
        [request] = requests(first)
        chain: Json = {"previous_response_id": first["id"], "store": False}
        frame = await socket.refused("invalid_value", input=[approve(request["id"])], tools=[OTHER], **chain)
        refused_at(frame["error"], request)
        first = await socket.turn(BOOK, tools=[ASKING], store=False)
        [request] = requests(first)
        chain["previous_response_id"] = first["id"]
        sent = [request, approve(request["id"])]
        frame = await socket.refused("invalid_value", input=sent, tools=[OTHER], **chain)
        refused_at(frame["error"], request, param="input[1]")
    assert (here.desk.called, here.other.called) == ([], [])


# ------------------------------------------------------------------------------------------------------------
# By `tool_outputs`


async def fed(here: Desks, response: Json, request: Json) -> Any:
    body = {"tool_outputs": [approve(request["id"])]}
    return await here.api.http.post(f"/v1/responses/{response['id']}/tool_outputs", json=body)


async def test_a_waiting_run_has_the_servers_that_it_began_with(tmp_path: Path) -> None:
    """Its plan has them, whatever the conversation gives its label to meanwhile."""
    async with desks(tmp_path) as here:
        conversation = await here.api.conversation({**ADDED, "tools": [ASKING]})
        asked: Json = {"conversation": conversation, "background": True, "await_tool_outputs": True}
        begun = await here.api.create(BOOK, **asked)
        now = await here.api.waits(begun["id"])
        [request] = requests(now)
        added = {"items": [{**ADDED, "tools": [OTHER]}]}
        reply = await here.api.http.post(f"/v1/conversations/{conversation}/items", json=added)
        assert reply.status_code == 200, reply.text
        here.api.response(await fed(here, now, request))
        done = await here.api.ended(begun["id"])
    assert text(done) == "The tool said: booked 3"
    assert (here.desk.called, here.other.called) == (["book"], [])


async def test_a_completed_response_goes_on_at_its_server_alone(tmp_path: Path) -> None:
    """It is continued with the tools of its conversation as they are by then."""
    async with desks(tmp_path) as here:
        conversation = await here.api.conversation({**ADDED, "tools": [ASKING]})
        first = await here.api.create(BOOK, conversation=conversation)
        [request] = requests(first)
        path = f"/v1/conversations/{conversation}/items"
        for tool in (OTHER, ASKING):
            reply = await here.api.http.post(path, json={"items": [{**ADDED, "tools": [tool]}]})
            assert reply.status_code == 200, reply.text
            reply = await fed(here, first, request)
            if tool is OTHER:
                assert reply.status_code == 400, reply.text
                refused_at(reply.json()["error"], request, param="tool_outputs[0]")
        done = here.api.response(reply)
    assert text(done) == "The tool said: booked 3"
    assert (here.desk.called, here.other.called) == (["book"], [])
