"""`antiphon bench`: loads, figures and reports, against servers that behave and servers that do not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import Fail, GenerateRequest, RequestFailed, Say, ScriptedEngine
from server.bench.figures import Sample, figures, ratios, spread
from server.bench.inside import decode_step_s
from server.bench.load import Load, Prompts, drive
from server.bench.measure import Plan, Target, measure
from server.bench.outside import Outside, ServerRefused, base_url, first_model
from server.cli.commands import main
from tests.support.running import live_app


def sample(first: float, token: float, count: int, **rest: Any) -> Sample:
    """A request with text at `first` seconds and each `token` seconds, one token a time."""
    arrivals = tuple(first + token * number for number in range(count))
    return Sample(0.0, arrivals[-1], arrivals, count, **{"num_input": 10, "counted": "usage", **rest})


# ------------------------------------------------------------------------------------------------------------
# Figures


def test_percentiles_are_linear_between_values() -> None:
    found = spread([number / 1000 for number in range(1, 102)])
    assert found is not None
    assert (found.p50, found.p90, found.p95, found.p99) == (51, 91, 96, 100)
    alone = spread([0.007])
    assert alone is not None and alone.p50 == alone.p99 == alone.mean == 7
    assert spread([]) is None


def test_a_failed_request_is_counted_and_in_no_other_figure() -> None:
    done = [sample(0.1, 0.01, 5), sample(0.3, 0.01, 3)]
    failed = Sample(0.0, 9.0, (0.001,), 2, error="429 queue_full")
    found = figures([*done, failed, failed], 2.0, asked=5)
    assert (found.requests, found.failed, found.errors) == (4, 2, {"429 queue_full": 2})
    assert found.short == 1  # one ended before its five tokens
    assert found.output_tokens == 8 and found.output_per_s == 4.0 and found.requests_per_s == 1.0
    assert found.first is not None and found.first.count == 2 and found.first.p50 == pytest.approx(200)
    assert found.token is not None and found.token.p99 == pytest.approx(10)
    nothing = figures([failed], 2.0, asked=5)
    assert nothing.first is None and nothing.output_per_s == 0 and nothing.counted == "nothing"


def test_where_one_reply_has_no_usage_input_is_unknown_and_the_mixture_is_said() -> None:
    found = figures([sample(1, 1, 2), sample(1, 1, 2, num_input=None, counted="events")], 1.0, asked=2)
    assert found.input_tokens is None and found.counted == "events and usage"


def test_ratios_are_taken_round_by_round() -> None:
    slow = [figures([sample(0.2 * drift, 0.02 * drift, 5)], drift, asked=5) for drift in (1, 10, 2)]
    fast = [figures([sample(0.1 * drift, 0.01 * drift, 5)], drift / 2, asked=5) for drift in (1, 10, 2)]
    found = {ratio.name: ratio for ratio in ratios(fast, slow)}
    assert found["output tok/s"].lowest == found["output tok/s"].highest == pytest.approx(2)
    assert found["TTFT p50"].median == pytest.approx(0.5)
    assert ratios([figures([], 1.0, asked=1)], slow[:1]) == []


def test_a_decode_step_is_read_off_the_request_that_began_last() -> None:
    early, late = sample(0.1, 0.02, 5, steps=4), sample(0.2, 0.01, 5, steps=2)  # two tokens a step
    assert decode_step_s([[early, late]]) == pytest.approx(0.02)
    assert decode_step_s([[sample(0.1, 0.1, 1, steps=0)]]) is None


# ------------------------------------------------------------------------------------------------------------
# Loads


async def test_a_closed_loop_never_has_more_at_once() -> None:
    now = most = 0
    seen: list[int] = []

    async def ask(prompt: Sequence[int], due: float) -> Sample:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0)
        now -= 1
        return Sample(due, time.perf_counter(), (), prompt[0])

    samples, seconds = await drive(
        ask,
        [[n] for n in range(20)],
        Load(concurrency=3),
        seed=0,
        done=lambda each: seen.append(each.num_output),
    )
    assert most == 3 and seconds > 0
    assert [each.num_output for each in samples] == list(range(20)) and sorted(seen) == list(range(20))


async def test_an_open_loop_waits_for_nobody_and_its_times_follow_from_the_seed() -> None:
    everybody = asyncio.Event()

    def asker(dues: list[float], count: int) -> Callable[[Sequence[int], float], Any]:
        async def ask(prompt: Sequence[int], due: float) -> Sample:
            dues.append(due)
            if len(dues) == count:
                everybody.set()
            await everybody.wait()  # a loop that waited for replies would hang here
            return Sample(due, time.perf_counter())

        return ask

    runs = []
    for seed in (1, 1, 2):
        everybody.clear()
        dues: list[float] = []
        await drive(asker(dues, 30), [[0]] * 30, Load(rate=20_000), seed=seed, done=lambda _: None)
        dues.sort()
        runs.append([after - dues[0] for after in dues])
    assert runs[0] == pytest.approx(runs[1], abs=1e-9) and runs[0] != pytest.approx(runs[2])


def test_prompts_share_what_they_are_asked_to_and_nothing_else() -> None:
    prompts = Prompts(num_tokens=20, prefix=8, share=1.0, seed=3)
    first, second = prompts.make(4, "one"), prompts.make(4, "two")
    assert len({tuple(prompt[:8]) for prompt in first + second}) == 1
    assert len({tuple(prompt[8:]) for prompt in first + second}) == 8
    assert all(len(prompt) == 20 for prompt in first)
    some = Prompts(20, 8, 0.5, 3).make(100, "one")
    assert 30 < sum(prompt[:8] == first[0][:8] for prompt in some) < 70
    assert first == prompts.make(4, "one")


async def test_targets_take_turns_with_the_same_prompts_and_warm_up_counts_for_nothing() -> None:
    asked: list[tuple[str, tuple[int, ...]]] = []

    def target(label: str) -> Target:
        async def ask(prompt: Sequence[int], due: float) -> Sample:
            asked.append((label, tuple(prompt)))
            return Sample(due, time.perf_counter(), (), 1)

        return Target(label, ask)

    plan = Plan([Load(concurrency=1)], Prompts(4), num_output=1, rounds=2, requests=1, warmup=1)
    cases = await measure([target("a"), target("b")], plan)
    assert [label for label, _ in asked] == ["b", "a", "a", "b", "b", "a"]  # warm-up, then two rounds
    assert asked[2][1] == asked[3][1] != asked[4][1] == asked[5][1]
    assert [case.figures.requests for case in cases] == [2, 2]


# ------------------------------------------------------------------------------------------------------------
# Servers


def events(*bodies: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(body).encode() + b"\n\n" for body in bodies)


class Whole(httpx.AsyncByteStream):
    """A body that comes in one piece."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._data


