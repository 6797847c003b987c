"""Several models behind one server: which one answers, models in processes of their own, and their ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest

from engine import EngineStats, LoadError, ModelInfo, RemoteEngine, RequestFailed, ScriptedEngine
from engine.backends.scripted_tokens import TEMPLATE
from server.config import Config
from server.errors import ApiError
from server.loading import Held, Shelf
from server.model_registry import children
from server.settings import ModelsFile
from tests.support.postgres import Postgres
from tests.support.processes import ServerProcess, server_process
from tests.support.running import Running, http_client, running_app
from tests.support.speech_checkpoints import make_whisper, sound_file
from tests.support.talk import WEATHER, Api, answer, call, text

Json = dict[str, Any]


def entries(*models: Json) -> ModelsFile:
    """The file of these models, scripted ones in this process unless they say otherwise."""
    return ModelsFile.model_validate({"models": [{"engine": "scripted", **model} for model in models]})


@asynccontextmanager
async def serving(folder: Path, *models: Json, **settings: Any) -> AsyncIterator[tuple[Running, Api]]:
    async with (
        running_app(folder, entries=entries(*models), **settings) as server,
        http_client(server) as client,
    ):
        yield server, Api(client)


async def model_of(api: Api, **fields: Any) -> str:
    response = await api.create(**{"input": "say hi", **fields})
    return str(response["model"])


# ------------------------------------------------------------------------------------------------------------
# Names


async def test_names_lead_to_models_and_what_is_shown_of_them(tmp_path: Path) -> None:
    models: list[Json] = [
        {"name": "chat", "version": "2025-08-01", "deprecation_date": "2027-01-31", "default": True},
        {"name": "chat", "version": "2025-10-01", "aliases": ["gpt-4o"]},
    ]
    async with serving(tmp_path, *models) as (_, api):
        asked = {
            "chat": "chat-2025-10-01",
            "gpt-4o": "chat-2025-10-01",
            "chat@2025-08-01": "chat-2025-08-01",
            "chat-2025-08-01": "chat-2025-08-01",
            "antiphon-scripted": "antiphon-scripted",
        }
        for name, answers in asked.items():
            assert await model_of(api, model=name) == answers
            chat = {"model": name, "messages": [{"role": "user", "content": "say hi"}]}
            reply = await api.http.post("/v1/chat/completions", json=chat)
            assert reply.json()["model"] == answers
        assert await model_of(api) == "chat-2025-08-01", "the default of the file wins"
        old = await api.http.post("/v1/responses", json={"model": "chat@2025-08-01", "input": "say hi"})
        assert old.headers["sunset"] == "Sun, 31 Jan 2027 00:00:00 GMT"
        assert old.headers["deprecation"] == "@1801353600"
        shown = {model["id"]: model for model in (await api.http.get("/v1/models")).json()["data"]}
        assert next(iter(shown)) == "chat-2025-08-01", "clients take the first one"
        assert {name: shown[name]["root"] for name in asked} == asked
        assert shown["chat@2025-08-01"]["deprecation_date"] == "2027-01-31"
        one = await api.http.get("/v1/models/gpt-4o")
        assert one.json() == shown["gpt-4o"] and one.json()["state"] == "loaded"
        missing = await api.http.post("/v1/responses", json={"model": "chat@2024", "input": "say hi"})
        assert missing.status_code == 404
        assert "'chat-2025-10-01'" in missing.json()["error"]["message"]


async def test_without_a_default_a_request_has_to_name_a_model(tmp_path: Path) -> None:
    files: list[Json] = [{"name": "a"}, {"name": "b"}]
    config: Json = {"engine": "local", "entries": entries(*files)}
    from server.config import Config
    from server.process.app import create_app
    from server.process.lifecycle import ServerLifecycle
    from tests.support.running import database

    life = ServerLifecycle(Config(data=tmp_path, **{**await database(tmp_path), **config}))
    try:
        await life.start()
        async with http_client(Running(life, create_app(life), "http://antiphon.localhost")) as client:
            asked: dict[str, Json] = {
                "/v1/responses": {"input": "say hi"},
                "/v1/chat/completions": {"messages": [{"role": "user", "content": "say hi"}]},
                "/v1/responses/input_tokens": {"input": "say hi"},
                "/tokenize": {"prompt": "hi"},
            }
            for path, body in asked.items():
                reply = await client.post(path, json=body)
                assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model"), path
                assert "'a', 'b'" in reply.json()["error"]["message"]
                assert (await client.post(path, json={**body, "model": "b"})).status_code == 200
    finally:
        await life.close()


async def test_a_field_of_ours_cannot_be_sent(tmp_path: Path) -> None:
    async with serving(tmp_path, {"name": "a"}) as (_, api):
        reply = await api.http.post(
            "/v1/responses", json={"model": "a", "input": "say hi", "asked_model": "x"}
        )
        assert reply.headers["x-antiphon-ignored"] == "asked_model"


async def test_a_model_for_vectors_generates_nothing_and_is_not_loaded_for_it(tmp_path: Path) -> None:
    vec: Json = {"name": "vec", "engine": "local", "path": "/nowhere", "use": "embedding", "aliases": ["ada"]}
    async with serving(tmp_path, {"name": "a"}, vec) as (_, api):
        for name in ("vec", "ada"):
            reply = await api.http.post("/v1/responses", json={"model": name, "input": "say hi"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_model")
            shown = (await api.http.get(f"/v1/models/{name}")).json()
            assert (shown["state"], shown["used_for"], shown["root"]) == ("unloaded", "embedding", "vec")
        wrong = await api.http.post("/v1/embeddings", json={"model": "a", "input": "hi"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "unsupported_model")


async def test_no_model_is_loaded_for_a_request_that_is_refused(tmp_path: Path) -> None:
    away: Json = {"engine": "local", "path": "/nowhere"}
    models: list[Json] = [{"name": "a"}, {"name": "b", **away}, {"name": "vec", "use": "embedding", **away}]
    async with serving(tmp_path, *models, owner_limit=("requests_per_minute=1",)) as (server, api):
        assert await model_of(api, model="a") == "a"
        said: Json = {"messages": [{"role": "user", "content": "say hi"}], "max_tokens": 9}
        for path, body in {
            "/v1/responses": {"model": "b", "input": "say hi"},
            "/v1/chat/completions": {"model": "b", **said},
            "/v1/messages": {"model": "b", **said},
            "/v1/embeddings": {"model": "vec", "input": "hi"},
        }.items():
            assert (await api.http.post(path, json=body)).status_code == 429, path
        assert {held.name: (held.state, held.num_failures) for held in server.life.several.shelf} == {
            "b": ("unloaded", 0),
            "vec": ("unloaded", 0),
        }


@pytest.mark.long
async def test_a_model_for_speech_is_loaded_when_it_is_wanted_and_makes_room_for_others(
    tmp_path: Path,
) -> None:
    ear: Json = {
        **{"name": "ear", "engine": "local", "use": "speech", "path": str(make_whisper(tmp_path / "ear"))},
        **{"aliases": ["whisper-1"], "deprecation_date": "2027-01-31", "memory_bytes": "100M"},
    }
    other: Json = {"name": "other", "child": True, "memory_bytes": "100M"}
    settings: Json = {"models_memory_bytes": 150 << 20, "num_threads": 1}
    async with serving(tmp_path / "data", ear, other, **settings) as (server, api):

        async def hear(**fields: str) -> httpx.Response:
            asked = {"language": "en", "temperature": "0.5", **fields}
            file = {"file": ("speech.wav", sound_file(1.0), "audio/wav")}
            return await api.http.post("/v1/audio/transcriptions", data=asked, files=file)

        async def shown() -> list[str]:
            found = {model["id"]: model for model in (await api.http.get("/v1/models")).json()["data"]}
            assert found["whisper-1"]["used_for"] == "speech" and found["whisper-1"]["root"] == "ear"
            return [found[name]["state"] for name in ("ear", "whisper-1", "other")]

        assert await shown() == ["unloaded", "unloaded", "unloaded"]
        refused = await api.http.post("/v1/responses", json={"model": "whisper-1", "input": "say hi"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_model")
        heard = await hear()
        assert heard.status_code == 200, "the first model for speech is loaded"
        assert heard.headers["sunset"] == "Sun, 31 Jan 2027 00:00:00 GMT"
        assert (await hear(model="whisper-1")).json() == heard.json()
        assert await shown() == ["loaded", "loaded", "unloaded"]
        assert await model_of(api, model="other") == "other"
        assert await shown() == ["unloaded", "unloaded", "loaded"]
        state = next(each for each in server.life.several.described() if each["id"] == "ear")
        assert (state["use"], state["loads"], state["state"]) == ("speech", 1, "unloaded")


async def test_what_cannot_be_loaded_is_told_at_the_start_and_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*argv: str, **options: object) -> None:
        raise AssertionError("no process is started for it")

    monkeypatch.setattr("server.loading.child.asyncio.create_subprocess_exec", never)
    large: Json = {"name": "large", "child": True, "memory_bytes": "2G"}
    away: Json = {"name": "away", "engine": "local", "path": "/nope"}
    async with serving(tmp_path, {"name": "here"}, large, away, models_memory_bytes=1 << 30) as (_, api):
        assert "cannot load large: large takes about 2.0 GiB" in caplog.text
        for name in ("large", "away"):
            refused = await api.http.post("/v1/responses", json={"model": name, "input": "say hi"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_loaded")


async def test_a_key_needs_the_name_that_it_asks_for(tmp_path: Path) -> None:
    models: list[Json] = [{"name": "a", "aliases": ["gpt-4o"], "canary": {"to": "b", "percent": 100}}]
    async with serving(tmp_path, *models, {"name": "b"}) as (server, api):
        admin = {"authorization": f"Bearer {server.life.admin_token}"}
        body = {"owner": None, "scopes": ["responses", "chat", "model:gpt-4o"], "name": "k"}
        made = await api.http.post("/admin/keys", json=body, headers=admin)
        key = {"authorization": f"Bearer {made.json()['key']}"}
        message = {"messages": [{"role": "user", "content": "say hi"}]}
        for name, status in {"gpt-4o": 200, "a": 403, "b": 403}.items():
            bodies: dict[str, Json] = {
                "/v1/messages": {**message, "max_tokens": 9},
                "/v1/messages/count_tokens": message,
                "/v1/responses": {"input": "say hi"},
            }
            for path, asked in bodies.items():
                reply = await api.http.post(path, json={"model": name, **asked}, headers=key)
                assert reply.status_code == status, (path, name)
        assert reply.json()["error"]["code"] == "insufficient_permissions"


# ------------------------------------------------------------------------------------------------------------
# Canaries and fallbacks


async def test_a_canary_is_decided_once_and_a_chain_stays_with_its_model(tmp_path: Path) -> None:
    base: Json = {"name": "base", "default": True, "canary": {"to": "next", "percent": 50}}
    async with serving(tmp_path, base, {"name": "next"}) as (_, api):
        firsts = [await api.create(input="say hi", model="base") for _ in range(24)]
        assert {first["model"] for first in firsts} == {"base", "next"}
        for first in firsts[:6]:
            for name in ("base", None):
                fields = {"input": "say hi", "previous_response_id": first["id"]}
                assert await model_of(api, **fields, **({"model": name} if name else {})) == first["model"]
        keyed = {await model_of(api, model="base", prompt_cache_key="one") for _ in range(8)}
        assert len(keyed) == 1
        assert await model_of(api, model="next") == "next"


async def test_a_canary_of_owners_leads_them_alone(tmp_path: Path) -> None:
    local: Json = {"name": "a", "canary": {"to": "b", "owners": ["local"]}}
    others: Json = {"name": "c", "canary": {"to": "b", "owners": ["somebody"]}}
    async with serving(tmp_path, local, {"name": "b"}, others) as (_, api):
        assert [await model_of(api, model=name) for name in "ac"] == ["b", "c"]


async def test_who_names_a_version_has_it(tmp_path: Path) -> None:
    one: Json = {"name": "chat", "version": "1", "canary": {"to": "next", "percent": 100}}
    async with serving(tmp_path, one, {"name": "next"}) as (_, api):
        asked = {name: await model_of(api, model=name) for name in ("chat", "chat@1", "chat-1")}
    assert asked == {"chat": "next", "chat@1": "chat-1", "chat-1": "chat-1"}


async def test_another_model_answers_where_one_is_away_or_fails_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, {"name": "a", "fallback": ["b"]}, {"name": "b"}) as (server, api):
        served = server.context.models.get("a")
        assert await model_of(api, model="a") == "a"
        with monkeypatch.context() as patch:
            patch.setattr(served.engine, "stats", lambda: EngineStats(unavailable=1))
            assert await model_of(api, model="a") == "b"
        served.breaker.succeeded()

        async def fails(*_: object) -> AsyncIterator[None]:
            if served.name:
                raise RequestFailed("broken")
            yield

        with monkeypatch.context() as patch:
            patch.setattr(served.engine, "generate", fails)
            failed = [
                await api.http.post("/v1/responses", json={"model": "a", "input": "say hi"}) for _ in "123"
            ]
            assert {reply.json()["model"] for reply in failed} == {"a"}
            assert {reply.json()["status"] for reply in failed} == {"failed"}
        assert await model_of(api, model="a") == "b", "it is left alone now"
        page = (await api.http.get("/metrics")).text
        assert 'antiphon_model_breaker_open{model="a"} 1.0' in page
        assert 'antiphon_engine_output_tokens_total{model="b"}' in page
        served.breaker.succeeded()
        assert await model_of(api, model="a") == "a"


async def test_a_chain_goes_on_with_another_model(tmp_path: Path) -> None:
    async with serving(tmp_path, {"name": "a"}, {"name": "b"}) as (_, api):
        include = ["reasoning.encrypted_content"]
        first = await api.create(input="think deep then say one", model="a", include=include)
        second = await api.create(input="say two", model="b", previous_response_id=first["id"])
        assert (first["model"], second["model"], text(second)) == ("a", "b", "two")
        items = [item for item in first["output"] if item["type"] == "reasoning"]
        sent = {"input": [*items, {"role": "user", "content": "say three"}], "model": "b"}
        refused = await api.http.post("/v1/responses", json=sent)
        assert "made by the model 'a', not by 'b'" in refused.json()["error"]["message"]


# ------------------------------------------------------------------------------------------------------------
# Processes of their own

ROOMY = "tick_s = 0.02\nmax_num_seqs = 8\n"


def file_of_two(folder: Path, more: str = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "models.toml").write_text(
        '[[models]]\nname = "inside"\nengine = "scripted"\ndefault = true\ntick_s = 0.02\n'
        f'[[models]]\nname = "outside"\nengine = "scripted"\nchild = true\n{ROOMY}{more}'
    )


@asynccontextmanager
async def process(folder: Path) -> AsyncIterator[ServerProcess]:
    """A server with the models of its file alone, whose children end with it."""
    async with server_process(folder, engine="local") as server:
        yield server


def admin(folder: Path) -> dict[str, str]:
    """The headers of the operator of a server on this folder."""
    return {"authorization": f"Bearer {json.loads(next(folder.glob('server-*.json')).read_text())['token']}"}


async def states(folder: Path, client: httpx.AsyncClient) -> dict[str, Json]:
    reply = await client.get("/admin/models", headers=admin(folder))
    return {model["id"]: model for model in reply.json()["data"]}


async def events(client: httpx.AsyncClient, body: Json) -> AsyncIterator[Json]:
    async with client.stream("POST", "/v1/responses", json={**body, "stream": True}) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


async def said(
    client: httpx.AsyncClient, body: Json, *, at: asyncio.Event, after: int = 3
) -> tuple[str, Json]:
    """What a streamed response says, and how it ended. at: set once it has said a little."""
    words, num, last = "", 0, {}
    async for event in events(client, body):
        last = event
        if event["type"] == "response.output_text.delta":
            words, num = words + event["delta"], num + 1
            if num == after:
                at.set()
    return words, last


COUNT = "count 40"


async def test_a_child_that_is_killed_takes_no_other_model_down_and_its_answers_go_on_exactly(
    tmp_path: Path,
) -> None:
    file_of_two(tmp_path)
    async with process(tmp_path) as server, server.client() as client:
        whole = (await client.post("/v1/responses", json={"model": "inside", "input": COUNT})).json()
        before = {model["id"]: model["state"] for model in (await client.get("/v1/models")).json()["data"]}
        assert before == {"inside": "loaded", "outside": "unloaded"}
        begun = {name: asyncio.Event() for name in ("inside", "outside")}
        streams = [
            asyncio.create_task(said(client, {"model": name, "input": COUNT}, at=begun[name]))
            for name in begun
        ]
        await asyncio.gather(*(event.wait() for event in begun.values()))
        found = (await states(tmp_path, client))["outside"]
        assert found["state"] == "loaded" and found["memory_bytes"] > 0
        os.kill(found["pid"], signal.SIGKILL)
        for words, last in await asyncio.gather(*streams):
            assert (words, last["type"]) == (text(whole), "response.completed")
        assert server.child.returncode is None
        again = (await states(tmp_path, client))["outside"]
        assert again["pid"] != found["pid"] and again["crashes"] == 1
        page = (await client.get("/metrics")).text
        assert 'antiphon_model_crashes_total{model="outside"} 1.0' in page

        # The whole server is killed: the run of the child's model goes on in the next one.
        begun["outside"].clear()
        cut = asyncio.create_task(said(client, {"model": "outside", "input": COUNT}, at=begun["outside"]))
        await begun["outside"].wait()
        listed = (await client.get("/v1/responses?limit=1")).json()["data"][0]
        server.signal(signal.SIGKILL)
        await server.child.wait()
        await asyncio.gather(cut, return_exceptions=True)
    async with process(tmp_path) as server, server.client() as client:
        reply = (await client.get(f"/v1/responses/{listed['id']}?wait=60")).json()
        assert (reply["status"], text(reply), reply["model"]) == ("completed", text(whole), "outside")
        operator = admin(tmp_path)
        done = await client.post("/admin/models/outside/unload?unheard_of", headers=operator)
        assert done.headers["x-antiphon-ignored"] == "?unheard_of"
        assert (done.status_code, done.json()["state"], done.json()["pid"]) == (200, "unloaded", None)
        refused = await client.post("/admin/models/inside/unload", headers=operator)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "model_not_loadable")
        unknown = await client.post("/admin/models/none/load", headers=operator)
        assert (unknown.status_code, "'outside'" in unknown.json()["error"]["message"]) == (404, True)
        assert (await client.post("/admin/models/outside/load")).status_code == 401


async def test_a_model_whose_first_load_fails_behind_the_start_of_its_process_is_loaded_by_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its tokenizer cannot be read at that moment."""
    start, starts = RemoteEngine.start, list[RemoteEngine]()

    async def fails_once(self: RemoteEngine) -> ModelInfo:
        starts.append(self)
        if len(starts) == 1:
            raise LoadError("the tokenizer cannot be read")
        return await start(self)

    monkeypatch.setattr(RemoteEngine, "start", fails_once)
    async with serving(tmp_path, {"name": "inside"}, {"name": "outside", "child": True}) as (server, api):
        held = server.context.models.shelf.get("outside")
        assert held is not None
        asked = {"model": "outside", "input": "say hi"}
        refused = await api.http.post("/v1/responses", json=asked)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_loaded")
        assert refused.json()["error"]["message"] == "The model 'outside' could not be loaded."
        assert (held.state, held.takes_memory) == ("failed", False)
        assert (await api.create(**asked))["model"] == "outside"
        assert held.is_up and len(starts) == 2
        assert "outside" in (await api.http.get("/ready")).json()["models"]
        await server.life.several.unload("outside")
        assert "outside" not in (await api.http.get("/ready")).json()["models"]


