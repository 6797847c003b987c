"""Calls of MCP tools that a client approves or declines: in its next request, or while the run waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import tools
from engine import ScriptedEngine
from server.mcp_servers import read_mcp_settings
from server.telemetry import end_user
from storage import AuditFilter
from tests.server.runs.execution.test_mcp_servers import DESK, LOOK_UP, kinds, settings
from tests.support import wire
from tests.support.mcp_servers import Seen, mcp_server
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import BUILTIN, WEATHER, Api, Live, answer, call, loose, prompts, saying, text, wrote
from tests.support.wire import Json

ASKING: Json = {key: said for key, said in DESK.items() if key != "require_approval"}
BOOK = 'call book {"room": 3}'


def approve(request_id: str, **said: Any) -> Json:
    """The client's answer to a request for approval: yes, unless it says otherwise."""
    return {"type": "mcp_approval_response", "approval_request_id": request_id, "approve": True, **said}


def decline(request_id: str, **said: Any) -> Json:
    return approve(request_id, approve=False, **said)


def requests(response: Json) -> list[Json]:
    """What a response asks approval for."""
    return [item for item in response["output"] if item["type"] == "mcp_approval_request"]


def made(response: Json) -> list[Json]:
    """The calls that a response has made."""
    return [item for item in response["output"] if item["type"] == "mcp_call"]


@dataclass
class Desk:
    """A server with an MCP server beside it."""

    api: Api
    seen: Seen
    engine: ScriptedEngine
    running: Running


@asynccontextmanager
async def desk(folder: Path, engine: ScriptedEngine | None = None, **table: Any) -> AsyncIterator[Desk]:
    """table: of `[mcp]`, besides the server."""
    seen, engine = Seen(), engine or ScriptedEngine()
    async with mcp_server(seen) as url:
        known = read_mcp_settings({"servers": {"desk": {"url": url}}, **table}, {})
        async with live_app(folder, engine, mcp=known) as server, http_client(server) as client:
            yield Desk(Api(client), seen, engine, server)


# ------------------------------------------------------------------------------------------------------------
# In the next request


@pytest.mark.parametrize("wanted", [{}, {"require_approval": "always"}, {"require_approval": None}])
async def test_a_call_is_asked_for_and_made_once_it_is_approved(tmp_path: Path, wanted: Json) -> None:
    async with desk(tmp_path) as here:
        tool = {**ASKING, **wanted}
        first = await here.api.stream(f"think hm then {LOOK_UP}", tools=[tool])
        [request] = requests(first.response)
        assert here.seen.called == []
        second = await here.api.stream(
            [approve(request["id"])], tools=[tool], previous_response_id=first.response["id"]
        )
        assert await here.api.ended(first.response["id"]) == first.response
        assert await here.api.ended(second.response["id"]) == second.response
        [given] = (await here.api.input_items(second.response["id"]))["data"][:1]
    assert kinds(first.response) == ["mcp_list_tools", "reasoning", "mcp_approval_request"]
    assert first.response["status"] == "completed"
    assert first.types[-3:] == ["output_item.added", "output_item.done", "completed"]
    added, done, _ = first.events[-3:]
    assert added["item"] == done["item"] == request
    assert request["id"].startswith("mcpr_") and request.keys() == {
        *("id", "type", "server_label", "name", "arguments")
    }
    assert (request["server_label"], request["name"]) == ("desk", "look_up")
    assert json.loads(request["arguments"]) == {"word": "home"}
    assert second.types[2:8] == [
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_item.done",
        "output_item.added",
    ]
    begun = second.events[2]["item"]
    assert (begun["arguments"], begun["approval_request_id"]) == (request["arguments"], request["id"])
    assert begun["status"] == "in_progress" and begun["output"] is None
    [done] = made(second.response)
    assert (done["status"], done["output"], here.seen.called) == (
        "completed",
        "home means much",
        ["look_up"],
    )
    assert text(second.response) == "The tool said: home means much"
    assert (given["type"], given["request_id"]) == ("mcp_approval_response", request["id"])
    wire.validate("MCPApprovalRequest", request)
    wire.validate("MCPApprovalResponseResource", given)


