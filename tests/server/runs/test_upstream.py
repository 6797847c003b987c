"""The server over other servers: the same events, the same durability, and a death there is none here."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine import Say, ScriptedEngine, UpstreamEngine
from server.config import Config, load
from server.model_registry import build_engine
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import WEATHER, Api, Gate, answer, call, calls, text
from tests.support.upstreams import TOKENIZER, Plan, breakable, going_on, scripted_folder, until

TEXT = "abcdefghijklmnopqrstuvwxyz"
EXACT = "x-antiphon-exact-resume"


def engine_over(folder: Path, *urls: str, **settings: Any) -> UpstreamEngine:
    return UpstreamEngine(
        scripted_folder(folder / "model"),
        urls,
        **{"name": "antiphon-scripted", "patience_s": 5.0, "probe_every_s": 0.01, **settings},
    )


@asynccontextmanager
async def over_another(tmp_path: Path, behind: ScriptedEngine) -> AsyncIterator[tuple[Running, Api]]:
    """A server over a server."""
    async with live_app(tmp_path / "behind", behind) as other:
        engine = engine_over(tmp_path, other.base_url)
        async with live_app(tmp_path / "data", engine) as server, http_client(server) as client:
            yield server, Api(client)


@pytest.mark.parametrize("input", ["say one two", "think hm then say ok", "count 40", call()])
async def test_a_response_is_that_of_the_engine_behind(tmp_path: Path, input: str) -> None:
    asked = {"tools": [WEATHER], "max_output_tokens": 90}
    async with running_app(tmp_path / "direct") as server, http_client(server) as client:
        direct = await Api(client).create(input, **asked)
    async with over_another(tmp_path, ScriptedEngine()) as (_, api):
        streamed = await api.stream(input, **asked)
        whole = await api.create(input, **asked)
        assert await api.replay(streamed.response["id"]) == streamed.raw
        for response in (streamed.response, whole):
            assert text(response) == text(direct) and response["usage"] == direct["usage"]
            assert [item["type"] for item in response["output"]] == [
                item["type"] for item in direct["output"]
            ]
            assert [item["arguments"] for item in calls(response)] == [
                item["arguments"] for item in calls(direct)
            ]
            assert response["status"] == direct["status"]


async def test_turns_with_tools_and_log_probabilities(tmp_path: Path) -> None:
    async with over_another(tmp_path, ScriptedEngine()) as (_, api):
        first = await api.create(call(), tools=[WEATHER])
        (made,) = calls(first)
        second = await api.create(
            [answer(made["call_id"])],
            previous_response_id=first["id"],
            include=["message.output_text.logprobs"],
            top_logprobs=2,
        )
        assert text(second) == "The tool said: sunny"
        logprobs = second["output"][0]["content"][0]["logprobs"]
        assert "".join(entry["token"] for entry in logprobs) == text(second)
        assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)


async def test_what_only_an_engine_of_ones_own_can_do_is_refused(tmp_path: Path) -> None:
    async with over_another(tmp_path, ScriptedEngine()) as (_, api):
        error = await api.refused(400, "hi", tools=[WEATHER], tool_choice="required")
        assert (error["param"], error["code"]) == ("tool_choice", "unsupported_parameter")
    async with breakable(TEXT, owned_by="sglang") as [behind]:
        behind.names_ids = False
        engine = engine_over(tmp_path, behind.url)
        async with running_app(tmp_path / "data2", engine) as server, http_client(server) as client:
            error = await Api(client).refused(400, "hi", include=["message.output_text.logprobs"])
            assert error["code"] == "unsupported_parameter"


async def test_replies_say_that_a_resumed_run_draws_anew(tmp_path: Path) -> None:
    async with over_another(tmp_path, ScriptedEngine()) as (server, api):
        for stream in (False, True):
            reply = await api.http.post("/v1/responses", json={"input": "say a", "stream": stream})
            assert reply.headers[EXACT] == "false"
        found = (await api.page("/v1/responses"))["data"][0]["id"]
        reply = await api.http.get(f"/v1/responses/{found}", params={"stream": "true"})
        assert reply.headers[EXACT] == "false"
    async with running_app(tmp_path / "direct") as server, http_client(server) as client:
        reply = await client.post("/v1/responses", json={"input": "say a"})
        assert EXACT not in reply.headers


@pytest.mark.parametrize("background", [False, True])
async def test_a_stop_in_the_middle_keeps_the_durable_prefix(tmp_path: Path, background: bool) -> None:
    """What a reader saw is where the next process goes on, at another server."""
    async with breakable(TEXT, 2) as servers:
        for each in servers:
            each.plans.append(Plan(tokens=9, ending="stall"))
        urls = [each.url for each in servers]
        async with (
            live_app(tmp_path / "data", engine_over(tmp_path, *urls)) as server,
            http_client(server) as client,
            Api(client).open("hi", background=background) as live,
        ):
            seen = ""
            while len(seen) < 9:
                seen += (await live.until("output_text.delta"))["delta"]
            await server.context.runs.drain(0)
            await live.cut()
        first = next(each for each in servers if each.asked)
        await first.close()
        for each in servers:
            each.plans.clear()
        engine = engine_over(tmp_path, *urls)
        async with live_app(tmp_path / "data", engine) as server, http_client(server) as client:
            api = Api(client)
            done = await api.ended(live.id)
            assert (done["status"], text(done)) == ("completed", TEXT)
            assert (await api.replay(live.id)).startswith(live.raw)
            assert done["usage"]["output_tokens"] == len(TEXT) + 1
        (other,) = (each for each in servers if each is not first)
        prompt = first.asked[0]["prompt"]
        assert other.asked[0]["prompt"] == [*prompt, *TOKENIZER.encode(TEXT[:9])]
        await first.open()


async def test_a_response_goes_on_when_the_engine_behind_it_dies(tmp_path: Path) -> None:
    gate = Gate()
    script = going_on(Say("one two"), gate.wait(), Say(" three four"))
    behind = [ScriptedEngine(script), ScriptedEngine(script)]
    async with live_app(tmp_path / "a", behind[0]) as a, live_app(tmp_path / "b", behind[1]) as b:
        engine = engine_over(tmp_path, a.base_url, b.base_url)
        async with (
            live_app(tmp_path / "data", engine) as server,
            http_client(server) as client,
            Api(client).open("hi") as live,
        ):
            await gate.reached.wait()
            await live.until("output_text.delta")
            (first,) = (each for each in behind if each.stats().running)
            first.kill(RuntimeError("as planned"))
            gate.release.set()
            assert text(await live.done()) == "one two three four"


async def test_nobody_behind_is_503_and_the_server_lives(tmp_path: Path) -> None:
    async with breakable(TEXT) as [behind]:
        engine = engine_over(tmp_path, behind.url, patience_s=0.0)
        async with live_app(tmp_path / "data", engine) as server, http_client(server) as client:
            api, chat = Api(client), {"messages": [{"role": "user", "content": "hi"}]}
            await behind.close()
            for path, body in (
                ("/v1/chat/completions", chat),
                ("/v1/completions", {"prompt": "hi"}),
                ("/v1/responses", {"input": "hi"}),
            ):
                error = await api.fails(503, "POST", path, json=body)
                assert error["code"] == "engine_unavailable" and int(error["headers"]["retry-after"]) > 0
            assert (await client.get("/health")).json() == {"status": "ready"}
            metrics = (await client.get("/metrics")).text
            assert re.search(r'^antiphon_engine_unavailable\{model="[^"]+"\} 1\.0$', metrics, re.M)
            await behind.open()
            await until(lambda: not engine.stats().unavailable)
            assert text(await api.create("hi")) == TEXT


async def test_the_settings_name_the_servers(tmp_path: Path) -> None:
    env = {
        "ANTIPHON_DATA": str(tmp_path),
        "ANTIPHON_ENGINE": "upstream",
        "ANTIPHON_UPSTREAM": "http://a:1, http://b:2/v1",
        "ANTIPHON_UPSTREAM_API_KEY": "secret",
        "ANTIPHON_MODEL": str(scripted_folder(tmp_path / "model")),
    }
    config = load(env=env).config
    assert config.upstream == ("http://a:1", "http://b:2/v1") and "secret" not in repr(config)
    engine = build_engine(config)
    assert isinstance(engine, UpstreamEngine)
    await engine.close()
    async with breakable(TEXT) as [behind]:
        found = Config(data=tmp_path, engine="upstream", upstream=[behind.url], model=env["ANTIPHON_MODEL"])
        engine = build_engine(found)
        info = await engine.start()
        assert (info.name, info.max_model_len) == ("model", 4096)
        await engine.close()
