"""A run whose process ended goes on at the next token: same id, same numbers, same text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import tools
from engine import GenerateRequest, LocalEngine, Place, Prompt, RenderInput, Say, ScriptedEngine
from engine.backends.script import Step
from server.items import ITEM_TYPES
from server.runs.execution.logprobs import dump_logprobs, load_logprobs
from storage import RunClaim, Storage
from tests.support import wire
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import BUILTIN, TIME, WEATHER, Api, Gate, Streamed, call, text
from tests.support.wire import Json

MIXED = "<think>\nlet me see\n</think>\n\nOne, two \U0001f600 three. " + "".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "Paris"}}}}\n</tool_call>\n'
    for name in ("get_weather", "get_time")
)

ASKED: Json = {
    "tools": [WEATHER, TIME],
    "seed": 7,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "stream": True,
}


def saying(text: str, gate: Gate | None = None, after: int = 0) -> Callable[..., Iterator[Step]]:
    """Says a text, word by word; held behind the first `after` words of it."""

    def script(request: GenerateRequest, prompt: str) -> Iterator[Step]:
        words = re.findall(r"\s*\S+|\s+$", text)
        for index, word in enumerate(words):
            if gate is not None and index == after:
                yield gate.wait()
            yield Say(word)

    return script


def alike(raw: bytes) -> bytes:
    """A stream without what differs between two responses that say the same: ids and times, and in the last
    event how many restarts the one that was cut went on after."""
    prefixes = ("resp_", "call_", *(row.prefix for row in ITEM_TYPES.values()))
    ids = b"|".join(prefix.encode() for prefix in prefixes)
    raw = re.sub(b"(" + ids + rb")[0-9a-f]+", rb"\1", raw)
    raw = re.sub(rb',"restarts":\d+', b"", raw)
    return re.sub(rb'"(created_at|completed_at)":\d+', rb'"\1":0', raw)


async def uninterrupted(folder: Path, script: Any, **asked: Any) -> bytes:
    async with running_app(folder, ScriptedEngine(script)) as server, http_client(server) as client:
        return (await Api(client).stream("hi", **asked)).raw


async def left(
    folder: Path, script: Any, gate: Gate, *, settings: Mapping[str, Any] | None = None, **asked: Any
) -> tuple[str, bytes]:
    """A run that its process leaves at the gate: its id, and what its client saw of it."""
    async with (
        live_app(folder, ScriptedEngine(script), **(settings or {})) as server,
        http_client(server) as client,
        Api(client).open("hi", **asked) as live,
    ):
        await live.next()
        await gate.reached.wait()
        await server.context.runs.drain(0)
        await live.cut()
        return live.id, live.raw


@pytest.mark.sampled(2)
@pytest.mark.parametrize("after", range(0, len(re.findall(r"\s*\S+", MIXED)), 3))
async def test_a_stream_goes_on_where_it_was_cut(tmp_path: Path, after: int) -> None:
    """Reasoning, text with log probabilities, two calls: the whole is what it would have been."""
    gate = Gate()
    asked = {name: value for name, value in ASKED.items() if name != "stream"}
    whole = await uninterrupted(tmp_path / "whole", saying(MIXED), **asked)
    response_id, seen = await left(tmp_path / "cut", saying(MIXED, gate, after), gate, **asked)
    async with (
        running_app(tmp_path / "cut", ScriptedEngine(saying(MIXED))) as server,
        http_client(server) as client,
    ):
        last = len(wire.events(seen)) - 1
        rest = await Api(client).replay(response_id, last)
        assert alike(seen + rest) == alike(whole)
        assert await Api(client).replay(response_id) == seen + rest
        await Api(client).ended(response_id)


async def test_reasoning_calls_and_answers_are_in_that_text(tmp_path: Path) -> None:
    """What the test above cuts has every kind of item, or it would prove little."""
    raw = await uninterrupted(tmp_path, saying(MIXED), tools=[WEATHER, TIME])
    final = wire.check_stream(wire.events(raw))
    assert [item["type"] for item in final["output"]] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip


@pytest.mark.parametrize("asked", [{"stop": ["e fo"]}, {"max_output_tokens": 19}, {"min_tokens": 30}])
async def test_ends_fall_where_they_would_have_fallen(tmp_path: Path, asked: Json) -> None:
    said, gate = "one two three four five", Gate()
    whole = await uninterrupted(tmp_path / "whole", saying(said), **asked)
    response_id, _ = await left(tmp_path / "cut", saying(said, gate, 2), gate, **asked)
    async with (
        running_app(tmp_path / "cut", ScriptedEngine(saying(said))) as server,
        http_client(server) as client,
    ):
        assert alike(await Api(client).replay(response_id)) == alike(whole)


async def test_a_forced_call_goes_on_under_its_grammar(tmp_path: Path) -> None:
    gate, asked = Gate(), {"tools": [WEATHER], "tool_choice": "required"}
    said = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "A b c d e f"}}\n</tool_call>'
    whole = await uninterrupted(tmp_path / "whole", saying(said), **asked)
    response_id, _ = await left(tmp_path / "cut", saying(said, gate, 6), gate, **asked)
    async with (
        running_app(tmp_path / "cut", ScriptedEngine(saying(said))) as server,
        http_client(server) as client,
    ):
        assert alike(await Api(client).replay(response_id)) == alike(whole)


async def test_a_run_survives_one_end_after_another(tmp_path: Path) -> None:
    said = "one two three four five six seven"
    whole = await uninterrupted(tmp_path / "whole", saying(said))
    gate = Gate()
    response_id, seen = await left(tmp_path / "cut", saying(said, gate, 1), gate)
    for after in (2, 3, 5):
        gate = Gate()
        async with (
            live_app(tmp_path / "cut", _HeldBehind(said, gate, after)) as server,
            http_client(server) as client,
            Api(client).follow(response_id, len(wire.events(seen)) - 1) as live,
        ):
            await gate.reached.wait()
            await server.context.runs.drain(0)
            await live.cut()
            seen += live.raw
    async with (
        running_app(tmp_path / "cut", ScriptedEngine(saying(said))) as server,
        http_client(server) as client,
    ):
        assert alike(await Api(client).replay(response_id)) == alike(whole)


class _HeldBehind(ScriptedEngine):
    """Holds a generation that goes on, too: gates in front of a prefix's end are passed otherwise."""

    def __init__(self, said: str, gate: Gate, after: int) -> None:
        super().__init__(saying(said))
        self._gate, self._words = gate, after

    async def generate(self, request: GenerateRequest, place: Place | None = None) -> Any:
        words = 0
        async for chunk in super().generate(request, place):
            if words == self._words:
                self._gate.reached.set()
                await self._gate.release.wait()
            words += 1
            yield chunk


