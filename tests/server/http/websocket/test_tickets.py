"""Tickets: a page opens a socket with one, once, soon, and with the rights of the key that made it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from server.clock import now_us
from server.http.websocket import LIFETIME_S, PROTOCOL, tickets
from tests.support.lines import line
from tests.support.running import Running, http_client, live_app
from tests.support.talk import text

KEY = {"authorization": "Bearer sk-one"}


async def ticket_of(running: Running, **headers: str) -> dict[str, Any]:
    async with http_client(running, **headers) as http:
        reply = await http.post("/v1/ws_tickets")
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found


async def denied(running: Running, *protocols: str) -> dict[str, Any]:
    with pytest.raises(InvalidStatus) as refused:
        async with line(running.base_url, subprotocols=protocols):
            pass
    assert refused.value.response.status_code == 401
    error: dict[str, Any] = json.loads(refused.value.response.body or b"")["error"]
    assert error["code"] == "invalid_api_key"
    return error


async def test_a_ticket_opens_one_socket_for_its_owner(tmp_path: Path) -> None:
    async with live_app(tmp_path, api_key=("sk-one", "sk-two")) as running:
        made = await ticket_of(running, **KEY)
        assert (made["object"], made["protocol"]) == ("ws_ticket", PROTOCOL)
        async with line(running.base_url, subprotocols=[PROTOCOL, made["ticket"]]) as socket:
            assert socket.socket.subprotocol == PROTOCOL
            response = await socket.turn("say hello")
            assert text(response) == "hello"
        async with http_client(running, **KEY) as http:
            assert (await http.get(f"/v1/responses/{response['id']}")).status_code == 200
        async with http_client(running, authorization="Bearer sk-two") as http:
            assert (await http.get(f"/v1/responses/{response['id']}")).status_code == 404
        assert "used" in (await denied(running, PROTOCOL, made["ticket"]))["message"]


async def test_a_ticket_alone_is_the_protocol_that_is_chosen(tmp_path: Path) -> None:
    async with live_app(tmp_path, api_key=("sk-one",)) as running:
        made = await ticket_of(running, **KEY)
        async with line(running.base_url, subprotocols=[made["ticket"]]) as socket:
            assert socket.socket.subprotocol == made["ticket"]


async def test_what_is_no_ticket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with live_app(tmp_path, api_key=("sk-one",)) as running:
        made = (await ticket_of(running, **KEY))["ticket"]
        changed = made[:-1] + ("A" if made[-1] != "A" else "B")
        for wrong in (changed, tickets.PREFIX, tickets.PREFIX + "AAAA", PROTOCOL):
            await denied(running, wrong)
        later = now_us() + (LIFETIME_S + 1) * 1_000_000
        monkeypatch.setattr(tickets, "now_us", lambda: later)
        assert "expired" in (await denied(running, made))["message"]


async def test_a_ticket_is_used_up_at_all_servers_of_a_database_and_after_a_restart(tmp_path: Path) -> None:
    async with live_app(tmp_path, api_key=("sk-one",)) as running:
        made = (await ticket_of(running, **KEY))["ticket"]
        async with line(running.base_url, subprotocols=[made]):
            pass
        other = (await ticket_of(running, **KEY))["ticket"]
    async with live_app(tmp_path, api_key=("sk-one",)) as running:
        assert "used" in (await denied(running, made))["message"]
        async with line(running.base_url, subprotocols=[other]) as socket:
            assert text(await socket.turn("say hello")) == "hello"


async def test_a_key_that_is_revoked_ends_what_its_ticket_opened(tmp_path: Path) -> None:
    async with live_app(tmp_path, api_key=("sk-one",)) as running:
        made = (await ticket_of(running, **KEY))["ticket"]
        async with line(running.base_url, subprotocols=[made]) as socket:
            assert text(await socket.turn("say hello")) == "hello"
            running.life.keys.give(["sk-two"])
            error = await socket.refused("invalid_api_key", input="say hello")
            assert error["status"] == 401
            await socket.socket.wait_closed()
            assert socket.socket.close_code == 1008


async def test_a_ticket_needs_a_key_and_its_scope(tmp_path: Path) -> None:
    async with live_app(tmp_path, api_key=("sk-one",)) as running, http_client(running) as http:
        assert (await http.post("/v1/ws_tickets")).status_code == 401