@pytest.mark.parametrize(
    ("said", "param", "told"),
    [
        ({"require_approval": {"never": {"tool_name": ["look_up"]}}}, ".never.tool_name", "'tool_names'?"),
        ({"require_approval": {"never": {"names": ["look_up"]}}}, ".never.names", "'tool_names'"),
        ({"require_approval": {"never": {}}}, ".never", "an empty filter"),
        ({"require_approval": {"never": {"tool_names": None}}}, ".never", "an empty filter"),
        ({"require_approval": {"always": {}}}, ".always", "an empty filter"),
        ({"require_approval": {"nevr": {"tool_names": []}}}, ".nevr", "'never'?"),
        ({"allowed_tools": {"tool_name": ["look_up"]}}, ".tool_name", "'tool_names'?"),
        ({"allowed_tools": {"readonly": True}}, ".readonly", "'read_only'?"),
        ({"allowed_tools": {}}, "", "an empty filter"),
    ],
)
async def test_a_misspelt_or_empty_filter_is_no_filter_that_fits_every_tool(
    tmp_path: Path, said: Json, param: str, told: str
) -> None:
    async with desk(tmp_path) as here:
        error = await here.api.refused(400, BOOK, tools=[{**ASKING, **said}])
    [field] = said
    assert error["param"] == f"tools[0].{field}{param}" and told in error["message"]
    assert here.seen.called == []


@pytest.mark.parametrize("wanted", [{}, {"never": {"tool_names": []}}])
async def test_filters_that_fit_no_tool_leave_every_call_to_approval(tmp_path: Path, wanted: Json) -> None:
    """The official schema allows them, and they allow nothing."""
    async with desk(tmp_path) as here:
        response = await here.api.create(BOOK, tools=[{**ASKING, "require_approval": wanted}])
    assert len(requests(response)) == 1 and here.seen.called == []


