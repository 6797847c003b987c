"""Probes, versions and metrics, in every phase of a server's life."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine import EngineDead, EngineStats, Fail, GenerateRequest, RequestFailed, ScriptedEngine
from server import __version__
from server.config import Config
from server.process.app import create_app
from server.process.lifecycle import ServerLifecycle
from server.settings import ModelsFile
from tests.support.running import Running, http_client, running_app


async def test_ready(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).json() == {"status": "ready"}
    ready = await client.get("/ready")
    assert ready.status_code == 200
    assert ready.json()["models"] == ["antiphon-scripted"]
    assert (await client.head("/ready")).status_code == 200
    assert (await client.get("/version")).json()["version"]


async def test_before_the_engine_has_started(tmp_path: Path) -> None:
    life = ServerLifecycle(Config(data=tmp_path, engine="scripted"))
    async with http_client(Running(life, create_app(life), "http://antiphon.localhost")) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/version")).status_code == 200
        for path in ("/ready", "/v1/models", "/v1/responses/resp_1"):
            reply = await client.get(path)
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "not_ready"
            assert reply.headers["retry-after"] == "3"
    await life.close()


async def test_while_draining(server_app: Running, client: httpx.AsyncClient) -> None:
    made = await client.post("/v1/responses", json={"input": "say hello"})
    await server_app.life.drain(0)
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ready")).status_code == 503
    refused = await client.post("/v1/responses", json={"input": "say more"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert "retry-after" in refused.headers
    assert (await client.get(f"/v1/responses/{made.json()['id']}")).status_code == 200
    assert (await client.post("/v1/responses/resp_1/tool_outputs", json={})).status_code == 400


async def test_after_the_engine_has_died(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        engine.kill(EngineDead("injected"))
        await running.life.died.wait()
        for path in ("/health", "/ping", "/ready", "/v1/models"):
            reply = await client.get(path)
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "engine_dead"


async def test_no_engine_that_can_be_asked_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "stats", lambda: EngineStats(unavailable=1))
            away = await client.get("/ready")
            assert (away.status_code, away.json()["error"]["code"]) == (503, "engine_unavailable")
            assert int(away.headers["retry-after"]) > 0
            assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).json()["models"] == ["antiphon-scripted"]


async def test_a_model_that_is_loaded_when_it_is_wanted_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine()
    models = ModelsFile.model_validate({"models": [{"name": "wanted", "engine": "scripted", "child": True}]})
    monkeypatch.setattr(engine, "stats", lambda: EngineStats(unavailable=1))
    async with running_app(tmp_path, engine, entries=models) as running, http_client(running) as client:
        for loaded in ([], ["wanted"]):
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["models"]) == (200, loaded)
            await running.life.several.load("wanted")


async def test_a_model_that_does_not_generate_is_not_ready_when_it_is_probed(tmp_path: Path) -> None:
    def broken(request: GenerateRequest, prompt: str) -> Iterator[Fail]:
        yield Fail(RequestFailed("injected"))

    async with running_app(tmp_path, ScriptedEngine(broken)) as running, http_client(running) as client:
        assert (await client.get("/ready")).status_code == 200
        probed = await client.get("/ready?probe=1")
        assert probed.status_code == 503
        assert probed.json()["error"]["code"] == "probe_failed"
        assert "RequestFailed" in probed.json()["error"]["message"]
        assert int(probed.headers["retry-after"]) > 0


async def test_metrics(client: httpx.AsyncClient) -> None:
    await client.post("/v1/responses", json={"input": "say one two three"})
    await client.get("/v1/responses/resp_unknown")
    text = (await client.get("/metrics")).text
    assert 'antiphon_requests_total{method="POST",route="/v1/responses",status="200"} 1.0' in text
    assert 'route="/v1/responses/{response_id}",status="404"' in text
    assert "resp_unknown" not in text
    for name in (
        'antiphon_time_to_first_token_seconds_count{model="antiphon-scripted"} 1.0',
        "antiphon_inter_token_seconds_count",
        'antiphon_engine_waiting{model="antiphon-scripted"} 0.0',
        'antiphon_engine_running{model="antiphon-scripted"} 0.0',
        "antiphon_engine_kv_blocks_used",
        "antiphon_engine_prefix_hits_total",
        "antiphon_storage_commits_total",
        "antiphon_sse_readers 0.0",
        'antiphon_runs_total{model="antiphon-scripted",status="completed"} 1.0',
        f'antiphon_build_info{{version="{__version__}"}} 1.0',
    ):
        assert name in text, name
    if sys.platform == "linux":  # where the client library of Prometheus reads /proc
        for name in ("start_time_seconds", "resident_memory_bytes", "cpu_seconds_total", "open_fds"):
            assert float(text.split(f"\nprocess_{name} ")[1].split()[0]) > 0


@pytest.mark.parametrize("name", ["antiphon-scripted", "other/name"])
async def test_models(tmp_path: Path, name: str) -> None:
    names = ("antiphon-scripted", "other/name")
    async with running_app(tmp_path, served_model_name=names) as running, http_client(running) as client:
        listed = (await client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == list(names)
        one = await client.get(f"/v1/models/{name.replace('/', '%2F')}")
        assert one.json() in listed["data"]
        assert (await client.get(f"/v1/models/{name}")).json() == one.json()
        missing = await client.get("/v1/models/nobody")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"
        assert missing.json()["error"]["param"] == "model"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/responses"])
async def test_a_balancer_is_told_the_load_where_it_asks(tmp_path: Path, path: str) -> None:
    engine = ScriptedEngine(max_running=1)
    keys = ("sk-balancer-0123456789",)
    async with running_app(tmp_path, engine, api_key=keys) as running, http_client(running) as client:
        good = {"authorization": f"Bearer {keys[0]}"}
        for form, told in {
            "TEXT": "TEXT named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=0.0",
            "json": 'JSON {"named_metrics": {"kv_cache_usage_perc": 0.0, "num_requests_waiting": 0.0}}',
            "BIN": None,
        }.items():
            asked = {"endpoint-load-metrics-format": form}
            reply = await client.get(path, headers={**good, **asked})
            assert (reply.status_code, reply.headers.get("endpoint-load-metrics")) == (200, told)
            stranger = await client.get(path, headers=asked)
            assert stranger.status_code == 401 and "endpoint-load-metrics" not in stranger.headers
        assert "endpoint-load-metrics" not in (await client.get(path, headers=good)).headers
