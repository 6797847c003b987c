"""Limits at the door: who is refused with what, on every API, and what is counted at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import GenerateRequest, Say, ScriptedEngine, Wait
from engine.backends.script import Step, obey
from server.access import OPERATOR
from server.access.keys import owner_of_flag_key
from server.admin import keys, projects
from server.errors import ApiError
from server.limits import NONE, LimitSet, Subject
from server.settings import ModelsFile
from server.usage import Prices
from storage import StorageUnavailable, StoredOwner
from tests.support import wire
from tests.support.blocking import until
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import BUILTIN, WEATHER, Api, Gate, call, gated_at
from tests.support.usage import told
from tests.support.usage import used as summed
from tests.support.wire import Json

MODEL = "antiphon-scripted"
CHAT: Json = {"messages": [{"role": "user", "content": "say hi"}]}
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "responses": ("/v1/responses", {"input": "say hi"}),
    "background": ("/v1/responses", {"input": "say hi", "background": True}),
    "unstored": ("/v1/responses", {"input": "say hi", "store": False}),
    "stream": ("/v1/responses", {"input": "say hi", "stream": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "completions": ("/v1/completions", {"prompt": "say hi"}),
}


def refused(reply: httpx.Response, code: str = "rate_limit_exceeded") -> Json:
    assert reply.status_code == 429, reply.text
    error: Json = wire.validate_error(reply.json())
    assert error["code"] == code
    return error


async def listed(client: httpx.AsyncClient) -> list[str]:
    return [each["id"] for each in (await client.get("/v1/responses")).json()["data"]]


def used(running: Running, name: str = "tokens_per_minute") -> int:
    """How much of a limit of the owner `local` is used up."""
    meters = running.context.limiter.meters
    meter = meters._meters[f"owner:local:{name}"]
    return meter.rate.limit - meter.remaining(meters.now())


async def settled(running: Running, name: str, wanted: int) -> None:
    """Wait until so much of a limit is used up. A day's limit, of which little comes back meanwhile."""
    async with asyncio.timeout(10):
        while used(running, name) != wanted:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("api_keys", [(), ("secret",)])