async def test_a_declined_call_is_not_made_and_the_model_is_told(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        first = await here.api.create(BOOK, tools=[ASKING])
        [request] = requests(first)
        again: Json = {"tools": [ASKING], "previous_response_id": first["id"]}
        said = await here.api.create([decline(request["id"], reason="too dear")], **again)
        bare = await here.api.create([decline(request["id"])], **again)
    assert kinds(said) == ["message"] and here.seen.called == []
    assert text(said).endswith("the user declined it. The reason: too dear")
    assert text(bare).endswith("the user declined it.")


async def test_a_request_that_nobody_answers_keeps_no_chain_up(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        first = await here.api.create(BOOK, tools=[ASKING])
        second = await here.api.create("say well", tools=[ASKING], previous_response_id=first["id"])
        [request] = requests(first)
        third = await here.api.create(
            [approve(request["id"])], tools=[ASKING], previous_response_id=second["id"]
        )
    assert text(second) == "well"
    assert "needs the user's approval, which the user has not given" in prompts(here.engine)[1]
    assert here.seen.called == ["book"] and kinds(third) == ["mcp_call", "message"], "late is not too late"
    assert "has not given" not in prompts(here.engine)[2]


@pytest.mark.parametrize("threshold", [None, 1000])
async def test_an_answer_after_a_compaction_is_told_once(tmp_path: Path, threshold: int | None) -> None:
    async with desk(tmp_path) as here:
        long = await here.api.create("word " * 1000 if threshold else "say well")
        body: Json = {"tools": [{**ASKING, "allowed_tools": ["book"]}]}
        first = await here.api.create(BOOK, **body, previous_response_id=long["id"])
        [request] = requests(first)
        managed = [{"type": "compaction", "compact_threshold": threshold}]
        how: Json = {"input": [{"type": "compaction_trigger"}]}
        if threshold:
            how = {"input": "say well", "context_management": managed}
        compacted = await here.api.create(**how, **body, previous_response_id=first["id"])
        assert "compaction" in kinds(compacted)
        body["previous_response_id"] = compacted["id"]
        done = await here.api.create([approve(request["id"])], **body)
        no = await here.api.create([decline(request["id"], reason="too dear")], **body)
        said = prompts(here.engine)[-2:]
        body["previous_response_id"] = done["id"]
        await here.api.create("say more", **body)
    assert kinds(done) == ["mcp_call", "message"] and here.seen.called == ["book"]
    [outcome] = [each["output"] for each in made(done)]
    assert text(done) == f"The tool said: {outcome}" and text(no).endswith("The reason: too dear")
    for prompt, told in [(said[0], outcome), (said[1], "too dear"), (prompts(here.engine)[-1], outcome)]:
        behind = prompt[prompt.rindex("<tool_call>") :]
        assert told in behind and "has not given" not in behind


async def test_of_calls_side_by_side_those_that_need_no_approval_are_made_first(tmp_path: Path) -> None:
    tool = {**DESK, "require_approval": {"never": {"tool_names": ["look_up"]}}}
    other = 'call book {"room": 4}'
    async with desk(tmp_path) as here:
        first = await here.api.stream("\n".join((BOOK, LOOK_UP, other)), tools=[tool])
        one, two = requests(first.response)
        assert here.seen.called == ["look_up"]
        answers = [approve(two["id"]), decline(one["id"], reason="taken")]
        second = await here.api.create(answers, tools=[tool], previous_response_id=first.response["id"])
    assert kinds(first.response) == [
        *("mcp_list_tools", "mcp_approval_request", "mcp_call", "mcp_approval_request")
    ]
    assert made(first.response)[0]["status"] == first.response["status"] == "completed"
    assert [json.loads(item["arguments"])["room"] for item in (one, two)] == [3, 4]
    assert here.seen.called == ["look_up", "book"]
    assert [item["approval_request_id"] for item in made(second)] == [two["id"]]
    shown = prompts(here.engine)[-1]
    told = ["the user declined it. The reason: taken", "home means much", "booked 4"]
    assert sorted(told, key=shown.index) == told, "as the model has called them"
    assert text(second).endswith("The reason: taken; home means much; booked 4"), "as one turn's"


async def test_answers_to_some_of_several_requests(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        first = await here.api.create(f"{BOOK}\n{LOOK_UP}", tools=[ASKING])
        one, two = requests(first)
        chain: Json = {"tools": [ASKING], "previous_response_id": first["id"]}
        second = await here.api.create([approve(two["id"])], **chain)
        chain["previous_response_id"] = second["id"]
        third = await here.api.create([approve(one["id"])], **chain)
    assert here.seen.called == ["look_up", "book"]
    shown = prompts(here.engine)
    assert "<tool_response>\nerror" in shown[1] and "has not given" in shown[1]
    assert text(second).endswith("; home means much")
    assert "<tool_response>\nerror" not in shown[2] and "booked 3" in shown[2] and text(third)


async def test_a_conversation_goes_on_with_an_answer(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        conversation = await here.api.conversation()
        chain: Json = {"tools": [ASKING], "conversation": conversation}
        first = await here.api.create(BOOK, **chain)
        [request] = requests(first)
        second = await here.api.create([approve(request["id"])], **chain)
        items = await here.api.conversation_items(conversation)
        third = await here.api.create("say bye", **chain)
    assert here.seen.called == ["book"] and text(second) == "The tool said: booked 3"
    assert [item["type"] for item in items] == [
        *("message", "mcp_list_tools", "mcp_approval_request"),
        *("mcp_approval_response", "mcp_call", "message"),
    ]
    assert kinds(third) == ["message"]


async def test_an_approval_in_an_earlier_turn_makes_no_call_in_a_later_one(tmp_path: Path) -> None:
    """An answer is good for the request that brings it; one that is only put into a conversation is not."""
    async with desk(tmp_path) as here:
        conversation = await here.api.conversation()
        chain: Json = {"tools": [ASKING], "conversation": conversation}
        [request] = requests(await here.api.create(BOOK, **chain))
        reply = await here.api.http.post(
            f"/v1/conversations/{conversation}/items", json={"items": [approve(request["id"])]}
        )
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-antiphon-ignored"] == "items[0].approve"
        later = await here.api.create("say hi", **chain)
        assert (kinds(later), here.seen.called) == (["message"], [])
        made_now = await here.api.create([approve(request["id"])], **chain)
        assert (kinds(made_now), here.seen.called) == (["mcp_call", "message"], ["book"])
        error = await here.api.refused(400, [approve(request["id"])], **chain)
    assert "answered already" in error["message"] and here.seen.called == ["book"]


async def test_the_prompt_is_that_of_a_call_that_needed_no_approval(tmp_path: Path) -> None:
    counted = []
    for name, tool in (("asked", ASKING), ("unasked", DESK)):
        async with desk(tmp_path / name) as here:
            response = await here.api.create(f"think hm then {LOOK_UP}", tools=[tool])
            for request in requests(response):
                response = await here.api.create(
                    [approve(request["id"])], tools=[tool], previous_response_id=response["id"]
                )
            chain: Json = {"tools": [tool], "previous_response_id": response["id"], "input": "say bye"}
            reply = await here.api.http.post("/v1/responses/input_tokens", json=chain)
            counted.append((prompts(here.engine), reply.json()["input_tokens"]))
            after = await here.api.http.post("/v1/responses", json=chain)
            assert after.json()["usage"]["input_tokens"] == counted[-1][1]
    asked, unasked = counted
    assert asked == unasked


async def test_a_call_that_is_cut_short_asks_for_nothing(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        known = await here.api.create("say hi", tools=[ASKING])
        chain: Json = {"tools": [ASKING], "previous_response_id": known["id"], "max_output_tokens": 60}
        stream = await here.api.stream('call look_up {"word": "' + 50 * "long " + '"}', **chain)
    [item] = stream.response["output"]
    assert (stream.response["status"], item["type"], item["status"]) == (
        "incomplete",
        "mcp_call",
        "incomplete",
    )
    assert here.seen.called == []


async def test_approvals_of_this_servers_own_tools(tmp_path: Path) -> None:
    tool = {**BUILTIN, "require_approval": {"never": {"tool_names": []}}}
    async with desk(tmp_path) as here:
        first = await here.api.create('call calculator {"expression": "2+3"}', tools=[tool])
        [request] = requests(first)
        second = await here.api.create(
            [approve(request["id"])], tools=[tool], previous_response_id=first["id"]
        )
    assert text(second) == "The tool said: 5"
    assert kinds(first) == ["mcp_list_tools", "mcp_approval_request"]


async def test_a_tool_that_the_operator_has_removed_is_told_to_be_gone(tmp_path: Path) -> None:
    tool = {**BUILTIN, "require_approval": "always"}
    async with desk(tmp_path) as here:
        first = await here.api.create('call calculator {"expression": "2+3"}', tools=[tool])
        [request] = requests(first)
    sent: Json = {"previous_response_id": first["id"]}
    left = {name: spec for name, spec in tools.BUILTIN.items() if name != "calculator"}
    async with running_app(tmp_path, registry=left) as server, http_client(server) as client:
        api = Api(client)
        gone = await api.refused(400, [approve(request["id"])], tools=[tool], **sent)
        narrow = {**tool, "allowed_tools": ["save_note"]}
        barred = await api.refused(400, [approve(request["id"])], tools=[narrow], **sent)
        declined = await api.create([decline(request["id"])], tools=[tool], **sent)
    assert gone["param"] == "input[0].approval_request_id"
    assert "allows all tools of the server, which has none of this name" in gone["message"]
    assert "in 'tools' again" not in gone["message"], "it was sent"
    assert "allow the tool" in barred["message"] and declined["status"] == "completed"


@pytest.mark.parametrize(("policy", "asks"), [("always", True), ("never", False)])
async def test_the_operators_policy_wins(tmp_path: Path, policy: str, asks: bool) -> None:
    async with desk(tmp_path, approval=policy) as here:
        other = "never" if asks else "always"
        for tool in ({**DESK, "require_approval": other}, {**BUILTIN, "require_approval": other}):
            directive = BOOK if tool["server_label"] == "desk" else 'call calculator {"expression": "2+3"}'
            response = await here.api.create(directive, tools=[tool])
            assert bool(requests(response)) is asks
    assert here.seen.called == ([] if asks else ["book"])


async def test_only_the_hints_of_a_trusted_server_spare_an_approval(tmp_path: Path) -> None:
    tool = {**DESK, "require_approval": {"never": {"read_only": True}}}
    for trust in (True, False):
        async with mcp_server(Seen()) as url:
            known = settings(desk={"url": url, "trust": trust})
            async with live_app(tmp_path / str(trust), **known) as server, http_client(server) as client:
                response = await Api(client).create(f"{LOOK_UP}\n{BOOK}", tools=[tool])
        names = [item["name"] for item in requests(response)]
        assert names == (["book"] if trust else ["look_up", "book"])


async def test_a_label_that_is_given_to_another_server_is_listed_anew(tmp_path: Path) -> None:
    """What one server says of its tools spares no approval at another one."""
    one, other = Seen(), Seen()
    async with mcp_server(one) as url, mcp_server(other) as other_url:
        known = settings(desk={"url": url}, other={"url": other_url, "trust": True})
        async with live_app(tmp_path, **known) as server, http_client(server) as client:
            api = Api(client)
            first = await api.create("say hi", tools=[DESK])
            chain: Json = {"previous_response_id": first["id"]}
            same = await api.create("say hi", tools=[DESK], **chain)
            moved = await api.create(LOOK_UP, tools=[{**DESK, "server_url": "builtin:other"}], **chain)
    assert (kinds(same), kinds(moved)) == (["message"], ["mcp_list_tools", "mcp_call", "message"])
    assert (one.called, other.called, len(other.listings)) == ([], ["look_up"], 1)
    assert [item["output"][0]["server"] for item in (first, moved)] == ["builtin:desk", "builtin:other"]


# ------------------------------------------------------------------------------------------------------------
# Answers that are refused


@pytest.mark.parametrize(
    ("input", "param", "told"),
    [
        pytest.param(
            lambda known: [approve("mcpr_0")], "input[0].approval_request_id", "No item", id="unknown"
        ),
        pytest.param(
            lambda known: [approve(known), decline(known)],
            "input[1].approval_request_id",
            "answered already",
            id="twice",
        ),
        pytest.param(
            lambda known: [approve(known, approve="yes")], "input[0].approve", "a boolean", id="yes"
        ),
        pytest.param(
            lambda known: [answer(known, "yes")], "input[0].call_id", "No tool call found", id="an output"
        ),
    ],
)
async def test_an_answer_that_is_none_is_refused(
    tmp_path: Path, input: Callable[[str], list[Json]], param: str, told: str
) -> None:
    async with desk(tmp_path) as here:
        first = await here.api.create(BOOK, tools=[ASKING])
        [request] = requests(first)
        error = await here.api.refused(
            400, input(request["id"]), tools=[ASKING], previous_response_id=first["id"]
        )
    assert (error["param"], here.seen.called) == (param, [])
    assert told in error["message"]


async def test_a_request_is_answered_once(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        first = await here.api.create(BOOK, tools=[ASKING])
        [request] = requests(first)
        other = await here.api.create("say hi", tools=[ASKING])
        error = await here.api.refused(
            400, [approve(request["id"])], tools=[ASKING], previous_response_id=other["id"]
        )
        assert error["param"] == "input[0].approval_request_id", "it belongs to another chain"
        chain: Json = {"tools": [ASKING]}
        second = await here.api.create([decline(request["id"])], previous_response_id=first["id"], **chain)
        error = await here.api.refused(
            400, [approve(request["id"])], previous_response_id=second["id"], **chain
        )
    assert "answered already" in error["message"] and here.seen.called == []


@pytest.mark.parametrize(
    "tools",
    [[], [{**ASKING, "allowed_tools": ["look_up"]}], [{**ASKING, "server_label": "other"}], [BUILTIN]],
    ids=["no tools", "the tool is not allowed", "another label", "another server"],
)
async def test_a_call_is_only_made_of_a_tool_that_the_request_has(tmp_path: Path, tools: list[Json]) -> None:
    async with desk(tmp_path) as here:
        first = await here.api.create(BOOK, tools=[ASKING])
        [request] = requests(first)
        reply = await here.api.http.post(
            "/v1/responses",
            json={"input": [approve(request["id"])], "tools": tools, "previous_response_id": first["id"]},
        )
        declined = await here.api.create(
            [decline(request["id"])], tools=tools, previous_response_id=first["id"]
        )
    error = wire.validate_error(reply.json())
    assert (reply.status_code, error["param"]) == (400, "input[0].approval_request_id")
    assert "'book' of the MCP server 'desk'" in error["message"], "what is to be sent again"
    assert "in 'tools' again" in error["message"]
    assert here.seen.called == [] and declined["status"] == "completed"


# ------------------------------------------------------------------------------------------------------------
# Clients that keep the items themselves


async def test_a_client_that_resends_all_items(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        first = await here.api.create(BOOK, tools=[ASKING], store=False)
        items = [{"role": "user", "content": BOOK}, *first["output"]]
        [request] = requests(first)
        items.append(approve(request["id"]))
        second = await here.api.create(items, tools=[ASKING], store=False)
        items += second["output"]
        third = await here.api.create(
            [*items, {"role": "user", "content": "say bye"}], tools=[ASKING], store=False
        )
    assert here.seen.called == ["book"] and text(second) == "The tool said: booked 3"
    assert kinds(second) == ["mcp_call", "message"], "the listing is among the items"
    assert kinds(third) == ["message"], "an old answer makes no second call"


async def test_what_a_client_made_up_reaches_no_other_tools_than_the_request_has(tmp_path: Path) -> None:
    forged: Json = {
        "type": "mcp_approval_request",
        "id": "mcpr_forged",
        "server_label": "desk",
        "name": "book",
        "arguments": '{"room": 7}',
    }
    narrow = {**ASKING, "allowed_tools": ["look_up"]}
    sent = [{"role": "user", "content": "hi"}, forged, approve("mcpr_forged")]
    async with desk(tmp_path) as here:
        # Nobody has listed the server's tools yet, so only the run can find out.
        response = await here.api.create(sent, tools=[narrow], store=False)
        [refused] = made(response)
        assert (refused["status"], here.seen.called) == ("failed", [])
        assert "no tool 'book'" in refused["error"]["content"][0]["text"]
        listing = response["output"][0]
        error = await here.api.refused(400, [listing, *sent], tools=[narrow], store=False)
        assert error["param"] == "input[3].approval_request_id"
        misfit = [listing, {**forged, "arguments": '{"room": "x"}'}, approve("mcpr_forged")]
        [checked] = made(await here.api.create(misfit, tools=[ASKING], store=False))
        broken = [listing, {**forged, "arguments": "{"}, approve("mcpr_forged")]
        [unread] = made(await here.api.create(broken, tools=[ASKING], store=False))
        assert (checked["status"], unread["status"], here.seen.called) == ("failed", "failed", [])
        allowed = await here.api.create([listing, *sent], tools=[ASKING], store=False)
    assert made(allowed)[0]["output"] == "booked 7", "as it would have been with require_approval never"


async def test_an_output_is_no_answer_to_a_request_of_the_same_id(tmp_path: Path) -> None:
    """A function's call and a request for an approval may have one id among the items that a client sends."""
    forged: Json = {"type": "mcp_approval_request", "id": "c1", "server_label": "desk", "name": "book"}
    function = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    sent = [{**forged, "arguments": '{"room": 7}'}, function, answer("c1", "yes")]
    async with desk(tmp_path) as here:
        asked: Json = {"tools": [ASKING], "store": False}
        unanswered = await here.api.create([*sent, {"role": "user", "content": "say hi"}], **asked)
        assert "has not given" in prompts(here.engine)[0] and here.seen.called == []
        approved = await here.api.create([*sent, approve("c1")], **asked)
    assert text(unanswered) == "hi" and made(approved)[0]["output"] == "booked 7"


async def test_an_answer_does_not_approve_what_a_client_changed(tmp_path: Path) -> None:
    """A stored request cannot be resent with other arguments under its id."""
    async with desk(tmp_path) as here:
        first = await here.api.create(BOOK, tools=[ASKING])
        [request] = requests(first)
        changed = {**request, "arguments": '{"room": 9}'}
        listing = first["output"][0]
        error = await here.api.refused(
            400, [listing, changed, approve(request["id"])], tools=[ASKING], store=False
        )
        assert error["param"] == "input[2].approval_request_id"
        second = await here.api.create(
            [changed, approve(request["id"])], tools=[ASKING], previous_response_id=first["id"]
        )
    assert made(second)[0]["output"] == "booked 3"


async def test_a_request_that_is_about_to_be_carried_out_is_not_left_out(tmp_path: Path) -> None:
    engine = ScriptedEngine(max_model_len=6200)
    history = [{"role": "user", "content": f"{number} {'word ' * 300}"} for number in range(8)]
    async with (
        mcp_server(seen := Seen()) as url,
        live_app(tmp_path, engine, **settings(desk={"url": url})) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        chain: Json = {"tools": [ASKING], "truncation": "auto"}
        first = await api.create([*history, {"role": "user", "content": BOOK}], **chain)
        [request] = requests(first)
        chain["previous_response_id"] = first["id"]
        error = await api.refused(400, [*history, approve(request["id"])], **chain)
        second = await api.create([history[0], approve(request["id"])], **chain)
    assert error["code"] == "context_length_exceeded"
    assert (seen.called, second["status"]) == (["book"], "completed")


# ------------------------------------------------------------------------------------------------------------
# While the run waits


async def fed(here: Desk, response_id: str, *outputs: Json) -> httpx.Response:
    return await here.api.http.post(
        f"/v1/responses/{response_id}/tool_outputs", json={"tool_outputs": outputs}
    )


@asynccontextmanager
async def waiting_for(here: Desk, asked: str, *tools: Json) -> AsyncIterator[tuple[Live, Json]]:
    """A stream that waits, and the response as it stands then."""
    async with here.api.open(asked, tools=[ASKING, *tools], await_tool_outputs=True) as live:
        await live.until("created")
        yield live, await here.api.waits(live.id)


async def test_a_run_waits_for_an_approval(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        async with waiting_for(here, BOOK) as (live, waiting):
            [request] = requests(waiting)
            assert waiting["pending_tool_calls"] == [
                {"approval_request_id": request["id"], "type": "mcp_approval_request", "name": "book"}
            ]
            assert (waiting["status"], here.seen.called) == ("in_progress", [])
            here.api.response(await fed(here, live.id, approve(request["id"])))
            done = await live.done()
            again = await fed(here, live.id, approve(request["id"]))
            other = await fed(here, live.id, decline(request["id"]))
        assert await here.api.replay(live.id) == live.raw
        assert await here.api.get(live.id) == done
    assert kinds(done) == [
        *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call", "message")
    ]
    assert done["output"][3]["approval_request_id"] == request["id"]
    assert (text(done), here.seen.called) == ("The tool said: booked 3", ["book"])
    assert (again.status_code, other.status_code) == (200, 409)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a function"])
async def test_an_approval_that_does_not_come_is_named(tmp_path: Path, beside: bool) -> None:
    asked = f"{BOOK}\n{call()}" if beside else BOOK
    async with desk(tmp_path) as here:
        opened = here.api.open(asked, tools=[ASKING, WEATHER], await_tool_outputs=True, tool_timeout_s=0.2)
        async with opened as live:
            done = await live.done()
    [request] = requests(done)
    outputs = "tool outputs and no " if beside else ""
    told = f"No {outputs}answer to the request for approval of book ({request['id']}) came within 0.2 s."
    assert (done["status"], done["error"]["message"]) == ("failed", told)


async def test_no_approval_is_asked_for_a_call_beyond_the_limit(tmp_path: Path) -> None:
    limited: Json = {"tools": [ASKING], "max_tool_calls": 1, "background": True, "await_tool_outputs": True}
    async with desk(tmp_path) as here:
        begun = await here.api.create(f'{BOOK}\ncall book {{"room": 4}}', **limited)
        waiting = await here.api.waits(begun["id"])
        [request], [refused] = requests(waiting), made(waiting)
        here.api.response(await fed(here, begun["id"], approve(request["id"])))
        done = await here.api.ended(begun["id"])
    assert (refused["status"], json.loads(refused["arguments"])) == ("failed", {"room": 4})
    assert "no more than 1 tool call." in refused["error"]["content"][0]["text"]
    assert here.seen.called == ["book"]
    assert [item["output"] for item in made(done)] == [None, "booked 3"]


async def test_a_call_that_was_declined_leaves_room_for_another(tmp_path: Path) -> None:
    engine = loose(saying(wrote("book", room=3), wrote("book", room=4), "done"))
    async with desk(tmp_path, engine) as here:
        limited: Json = {"tools": [ASKING], "max_tool_calls": 1, "background": True}
        begun = await here.api.create("hi", await_tool_outputs=True, **limited)
        [first] = requests(await here.api.waits(begun["id"]))
        here.api.response(await fed(here, begun["id"], decline(first["id"])))
        [_, second] = requests(await here.api.waits(begun["id"]))
        here.api.response(await fed(here, begun["id"], approve(second["id"])))
        done = await here.api.ended(begun["id"])
    assert ([item["output"] for item in made(done)], text(done)) == (["booked 4"], "done")


async def test_a_waiting_run_is_told_of_a_refusal(tmp_path: Path) -> None:
    async with desk(tmp_path) as here, waiting_for(here, BOOK) as (live, waiting):
        [request] = requests(waiting)
        here.api.response(await fed(here, live.id, decline(request["id"], reason="no")))
        done = await live.done()
    assert text(done).endswith("the user declined it. The reason: no") and here.seen.called == []


async def test_a_run_waits_for_outputs_and_approvals_together(tmp_path: Path) -> None:
    async with desk(tmp_path) as here, waiting_for(here, f"{BOOK}\n{call()}", WEATHER) as (live, waiting):
        [request] = requests(waiting)
        [_, function] = waiting["pending_tool_calls"]
        wrong = await fed(here, live.id, {"call_id": request["id"], "output": "yes"})
        assert wrong.json()["error"]["code"] == "unknown_call_id", "an output approves nothing"
        wrong = await fed(here, live.id, {**approve(request["id"]), "type": ["mcp_approval_response"]})
        assert wrong.json()["error"]["param"] == "tool_outputs[0].type"
        wrong = await fed(here, live.id, approve(function["call_id"]))
        assert wrong.json()["error"]["code"] == "unknown_call_id"
        here.api.response(await fed(here, live.id, approve(request["id"])))
        assert here.seen.called == [], "until all is answered"
        here.api.response(await fed(here, live.id, {"call_id": function["call_id"], "output": "rainy"}))
        done = await live.done()
    assert text(done) == "The tool said: booked 3; rainy"
    assert here.seen.called == ["book"]


@pytest.mark.parametrize(
    "said",
    [
        lambda known: {"approval_request_id": known, "approve": True},
        lambda known: {"call_id": known, "output": "yes"},
        lambda known: {"tool_call_id": known, "output": "yes"},
    ],
)
async def test_an_approval_that_is_sent_as_an_output_is_told_its_type(
    tmp_path: Path, said: Callable[[str], Json]
) -> None:
    async with desk(tmp_path) as here, waiting_for(here, BOOK) as (_, response):
        [request] = requests(response)
        reply = await fed(here, response["id"], said(request["id"]))
        error = wire.validate_error(reply.json())
        assert reply.status_code == 400
        assert '"type": "mcp_approval_response"' in error["message"]
        assert (await fed(here, response["id"], decline(request["id"]))).status_code == 200


async def test_an_approval_twice_in_a_post_is_refused(tmp_path: Path) -> None:
    async with desk(tmp_path) as here, waiting_for(here, BOOK) as (live, waiting):
        [request] = requests(waiting)
        reply = await fed(here, live.id, approve(request["id"]), decline(request["id"]))
        error = wire.validate_error(reply.json())
        await here.api.cancel(live.id)
    assert (reply.status_code, error["param"]) == (400, "tool_outputs[1].approval_request_id")


async def test_a_completed_response_goes_on_by_tool_outputs(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        first = await here.api.create(BOOK, tools=[ASKING])
        [request] = requests(first)
        second = here.api.response(await fed(here, first["id"], approve(request["id"])))
    assert second["previous_response_id"] == first["id"]
    assert (kinds(second), here.seen.called) == (["mcp_call", "message"], ["book"])


# ------------------------------------------------------------------------------------------------------------
# The end of the process


@pytest.mark.parametrize(
    ("rights", "told"),
    [({}, "not known"), ({"idempotent": ["hold"]}, "held")],
    ids=["may not run twice", "may run twice"],
)
async def test_an_approved_call_that_the_end_of_the_process_cuts(
    tmp_path: Path, rights: Mapping[str, Any], told: str
) -> None:
    """The run goes on in front of its first generation, and makes no call twice that may not be."""
    seen = Seen()
    async with mcp_server(seen) as url:
        known = settings(desk={"url": url, **rights})
        async with live_app(tmp_path, **known) as server, http_client(server) as client:
            api = Api(client)
            first = await api.create("call hold {}", tools=[ASKING])
            [request] = requests(first)
            begun = await api.create(
                [approve(request["id"])],
                tools=[ASKING],
                previous_response_id=first["id"],
                background=True,
            )
            await asyncio.wait_for(seen.held.wait(), 20)
            await server.context.runs.drain(0.0)
        seen.free.set()
        async with live_app(tmp_path, **known) as server, http_client(server) as client:
            ended = await Api(client).ended(begun["id"])
    assert ended["status"] == "completed" and kinds(ended) == ["mcp_call", "message"]
    assert told in text(ended)
    assert seen.called == ["hold"] * (1 + bool(rights))


async def test_a_run_asks_after_a_restart_as_it_began(tmp_path: Path) -> None:
    """What needs approval is pinned when a run starts: an operator's change is for the runs after it."""
    async with mcp_server(seen := Seen()) as url:
        servers = {"servers": {"desk": {"url": url}}}
        asked: Json = {"tools": [ASKING], "await_tool_outputs": True, "background": True}
        known = read_mcp_settings(servers, {})
        async with live_app(tmp_path, mcp=known) as server, http_client(server) as client:
            begun = await Api(client).create(BOOK, **asked)
            [request] = requests(await Api(client).waits(begun["id"]))
        other = read_mcp_settings({**servers, "approval": "never"}, {})
        async with live_app(tmp_path, mcp=other) as server, http_client(server) as client:
            api = Api(client)
            assert seen.called == []
            reply = await client.post(
                f"/v1/responses/{begun['id']}/tool_outputs", json={"tool_outputs": [approve(request["id"])]}
            )
            assert reply.status_code == 200, reply.text
            ended = await api.ended(begun["id"])
    assert (text(ended), seen.called) == ("The tool said: booked 3", ["book"])


# ------------------------------------------------------------------------------------------------------------
# The audit log


@pytest.mark.parametrize("store", [True, False])
async def test_an_approval_is_in_the_audit_log(tmp_path: Path, store: bool) -> None:
    async with desk(tmp_path) as here:
        first = await here.api.create(f"{BOOK}\n{LOOK_UP}", tools=[ASKING], store=store)
        one, two = requests(first)
        items = [approve(one["id"]), decline(two["id"])]
        chain: Json = {"previous_response_id": first["id"]}
        if not store:
            chain, items = {"store": False}, [*first["output"], *items]
        second = await here.api.create(items, tools=[ASKING], safety_identifier="ann", **chain)
        wanted = AuditFilter(actions=("tool_call.approved",))
        [entry] = (
            await here.running.context.storage.list_audit(wanted, limit=9, after=None, before=None)
        ).data
    assert entry.entry.target == one["id"] and entry.entry.request_id is not None
    assert json.loads(entry.entry.details) == {
        "response_id": second["id"],
        "server_label": "desk",
        "name": "book",
        "safety_identifier": end_user("local", "ann"),
    }


async def test_an_approval_of_a_waiting_run_is_in_the_audit_log_once(tmp_path: Path) -> None:
    async with desk(tmp_path) as here:
        asked: Json = {"await_tool_outputs": True, "background": True, "user": "ann"}
        begun = await here.api.create(BOOK, tools=[ASKING], **asked)
        [request] = requests(await here.api.waits(begun["id"]))
        for _ in range(2):
            here.api.response(await fed(here, begun["id"], approve(request["id"])))
        await here.api.ended(begun["id"])
        wanted = AuditFilter(actions=("tool_call.approved",))
        page = await here.running.context.storage.list_audit(wanted, limit=9, after=None, before=None)
    [entry] = page.data
    assert entry.entry.target == request["id"]
    assert json.loads(entry.entry.details)["safety_identifier"] == end_user("local", "ann")
