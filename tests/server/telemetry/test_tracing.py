"""Spans as a collector receives them: one trace from HTTP to a tool, and over the end of a process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, mcp_attributes

from engine import UpstreamEngine
from server.telemetry import RequestRecord, read_traceparent, trace_names
from tests.support.forking import READY
from tests.support.otlp import Receiver, receiver
from tests.support.running import http_client, live_app
from tests.support.talk import BUILTIN, Api
from tests.support.upstreams import scripted_folder

ROOT = Path(__file__).parents[3]
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
SUM = 'call calculator {"expression": "2+3"}'


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A collector, to which the servers of this test send at once."""
    with receiver() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield found


def test_names_are_those_of_the_conventions() -> None:
    modules = (gen_ai_attributes, mcp_attributes)
    known = {value for module in modules for name, value in vars(module).items() if name.isupper()}
    ours = {value for name, value in vars(trace_names).items() if name.isupper()}
    assert {name for name in ours if name.startswith(("gen_ai.", "mcp."))} <= known


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (TRACEPARENT, TRACEPARENT),
        (f"cc-{TRACE}-{PARENT}-01-what-is-to-come", TRACEPARENT),
        (f"01-{TRACE}-{PARENT}-01-x ", TRACEPARENT),  # in a header that is sent it could not stand so
        (f"01-{TRACE}-{PARENT}-01-caf\xe9", TRACEPARENT),
        (f"01-{TRACE}-{PARENT}-01-{'x' * 100_000}", TRACEPARENT),
        (f"01-{TRACE}-{PARENT}-01x", None),
        (f"00-{TRACE}-{PARENT}-01-more", None),
        (f"00-{'0' * 32}-{PARENT}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"ff-{TRACE}-{PARENT}-01", None),
        (TRACEPARENT.upper(), None),
        ("", None),
    ],
    ids=range(12),
)
def test_a_traceparent_is_checked(value: str, read: str | None) -> None:
    assert read_traceparent(value) == read


def test_what_cannot_be_sent_of_a_tracestate_is_left_out() -> None:
    headers = dict(RequestRecord("r", TRACEPARENT, "a=b, c=d ").trace_headers)
    assert headers == {"traceparent": TRACEPARENT, "tracestate": "a=b, c=d"}
    assert dict(RequestRecord("r", TRACEPARENT, " ").trace_headers) == {"traceparent": TRACEPARENT}


async def test_one_trace_from_http_through_generations_to_a_tool(tmp_path: Path, collector: Receiver) -> None:
    async with live_app(tmp_path, otel=True) as server, http_client(server) as client:
        headers = {"traceparent": TRACEPARENT, "x-request-trace": "order-17"}
        reply = await client.post("/v1/responses", json={"input": SUM, "tools": [BUILTIN]}, headers=headers)
        response = reply.json()
        assert response["output"][-1]["content"][0]["text"] == "The tool said: 5"
        assert reply.headers["x-request-trace"] == "order-17"
        assert (await client.get("/health")).status_code == 200
    spans = collector.wait(lambda spans: len(spans) >= 4)
    assert collector.paths == {"/v1/traces"} and {span.service for span in spans} == {"antiphon"}
    assert sorted(span.name for span in spans) == [
        "POST /v1/responses",
        "chat antiphon-scripted",
        "chat antiphon-scripted",
        "execute_tool calculator",
    ]
    assert {span.trace_id for span in spans} == {TRACE}
    request = next(span for span in spans if span.name.startswith("POST"))
    assert request.parent_id == PARENT
    assert reply.headers["traceparent"] == f"00-{TRACE}-{request.span_id}-01"
    assert request.attributes["http.route"] == "/v1/responses"
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["antiphon.request_id"] == reply.headers["x-request-id"]
    assert request.attributes["antiphon.request_trace"] == "order-17"
    assert {span.parent_id for span in spans if span is not request} == {request.span_id}
    first, second = sorted(
        (span for span in spans if span.name.startswith("chat")), key=lambda span: span.start
    )
    assert first.attributes["gen_ai.operation.name"] == "chat"
    assert first.attributes["gen_ai.response.id"] == response["id"]
    assert first.attributes["gen_ai.response.finish_reasons"] == ["tool_calls"]
    assert second.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    for name in ("input", "output"):
        used = sum(span.attributes[f"gen_ai.usage.{name}_tokens"] for span in (first, second))
        assert used == response["usage"][f"{name}_tokens"]
    assert first.start <= first.events["antiphon.first_token"] <= first.end
    assert 0 < first.attributes["gen_ai.response.time_to_first_chunk"] < 60
    tool = next(span for span in spans if span.name.startswith("execute_tool"))
    assert tool.attributes["gen_ai.tool.call.id"].startswith("mcp_")
    assert tool.attributes["mcp.method.name"] == "tools/call" and not tool.failed
    said = json.dumps([span.attributes for span in spans])
    assert "2+3" not in said and "The tool said" not in said  # content, which nobody asked for