async def test_owners_without_stored_keys_have_limits_too(
    tmp_path: Path, api_keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of everything on a server without keys, and that of a key of the configuration."""
    owner = owner_of_flag_key("secret") if api_keys else "local"
    async with running_app(tmp_path, api_key=api_keys) as server, http_client(server) as client:
        client.headers["authorization"] = "Bearer secret"
        admin = {"authorization": f"Bearer {server.life.admin_token}"}
        path = f"/v1/organization/projects/{owner}/limits"
        assert (await client.post("/v1/responses", json={"input": "hi"})).status_code == 200
        body = {"limits": {"requests_per_minute": 1}}
        assert (await client.post(path, json=body, headers=admin)).status_code == 200
        assert (await client.post("/v1/responses", json={"input": "hi"})).status_code == 200
        refused(await client.post("/v1/responses", json={"input": "hi"}))

        async def away(owner: str) -> StoredOwner:
            raise StorageUnavailable

        monkeypatch.setattr(server.context.storage, "get_owner", away)
        known = server.life.keys._owner_limits
        known[owner] = known[owner][0], 0.0
        refused(await client.post("/v1/responses", json={"input": "hi"}))


@pytest.mark.parametrize("api", APIS)
async def test_requests_are_counted_on_every_api(tmp_path: Path, api: str) -> None:
    path, body = APIS[api]
    async with (
        running_app(tmp_path, owner_limit=("requests_per_minute=2",)) as server,
        http_client(server) as client,
    ):
        for left in ("1", "0"):
            reply = await client.post(path, json=body)
            assert reply.status_code == 200
            assert reply.headers["x-ratelimit-limit-requests"] == "2"
            assert reply.headers["x-ratelimit-remaining-requests"] == left
            assert reply.headers["x-ratelimit-reset-requests"].endswith("s")
            assert reply.headers["x-ratelimit-period-requests"] == "60"
        made = await listed(client)
        reply = await client.post(path, json=body)
        assert "2 requests a minute" not in refused(reply)["message"]
        assert "requests a minute of this server: limit 2, left 0" in refused(reply)["message"]
        assert 25 <= int(reply.headers["retry-after"]) <= 30
        assert (
            reply.headers["x-ratelimit-remaining"] == reply.headers["x-ratelimit-remaining-requests"] == "0"
        )
        assert reply.headers.get_list("x-ratelimit-limit") == ["2"]
        assert await listed(client) == made, "nothing was begun"
        read = await client.get("/v1/responses")
        assert read.headers["x-ratelimit-remaining-requests"] == "0", "reading tells, and costs nothing"
        assert (
            'antiphon_over_limit_total{limit="requests_per_minute"} 1.0'
            in (await client.get("/metrics")).text
        )


@pytest.mark.parametrize("api", APIS)
async def test_what_was_used_is_counted_in_place_of_what_was_reserved(tmp_path: Path, api: str) -> None:
    path, body = APIS[api]
    async with (
        running_app(tmp_path, owner_limit=("tokens_per_day=100000",)) as server,
        http_client(server) as client,
    ):
        reply = await client.post(path, json=body)
        assert reply.status_code == 200
        if api == "background":
            reply = await client.get(f"/v1/responses/{reply.json()['id']}?wait=10")
        if "stream" not in api:
            usage = reply.json()["usage"]
            await settled(server, "tokens_per_day", usage["total_tokens"])
        async with asyncio.timeout(10):
            while not 0 < used(server, "tokens_per_day") < 200:  # 256 are reserved for an answer
                await asyncio.sleep(0.01)


def held(request: GenerateRequest, prompt: str) -> Iterator[Step]:
    """Says something and stops there, where it is asked to; otherwise does what it is told."""
    if "hold" not in prompt:
        yield from obey(request, prompt)
        return
    yield Say("held")
    yield Wait(asyncio.Event())


async def test_what_fails_is_cancelled_or_left_gives_back_the_rest(tmp_path: Path) -> None:
    engine = ScriptedEngine(held)
    limits = ("tokens_per_day=100000", "concurrent_requests=2")
    async with live_app(tmp_path, engine, owner_limit=limits) as server, http_client(server) as client:

        def given_back() -> bool:
            return used(server, "tokens_per_day") < 200 and not server.context.limiter._at_once

        assert (await client.post("/v1/responses", json={"input": "fail x"})).json()["status"] == "failed"
        assert given_back()
        unstored = {"input": "hold", "stream": True, "store": False}
        chat = {"messages": [{"role": "user", "content": "hold"}], "stream": True}
        async with client.stream("POST", "/v1/responses", json=unstored) as reply:
            assert reply.status_code == 200
            async with client.stream("POST", "/v1/chat/completions", json=chat) as second:
                assert second.status_code == 200
                assert used(server, "tokens_per_day") > 2 * 256
                third = await client.post("/v1/completions", json={"prompt": "say hi"})
                assert "2 requests at once" in refused(third)["message"]
        await until(given_back)
        background = {"input": "hold", "background": True}
        made = (await client.post("/v1/responses", json=background)).json()["id"]
        assert used(server, "tokens_per_day") > 256
        assert (await client.post(f"/v1/responses/{made}/cancel")).json()["status"] == "cancelled"
        await until(given_back)
        made = (await client.post("/v1/responses", json=background)).json()["id"]
        assert (await client.delete(f"/v1/responses/{made}")).status_code == 200
        await until(given_back)


@pytest.mark.parametrize("restarts", [0, 1, 2])
async def test_a_response_that_goes_on_after_a_restart_counts_what_it_used(
    tmp_path: Path, restarts: int
) -> None:
    """It waits for its client, goes on with an answer, and is cut in the midst of that, once or twice."""
    gate = Gate()

    def script(request: GenerateRequest, prompt: str) -> Iterator[Step]:
        if request.generation == 0:
            yield from obey(request, prompt)
            return
        yield Say("one two three four")
        yield gate.wait()
        yield Say(" five")

    settings = {"owner_limit": ("tokens_per_day=100000",)}
    asked = {"tools": [WEATHER], "await_tool_outputs": True, "background": True}
    async with (
        live_app(tmp_path, ScriptedEngine(script), **settings) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        made = await api.create(call(), **asked)
        waiting = await api.waits(made["id"])
        [pending] = waiting["pending_tool_calls"]
        await api.outputs(made["id"], {pending["call_id"]: "sunny"})
        await gate.reached.wait()
        if not restarts:
            gate.release.set()
            await api.ended(made["id"])
    for left in reversed(range(restarts)):
        gate.reached.clear()
        if not left:
            gate.release.set()
        async with (
            live_app(tmp_path, ScriptedEngine(script), **settings) as server,
            http_client(server) as client,
        ):
            if left:
                await gate.reached.wait()
            else:
                await Api(client).ended(made["id"])
    async with live_app(tmp_path, **settings) as server, http_client(server) as client:
        done = await Api(client).get(made["id"])
        usage = done["usage"]
        assert await summed(server) == told(done), "what the log says, once"
        assert usage["input_tokens_details"]["cached_tokens"] == 0
        # The first request after a start learns what is used.
        more = (await client.post("/v1/completions", json={"prompt": "say hi"})).json()["usage"]
        total = usage["total_tokens"] + more["total_tokens"]
        left = int((await client.get("/v1/models")).headers["x-ratelimit-remaining-tokens"])
        came_back = 100_000 * 60 // 86_400  # within a minute, more than this test takes
        assert total - came_back <= 100_000 - left <= total + 1


async def test_tokens_are_refused_before_a_response_exists(tmp_path: Path) -> None:
    limits = ("tokens_per_minute=150", "requests_per_minute=100")
    async with running_app(tmp_path, owner_limit=limits) as server, http_client(server) as client:
        large = await client.post("/v1/responses", json={"input": "word " * 400})
        assert "larger than the limit" in refused(large)["message"]
        assert large.headers["x-should-retry"] == "false"
        reply = await client.post("/v1/responses", json={"input": "say hi", "max_output_tokens": 100})
        assert reply.status_code == 200
        assert int(reply.headers["x-ratelimit-limit-tokens"]) == 150
        left = int(reply.headers["x-ratelimit-remaining-tokens"])
        assert 100 < left < 150, "what was reserved is given back at the end"
        over = refused(await client.post("/v1/responses", json={"input": "word " * 140}))
        assert "limit 150" in over["message"]
        assert len((await client.get("/v1/responses")).json()["data"]) == 1
        assert used(server, "requests_per_minute") <= 1, "what was not begun is not counted"


async def test_a_day_s_allowance_that_is_spent(tmp_path: Path) -> None:
    async with (
        running_app(tmp_path, owner_limit=("requests_per_day=1",)) as server,
        http_client(server) as client,
    ):
        assert (await client.post("/v1/responses", json={"input": "say hi"})).status_code == 200
        reply = await client.post("/v1/responses", json={"input": "say hi"})
        assert refused(reply, "insufficient_quota")["type"] == "insufficient_quota"
        assert reply.headers["x-should-retry"] == "false"
        assert 86_300 < int(reply.headers["retry-after"]) <= 86_400
        assert reply.headers["x-ratelimit-reset-requests"].startswith(("23h59m", "24h0m"))
    async with (
        running_app(tmp_path, owner_limit=("requests_per_day=1",)) as server,
        http_client(server) as client,
    ):  # a restart does not forget it
        refused(await client.post("/v1/responses", json={"input": "say hi"}), "insufficient_quota")


async def test_limits_of_every_owner_change_while_the_server_runs(tmp_path: Path) -> None:
    async with (
        running_app(tmp_path, owner_limit=("concurrent_requests=5", "requests_per_day=2")) as server,
        http_client(server) as client,
    ):
        assert (await client.post("/v1/responses", json={"input": "say hi"})).status_code == 200
        server.life.limit_owners(("requests_per_day=4",))  # what SIGHUP does; half of it is used, as before
        more = await client.post("/v1/responses", json={"input": "say hi"})
        assert (more.status_code, more.headers["x-ratelimit-limit-requests"]) == (200, "4")
        assert (await client.post("/v1/responses", json={"input": "say hi"})).status_code == 200
        refused(await client.post("/v1/responses", json={"input": "say hi"}), "insufficient_quota")
        server.life.limit_owners(())
        assert (await client.post("/v1/responses", json={"input": "say hi"})).status_code == 200


async def test_keys_owners_and_models_each_have_their_limits(tmp_path: Path) -> None:
    models = ModelsFile.model_validate({"models": [{"engine": "scripted", "name": name} for name in "ab"]})
    async with running_app(tmp_path, owner_limit=("requests_per_minute=3",), entries=models) as server:
        storage = server.context.storage
        made = [
            await keys.make(storage, OPERATOR, name="", owner="team", limits=limits)
            for limits in ({"requests_per_minute": 1}, {"models": {"a": {"requests_per_minute": 1}}})
        ]
        server.life.keys.forget()
        async with (
            http_client(server, authorization=f"Bearer {made[0].key}") as first,
            http_client(server, authorization=f"Bearer {made[1].key}") as second,
        ):

            async def asked(client: httpx.AsyncClient, model: str) -> int:
                reply = await client.post("/v1/completions", json={"model": model, "prompt": "say hi"})
                return reply.status_code

            assert [await asked(first, "a"), await asked(first, "a")] == [200, 429]
            assert [await asked(second, "a"), await asked(second, "a")] == [200, 429]
            assert [await asked(second, "b"), await asked(second, "b")] == [200, 429], "the owner's three"
            headers = (await second.get("/v1/models")).headers
            assert headers["x-ratelimit-limit-requests"] == "3"
            assert headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_limit_holds_for_a_model_whichever_of_its_names_has_it_and_is_asked_for(
    tmp_path: Path,
) -> None:
    entry = {"engine": "scripted", "name": "llama", "version": "3.1", "aliases": ["gpt-4o"]}
    settings: Any = {
        "entries": ModelsFile.model_validate({"models": [entry]}),
        "served_model_name": ("a", "b"),
        "owner_limit": ("b:requests_per_minute=1",),
    }
    async with running_app(tmp_path, **settings) as server, http_client(server) as client:
        admin = {"authorization": f"Bearer {server.life.admin_token}"}
        project = "/v1/organization/projects/local"
        limits = {"models": {"gpt-4o": {"requests_per_minute": 2}}}
        assert (await client.post(f"{project}/limits", json={"limits": limits}, headers=admin)).is_success

        async def asked(model: str) -> int:
            return (await client.post("/v1/completions", json={"model": model, "prompt": "hi"})).status_code

        names = ("llama", "llama-3.1", "gpt-4o", "llama@3.1")
        assert [await asked(name) for name in names] == [200, 200, 429, 429]
        assert [await asked("a"), await asked("b")] == [200, 429]
        shown = (await client.get(f"{project}/rate_limits", headers=admin)).json()["data"]
        told = {each["model"]: each["max_requests_per_1_minute"] for each in shown}
        assert told == {**dict.fromkeys(names, 2), "a": 1, "b": 1}


async def test_a_limit_of_every_owner_that_holds_for_no_model_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: Any = {"served_model_name": ("a", "llama-large")}
    limits = ("llama-larg:requests_per_minute=1", "a:requests_per_minute=9")
    async with running_app(tmp_path, owner_limit=limits, **settings) as server:
        why = "owner_limit: this server does not serve '{}'; did you mean 'llama-large'?"
        assert [*_warned(caplog)] == [why.format("llama-larg")]
        caplog.clear()
        server.life.limit_owners(("lama-large:tokens_per_day=1",))
        assert [*_warned(caplog)] == [why.format("lama-large")]


def _warned(caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    return (record.getMessage() for record in caplog.records if "owner_limit" in record.getMessage())


FILE: Json = {"file_id": "file-unknown"}
WITH_FILE: dict[str, list[Json]] = {
    "/v1/responses": [{"type": "input_file", **FILE}],
    "/v1/chat/completions": [{"type": "file", "file": FILE}],
    "/v1/messages": [{"type": "document", "source": {"type": "file", **FILE}}],
}


@pytest.mark.parametrize("path", WITH_FILE)
async def test_files_are_not_looked_at_for_a_request_that_is_refused(tmp_path: Path, path: str) -> None:
    said = [{"role": "user", "content": WITH_FILE[path]}]
    body = {"input": said} if path == "/v1/responses" else {"messages": said, "model": MODEL, "max_tokens": 9}
    async with (
        running_app(tmp_path, owner_limit=("requests_per_minute=1",)) as server,
        http_client(server) as client,
    ):
        first, second = [await client.post(path, json=body) for _ in range(2)]
        assert first.status_code == 404, "the file is unknown"
        assert (second.status_code, int(second.headers["retry-after"]) > 0) == (429, True)


async def test_a_limit_of_a_second_comes_back_within_it(tmp_path: Path) -> None:
    limits = ("requests_per_second=2", "requests_per_day=1000")
    async with running_app(tmp_path, owner_limit=limits) as server, http_client(server) as client:
        limiter = server.context.limiter
        subjects = [Subject("owner", "x", LimitSet(requests_per_second=2))]
        with pytest.raises(ApiError) as refusal:
            for _ in range(50):
                (await limiter.enter(subjects, MODEL)).leave()
        assert refusal.value.headers["retry-after"] == "1" and refusal.value.code == "rate_limit_exceeded"
        assert "requests a second" in refusal.value.message
        async with asyncio.timeout(10):
            while True:
                try:
                    (await limiter.enter(subjects, MODEL)).leave()
                    break
                except ApiError:
                    await asyncio.sleep(0.05)
        reply = await client.post("/v1/responses", json={"input": "say hi"})
        assert reply.headers["x-ratelimit-limit-requests"] == "2"


async def test_ids_with_colons_have_limits_of_their_own(tmp_path: Path) -> None:
    async with running_app(tmp_path) as server:
        limiter, one = server.context.limiter, {"requests_per_minute": 1, "concurrent_requests": 1}
        asked = [
            ([Subject("owner", "a", LimitSet.model_validate({"models": {name: one}}))], name)
            for name in ("b", "b:c", "%3Ab")
        ]
        asked += [
            ([Subject("owner", id, LimitSet.model_validate(one))], "b")
            for id in ("a:b", "a:b:c", "a%3Ab", "a::b")
        ]
        for subjects, model in asked:
            await limiter.enter(subjects, model)
        for subjects, model in asked:
            with pytest.raises(ApiError):
                await limiter.enter(subjects, model)


async def test_a_server_without_limits_says_nothing_of_them(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/responses", json={"input": "say hi"})
    assert not [name for name in reply.headers if name.startswith("x-ratelimit")]


async def test_open_streams(tmp_path: Path) -> None:
    engine = ScriptedEngine(held)
    async with (
        live_app(tmp_path, engine, owner_limit=("concurrent_streams=1",)) as server,
        http_client(server) as client,
    ):
        body = {"input": "hold", "stream": True}
        async with client.stream("POST", "/v1/responses", json=body) as reply:
            assert reply.status_code == 200
            first = (await client.get("/v1/responses")).json()["data"][0]["id"]
            refused(await client.post("/v1/responses", json=body))
            refused(await client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
            refused(await client.get(f"/v1/responses/{first}?stream=true"))
            assert (await client.post("/v1/responses", json={"input": "say hi"})).status_code == 200
        await until(lambda: not server.context.limiter._at_once)
        async with client.stream("GET", f"/v1/responses/{first}?stream=true") as reply:
            assert reply.status_code == 200
        await until(lambda: not server.context.limiter._at_once)


async def test_queued_responses_stored_bytes_and_tool_calls(tmp_path: Path) -> None:
    limits = ("queued_responses=1", "stored_bytes=2000", "tool_calls_per_minute=1")
    async with (
        running_app(tmp_path, ScriptedEngine(held), owner_limit=limits, max_num_seqs=1) as server,
        http_client(server) as client,
    ):
        refused(await client.post("/v1/responses", json={"input": "x" * 3000}), "insufficient_quota")
        items = [{"type": "message", "role": "user", "content": "x" * 3000}]
        refused(await client.post("/v1/conversations", json={"items": items}), "insufficient_quota")
        asked = {"input": 'call calculator {"expression": "2+2"}', "tools": [BUILTIN], "store": False}
        errors = []
        for _ in range(2):
            said = (await client.post("/v1/responses", json=asked)).json()
            [made] = [item for item in said["output"] if item["type"] == "mcp_call"]
            errors.append(made["error"])
        assert errors[0] is None and "only 1 tool calls a minute" in str(errors[1])
        for place in (None, "1"):  # one at work, one in the queue
            reply = await client.post("/v1/responses", json={"input": "hold", "background": True})
            assert reply.status_code == 200
            assert reply.headers.get("x-queue-position") == place
        reply = await client.get(f"/v1/responses/{reply.json()['id']}")
        assert reply.headers["x-queue-position"] == str(reply.json()["queue_position"]) == "1"
        refused(await client.post("/v1/responses", json={"input": "hold", "background": True}), "queue_full")


async def test_a_refusal_costs_less_than_a_millisecond_of_the_loop(tmp_path: Path) -> None:
    async with running_app(tmp_path) as server:
        limiter = server.context.limiter
        subjects = [
            Subject(kind, "x", LimitSet(requests_per_minute=1, requests_per_day=9, tokens_per_minute=9))
            for kind in ("key", "owner")
        ]
        (await limiter.enter(subjects, MODEL)).leave()
        took = []
        for _ in range(200):
            began = time.perf_counter()
            with pytest.raises(ApiError):
                await limiter.enter(subjects, MODEL)
            took.append(time.perf_counter() - began)
        assert sorted(took)[100] < 0.001


@pytest.mark.parametrize(
    ("of_key", "of_owner", "told"),
    [
        ({"requests_per_minute": 1}, {}, "requests a minute of your key: limit 1"),
        ({}, {"requests_per_day": 1}, "requests a day of your project: limit 1"),
        ({"models": {"a": {"requests_per_day": 1}}}, {}, "requests a day of your key for 'a': limit 1"),
        ({}, {"models": {"a": {"tokens_per_minute": 1}}}, "tokens a minute of your project for 'a': limit 1"),
        ({"total_tokens": 1}, {}, "Your key has used"),
        ({}, {"total_cost": 0.001}, "EUR of 0.001, the limit total_cost."),
    ],
)
async def test_a_refusal_says_whose_limit_it_is(
    tmp_path: Path, of_key: dict[str, Any], of_owner: dict[str, Any], told: str
) -> None:
    settings: dict[str, Any] = {"price": ("*=1000/0/1000",), "currency": "eur", "served_model_name": ("a",)}
    async with running_app(tmp_path, **settings) as server:
        storage = server.context.storage
        made = await keys.make(storage, OPERATOR, name="", owner="team", limits=of_key)
        prices = Prices(server.context.config)
        await projects.limit(storage, prices, NONE, OPERATOR, "team", of_owner)
        server.life.keys.forget()
        async with http_client(server, authorization=f"Bearer {made.key}") as client, asyncio.timeout(10):
            while (reply := await client.post("/v1/responses", json={"input": "say hi"})).status_code == 200:
                await asyncio.sleep(0.05)
            assert reply.status_code in (403, 429) and told in reply.json()["error"]["message"], reply.text


async def test_a_restart_does_not_forget_how_long_the_answers_of_an_owner_are(tmp_path: Path) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        for _ in range(8):
            assert (await client.post("/v1/responses", json={"input": "say hi"})).status_code == 200
    gate = Gate()
    engine, limit = ScriptedEngine(gated_at(gate, "hi")), ("tokens_per_day=400",)
    async with running_app(tmp_path, engine, owner_limit=limit) as server, http_client(server) as client:
        asked = [
            asyncio.create_task(client.post("/v1/responses", json={"input": "say hi"})) for _ in range(2)
        ]
        async with asyncio.timeout(30):
            await gate.reached.wait()
        gate.release.set()
        assert [(await each).status_code for each in asked] == [200, 200], "neither reserved 256 tokens"
