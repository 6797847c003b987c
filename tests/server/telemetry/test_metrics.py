"""`/metrics`: what is there after real work, how it is labelled, and who else's names it can have."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import EngineStats, LocalEngine, ScriptedEngine, TierStats
from engine.executor import gpu_readings
from server.telemetry import EngineRates
from server.telemetry.meanings import MEANINGS
from server.telemetry.vllm_names import NAMES
from tests.support.gpus import GPU, make_up_a_gpu
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import BUILTIN, WEATHER, Api, Gate, gated_at
from tests.support.upstreams import until

ROOT = Path(__file__).parents[3]
TINY = ROOT / "engine" / "tiny" / "checkpoint"
PAGE = ROOT / "docs" / "observability.md"
DASHBOARD = ROOT / "examples" / "grafana-dashboard.json"
MODEL = "antiphon-scripted"
SUM = 'call calculator {"expression": "2+3"}'

Families = dict[str, Any]


async def families(client: httpx.AsyncClient) -> Families:
    """Metric families by name."""
    text = (await client.get("/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(found: Families, name: str, sample: str = "", **labels: str) -> float:
    """The value of the one sample with these labels. `sample`: what its name ends with."""
    samples = [
        float(each.value)
        for each in found[name].samples
        if each.name.endswith(sample) and labels.items() <= each.labels.items()
    ]
    assert len(samples) == 1, (name, labels, found[name].samples)
    return samples[0]


async def test_every_metric_of_a_generation_by_the_model_that_ships(tmp_path: Path) -> None:
    engine = LocalEngine(TINY, num_threads=1)
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        made = await api.create("My name is Mark.", max_output_tokens=16)
        again = await api.create("My name is Mark.", max_output_tokens=16)
        found = await families(client)
    used = [made["usage"], again["usage"]]
    for name, expected in {
        "antiphon_prompt_tokens": sum(each["input_tokens"] for each in used),
        "antiphon_generation_tokens": sum(each["output_tokens"] for each in used),
        "antiphon_cached_tokens": sum(each["input_tokens_details"]["cached_tokens"] for each in used),
        "antiphon_engine_prompt_tokens": sum(each["input_tokens"] for each in used),
        "antiphon_engine_output_tokens": sum(each["output_tokens"] for each in used),
    }.items():
        assert value(found, name, "_total", model=MODEL) == expected, name
    for name in (
        *("time_to_first_token", "time_per_output_token", "generation", "queue", "prefill", "decode"),
    ):
        assert value(found, f"antiphon_{name}_seconds", "_count", model=MODEL) == 2, name
        assert value(found, f"antiphon_{name}_seconds", "_sum", model=MODEL) > 0, name
    parts = [value(found, f"antiphon_{part}_seconds", "_sum") for part in ("queue", "prefill", "decode")]
    assert sum(parts) <= value(found, "antiphon_generation_seconds", "_sum")
    assert value(found, "antiphon_request_prompt_tokens", "_count", model=MODEL) == 2
    assert value(found, "antiphon_engine_kv_blocks", model=MODEL) > 0
    assert value(found, "antiphon_engine_kv_bytes", model=MODEL) > 0
    assert value(found, "antiphon_engine_kv_cache_usage", model=MODEL) == 0
    assert value(found, "antiphon_runs", "_total", model=MODEL, status="completed") == 2


async def test_a_capacity_is_a_gauge_and_a_duration_a_histogram(client: httpx.AsyncClient) -> None:
    await client.post("/v1/responses", json={"input": "say hello"})
    found = await families(client)
    kinds = {name: family.type for name, family in found.items()}
    assert kinds["antiphon_engine_kv_blocks"] == kinds["antiphon_engine_kv_bytes"] == "gauge"
    assert kinds["antiphon_storage_commit_seconds"] == "histogram"
    assert value(found, "antiphon_storage_commit_seconds", "_count") == value(
        found, "antiphon_storage_commits", "_total"
    )
    assert not any(re.search(r"p\d\d$|_max$", name) for name in kinds), "quantiles cannot be added up"


async def test_how_generations_ended(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated_at(gate, "wait"))) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        say: dict[str, Any] = {"messages": [{"role": "user", "content": "say one two three"}]}
        await client.post("/v1/chat/completions", json=say)
        await client.post("/v1/chat/completions", json={**say, "max_tokens": 3})
        failing = {"messages": [{"role": "user", "content": "fail injected"}]}
        await client.post("/v1/chat/completions", json=failing)
        await api.create(SUM, tools=[BUILTIN])
        await api.create('call get_weather {"city": "Paris"}', tools=[WEATHER])
        running = await api.create("wait", background=True)
        await gate.reached.wait()
        await client.post(f"/v1/responses/{running['id']}/cancel")
        found = await families(client)
    ended = {s.labels["finish_reason"]: s.value for s in found["antiphon_generations"].samples}
    assert ended == {"stop": 2, "length": 1, "error": 1, "tool_calls": 2, "cancelled": 1}
    calls = {(s.labels["tool"], s.labels["outcome"]): s.value for s in found["antiphon_tool_calls"].samples}
    assert calls == {("calculator", "ok"): 1, ("client", "asked"): 1}
    assert value(found, "antiphon_errors", "_total", code="server_error") == 1
    assert value(found, "antiphon_runs", "_total", model=MODEL, status="cancelled") == 1


async def test_labels_are_few_whatever_is_sent(client: httpx.AsyncClient) -> None:
    for number in range(5):
        await client.get(f"/v1/nothing-{number}")
        await client.request(f"BREW{number}", f"/coffee-{number}")
        await client.post("/v1/responses", json={"input": "hi", "model": f"model-{number}"})
    found = await families(client)
    labels = {tuple(sorted(s.labels.items())) for s in found["antiphon_requests"].samples}
    routes = {dict(each)["route"] for each in labels}
    assert {"unmatched", "/v1/responses"} == routes
    assert {dict(each)["method"] for each in labels} == {"GET", "POST", "other"}
    assert value(found, "antiphon_errors", "_total", code="model_not_found") == 5
    assert "model-1" not in (await client.get("/metrics")).text


async def test_what_is_answered_before_the_router_counts_for_its_route(tmp_path: Path) -> None:
    async with live_app(tmp_path, api_key=("sk-metrics-0123456789",)) as server:
        async with http_client(server) as stranger:
            assert (await stranger.get("/v1/responses/resp_1/input_items")).status_code == 401
        async with http_client(server, authorization="Bearer sk-metrics-0123456789") as client:
            for _ in range(2):  # the second reply is the first one, said again
                await client.post("/v1/conversations", json={}, headers={"idempotency-key": "once"})
            found = await families(client)
    seen = [dict(s.labels) for s in found["antiphon_requests"].samples]
    routes = {(each["route"], each["status"]) for each in seen}
    assert routes == {("/v1/responses/{response_id}/input_items", "401"), ("/v1/conversations", "200")}


async def test_what_is_refused_for_its_rate_is_counted(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "wait"), max_running=1, max_waiting=1)
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        first = asyncio.create_task(client.post("/v1/responses", json={"input": "wait"}))
        await gate.reached.wait()
        second = asyncio.create_task(client.post("/v1/responses", json={"input": "hi"}))
        await until(lambda: engine.stats().waiting == 1)
        assert (await client.post("/v1/responses", json={"input": "hi"})).status_code == 429
        found = await families(client)
        assert value(found, "antiphon_rate_limited", "_total", code="queue_full") == 1
        assert value(found, "antiphon_http_connections") >= 1
        assert value(found, "antiphon_engine_running", model=MODEL) == 1
        load = (await client.get("/load")).json()
        assert load == {"server_load": 2, "running": 1, "waiting": 1, "kv_cache_usage": 0.0}
        gate.release.set()
        assert (await first).status_code == (await second).status_code == 200


async def test_vllms_names_behind_a_setting(tmp_path: Path, client: httpx.AsyncClient) -> None:
    assert "vllm:" not in (await client.get("/metrics")).text
    async with running_app(tmp_path / "vllm", vllm_metrics=True) as server, http_client(server) as theirs:
        say: dict[str, Any] = {"messages": [{"role": "user", "content": "say one two three"}]}
        for limit in (3, 100):
            await theirs.post("/v1/chat/completions", json={**say, "max_tokens": limit})
        found = await families(theirs)
    assert {name for names in NAMES.values() for name in names} <= set(found)
    success = {s.labels["finished_reason"]: s.value for s in found["vllm:request_success"].samples}
    assert success == {"length": 1, "stop": 1}
    for ours, names in NAMES.items():
        for name in names:
            assert found[name].type == found[ours].type
            assert [s.value for s in found[name].samples] == [s.value for s in found[ours].samples]
            assert all(s.labels["model_name"] == MODEL for s in found[name].samples)


def test_tokens_a_second_are_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("server.telemetry.readings.time.monotonic", lambda: now)
    rates = EngineRates()
    first = rates.read(EngineStats(output_tokens_total=9_000))
    assert first["output_tokens_per_second"] == 0, "nobody knows since when"
    rates = EngineRates()
    rates.read(EngineStats())
    now += 10
    assert rates.read(EngineStats(output_tokens_total=50))["output_tokens_per_second"] == 5
    for _ in range(12):
        now += 10
        rates.read(EngineStats(output_tokens_total=50))
    assert rates.read(EngineStats(output_tokens_total=50))["output_tokens_per_second"] == 0
    now += 30
    assert rates.read(EngineStats(output_tokens_total=350))["output_tokens_per_second"] == 300 / 60


class _WithGpu(ScriptedEngine):
    """A scripted engine that says that it computes on a GPU."""

    def gpu(self) -> Mapping[str, float]:
        return gpu_readings(GPU)


async def test_the_page_explains_every_metric_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that begins with an underscore goes on from the first two words of the one before."""
    named: set[str] = set()
    for line in PAGE.read_text().splitlines():
        if line.startswith(("| `antiphon_", "| `process_")):
            prefix = ""
            for name in re.findall(r"`([\w*]+)`", line.split("|")[1]):
                prefix = prefix if name.startswith("_") else "_".join(name.split("_")[:2])
                named.add((prefix + name if name.startswith("_") else name).removesuffix("_total"))
    make_up_a_gpu(monkeypatch)
    async with running_app(tmp_path, _WithGpu()) as server, http_client(server) as client:
        await client.post("/v1/responses", json={"input": "hi"})
        assert server.life._retention is not None
        await server.life._retention.sweep()  # it measures what owners store
        found = await families(client)
    assert found["antiphon_gpu_utilization"].samples[0].value == 0.8
    shown = {name for name in found if not name.startswith("antiphon_retention_")}
    of_models = ("antiphon_pooling_", "antiphon_speech_")  # shown with models for it alone
    others = {name for name in named if name.startswith(of_models)}
    assert others
    assert named - {"antiphon_retention_*", "antiphon_process_up"} - others == shown
    assert all(family.documentation.endswith(".") for family in found.values())
    disk = {f"antiphon_kv_{field.name}" for field in fields(TierStats) if field.type in ("int", "float")}
    assert others | {name.removesuffix("_total") for name in disk} <= {
        f"antiphon_{name}".removesuffix("_total") for name in MEANINGS
    }