async def test_a_start_warns_of_models_that_are_not_where_the_file_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away: Json = {"name": "away", "engine": "local", "path": "/nowhere/at/all"}
    async with serving(tmp_path, {"name": "inside"}, away):
        (told,) = [text for text in caplog.messages if "cannot load" in text]
    assert told.startswith("the server starts, and cannot load away: /nowhere/at/all is not a folder")


async def test_a_process_that_others_use_is_not_loaded_until_it_can_be_asked_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Far:
        """It was loaded for others, and stays for them."""

        line = None
        start = close = AsyncMock()
        stop = AsyncMock(side_effect=ApiError(409, "in use"))
        memory_bytes = Mock(return_value=1)
        state = Mock(return_value="loaded")

    engine = Mock(spec=RemoteEngine, is_current=True)
    engine.start = AsyncMock(side_effect=[LoadError("no descriptor is free"), None])
    monkeypatch.setattr(children, "remote_engine", lambda *_: engine)
    [entry] = entries({"name": "far", "child": True})
    model = children.ChildText(entry, Config(data=tmp_path, engine="scripted"), Far())  # type: ignore[arg-type]
    shelf, held = Shelf(), Held("far", model)
    shelf.add(held)
    with pytest.raises(LoadError):
        await shelf.ready(held)
    assert not held.is_up
    await shelf.ready(held)
    assert (held.is_up, model.engine) == (True, engine)


