"""An engine over other servers: the same tokens and text, whatever becomes of the servers on the way."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import (
    CallArgs,
    CallEnd,
    CallStart,
    Chunk,
    Constraint,
    ConstraintError,
    DeadlineExceeded,
    Delta,
    Done,
    Engine,
    EngineDead,
    EngineUnavailable,
    GenerateRequest,
    LoadError,
    LocalEngine,
    Prompt,
    QueueFull,
    ReaderParams,
    RenderInput,
    RequestError,
    RequestFailed,
    SamplingParams,
    ScriptedEngine,
    Text,
    ToolShape,
    UpstreamEngine,
)
from engine.backends.generation import LONG_SCORES, Generation
from engine.backends.upstream_peers import Peer
from engine.backends.upstream_wire import Answer
from tests.support.running import live_app
from tests.support.upstreams import EOS, TINY, TOKENIZER, Breakable, Plan, breakable, scripted_folder, until

TEXT = "abcdefghijklmnopqrstuvwxyz"  # a token a letter, and no letter twice


@asynccontextmanager
async def over(folder: Path, *servers: Breakable | str, **settings: Any) -> AsyncIterator[UpstreamEngine]:
    """An engine over servers, started; it leaves nothing behind."""
    urls = [server if isinstance(server, str) else server.url for server in servers]
    engine = UpstreamEngine(
        folder, urls, **{"patience_s": 5.0, "timeout_s": 5.0, "probe_every_s": 0.01, **settings}
    )
    try:
        await engine.start()
        yield engine
        engine.check_integrity()
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    finally:
        await engine.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return scripted_folder(tmp_path / "model")


def asked(prompt: Prompt | Sequence[int] = tuple(b"say it"), **changes: Any) -> GenerateRequest:
    """A greedy request; `changes` are of its sampling where that has such a field."""
    ids, starts_in = (prompt.ids, prompt.starts_in) if isinstance(prompt, Prompt) else (tuple(prompt), "text")
    names = SamplingParams.__dataclass_fields__
    sampling = {key: changes.pop(key) for key in list(changes) if key in names}
    params = SamplingParams(**{"seed": 1, "max_tokens": 100, "temperature": 0.0, **sampling})
    return replace(
        GenerateRequest("r", ids, params, ReaderParams(calls=True, starts_in=starts_in)), **changes
    )


async def chunks(engine: Engine, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


def text(found: Sequence[Chunk]) -> str:
    return "".join(delta.text for chunk in found for delta in chunk.deltas if isinstance(delta, Text))


def tokens(found: Sequence[Chunk]) -> list[int]:
    return [token for chunk in found for token in chunk.token_ids]


def deltas(found: Sequence[Chunk]) -> list[Delta]:
    return [delta for chunk in found for delta in chunk.deltas]


def all_up(engine: UpstreamEngine) -> bool:
    assert engine._peers is not None
    return all(peer.facts for peer in engine._peers.all)


# ------------------------------------------------------------------------------------------------------------
# The same as without another server in between


async def test_greedy_and_seeded_answers_are_those_of_the_engine_behind(tmp_path: Path) -> None:
    local = LocalEngine(TINY, num_threads=1)
    async with (
        live_app(tmp_path, local, served_model_name=["tiny"]) as server,
        over(TINY, server.base_url + "/v1") as engine,
    ):
        assert engine.info.max_model_len == local.info.max_model_len
        assert engine.info.defaults == local.info.defaults and engine.info.dialect == "hermes"
        assert engine.info.capabilities == {"logprobs", "token_ids"}
        for question in ("What is the capital of France?", "Count to five."):
            prompt = await engine.render(RenderInput([{"role": "user", "content": question}]))
            for temperature in (0.0, 0.9):
                request = asked(prompt, temperature=temperature, logprobs=2, max_tokens=40, seed=7)
                there, here = await chunks(local, request), await chunks(engine, request)
                assert tokens(here) == tokens(there) and text(here) == text(there)
                assert here[-1].deltas[-1] == there[-1].deltas[-1]
                assert [entry for chunk in here for entry in chunk.logprobs] == [
                    entry for chunk in there for entry in chunk.logprobs
                ]


async def test_a_prompt_is_scored_there(folder: Path, tmp_path: Path) -> None:
    scripted = ScriptedEngine()
    async with live_app(tmp_path, scripted) as server, over(folder, server.base_url) as engine:
        for max_tokens in (0, 3):
            request = asked(tuple(b"say abcdef"), prompt_logprobs=2, logprobs=2, max_tokens=max_tokens)
            there, here = await chunks(scripted, request), await chunks(engine, request)
            assert tokens(here) == tokens(there) and len(tokens(here)) == max_tokens
            if max_tokens:
                assert here[0].prompt_logprobs == there[0].prompt_logprobs
            scores = here[0].prompt_logprobs
            assert scores is not None and scores[0] is None and len(scores) == len(request.prompt_ids)


async def test_scores_of_a_long_prompt_are_read_beside_the_loop(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop: dict[str, list[bool]] = {"Answer": [], "Generation": []}
    loop = threading.get_ident()

    def watched(kind: type[Any]) -> Callable[..., Any]:
        read = kind.read

        def watching(*given: Any) -> Any:
            on_loop[kind.__name__].append(threading.get_ident() == loop)
            return read(*given)

        return watching

    for kind in (Answer, Generation):
        monkeypatch.setattr(kind, "read", watched(kind))
    prompt = tuple(b"say it" * LONG_SCORES)
    async with breakable(TEXT) as [server], over(folder, server) as engine:
        first, *_ = found = await chunks(engine, asked(prompt, prompt_logprobs=1))
    assert first.prompt_logprobs is not None and text(found) == TEXT
    assert [entry and entry.token_id for entry in first.prompt_logprobs] == [None, *prompt[1:]]
    for first_on_loop, *others in on_loop.values():  # what comes behind the scores is little
        assert not first_on_loop and others and all(others)


async def test_stop_strings_end_here_and_the_answer_there(folder: Path, tmp_path: Path) -> None:
    async with (
        live_app(tmp_path, ScriptedEngine(tick_s=0.001)) as server,
        over(folder, server.base_url) as engine,
    ):
        request = asked(tuple(b"count 2000"), stop=("12",), max_tokens=4000)
        found = await chunks(engine, request)
        assert text(found) == "1 2 3 4 5 6 7 8 9 10 11 "
        assert found[-1].deltas[-1] == Done("stop", "12")
        running = server.context.models.get(None).engine
        await until(lambda: running.stats().running == 0)
        assert running.stats().output_tokens_total < 2000


async def test_calls_are_read_here(folder: Path, tmp_path: Path) -> None:
    async with live_app(tmp_path, ScriptedEngine()) as server, over(folder, server.base_url) as engine:
        prompt = await engine.render(RenderInput([{"role": "user", "content": 'call f {"a": 1}'}]))
        start, *arguments, end, done = deltas(await chunks(engine, asked(prompt)))
        assert (start, end, done) == (CallStart("f"), CallEnd(), Done("stop"))
        assert "".join(part.text for part in arguments if isinstance(part, CallArgs)) == '{"a": 1}'


async def test_stop_tokens_and_limits_are_told_apart(folder: Path) -> None:
    async with breakable(TEXT) as [server], over(folder, server) as engine:
        assert deltas(await chunks(engine, asked()))[-1] == Done("stop")
        assert deltas(await chunks(engine, asked(max_tokens=4)))[-1] == Done("length")
        server.output = [*TOKENIZER.encode("ab"), EOS]
        assert deltas(await chunks(engine, asked(ignore_eos=True, stop_token_ids=(EOS,))))[-1] == Done(
            "stop", EOS
        )


async def test_every_sampling_field_is_sent(folder: Path) -> None:
    """Unset ones too: a server's own defaults may differ."""
    async with breakable(TEXT) as [server], over(folder, server, api_key="k") as engine:
        await chunks(engine, asked(owner="a", cache_salt="s", priority=3, logit_bias=((5, -1.0),), top_k=0))
        await chunks(engine, asked(owner="b", ignore_eos=True, stop_token_ids=(9,), top_k=4, min_tokens=9))
        first, second = server.asked
        assert all(headers["authorization"] == "Bearer k" for headers in server.headers)
    salts = first.pop("cache_salt"), second["cache_salt"]
    assert len(set(salts)) == 2 and "a" != salts[0] != "s"
    assert first == {
        "model": "m", "prompt": list(b"say it"), "stream": True, "return_token_ids": True, "max_tokens": 100,
        "min_tokens": 0, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "ignore_eos": False,
        "stop_token_ids": list(TOKENIZER.eos_token_ids), "logit_bias": {"5": -1.0}, "priority": 3,
    }  # fmt: skip
    assert (second["ignore_eos"], second["stop_token_ids"]) == (True, [9])
    assert (second["top_k"], second["min_tokens"]) == (4, 9)


