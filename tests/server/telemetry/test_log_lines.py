"""Log lines as objects: what stands on them, and what never does."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import ScriptedEngine
from server.process.log_lines import json_lines
from server.runs.planning import RunPlan
from server.telemetry import RequestRecord
from tests.support.running import http_client, running_app
from tests.support.talk import Api

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {
    "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01",
    "x-request-trace": "order-17",
    "x-request-id": "req-1",
}
SECRET = "say the-secret-word"

Lines = Any


@pytest.fixture
def lines() -> Iterator[Lines]:
    """Reads what was logged so far, as objects."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(json_lines())
    log = logging.getLogger("antiphon")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lambda logger: [
        line for line in map(json.loads, out.getvalue().splitlines()) if line["logger"] == logger
    ]
    log.removeHandler(handler)
    log.setLevel(level)


async def test_a_response_is_two_lines_the_requests_and_the_runs(
    client: httpx.AsyncClient, lines: Lines
) -> None:
    reply = await client.post("/v1/responses", json={"input": SECRET}, headers=HEADERS)
    response = reply.json()
    (run,) = lines("antiphon.runs")
    (line,) = lines("antiphon.access")
    for each in (run, line):
        assert (each["request_id"], each["trace_id"]) == ("req-1", TRACE)
        assert (each["owner"], each["model"]) == ("local", "antiphon-scripted")
        assert (each["response_id"], each["finish_reason"]) == (response["id"], "stop")
        assert each["prompt_tokens"] == response["usage"]["input_tokens"]
        assert each["output_tokens"] == response["usage"]["output_tokens"]
        assert each["level"] == "info" and each["time"].endswith("Z") and each["duration_ms"] > 0
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/responses", 200)
    assert line["request_trace"] == "order-17" and 0 < line["first_token_ms"] <= line["duration_ms"]
    assert run["status"] == "completed"
    assert "secret" not in json.dumps([line, run])


async def test_chat_and_refusals(client: httpx.AsyncClient, lines: Lines) -> None:
    say = {"messages": [{"role": "user", "content": SECRET}], "n": 2}
    usage = (await client.post("/v1/chat/completions", json=say)).json()["usage"]
    await client.post("/v1/chat/completions", json={**say, "model": "nobody"})
    await client.get("/v1/responses/resp_unknown")
    chat, unknown_model, unknown = lines("antiphon.access")
    assert (chat["prompt_tokens"], chat["output_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert chat["request_id"].startswith("req_") and "trace_id" not in chat
    assert (unknown_model["status"], unknown_model["error_code"]) == (404, "model_not_found")
    assert "finish_reason" not in unknown_model and "output_tokens" not in unknown_model
    assert (unknown["route"], unknown["path"]) == (
        "/v1/responses/{response_id}",
        "/v1/responses/resp_unknown",
    )


async def test_a_line_of_text_says_why_and_for_whom_a_request_was_refused(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "antiphon.access"):
        await client.post("/v1/responses", json={"input": "x", "model": "nobody"})
        await client.post("/v1/responses", json={"input": "x"})
    refused, taken = [each.getMessage() for each in caplog.records if each.name == "antiphon.access"]
    assert refused.startswith("POST /v1/responses 404 ") and refused.endswith(" model_not_found local")
    assert taken.startswith("POST /v1/responses 200 ") and taken.split()[-1].startswith("127.")


async def test_what_the_console_reads_is_told_where_it_goes_wrong(
    client: httpx.AsyncClient, lines: Lines
) -> None:
    by_page = {"sec-fetch-site": "same-origin"}
    for path in ("/", "/console/main.js", "/console/missing.js", "/health"):
        await client.get(path)
    for path in ("/v1/responses", "/v1/responses/resp_unknown"):
        await client.get(path, headers=by_page)
    await client.post("/v1/conversations", json={}, headers=by_page)
    await client.get("/v1/responses")
    await client.get("/v1/responses", headers={"sec-fetch-site": "none"})
    assert [(line["method"], line["path"], line["status"]) for line in lines("antiphon.access")] == [
        ("GET", "/console/missing.js", 404),
        ("GET", "/v1/responses/resp_unknown", 404),
        ("POST", "/v1/conversations", 200),
        ("GET", "/v1/responses", 200),
        ("GET", "/v1/responses", 200),
    ]


async def test_a_run_that_is_taken_up_names_the_request_that_began_it(tmp_path: Path, lines: Lines) -> None:
    engine = ScriptedEngine(tick_s=0.05)
    async with running_app(tmp_path, engine) as server, http_client(server, **HEADERS) as client:
        made = await Api(client).create("count 60", background=True)
        await server.life.drain(0)
    async with running_app(tmp_path) as server, http_client(server) as client:
        await Api(client).ended(made["id"])
    (run,) = [line for line in lines("antiphon.runs") if "status" in line]
    assert (run["request_id"], run["trace_id"], run["response_id"]) == ("req-1", TRACE, made["id"])
    assert run["output_tokens"] > 60


async def test_a_failed_run_says_why(tmp_path: Path, lines: Lines) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        await client.post("/v1/responses", json={"input": "fail injected"})
    said = [line for line in lines("antiphon.runs") if "status" in line]
    assert [(line["status"], line["error_code"]) for line in said] == [("failed", "server_error")]


async def test_prompts_only_where_they_are_asked_for(tmp_path: Path, lines: Lines) -> None:
    async with running_app(tmp_path, log_prompts=True) as server, http_client(server) as client:
        await client.post("/v1/responses", json={"input": SECRET, "temperature": 0.5})
        await client.post("/v1/completions", json={"prompt": SECRET})
    response, completion = lines("antiphon.prompts")
    assert "the-secret-word<|im_end|>" in response["prompt"]  # as the model reads it
    assert "temperature=0.5" in response["message"]
    assert completion["prompt"] == SECRET and completion["request_id"]


def test_a_line_is_one_object_whatever_is_logged() -> None:
    """Formatted directly: pytest hands on what is logged, and cannot where that is a lone surrogate."""
    text = "a\nb \x1b[31m \u2028 %s"
    record = logging.LogRecord("antiphon.odd", logging.INFO, __file__, 1, text, ("\ud800",), None)
    record.model, record.owner = None, 'x"}\n{'
    (line,) = json_lines().format(record).splitlines()
    odd = json.loads(line)
    assert odd["owner"] == 'x"}\n{' and "model" not in odd
    try:
        raise ValueError("in\nlines")
    except ValueError as error:
        cause = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("antiphon.odd", logging.ERROR, __file__, 1, "failed", (), cause)
    failed = json.loads(json_lines().format(record))
    assert failed["level"] == "error" and failed["exc_info"].endswith("ValueError: in\nlines")


def test_a_plan_of_an_earlier_version_can_be_read() -> None:
    """It has no trace; the run goes on without one."""
    plan = dict.fromkeys(RunPlan.__slots__)
    del plan["trace"]
    assert RunPlan(**plan).trace is None  # type: ignore[arg-type]
    record = RequestRecord.load({})
    assert (record.request_id, record.trace_id, record.trace_headers) == ("", None, ())