async def test_usage_counts_each_token_once(tmp_path: Path) -> None:
    gate = Gate()
    whole = wire.check_stream(wire.events(await uninterrupted(tmp_path / "whole", saying(MIXED))))
    response_id, _ = await left(tmp_path / "cut", saying(MIXED, gate, 9), gate)
    async with (
        running_app(tmp_path / "cut", ScriptedEngine(saying(MIXED))) as server,
        http_client(server) as client,
    ):
        assert (await Api(client).ended(response_id))["usage"] == whole["usage"]


async def test_a_cancel_while_a_run_waits_to_go_on_keeps_what_was_seen(tmp_path: Path) -> None:
    gate = Gate()
    response_id, seen = await left(tmp_path, saying("one two three", gate, 2), gate, background=True)
    engine = ScriptedEngine(saying("one two three"), max_running=1)
    hold = Gate()

    async def render(self: ScriptedEngine, messages: RenderInput) -> Prompt:
        hold.reached.set()
        await hold.release.wait()
        raise AssertionError("the run was cancelled")

    engine.render = render.__get__(engine)  # type: ignore[method-assign]
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        await hold.reached.wait()
        done = await Api(client).cancel(response_id)
        assert (done["status"], text(done)) == ("cancelled", "one two")
        assert (await Api(client).replay(response_id)).startswith(seen)
        await Api(client).ended(response_id)