def scripted_template(file: Path, more: str = "") -> None:
    """Write the template of a scripted model, whose fingerprint it is a part of."""
    file.write_text(TEMPLATE.read_text("utf-8") + more, "utf-8")


async def test_a_model_that_changes_on_disk_is_served_anew_and_what_it_had_begun_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scripted_template(file := tmp_path / "template.jinja")
    settings = {"chat_template": str(file), "tick_s": 0.02}
    outside: Json = {"name": "outside", "child": True, "settings": settings}
    async with serving(tmp_path, {"name": "inside"}, outside) as (server, api):
        held = server.context.models.shelf.get("outside")
        assert held is not None
        asked = {"tools": [WEATHER], "input": call(), "await_tool_outputs": True, "background": True}
        begun_run = await api.create(model="outside", **asked)
        waiting = (await api.http.get(f"/v1/responses/{begun_run['id']}?wait=20")).json()
        [asks] = [item for item in waiting["output"] if item["type"] == "function_call"]
        body = {"model": "outside", "input": "count 1000"}
        stream = asyncio.create_task(said(api.http, body, at=asyncio.Event()))
        async with asyncio.timeout(10):
            while not held.model.is_busy():
                await asyncio.sleep(0.01)
        before = server.context.models.get("outside").info.fingerprint
        scripted_template(file, "{# another one #}")
        [pid] = [each["pid"] for each in server.life.several.described() if each["id"] == "outside"]
        os.kill(pid, signal.SIGKILL)
        _, last = await stream
        changed = "The model 'outside' has changed since this response began."
        assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", changed)
        assert any(text.startswith("outside has changed on disk") for text in caplog.messages)
        async with asyncio.timeout(10):
            while not held.is_up:  # by itself, without a request for it
                await asyncio.sleep(0.01)
        assert server.context.models.get("outside").info.fingerprint != before
        assert (await api.create(model="outside", input="say hi"))["status"] == "completed"
        answered = {"tool_outputs": [answer(asks["call_id"])]}
        await api.http.post(f"/v1/responses/{waiting['id']}/tool_outputs", json=answered)
        ended = await api.ended(waiting["id"])
        assert (ended["status"], ended["error"]["message"]) == ("failed", changed)

        # One that has changed while it was not loaded is another model from its next load on.
        await server.life.several.unload("outside")
        scripted_template(file, "{# another one again #}")
        assert (await api.create(model="outside", input="say hi"))["status"] == "completed"
        assert held.num_failures == 0