async def test_choices_and_generations_do_not_draw_alike(folder: Path) -> None:
    async with breakable(TEXT) as [server], over(folder, server) as engine:
        for choice, generation in ((0, 0), (1, 0), (0, 1)):
            await chunks(engine, asked(choice=choice, generation=generation, seed=5, temperature=1.0))
        seeds = [body["seed"] for body in server.asked]
    assert seeds[0] == 5 and len(set(seeds)) == 3 and all(0 <= seed < 1 << 63 for seed in seeds)


# ------------------------------------------------------------------------------------------------------------
# Going on


FAULTS = [
    *(Plan(tokens=9, ending=ending) for ending in ("cut", "stall", "error", "garbage", "unfinished")),
    *(Plan(tokens=0, ending=ending) for ending in ("cut", "error")),
    Plan(tokens=len(TEXT) + 1, ending="cut"),  # all was said, and then not that it was all
    *(Plan(status) for status in (500, 502, 401, 404)),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize("others", [0, 1])
async def test_an_answer_goes_on_where_it_broke_off(folder: Path, fault: Plan, others: int) -> None:
    """At another server, or at the same one when it is up again: no token twice, none missing."""
    async with breakable(TEXT, 1 + others) as servers, over(folder, *servers, timeout_s=0.1) as engine:
        first = await owner_of(engine, servers)
        first.plans.append(fault)
        found = await chunks(engine, asked(logprobs=1))
        assert tokens(found) == [*TOKENIZER.encode(TEXT), EOS] and text(found) == TEXT
        assert found[-1].deltas[-1] == Done("stop")
        assert [entry.token_id for chunk in found for entry in chunk.logprobs] == tokens(found)
        bodies = [body for server in servers for body in server.asked[1 if server is first else 0 :]]
        if fault.status == 200 and fault.tokens == 9:
            behind = next(body for body in bodies if len(body["prompt"]) > len(b"say it"))
            given = behind["prompt"][len(b"say it") :]
            assert given == TOKENIZER.encode(TEXT)[: len(given)] and behind["max_tokens"] == 100 - len(given)


async def owner_of(engine: UpstreamEngine, servers: Sequence[Breakable]) -> Breakable:
    """The server that requests as `asked` makes them go to."""
    await chunks(engine, asked())
    return next(server for server in servers if server.asked)


async def test_no_mix_of_faults_loses_or_repeats_a_token(folder: Path) -> None:
    draw = random.Random(11)
    whole = [*TOKENIZER.encode(TEXT), EOS]

    async def one(engine: UpstreamEngine, number: int) -> None:
        given = draw.randrange(0, 9)
        found: list[Chunk] = []
        try:
            prefix = (tuple(whole[:given]),) if given else ()
            async for chunk in engine.generate(asked(owner=str(number), prefix=prefix)):
                found.append(chunk)
        except RequestFailed:
            assert tokens(found) == whole[: len(tokens(found))]
        else:
            assert tokens(found) == whole and text(found) == TEXT

    async with breakable(TEXT, 3) as servers, over(folder, *servers, timeout_s=0.2) as engine:
        for server in servers:
            faults = [replace(draw.choice(FAULTS), tokens=draw.randrange(20)) for _ in range(20)]
            server.plans.extend(draw.sample([*faults, *[Plan()] * 20], 40))
        await asyncio.gather(*(one(engine, number) for number in range(60)))
        assert sum(len(server.asked) for server in servers) > 80


async def test_a_request_that_fails_everywhere_is_given_up(folder: Path) -> None:
    async with breakable(TEXT, 2) as servers, over(folder, *servers) as engine:
        for server in servers:
            server.plans.extend([Plan(tokens=2, ending="error")] * 4)
        found: list[Chunk] = []
        with pytest.raises(RequestFailed, match="as planned"):
            async for chunk in engine.generate(asked()):
                found.append(chunk)
        assert text(found) == TEXT[:8]  # four times two tokens
        for server in servers:
            server.plans.clear()
        assert text(await chunks(engine, asked())) == TEXT


async def test_a_prefix_is_replayed_and_gone_on_from(folder: Path) -> None:
    ids = TOKENIZER.encode(TEXT)
    async with breakable(TEXT) as [server], over(folder, server) as engine:
        whole = await chunks(engine, asked(max_tokens=12))
        request = asked(
            prefix=(tuple(ids[:3]), tuple(ids[3:5])), max_tokens=12, min_tokens=8, temperature=0.5
        )
        found = await chunks(engine, request)
        assert [chunk.replayed for chunk in found] == [True, True, False, False, False]
        assert tokens(found) == tokens(whole) and text(found) == text(whole)
        body = server.asked[-1]
        assert body["prompt"] == [*request.prompt_ids, *ids[:5]]
        assert (body["max_tokens"], body["min_tokens"]) == (7, 3)
        assert body["seed"] != request.sampling.seed
        assert "exact_resume" not in engine.info.capabilities


async def test_a_prefix_that_had_ended_asks_nobody(folder: Path) -> None:
    ids = tuple(TOKENIZER.encode(TEXT))
    async with breakable(TEXT) as [server], over(folder, server) as engine:
        for request, end in (
            (asked(prefix=((*ids[:3], EOS),)), Done("stop")),
            (asked(prefix=(ids[:4],), max_tokens=4), Done("length")),
            (asked(prefix=(ids[:4],), stop=("cd",)), Done("stop", "cd")),
        ):
            assert (await chunks(engine, request))[-1].deltas[-1] == end
        assert server.asked == []


# ------------------------------------------------------------------------------------------------------------
# Health


async def test_a_server_that_went_away_is_asked_again_when_it_is_back(folder: Path) -> None:
    async with breakable(TEXT, 2) as servers, over(folder, *servers) as engine:
        first = await owner_of(engine, servers)
        other = next(server for server in servers if server is not first)
        await first.close()
        assert text(await chunks(engine, asked())) == TEXT and len(other.asked) == 1
        await other.close()
        impatient = asyncio.create_task(chunks(engine, asked()))
        await other.open()
        assert text(await impatient) == TEXT  # it waited
        known = len(first.bodies)
        await first.open()
        await until(lambda: len(first.bodies) > known + 2)
        await until(lambda: all_up(engine))
        assert text(await chunks(engine, asked())) == TEXT and len(first.asked) == 2


async def test_nobody_up_is_no_death(folder: Path) -> None:
    async with breakable(TEXT) as [server], over(folder, server, patience_s=0.0) as engine:
        await server.close()
        for _ in range(2):
            with pytest.raises(EngineUnavailable):
                await chunks(engine, asked())
        dead = asyncio.ensure_future(engine.dead())
        await asyncio.sleep(0)
        assert not dead.done()
        dead.cancel()
        await server.open()
        await until(lambda: all_up(engine))
        assert text(await chunks(engine, asked())) == TEXT


async def test_one_that_came_back_as_another_stays_out(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with breakable(TEXT, 2) as servers, over(folder, *servers) as engine:
        first = await owner_of(engine, servers)
        for change in ({"id": "other"}, {"max_model_len": 64}):
            first.card |= change
            first.plans.append(Plan(500))
            await chunks(engine, asked())
            known = len(first.bodies)
            await until(lambda: len(first.bodies) > known + 4)  # noqa: B023
            assert text(await chunks(engine, asked())) == TEXT
            first.card |= {"id": "m", "max_model_len": 4096}
            await until(lambda: all_up(engine))
    assert "different models" in caplog.text and "offers less" in caplog.text


async def test_one_that_answers_nonsense_while_it_restarts_is_asked_again(folder: Path) -> None:
    async with breakable(TEXT) as [server], over(folder, server) as engine:
        server.plans.append(Plan(500))
        server.listing = 400
        known = server.listed
        waiting = asyncio.create_task(chunks(engine, asked()))
        await until(lambda: server.listed > known + 2)
        server.listing = 200
        assert text(await waiting) == TEXT and all_up(engine)


@pytest.mark.parametrize("value", ["01-x ", "caf\xe9"])
async def test_a_header_that_cannot_be_sent_fails_its_request_and_no_server(folder: Path, value: str) -> None:
    async with breakable(TEXT, 2) as servers, over(folder, *servers) as engine:
        with pytest.raises(RequestFailed, match="cannot be sent"):
            await chunks(engine, asked(trace_headers=(("traceparent", value),)))
        assert all_up(engine) and not any(server.asked for server in servers)


async def test_a_header_that_a_server_finds_too_large_fails_its_request_and_no_server(folder: Path) -> None:
    async with breakable(TEXT, 2) as servers, over(folder, *servers) as engine:
        for server in servers:
            server.plans.append(Plan(431))
        with pytest.raises(RequestError, match="upstream refused"):
            await chunks(engine, asked(trace_headers=(("tracestate", "a=" + "b" * 500),)))
        assert all_up(engine) and sum(len(server.asked) for server in servers) == 1


def event(part: str, reason: str | None = None) -> bytes:
    choice = {"token_ids": TOKENIZER.encode(part), "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


async def answering(engine: UpstreamEngine, answers: Iterator[AsyncIterator[bytes]]) -> None:
    """From now on the only server's answers are these."""
    assert engine._peers is not None
    (peer,) = engine._peers.all
    await peer.close()
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=next(answers)))
    peer._client = httpx.AsyncClient(base_url=peer.url, transport=transport)


async def test_silence_counts_as_down_only_where_others_hear_nothing_either(folder: Path) -> None:
    silent, heard = asyncio.Event(), asyncio.Event()

    async def nothing() -> AsyncIterator[bytes]:
        silent.set()
        await heard.wait()
        if heard.is_set():
            raise httpx.ReadTimeout("")
        yield b""

    async def something() -> AsyncIterator[bytes]:
        await silent.wait()
        yield event("ab")
        heard.set()
        yield event("c", "length")

    settings: dict[str, Any] = {"probe_every_s": 60.0, "patience_s": 0.0}
    async with breakable(TEXT) as [server], over(folder, server, **settings) as engine:
        await answering(engine, iter([nothing(), something(), something(), nothing()]))
        one, other = await asyncio.gather(chunks(engine, asked()), chunks(engine, asked()))
        assert text(one) == text(other) == "abc"  # the first one when it was asked again
        assert all_up(engine)
        with pytest.raises(EngineUnavailable):
            await chunks(engine, asked())
        assert not all_up(engine)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
async def test_an_answer_may_be_cut_anywhere(folder: Path, end: bytes) -> None:
    async def pieces(size: int) -> AsyncIterator[bytes]:
        data = b": a remark\n\n" + event("ab") + event("") + event("cd", "length") + b"data: [DONE]\n\n"
        data = data.replace(b"\n", end)
        for at in range(0, len(data), size):
            yield data[at : at + size]

    async with breakable(TEXT) as [server], over(folder, server) as engine:
        sizes = (1, 2, 7, 64, 1000)
        await answering(engine, iter([pieces(size) for size in sizes]))
        assert [text(await chunks(engine, asked())) for _ in sizes] == ["abcd"] * len(sizes)


async def test_a_busy_server_is_asked_again_later(folder: Path) -> None:
    async with breakable(TEXT) as [server], over(folder, server) as engine:
        server.plans.extend([Plan(429, {"retry-after": "0"}), Plan(429, {"retry-after": "0"})])
        assert text(await chunks(engine, asked())) == TEXT and len(server.asked) == 3
    async with breakable(TEXT) as [server], over(folder, server, patience_s=0.0) as engine:
        server.plans.append(Plan(429, {"retry-after": "30"}))
        with pytest.raises(QueueFull):
            await chunks(engine, asked())


async def test_a_request_that_a_server_refuses_is_the_callers_fault(folder: Path) -> None:
    async with breakable(TEXT) as [server], over(folder, server) as engine:
        server.plans.append(Plan(400))
        with pytest.raises(RequestError, match="as planned"):
            await chunks(engine, asked())
        assert len(server.asked) == 1 and text(await chunks(engine, asked())) == TEXT


# ------------------------------------------------------------------------------------------------------------
# Who is asked


async def test_prompts_that_begin_alike_go_to_the_same_server(folder: Path) -> None:
    beginnings = [tuple(b"%03d" % number) * 100 for number in range(48)]  # which server has one is a draw
    async with breakable(TEXT, 3) as servers, over(folder, *servers) as engine:
        for beginning in beginnings:
            for end in (b"a", b"bb"):
                await chunks(engine, asked((*beginning, *end)))
        loads = [len(server.asked) for server in servers]
        for server in servers:
            seen = [tuple(body["prompt"][:300]) for body in server.asked]
            assert seen[::2] == seen[1::2]
        assert sum(loads) == 96 and min(loads) >= 4
        for owner in "abcdefghijkl":
            await chunks(engine, asked(beginnings[0], owner=owner))
        assert sum(len(server.asked) > load for server, load in zip(servers, loads, strict=True)) > 1


async def test_a_server_with_much_more_to_do_than_the_others_is_passed_over(folder: Path) -> None:
    async with breakable(TEXT, 2) as servers, over(folder, *servers) as engine:
        for server in servers:
            server.plans.extend([Plan(tokens=3, ending="stall")] * 20)
        requests = [engine.generate(asked()) for _ in range(20)]
        for request in requests:
            await anext(request)
        loads = sorted(len(server.asked) for server in servers)
        assert sum(loads) == 20 and loads[0] >= 5
        for request in requests:
            await request.aclose()


# ------------------------------------------------------------------------------------------------------------
# Ends


async def test_an_abandoned_request_closes_its_connection_at_once(folder: Path) -> None:
    async with breakable(TEXT) as [server], over(folder, server) as engine:
        server.plans.append(Plan(tokens=6, ending="stall"))
        async with aclosing(engine.generate(asked())) as stream:
            await anext(stream)
        await asyncio.wait_for(server.gone.wait(), 5)


async def test_connections_are_used_again(folder: Path) -> None:
    async with breakable(TEXT) as [server], over(folder, server) as engine:
        for _ in range(5):
            await chunks(engine, asked())
        assert len(server._busy) == 1


async def test_a_deadline_ends_a_request(folder: Path) -> None:
    async with breakable(TEXT) as [server], over(folder, server) as engine:
        server.plans.append(Plan(tokens=3, ending="stall"))
        with pytest.raises(DeadlineExceeded):
            await chunks(engine, asked(deadline=time.monotonic() + 1))  # by which it has come to the server
        await asyncio.wait_for(server.gone.wait(), 5)


async def test_close_ends_what_runs(folder: Path) -> None:
    async with breakable(TEXT) as [server], over(folder, server) as engine:
        server.plans.extend([Plan(tokens=3, ending="stall"), Plan(429, {"retry-after": "30"})])
        running = asyncio.create_task(chunks(engine, asked()))
        await server.stalled.wait()
        waiting = asyncio.create_task(chunks(engine, asked()))
        await until(lambda: len(server.asked) == 2)
        await engine.close()
        for request in (running, waiting):
            with pytest.raises(EngineDead):
                await request
        with pytest.raises(EngineDead):
            await chunks(engine, asked())


async def test_a_refusal_read_while_the_engine_closes_is_not_waited_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with breakable(TEXT) as [server], over(folder, server, patience_s=60.0) as engine:

        def rest(peer: Peer, seconds: float | None) -> None:
            """The first step of close() has run in the very turn of the loop in which the refusal came."""
            leave_alone(peer, seconds)
            monkeypatch.setattr(engine, "_closed", True)

        leave_alone = Peer.rest
        monkeypatch.setattr(Peer, "rest", rest)
        server.plans.append(Plan(429, {"retry-after": "30"}))
        with pytest.raises(EngineDead):
            await asyncio.wait_for(chunks(engine, asked()), 10)
        monkeypatch.undo()


async def test_only_so_many_wait_for_their_first_token(folder: Path) -> None:
    async with breakable(TEXT) as [server], over(folder, server, max_waiting=1) as engine:
        server.plans.append(Plan(tokens=0, ending="stall"))
        first = asyncio.create_task(chunks(engine, asked()))
        await server.stalled.wait()
        assert (engine.stats().waiting, engine.stats().running) == (1, 0)
        with pytest.raises(QueueFull):
            await chunks(engine, asked())
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert text(await chunks(engine, asked())) == TEXT


async def test_no_constraint_is_taken(folder: Path) -> None:
    constraint = Constraint((ToolShape("f", "{}"),))
    async with breakable(TEXT) as [server], over(folder, server) as engine:
        assert "grammar" not in engine.info.capabilities
        with pytest.raises(ConstraintError):
            await engine.check(constraint)
        with pytest.raises(ConstraintError):
            await chunks(engine, asked(constraint=constraint))


# ------------------------------------------------------------------------------------------------------------
# The start


async def test_servers_that_cannot_serve_are_refused_in_a_line(folder: Path) -> None:
    async def refusal(*servers: Breakable | str, **settings: Any) -> str:
        with pytest.raises(LoadError) as caught:
            async with over(folder, *servers, patience_s=0.0, **settings):
                pass
        assert "\n" not in str(caught.value)
        return str(caught.value)

    async with breakable(TEXT) as [server], breakable(TEXT, model="n") as [other]:
        assert "does not serve other" in await refusal(server, upstream_model="other")
        assert "different models" in await refusal(server, other)
        server.gives_ids = False
        assert "no token ids" in await refusal(server)
        server.gives_ids = True
        scripted = folder
        (folder / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
        assert "tokenizes otherwise" in await refusal(server)
        scripted_folder(scripted)
        await other.close()
        assert "no upstream answers" in await refusal(other)
        await other.open()
    for url in ("localhost:8000", "http://", "http://a:b", "ftp://a"):
        assert "is no http URL" in await refusal(url)
    assert "at least one upstream" in await refusal()


async def test_one_server_that_is_up_is_enough_to_start(folder: Path) -> None:
    async with breakable(TEXT, 2) as [up, down]:
        await down.close()
        async with over(folder, up, down) as engine:
            assert text(await chunks(engine, asked())) == TEXT
            await down.open()
            await until(lambda: all_up(engine))


async def test_what_a_server_does_not_offer_is_no_capability(folder: Path, tmp_path: Path) -> None:
    async with breakable(TEXT) as [server], over(folder, server, max_model_len=100) as engine:
        assert engine.info.capabilities == {"logprobs", "priority", "token_ids"}
        assert engine.info.max_model_len == 100
    async with breakable(TEXT, owned_by="sglang") as [server], over(folder, server) as engine:
        await chunks(engine, asked(priority=3))
        assert engine.info.capabilities == {"logprobs", "token_ids"}
        assert "priority" not in server.asked[-1]