async def test_a_chat_with_tools_of_the_server_has_the_same_spans(
    tmp_path: Path, collector: Receiver
) -> None:
    async with live_app(tmp_path, otel=True) as server, http_client(server) as client:
        body = {"messages": [{"role": "user", "content": SUM}], "tools": [BUILTIN]}
        reply = await client.post("/v1/chat/completions", json=body)
    names = ["POST /v1/chat/completions", *["chat antiphon-scripted"] * 2, "execute_tool calculator"]
    spans = collector.wait(lambda spans: len(spans) >= len(names))
    assert sorted(span.name for span in spans) == names and len({span.trace_id for span in spans}) == 1
    said = {span.attributes.get("gen_ai.response.id") for span in spans if span.name.startswith("chat")}
    assert said == {reply.json()["id"].replace("chatcmpl-", "resp_")}


async def test_content_only_where_it_is_asked_for(tmp_path: Path, collector: Receiver) -> None:
    async with live_app(tmp_path, otel=True, otel_content=True) as server, http_client(server) as client:
        api = Api(client)
        await api.create(SUM, tools=[BUILTIN], instructions="Be brief.")
        await client.post("/v1/completions", json={"prompt": "say hello"})
    spans = collector.wait(lambda spans: len(spans) >= 6)
    chats = sorted((span for span in spans if span.name.startswith("chat")), key=lambda span: span.start)
    asked = json.loads(chats[0].attributes["gen_ai.input.messages"])
    assert [message["role"] for message in asked] == ["system", "user"]
    assert asked[1]["parts"] == [{"type": "text", "content": SUM}]
    again = json.loads(chats[1].attributes["gen_ai.input.messages"])
    assert again[-1]["parts"][0]["type"] == "tool_call_response"
    (said,) = json.loads(chats[1].attributes["gen_ai.output.messages"])
    assert said["parts"] == [{"type": "text", "content": "The tool said: 5"}]
    tool = next(span for span in spans if span.name.startswith("execute_tool"))
    assert json.loads(tool.attributes["gen_ai.tool.call.arguments"]) == {"expression": "2+3"}
    assert tool.attributes["gen_ai.tool.call.result"] == "5"
    text = next(span for span in spans if span.name.startswith("text_completion"))
    assert "hello" in text.attributes["gen_ai.output.messages"]


async def test_a_trace_goes_on_at_an_upstream_server(tmp_path: Path, collector: Receiver) -> None:
    async with live_app(tmp_path / "behind", otel=True) as behind:
        engine = UpstreamEngine(scripted_folder(tmp_path / "model"), [behind.base_url])
        async with live_app(tmp_path / "front", engine, otel=True) as front, http_client(front) as client:
            say = {"messages": [{"role": "user", "content": "say hello"}]}
            assert (await client.post("/v1/chat/completions", json=say)).status_code == 200
    (request,) = collector.named("POST /v1/chat/completions")
    # The front also asks by itself, as it starts, what the server behind it can do.
    spans = collector.wait(lambda spans: sum(span.trace_id == request.trace_id for span in spans) == 4)
    ours = {span.name: span for span in spans if span.trace_id == request.trace_id}
    chat, there = ours["chat antiphon-scripted"], ours["POST /v1/completions"]
    assert chat.parent_id == request.span_id and there.parent_id == chat.span_id
    assert ours["text_completion antiphon-scripted"].parent_id == there.span_id


async def test_a_tool_that_fails_is_marked(tmp_path: Path, collector: Receiver) -> None:
    async with live_app(tmp_path, otel=True) as server, http_client(server) as client:
        await Api(client).create('call calculator {"expression": "1/0"}', tools=[BUILTIN])
    (tool,) = collector.named("execute_tool calculator")
    assert tool.failed and tool.attributes["error.type"] == "tool_error"