def queries() -> Iterator[tuple[str, str]]:
    """(panel, query) of the dashboard."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


SELECTOR = re.compile(r"(antiphon_\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"by \(([^)]*)\)")
AUTOMATIC = {"instance", "le"}
"""Labels that Prometheus and histograms bring."""


async def test_the_dashboard_asks_for_what_is_there(tmp_path: Path) -> None:
    engine = LocalEngine(TINY, num_threads=1, kv_disk_folder=tmp_path / "kv")
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        await Api(client).create("Hello!", max_output_tokens=16)
        found = await families(client)
    labels: dict[str, set[str]] = {}
    for family in found.values():
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
        if not family.samples:  # a counter that nothing has happened for yet
            labels.setdefault(f"{family.name}_total", set())
    asked = list(queries())
    assert len(asked) > 40
    for panel, query in asked:
        selectors = SELECTOR.findall(query)
        assert selectors, panel
        grouped = {name.strip() for names in GROUPED.findall(query) for name in names.split(",")}
        for name, matchers in selectors:
            assert name in labels, f"{panel}: there is no {name}"
            wanted = {matcher.split("=")[0] for matcher in matchers.split(",") if matcher} | grouped
            assert not labels[name] or wanted - AUTOMATIC <= labels[name], f"{panel}: {name}, {labels[name]}"


def test_the_dashboard_can_be_imported() -> None:
    """Grafana wants ids that differ, a place for each panel, and data sources that it can fill in."""
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    boxes: set[tuple[int, int]] = set()
    for panel in panels:
        box = panel["gridPos"]
        assert box["x"] + box["w"] <= 24
        cells = {
            (x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])
        }
        assert not boxes & cells, f"{panel['title']} lies over another panel"
        boxes |= cells
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) <= names | {"__rate_interval"}


async def test_the_probe_generates_and_is_shared(server_app: Running, client: httpx.AsyncClient) -> None:
    async def steps() -> float:
        return value(await families(client), "antiphon_engine_output_tokens", "_total")

    before = await steps()
    replies = await asyncio.gather(*(client.get("/ready?probe=1") for _ in range(20)))
    assert {reply.status_code for reply in replies} == {200}
    assert await steps() == before + 2  # once, for all of them
    assert (await client.get("/ready?probe=maybe")).status_code == 400