@pytest.mark.long
async def test_several_server_processes_share_the_models_of_the_file(
    tmp_path: Path, postgres: Postgres
) -> None:
    db = await postgres.fresh()
    tmp_path.joinpath("models.toml").write_text(
        "".join(
            f'[[models]]\nname = "{name}"\nengine = "scripted"\nchild = true\n{ROOMY}'
            for name in ("first", "second")
        )
    )
    flags = ("--db", db, "--api-server-count", "2")
    async with (
        server_process(tmp_path, *flags, engine="local") as server,
        server.client() as one,
        server.client() as other,  # connections go in turn to the process that has fewer
    ):
        whole = " ".join(map(str, range(1, 41)))
        before = await states(tmp_path, other)
        assert {name: state["state"] for name, state in before.items()} == {
            "first": "loaded",
            "second": "unloaded",
        }
        for client in (one, other):
            for name in ("first", "second"):
                reply = await client.post("/v1/responses", json={"model": name, "input": "count 3"})
                assert (reply.json()["model"], text(reply.json())) == (name, "1 2 3")
        page = (await one.get("/metrics")).text
        asked_by = re.findall(r'^antiphon_requests_total\{.*process="([^"]+)".*"/v1/responses"', page, re.M)
        assert sorted(asked_by) == ["server-0", "server-1"]
        assert sorted(re.findall(r'process_up\{process="([^"]+)"\} 1', page)) == ["server-0", "server-1"]
        assert 'process_up{process="engine"}' not in page
        assert page.count('antiphon_model_loads_total{model="second"} 1.0') == 1

        begun = {name: asyncio.Event() for name in ("first", "second")}
        asked = {"second": one, "first": other}
        streams = [
            asyncio.create_task(said(client, {"model": name, "input": COUNT}, at=begun[name]))
            for name, client in asked.items()
        ]
        await asyncio.gather(*(event.wait() for event in begun.values()))
        found = await states(tmp_path, other)
        refused = await other.post("/admin/models/second/unload", headers=admin(tmp_path))
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_busy")
        os.kill(found["second"]["pid"], signal.SIGKILL)
        for words, last in await asyncio.gather(*streams):
            assert (words, last["type"]) == (whole, "response.completed")
        for client in (one, other):
            again = await states(tmp_path, client)
            assert again["first"]["pid"] == found["first"]["pid"]
            assert again["second"]["pid"] != found["second"]["pid"] and again["second"]["crashes"] == 1

        done = await one.post("/admin/models/second/unload", headers=admin(tmp_path))
        assert (done.status_code, done.json()["state"], done.json()["pid"]) == (200, "unloaded", None)
        server.signal(signal.SIGTERM)
        assert await server.ended() == 0
        assert not any(Path(f"/proc/{state['pid']}").exists() for state in again.values())
    await postgres.give_back(db)