def streamed(data: bytes) -> httpx.Response:
    return httpx.Response(200, stream=Whole(data))


DONE = b"data: [DONE]\n\n"
CHUNK = {"choices": [{"delta": {"content": "word"}}]}
ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}},
}


async def one_from(reply: Callable[[httpx.Request], httpx.Response], api: str = "chat") -> Sample:
    transport = httpx.MockTransport(reply)
    async with httpx.AsyncClient(transport=transport, base_url="http://mock/v1") as http:
        outside = Outside(http, api, "m", 5, store=False, timeout_s=0.2, extra={"top_k": 3})
        return await outside.ask([1, 2, 3], time.perf_counter())


async def test_usage_counts_where_there_is_some_and_events_where_there_is_none() -> None:
    whole = await one_from(lambda _: streamed(events(ROLE, CHUNK, CHUNK, USAGE) + DONE))
    assert (whole.num_output, whole.num_input, whole.num_cached, whole.counted) == (5, 7, 3, "usage")
    assert len(whole.arrivals) == 1  # they came together
    bare = await one_from(lambda _: streamed(events(ROLE, CHUNK, CHUNK) + DONE))
    assert (bare.num_output, bare.num_input, bare.counted) == (2, None, "events")


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (streamed(events(CHUNK)), "the stream broke off"),
        (streamed(b""), "the stream broke off"),
        (streamed(b"data: {nonsense\n\n"), "none of this API"),
        (streamed(events({"error": {"message": "out of memory"}})), "out of memory"),
        (httpx.Response(429, json={"error": {"code": "queue_full", "message": "Full."}}), "429 queue_full"),
        (httpx.Response(502, content=b"<html>"), "502 <html>"),
        (httpx.Response(500, json=["strange"]), "500"),
    ],
)
async def test_whatever_fails_is_a_sample_that_says_how(reply: httpx.Response, error: str) -> None:
    failed = await one_from(lambda _: reply)
    assert failed.error is not None and error in failed.error


async def test_a_response_that_failed_and_a_server_that_is_silent_are_failures() -> None:
    body = {"type": "response.failed", "response": {"error": {"code": "server_error"}, "usage": None}}
    failed = await one_from(lambda _: streamed(events(body)), "responses")
    assert failed.error == "server_error"

    async def silent(request: httpx.Request) -> httpx.Response:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody ends it")

    assert (await one_from(silent)).error == "no end after 0.2 s"

    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert (await one_from(gone)).error == "ConnectError: refused"