async def test_a_run_that_is_deleted_before_it_goes_on_is_dropped_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    response_id, _ = await left(tmp_path, saying("one two three", gate, 2), gate, background=True)
    admit = Storage.admit

    async def late(self: Storage, claim: RunClaim) -> None:
        await self.delete_response("local", response_id, 1)
        await admit(self, claim)

    monkeypatch.setattr(Storage, "admit", late)
    engine = ScriptedEngine(saying("one two three"))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        async with asyncio.timeout(10):
            while server.context.runs.num_active or not await _is_gone(client, response_id):
                await asyncio.sleep(0)
    assert not engine.requests
    assert [entry for entry in caplog.records if entry.name == "antiphon.runs"] == []


async def _is_gone(client: httpx.AsyncClient, response_id: str) -> bool:
    return (await client.get(f"/v1/responses/{response_id}")).status_code == 404


# ------------------------------------------------------------------------------------------------------------
# What cannot go on


async def test_a_run_behind_another_prompt_ends_failed(tmp_path: Path) -> None:
    gate = Gate()
    response_id, seen = await left(tmp_path, saying("one two three", gate, 2), gate)
    engine = ScriptedEngine(saying("one two three"))
    render = engine.render

    async def other(messages: RenderInput) -> Prompt:
        return replace(prompt := await render(messages), ids=prompt.ids[:-1])

    engine.render = other  # type: ignore[method-assign]
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        done = await Api(client).ended(response_id)
        assert done["status"] == "failed" and "prompt" in done["error"]["message"]
        assert (await Api(client).replay(response_id)).startswith(seen)
        assert not engine.requests


async def test_a_run_whose_model_changed_ends_failed_once(tmp_path: Path) -> None:
    gate = Gate()
    response_id, _ = await left(tmp_path, saying("one two three", gate, 2), gate)
    for _ in range(2):
        engine = ScriptedEngine(chat_template="{{ messages[-1]['content'] }}")
        async with running_app(tmp_path, engine) as server, http_client(server) as client:
            done = await Api(client).ended(response_id)
            assert (done["status"], text(done)) == ("failed", "one two")
            assert "has changed" in done["error"]["message"]
            assert not engine.requests


async def test_events_that_come_out_otherwise_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    response_id, _ = await left(tmp_path, saying("one two three", gate, 2), gate)
    other = replace(ITEM_TYPES["message"], prefix="msg_of_another_version_")
    monkeypatch.setitem(ITEM_TYPES, "message", other)
    async with (
        running_app(tmp_path, ScriptedEngine(saying("one two three"))) as server,
        http_client(server) as client,
    ):
        done = await Api(client).ended(response_id)
        assert done["status"] == "failed" and "differently" in done["error"]["message"]


# ------------------------------------------------------------------------------------------------------------
# A run that stops the engine