async def test_failures_are_marked(tmp_path: Path, collector: Receiver) -> None:
    async with live_app(tmp_path, otel=True) as server, http_client(server) as client:
        failed = await client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "fail injected"}]}
        )
        assert failed.status_code == 500
        refused = await client.get("/v1/responses/resp_unknown")
        assert refused.status_code == 404
    request, chat, missing = collector.named(
        "POST /v1/chat/completions", "chat antiphon-scripted", "GET /v1/responses/{response_id}"
    )
    assert request.failed and request.attributes["error.type"] == "server_error"
    assert chat.failed and chat.attributes["error.type"] == "RequestFailed"
    assert not missing.failed and missing.trace_id != request.trace_id


async def test_a_background_run_stays_in_its_requests_trace(tmp_path: Path, collector: Receiver) -> None:
    async with live_app(tmp_path, otel=True) as server, http_client(server) as client:
        api = Api(client)
        made = await api.create("say hello", background=True)
        await api.ended(made["id"])
    request, chat = collector.named("POST /v1/responses", "chat antiphon-scripted")
    assert (chat.trace_id, chat.parent_id) == (request.trace_id, request.span_id)


async def test_without_spans_a_trace_passes_through(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/responses", json={"input": "say hi"}, headers={"traceparent": TRACEPARENT})
    assert reply.headers["traceparent"] == TRACEPARENT
    assert "traceparent" not in (await client.get("/v1/models")).headers
    assert "traceparent" not in (await client.get("/v1/models", headers={"traceparent": "00-x"})).headers


def test_without_the_setting_the_sdk_is_not_imported() -> None:
    script = """
import asyncio, sys, tempfile
from pathlib import Path
from tests.support.running import http_client, running_app

async def main():
    with tempfile.TemporaryDirectory() as folder:
        async with running_app(Path(folder)) as running, http_client(running) as client:
            assert (await client.post("/v1/responses", json={"input": "say hello"})).status_code == 200

asyncio.run(main())
assert "opentelemetry.sdk" not in sys.modules and "pythonjsonlogger" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=60)


@contextmanager
def process(data: Path, *args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its URL; it is killed at the end, if it is still there."""
    command = [READY, "-m", "server.cli", "serve", "--engine", "scripted", "--port", "0", "--otel"]
    with subprocess.Popen(
        [*command, "--data", str(data), *args],
        cwd=ROOT,
        env=os.environ,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:\d+", running.stdout.readline())
            assert found is not None, "the server ended before it listened"
            yield running, found.group()
        finally:
            running.kill()
            running.wait(20)


def test_a_resumed_run_is_linked_to_its_first_trace(tmp_path: Path, collector: Receiver) -> None:
    """The server is killed in the middle of an answer; the next one goes on, and says where it came from."""
    headers = {"traceparent": TRACEPARENT}
    asked: dict[str, Any] = {"input": "tick 5\ncount 400", "background": True}
    with process(tmp_path) as (running, url):
        made = httpx.post(f"{url}/v1/responses", json=asked, headers=headers)
        response_id = made.json()["id"]
        with httpx.stream("GET", f"{url}/v1/responses/{response_id}?stream=true", timeout=20) as stream:
            for number, _ in enumerate(stream.iter_lines()):
                if number > 60:
                    break
        (request,) = collector.named("POST /v1/responses")
        os.kill(running.pid, signal.SIGKILL)
    assert (request.trace_id, request.parent_id) == (TRACE, PARENT)
    assert not any(span.name.startswith("chat") for span in collector.spans)  # it died with the process
    with process(tmp_path) as (_, url):
        ended = httpx.get(f"{url}/v1/responses/{response_id}?wait=30", timeout=40).json()
        assert ended["status"] == "completed"
        resumed, chat = collector.named("resume_response", "chat antiphon-scripted")
    assert resumed.links == [(TRACE, request.span_id)]
    assert resumed.trace_id != TRACE and resumed.attributes["gen_ai.response.id"] == response_id
    assert (chat.trace_id, chat.parent_id) == (resumed.trace_id, resumed.span_id)
    assert chat.attributes["gen_ai.response.finish_reasons"] == ["stop"]