@pytest.mark.parametrize(
    ("api", "path", "fields"),
    [
        ("responses", "/v1/responses", {"input", "max_output_tokens", "store"}),
        ("chat", "/v1/chat/completions", {"messages", "max_tokens", "stream_options"}),
        ("completions", "/v1/completions", {"prompt", "max_tokens", "stream_options"}),
    ],
)
async def test_what_is_asked(api: str, path: str, fields: set[str]) -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert request.url.path == path and body.keys() == fields | {"model", "stream", "top_k"}
        return streamed(DONE)

    assert (await one_from(reply, api)).error is None


async def test_words_are_measured_so_that_prompts_have_the_tokens_that_were_asked_for() -> None:
    def count(request: httpx.Request) -> httpx.Response:
        words = len(json.loads(request.content)["prompt"].split())
        usage = {"prompt_tokens": 30 + 2 * words, "completion_tokens": 1}
        return streamed(events({"choices": [], "usage": usage}) + DONE)

    async with httpx.AsyncClient(transport=httpx.MockTransport(count), base_url="http://mock/v1") as http:
        outside = Outside(http, "completions", "m", 5, store=False, timeout_s=9, extra={})
        assert await outside.words(130) == (50, 2.0)
    silent = httpx.MockTransport(lambda _: streamed(DONE))
    async with httpx.AsyncClient(transport=silent, base_url="http://mock/v1") as http:
        outside = Outside(http, "completions", "m", 5, store=False, timeout_s=9, extra={})
        assert await outside.words(130) == (130, None)


async def test_a_server_without_models_is_refused() -> None:
    for reply in (httpx.Response(404), httpx.Response(200, json={"data": []}), httpx.Response(200, json=[])):
        transport = httpx.MockTransport(lambda _, reply=reply: reply)
        async with httpx.AsyncClient(transport=transport, base_url=base_url("http://mock/")) as http:
            with pytest.raises(ServerRefused, match="http://mock/v1"):
                await first_model(http)


# ------------------------------------------------------------------------------------------------------------
# The command


async def bench(*argv: str) -> int:
    """In a thread, so that a server on this loop can answer."""
    return await asyncio.to_thread(main, ["bench", *argv])


QUICK = ["--input", "300", "--output", "16", "--requests", "4", "--warmup", "1"]