# ------------------------------------------------------------------------------------------------------------
# Replicas


async def test_a_replica_goes_on_only_with_runs_of_models_that_it_serves(
    tmp_path: Path, postgres: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    db = await postgres.fresh()
    common: Json = {"db": db, "lease_s": 0.4}
    caplog.set_level("WARNING", logger="antiphon.fleet")
    async with serving(tmp_path / "1", {"name": "shared"}, {"name": "ours"}, **common) as (first, api):
        asked = {"tools": [WEATHER], "input": call(), "await_tool_outputs": True, "background": True}
        begun = {name: await api.create(model=name, **asked) for name in ("shared", "ours")}
        runs = {
            name: api.response(await api.http.get(f"/v1/responses/{response['id']}?wait=20"))
            for name, response in begun.items()
        }
        async with serving(tmp_path / "2", {"name": "shared"}, {"name": "theirs"}, **common) as (_, other):
            assert await model_of(other, model="theirs") == "theirs"
            async with asyncio.timeout(10):
                while not any("serves other models: ours" in record.message for record in caplog.records):
                    await asyncio.sleep(0.02)
            unknown = await other.http.post("/v1/responses", json={"model": "ours", "input": "say hi"})
            assert unknown.status_code == 404
            for response in runs.values():  # both are posted to the second, which can carry on one of them
                [asks] = [item for item in response["output"] if item["type"] == "function_call"]
                path = f"/v1/responses/{response['id']}/tool_outputs"
                body = {"tool_outputs": [answer(asks["call_id"])]}
                assert (await other.http.post(path, json=body)).status_code == 200
            for response in runs.values():
                ended = await other.ended(response["id"])
                assert (ended["status"], ended["model"]) == ("completed", response["model"])
            engine = first.context.models.get("ours").engine
            assert isinstance(engine, ScriptedEngine) and len(engine.requests) == 2
    await postgres.give_back(db)