class _Mortal(ScriptedEngine):
    """Dies of every generation whose prompt holds `poison`, once that has gone on for `after` chunks."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after

    async def generate(self, request: GenerateRequest, place: Place | None = None) -> Any:
        poisonous = "poison" in self.tokenizer.decode(request.prompt_ids)
        num_chunks = 0
        async for chunk in super().generate(request, place):
            if poisonous and num_chunks == self._after:
                self.kill(RuntimeError("poisoned"))
            num_chunks += 1
            yield chunk


@pytest.mark.sampled(2)
@pytest.mark.parametrize("after", [0, 3, 40])
async def test_a_poisonous_run_stops_the_engine_three_times_at_most(tmp_path: Path, after: int) -> None:
    """Those beside it go on, each as if nothing had happened."""
    poison, others = "", []
    for start in range(4):
        async with running_app(tmp_path, _Mortal(after)) as server, http_client(server) as client:
            api = Api(client)
            if start == 0:
                others = [(await api.create("count 400", background=True))["id"] for _ in range(5)]
                poison = (await api.create("say poison " + "word " * 99, background=True))["id"]
            if start < 3:
                await server.life.died.wait()
                continue
            done = await api.ended(poison)
            assert done["status"] == "failed" and "3 times" in done["error"]["message"]
            for other in others:
                done = await api.ended(other)
                assert done["status"] == "completed"
                assert text(done) == " ".join(map(str, range(1, 401)))
            assert server.life.phase == "ready"


# ------------------------------------------------------------------------------------------------------------
# Tools


@pytest.mark.parametrize(
    ("name", "asked", "answer"),
    [
        ("calculator", 'call calculator {"expression": "2+3"}', "5"),
        ("save_note", 'call save_note {"note": "five"}', None),
    ],
)
async def test_a_call_under_way_is_made_again_only_if_that_does_no_harm(
    tmp_path: Path, name: str, asked: str, answer: str | None
) -> None:
    gate = Gate()

    async def run(**arguments: Any) -> str:
        gate.reached.set()
        await gate.release.wait()
        raise AssertionError("not to be reached")

    held = {**tools.BUILTIN, name: replace(tools.BUILTIN[name], run=run)}
    async with live_app(tmp_path, registry=held) as server, http_client(server) as client:
        begun = await Api(client).create(asked, tools=[BUILTIN], background=True)
        await gate.reached.wait()
        await server.context.runs.drain(0)
    async with running_app(tmp_path) as server, http_client(server) as client:
        done = await Api(client).ended(begun["id"])
        assert done["status"] == "completed"
        [made] = [item for item in done["output"] if item["type"] == "mcp_call"]
        assert made["output"] == answer
        assert (made["status"] == "failed") is (answer is None)
        assert ("not known" in str(made["error"])) is (answer is None)


async def test_outputs_that_a_stopped_process_had_claimed_are_used(tmp_path: Path) -> None:
    """The claim was committed, the items were not."""
    async with live_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        begun = await api.create(call(), tools=[WEATHER], background=True, await_tool_outputs=True)
        now = await api.waits(begun["id"])
        await server.context.runs.drain(0)
        await api.outputs(begun["id"], {now["pending_tool_calls"][0]["call_id"]: "rainy"})
        assert await server.context.storage.claim(begun["id"]) is not None
    async with running_app(tmp_path) as server, http_client(server) as client:
        done = await Api(client).ended(begun["id"])
        assert (done["status"], text(done)) == ("completed", "The tool said: rainy")


# ------------------------------------------------------------------------------------------------------------
# The shipped model


TINY = Path(tools.__file__).parents[1] / "engine" / "tiny" / "checkpoint"


class _Watched(LocalEngine):
    """Stands still after a number of tokens."""

    def __init__(self, gate: Gate | None, after: int = 0) -> None:
        super().__init__(TINY, name="antiphon-tiny", num_threads=1)
        self._gate, self._tokens = gate, after

    async def generate(self, request: GenerateRequest, place: Place | None = None) -> Any:
        num_tokens = 0
        async for chunk in super().generate(request, place):
            if self._gate is not None and num_tokens >= self._tokens:
                self._gate.reached.set()
                await self._gate.release.wait()
            num_tokens += len(chunk.token_ids)
            yield chunk


async def test_the_shipped_model_says_what_it_would_have_said(tmp_path: Path) -> None:
    """Sampled, cut behind the first token, the eighth and the fortieth."""
    asked: Json = {"seed": 11, "temperature": 1.0, "max_output_tokens": 400, "ignore_eos": True}
    question = "Tell me something about the weather."

    async def said(server: Running) -> Streamed:
        async with http_client(server) as client:
            return await Api(client).stream(question, **asked)

    async with running_app(tmp_path / "whole", _Watched(None)) as server:
        whole = await said(server)
    for after in (1, 8, 40):
        gate, folder = Gate(), tmp_path / str(after)
        async with running_app(folder, _Watched(gate, after)) as server, http_client(server) as client:
            begun = await Api(client).create(question, background=True, **asked)
            await gate.reached.wait()
        async with running_app(folder, _Watched(None)) as server, http_client(server) as client:
            done = await Api(client).ended(begun["id"])
        assert text(done) == text(whole.response)
        assert done["usage"] == whole.response["usage"]


# ------------------------------------------------------------------------------------------------------------
# Log probabilities


async def test_log_probabilities_come_back_from_the_log_as_they_were() -> None:
    engine = ScriptedEngine()
    await engine.start()
    sampling = _sampling(logprobs=3)
    request = GenerateRequest("r", tuple(engine.tokenizer.encode("say h\u00e9 \U0001f600")), sampling)
    entries = [entry async for chunk in engine.generate(request) for entry in chunk.logprobs]
    assert len(entries) > 8
    assert list(load_logprobs(dump_logprobs(entries))) == entries
    await engine.close()


def _sampling(**fields: Any) -> Any:
    from engine import SamplingParams

    return SamplingParams(seed=1, max_tokens=100, **fields)