@pytest.mark.long
async def test_two_servers_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, picture = tmp_path / "found.json", tmp_path / "found.png"
    async with live_app(tmp_path / "a") as one, live_app(tmp_path / "b") as other:
        flags = ["--compare", other.base_url, "--concurrency", "1,2", "--rounds", "2", "--store"]
        files = ["--json", str(found), "--plot", str(picture)]
        keys = ["--api-key", "sk-first", "--compare-api-key", "sk-second"]
        assert await bench("serve", "--url", one.base_url, *QUICK, *flags, *keys, *files) == 0
        listed = await one.context.storage.list_responses("local", limit=100)
    assert len(listed.data) == 2 + 2 * (1 + 2 * 4)  # to measure words, then each load: warm-up and rounds
    printed = capsys.readouterr().out
    for words in ("2 at once", "8 requests", "0 failed", "stored", "counted by usage", "TTFT", "p99"):
        assert words in printed
    assert f"{one.base_url} (antiphon-scripted, responses, stored) by {other.base_url}" in printed
    body = json.loads(found.read_text())
    assert "sk-" not in found.read_text()
    assert [case["figures"]["requests"] for case in body["cases"]] == [8, 8, 8, 8]
    first = body["cases"][0]["rounds"][0]["requests"]
    assert len(first) == 4 and all(row["output_tokens"] == 16 and row["input_tokens"] > 250 for row in first)
    assert len(body["ratios"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_stateless_apis_at_a_rate_with_a_shared_prefix(
    api: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_app(tmp_path) as running:
        flags = [
            "--api",
            api,
            "--rate",
            "200",
            "--prefix-tokens",
            "100",
            "--prefix-share",
            "0.5",
            "--rounds",
            "1",
        ]
        assert await bench("serve", "--url", f"{running.base_url}/v1", *QUICK, *flags) == 0
        engine = running.context.models.get(None).engine
        assert isinstance(engine, ScriptedEngine)
        assert len(engine.requests) == 2 + 1 + 4
    printed = capsys.readouterr().out
    assert "200 requests/s" in printed and "4 requests in" in printed and "by usage" in printed


async def test_failures_are_shown_by_kind_and_the_exit_code_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = count()

    def script(request: GenerateRequest, prompt: str) -> Iterator[Say | Fail]:
        number = next(asked)
        yield Say("word " * 20)
        if number in (4, 5):  # behind two that measure words, and one to warm up
            yield Fail(RequestFailed("the dog ate it"))

    async with live_app(tmp_path, ScriptedEngine(script)) as running:
        flags = ["--concurrency", "1", "--rounds", "1", "--output", "200", "--no-ignore-eos"]
        assert await bench("serve", "--url", running.base_url, *QUICK, *flags) == 1
    printed = capsys.readouterr().out
    assert "4 requests in" in printed and "2 failed" in printed
    assert "2 x server_error" in printed and "2 ended before their 200 tokens" in printed


async def test_what_cannot_be_measured_is_said_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live_app(tmp_path) as running:
        url = ["--url", running.base_url]
        assert await bench("serve", *url, "--model", "nobody") == 2
        assert await bench("serve", *url, "--body", '{"background": 7}') == 2
    assert await bench("serve", "--url", "http://127.0.0.1:9", "--api-key", "sk-\u2026") == 2
    assert await bench("serve", "--url", "http://127.0.0.1:9") == 2
    chat = ["--api", "chat", "--compare", "http://127.0.0.1:9"]
    assert await bench("serve", "--prefix-tokens", "256") == 2
    assert await bench("serve", "--output", "15") == 2
    assert await bench("serve", "--output", "15", *chat, "--compare-api", "responses") == 2
    assert await bench("serve", "--json", "/nowhere/at/all.json") == 2
    assert await bench("latency", "--shape", "qwen3-9b") == 2
    assert await bench("latency", "--model", "/nowhere/at/all") == 2
    assert await bench("throughput", "--engine", "scripted", "--input", "300000") == 2
    assert await bench("checkpoint", "nonsense", str(tmp_path / "made")) == 2
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert await bench("serve", "--plot", str(tmp_path / "x.png")) == 2
    lines = capsys.readouterr().err.splitlines()
    words = (
        "model_not_found",
        "background",
        "key cannot be sent",
        "127.0.0.1:9",
        "--prefix-tokens",
        "takes 16 tokens or more",
        "takes 16 tokens or more",
        "/nowhere/at",
        "qwen3-0.6b",
    )
    for line, word in zip(
        lines, (*words, "/nowhere/at", "262144", "nonsense", "pip install matplotlib"), strict=True
    ):
        assert line.startswith("antiphon: ") and word in line


@pytest.mark.parametrize(
    "flags", [["--rate", "0"], ["--concurrency", "2,x"], ["--body", "[]"], ["--prefix-share", "2"]]
)
def test_flags_that_make_no_sense_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", *flags])
    assert flags[0] in capsys.readouterr().err


async def test_an_engine_in_this_process_beside_its_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    flags = ["--input", "20", "--output", "8", "--rounds", "2", "--warmup", "1", "--json", str(found)]
    assert await bench("latency", "--batch", "1,2", "--max-model-len", "512", *flags) == 0
    printed = capsys.readouterr().out
    assert (
        "antiphon-tiny in this process: 2 at once, 2 rounds" in printed and "a decode step takes" in printed
    )
    cases = json.loads(found.read_text())["cases"]
    assert [case["figures"]["output_tokens"] for case in cases] == [16, 32]
    assert all(0 < case["pace"]["share"] < 5 and case["pace"]["num_bytes"] > 17e6 for case in cases)


async def test_throughput_of_any_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench("throughput", "--engine", "scripted", *QUICK, "--concurrency", "2") == 0
    printed = capsys.readouterr().out
    assert "antiphon-scripted in this process: 2 at once, 1 round" in printed and "4 requests in" in printed
    assert "decode step" not in printed


async def test_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine import SIZES

    small = {**SIZES["qwen3-0.6b"], "vocab_size": 4096, "hidden_size": 32, "num_hidden_layers": 1}
    monkeypatch.setitem(SIZES, "small", {**small, "intermediate_size": 32, "num_attention_heads": 8})
    assert await bench("checkpoint", "small", str(tmp_path / "deep" / "made")) == 0
    assert (tmp_path / "deep" / "made" / "config.json").exists()


def test_the_plan_of_a_load() -> None:
    assert Load(concurrency=16).requests(None) == 32 and Load(rate=4).requests(None) == 40
    assert Load(concurrency=1).requests(None) == 8 and Load(rate=0.1).requests(3) == 3
