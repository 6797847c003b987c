"""An engine in another process: the same chunks as with one in this process, and what its end leaves behind.

Host and client are in one process here, with the socket between them.
"""

from __future__ import annotations

import asyncio
import math
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import (
    CallArgs,
    Chunk,
    Constraint,
    ConstraintError,
    DeadlineExceeded,
    Engine,
    EngineDead,
    EngineError,
    EngineHost,
    EngineLine,
    EngineUnavailable,
    GenerateRequest,
    LocalEngine,
    Place,
    PoolingConfig,
    PoolingEngine,
    PromptTooLong,
    QueueFull,
    ReaderParams,
    Reasoning,
    RemoteEngine,
    RemotePooling,
    RenderInput,
    RequestError,
    RequestFailed,
    SamplingParams,
    Say,
    ScriptedEngine,
    Shape,
    Text,
    ToolShape,
    Wait,
)
from engine.backends import remote_host, remote_wire
from engine.backends.generation import LONG_SCORES
from engine.backends.remote_host import TokenEngine
from engine.backends.remote_wire import (
    error_form,
    message,
    output_message,
    read_error,
    read_line,
    read_output,
)
from engine.backends.script import Script, Step
from engine.backends.scripted_tokens import scripted_tokenizer
from engine.step import RowLogprobs, RowOutput
from engine.types import Done, Timing
from tests.support.pooling_checkpoints import make_embedder

TOKENIZER = scripted_tokenizer()
WEATHER = ToolShape("weather", '{"type": "object", "properties": {"city": {"type": "string"}}}')
PLAIN = ReaderParams(dialect=False)
CALLS = ReaderParams(calls=True)


def asked(text: str, *, reader: ReaderParams = CALLS, **changes: Any) -> GenerateRequest:
    """A request of the scripted engine; `changes` are of its sampling where that has such a field."""
    names = SamplingParams.__dataclass_fields__
    sampling = {key: changes.pop(key) for key in list(changes) if key in names}
    prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    params = SamplingParams(**{"seed": 1, "max_tokens": 400, **sampling})
    return replace(GenerateRequest("r", tuple(TOKENIZER.encode(prompt)), params, reader), **changes)


@asynccontextmanager
async def hosted(path: Path, engine: TokenEngine) -> AsyncIterator[EngineHost]:
    """An engine that has started, served."""
    await engine.start()
    host = EngineHost(path, engine)
    await host.start()
    try:
        yield host
    finally:
        await host.close()
        await engine.close()


@asynccontextmanager
async def remote(path: Path, model: Path | None = None, **settings: Any) -> AsyncIterator[RemoteEngine]:
    """A client of it, started; it leaves nothing behind."""
    engine = RemoteEngine(EngineLine(path), model, **{"num_servers": 1, **settings})
    try:
        await engine.start()
        yield engine
        engine.check_integrity()
        assert engine.admission.num_places == 0
    finally:
        await engine.close()


async def chunks_of(engine: Engine, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


def whole(chunks: list[Chunk]) -> tuple[Any, ...]:
    """What chunks say, however they are cut."""
    text = "".join(delta.text for chunk in chunks for delta in chunk.deltas if isinstance(delta, Text))
    others: list[Any] = []
    for delta in (delta for chunk in chunks for delta in chunk.deltas if not isinstance(delta, Text)):
        if isinstance(delta, CallArgs | Reasoning) and others and type(others[-1]) is type(delta):
            others[-1] = replace(delta, text=others[-1].text + delta.text)
        else:
            others.append(delta)
    logprobs = [row for chunk in chunks for row in chunk.logprobs]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    thoughts = sum(chunk.reasoning_tokens for chunk in chunks)
    cached = [chunk.cached_tokens for chunk in chunks if chunk.cached_tokens is not None]
    scored = [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None]
    return text, others, logprobs, tokens, thoughts, cached, scored


# ------------------------------------------------------------------------------------------------------------
# The same as without

CALL = 'call weather {"city": "Oslo"}'
REQUESTS: dict[str, GenerateRequest] = {
    "text": asked("say The cat sat on the mat."),
    "logprobs": asked("say cat", logprobs=3),
    "scored prompt": asked("say cat", prompt_logprobs=2, logprobs=0),
    "a call": asked(CALL),
    "one call of two": asked(CALL + "\n" + CALL, reader=ReaderParams(calls=True, max_calls=1)),
    "a thought": asked("think one two then say three"),
    "a stop string": asked("say one two three four", stop=("two",)),
    "a limit": asked("count 100", max_tokens=17),
    "no tokens": asked("say cat", max_tokens=0),
    "a forced call": asked(
        "say no", constraint=Constraint((WEATHER,), 1), reader=ReaderParams(calls=True, tools=(WEATHER,))
    ),
    "a shape": asked(
        "say purple",
        constraint=Constraint(answer=Shape("choice", '["red", "purple"]')),
        reader=ReaderParams(shaped=True),
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_chunks_say_the_same_as_from_the_engine_itself(name: str, tmp_path: Path) -> None:
    request = REQUESTS[name]
    engine = ScriptedEngine()
    async with hosted(tmp_path / "s", engine), remote(tmp_path / "s") as client:
        expected = await chunks_of(engine, request)
        got = await chunks_of(client, request)
        assert whole(got) == whole(expected)
        tokens = [token for chunk in expected for token in chunk.token_ids]
        for cut in (1, len(tokens) // 2, len(tokens)):
            if not 0 < cut <= len(tokens) or request.sampling.prompt_logprobs is not None:
                continue
            logprobs = tuple(row for chunk in expected for row in chunk.logprobs)[:cut]
            again = replace(
                request,
                prefix=(tuple(tokens[:cut]),),
                prefix_logprobs=(logprobs,) if logprobs else (),
            )
            gone_on = await chunks_of(client, again)
            assert whole(gone_on)[:5] == whole(expected)[:5]
            assert gone_on[0].replayed


async def test_what_the_engine_says_of_itself_arrives(tmp_path: Path) -> None:
    path = tmp_path / "s"
    engine = ScriptedEngine(max_running=7)
    async with hosted(path, engine), remote(path, num_servers=2, max_waiting=9) as client:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert client.info == engine.info
        assert client.admission.max_running == 7
        messages = RenderInput([{"role": "user", "content": "Hello!"}])
        assert (await client.render(messages)).ids == (await engine.render(messages)).ids
        assert await client.detokenize(await client.tokenize("déjà vu")) == "déjà vu"
        assert client.token_text(65) == "A"
        await chunks_of(client, asked("say one two"))
        async with asyncio.timeout(5):
            while client.stats() != engine.stats():
                await asyncio.sleep(0.01)
        assert client.stats().output_tokens_total > 0
        assert client.gpu() == {} and await client.saved_names() == frozenset()
        places = [client.admission.enter() for _ in range(7 + 5)]  # half of nine, rounded up, wait
        with pytest.raises(QueueFull):
            client.admission.enter()
        for place in places:
            place.leave()


async def test_errors_are_those_of_the_engine(tmp_path: Path) -> None:
    async with hosted(tmp_path / "s", ScriptedEngine()), remote(tmp_path / "s") as client:
        with pytest.raises(RequestFailed, match="by order"):
            await chunks_of(client, asked("fail by order"))
        with pytest.raises(PromptTooLong):
            await chunks_of(client, replace(asked("x"), prompt_ids=(1,) * 300_000))
        with pytest.raises(DeadlineExceeded):
            await chunks_of(client, replace(asked("tick 50\ncount 100"), deadline=time.monotonic() + 0.2))
        bad = Constraint(answer=Shape("json", '{"type": "nothing"}'))
        with pytest.raises(ConstraintError) as refused:
            await client.check(bad)
        assert refused.value.reason
        with pytest.raises(ConstraintError):
            await chunks_of(client, replace(asked("say x"), constraint=bad))


async def test_closing_the_generator_aborts_there(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with hosted(tmp_path / "s", engine), remote(tmp_path / "s") as client:
        async with aclosing(client.generate(asked("tick 10\ncount 300"))) as chunks:
            await anext(chunks)
            assert engine.stats().running == 1
        async with asyncio.timeout(5):
            while engine.stats().running:
                await asyncio.sleep(0.01)
        async with remote(tmp_path / "s") as other:
            generating = other.generate(asked("tick 10\ncount 300"))
            await anext(generating)
            await other.close()  # as when its process ends
            with pytest.raises(EngineDead):
                async for _ in generating:
                    pass
        async with asyncio.timeout(5):
            while engine.stats().running:
                await asyncio.sleep(0.01)


async def test_a_reader_that_takes_nothing_pauses_its_request_and_no_other(tmp_path: Path) -> None:
    engine = ScriptedEngine(chunk=16)
    async with hosted(tmp_path / "s", engine), remote(tmp_path / "s") as client:
        slow = client.generate(asked("count 5000", max_tokens=20_000))
        await anext(slow)
        before = -1
        async with asyncio.timeout(10):
            while before != (before := engine.stats().output_tokens_total):
                await asyncio.sleep(0.2)
        assert before < 3000
        assert whole(await chunks_of(client, asked("say quick")))[0] == "quick"
        rest = [chunk async for chunk in slow]
        assert isinstance(rest[-1].deltas[-1], Done) and engine.stats().output_tokens_total > 20_000


async def test_scores_of_a_long_prompt_are_written_and_read_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, written, read = threading.get_ident(), set[bool](), set[bool]()

    def write(handle: int, output: RowOutput) -> bytes:
        if output.prompt_logprobs is not None:
            written.add(threading.get_ident() == loop)
        return output_message(handle, output)

    def row(*given: Any) -> RowLogprobs:
        read.add(threading.get_ident() == loop)
        return RowLogprobs(*given)

    monkeypatch.setattr(remote_host, "output_message", write)
    monkeypatch.setattr(remote_wire, "RowLogprobs", row)
    request, engine = asked("say cat " * LONG_SCORES, prompt_logprobs=2), ScriptedEngine()
    async with hosted(tmp_path / "s", engine), remote(tmp_path / "s") as client:
        assert whole(await chunks_of(client, request)) == whole(await chunks_of(engine, request))
    assert written == read == {False}


def test_the_wire_keeps_what_json_has_no_word_for() -> None:
    row = RowLogprobs(5, -0.1, (5, 6), (-0.1, -math.inf))
    output = RowOutput(3, (5,), Done("stop", "x"), (row,), None, 7, (row,), Timing(0.25, 0.5))
    word, *parts = read_line(output_message(3, output)[:-1])
    read = read_output(parts)
    assert word == "output" and read.prompt_logprobs is not None and len(read.prompt_logprobs) == 1
    assert read._replace(prompt_logprobs=tuple(read.prompt_logprobs)) == output
    errors: list[EngineError] = [
        ConstraintError("no", tool="t", place=("a", 1)),
        QueueFull("full", retry_after_s=9),
        RequestError("bad", param="stop"),
        PromptTooLong(9, 3),
        DeadlineExceeded("late"),
    ]
    for error in errors:
        _, form = read_line(message("failed", error_form(error))[:-1])
        again = read_error(form)
        assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


# ------------------------------------------------------------------------------------------------------------
# Lives of the engine


async def test_requests_go_on_at_the_next_token_when_the_engine_is_back(tmp_path: Path) -> None:
    path = tmp_path / "s"
    request = asked("tick 5\ncount 120", logprobs=0)
    async with hosted(path, ScriptedEngine()) as host:
        expected = whole(await chunks_of(host.engine, request))  # type: ignore[arg-type]
        client = RemoteEngine(EngineLine(path), None, num_servers=1)
        await client.start()
        streams = [client.generate(request) for _ in range(3)]
        got = [[await anext(stream) for _ in range(10)] for stream in streams]
        assert client.stats().unavailable == 0
    await _away(client)
    resting = [asyncio.create_task(_rest(stream)) for stream in streams]
    async with hosted(path, ScriptedEngine()):
        for seen, rest in zip(got, resting, strict=True):
            assert whole([*seen, *await rest]) == expected
    await client.close()


async def _away(client: RemoteEngine) -> None:
    async with asyncio.timeout(5):
        while not client.stats().unavailable:
            await asyncio.sleep(0.01)


async def _rest(stream: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in stream]


def deadly(engine: list[ScriptedEngine]) -> Script:
    """A script under which `poison` ends the engine, and all else is said."""

    def script(request: GenerateRequest, prompt: str) -> list[Step]:
        if "poison" in prompt:
            engine[0].kill(RuntimeError("poisoned"))
            return [Wait(asyncio.Event())]
        return [Say("one two three")]

    return script


async def test_a_request_that_ends_the_engine_is_given_up_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "s"
    lives = 0

    async def live() -> None:
        nonlocal lives
        while True:
            lives += 1
            mortal: list[ScriptedEngine] = []
            mortal.append(ScriptedEngine(deadly(mortal)))
            async with hosted(path, mortal[0]):
                await mortal[0].dead()

    living = asyncio.create_task(live())
    async with remote(path) as client, remote(path) as other:
        good = [each.generate(asked("say it")) for each in (client, other) * 3]
        poisoned = asyncio.create_task(chunks_of(client, asked("poison")))
        for stream in good:
            assert whole(await _rest(stream))[0] == "one two three"
        with pytest.raises(RequestFailed, match="ended 4 times"):
            await poisoned
        assert whole(await chunks_of(other, asked("say it")))[0] == "one two three"
        assert lives == 5
    living.cancel()
    await asyncio.gather(living, return_exceptions=True)


async def test_a_new_request_does_not_wait_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "s"
    client = RemoteEngine(EngineLine(path), None, num_servers=1, patience_s=0.1)
    async with hosted(path, ScriptedEngine()):
        await client.start()
        assert whole(await chunks_of(client, asked("say it")))[0] == "it"
    await _away(client)
    with pytest.raises(EngineUnavailable):
        await chunks_of(client, asked("say it"))
    with pytest.raises(EngineUnavailable):
        await client.saved_names()
    with client.admission.enter(promised=True) as place:
        waiting = client.generate(asked("say it"), place)
        first = asyncio.create_task(anext(waiting))  # type: ignore[arg-type]
        done, _ = await asyncio.wait([first], timeout=0.3)
        assert not done
        async with hosted(path, ScriptedEngine()):
            assert whole([await first, *await _rest(waiting)])[0] == "it"
    await client.close()


async def test_an_engine_that_comes_back_as_another_ends_this_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    client = RemoteEngine(EngineLine(path), None, num_servers=1)
    async with hosted(path, ScriptedEngine()):
        await client.start()
    async with hosted(path, ScriptedEngine(max_model_len=4096)):
        assert "another model" in str(await asyncio.wait_for(client.dead(), 5))
        with pytest.raises(EngineDead):
            await chunks_of(client, asked("say it"))
    await client.close()


# ------------------------------------------------------------------------------------------------------------
# A model


async def test_a_model_behind_the_socket(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The same tokens, the prefix cache, owners that share nothing, KV that is kept and saved by name."""
    folder, path = checkpoint("qwen3"), tmp_path / "s"
    engine = LocalEngine(
        folder,
        num_blocks=64,
        block_size=4,
        max_model_len=128,
        kv_disk_folder=tmp_path / "kv",
        kv_disk_bytes=1 << 20,
    )
    prompt = tuple(b"What does the cat say to the dog?")
    params = SamplingParams(seed=3, max_tokens=24, logprobs=2)
    request = GenerateRequest("r", prompt, params, PLAIN, owner="ann")
    async with hosted(path, engine), remote(path, folder) as client:
        expected = whole(await chunks_of(engine, replace(request, owner="bob")))
        got = await chunks_of(client, request)
        assert whole(got)[:5] == expected[:5]
        assert got[0].cached_tokens == 0 and got[0].timing is not None
        again = await chunks_of(client, request)
        assert whole(again)[3] == expected[3]  # what is not computed again rounds differently
        assert (again[0].cached_tokens or 0) > 0
        tokens = expected[3]
        gone_on = await chunks_of(client, replace(request, prefix=(tuple(tokens[:5]), tuple(tokens[5:9]))))
        assert [token for chunk in gone_on for token in chunk.token_ids] == tokens
        client.keep("resp_1", request, tokens, 60.0)
        client.let_go("resp_1")
        client.save("resp_1", request, tokens)
        await client.check(Constraint(answer=Shape("regex", "a+")))  # behind what was noted
        await engine.saved()
        saved = await client.saved_names()
        assert saved == await engine.saved_names()
        client.forget(["resp_1"])
        assert await client.saved_names() == frozenset()
        with pytest.raises(RequestError, match="adapter"):
            await chunks_of(client, replace(request, adapter="none"))


@pytest.mark.parametrize(("word", "end"), [("red", Done("stop")), ("redder", Done("length"))])
async def test_a_crash_behind_the_last_token_that_may_be_does_not_change_how_a_shape_ends(
    word: str, end: Done, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path, crashes = checkpoint("qwen3"), tmp_path / "s", 0
    got_output = EngineLine.got_output

    def crash(line: EngineLine, handle: int, token_ids: list[int], *more: Any) -> None:
        """The connection ends between the last token and the word that it was the last."""
        nonlocal crashes
        got_output(line, handle, token_ids, *(() if token_ids else more))
        if more and "finish" in more[0] and token_ids:
            crashes += 1
            assert line._wire is not None and line._wire._transport is not None
            line._wire._transport.abort()

    monkeypatch.setattr(EngineLine, "got_output", crash)
    request = GenerateRequest(
        "r",
        tuple(b"Which one?"),
        SamplingParams(seed=3, max_tokens=3),
        ReaderParams(shaped=True),
        constraint=Constraint(answer=Shape("choice", f'["{word}"]')),
    )
    engine = LocalEngine(folder, num_blocks=64, block_size=4, max_model_len=128)
    async with hosted(path, engine), remote(path, folder) as client:
        expected = await chunks_of(engine, request)
        assert expected[-1].deltas[-1] == end
        got = await chunks_of(client, request)
        assert crashes == 1 and whole(got)[:4] == whole(expected)[:4]
        recovered = await chunks_of(client, replace(request, prefix=(tuple(whole(expected)[3]),)))
        assert crashes == 1 and whole(recovered)[:4] == whole(expected)[:4]


async def begins(place: Place) -> None:
    """Wait until the engine's process has said that it begins with what has this place."""
    async with asyncio.timeout(10):
        while not place.has_begun:
            await asyncio.sleep(0)


async def test_a_place_begins_when_the_engine_does(tmp_path: Path) -> None:
    """Which is before anything comes of it."""
    reached, release = asyncio.Event(), asyncio.Event()
    engine = ScriptedEngine(lambda request, prompt: [Wait(release, reached), Say("cat")], max_running=1)
    async with hosted(tmp_path / "s", engine), remote(tmp_path / "s") as client:
        with client.admission.enter() as first, client.admission.enter() as second:
            streams = [client.generate(asked("x"), place) for place in (first, second)]
            tasks = [asyncio.create_task(anext(stream)) for stream in streams]
            await reached.wait()
            await begins(first)
            assert not second.has_begun, "the engine works for one at a time"
            release.set()
            await asyncio.gather(*tasks)
            for stream in streams:
                await stream.aclose()


async def test_a_place_of_texts_begins_when_the_engine_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = PoolingEngine(PoolingConfig(make_embedder("bert", tmp_path / "m"), "embedding", num_threads=1))
    await engine.start()
    host = EngineHost(tmp_path / "s", None, [engine])
    await host.start()
    pooling = RemotePooling(EngineLine(tmp_path / "s"), 0, num_servers=1)
    await pooling.start()
    compute, release = engine._worker._compute, threading.Event()  # type: ignore[attr-defined]

    def held(batch: Any) -> Any:
        assert release.wait(60)
        return compute(batch)

    monkeypatch.setattr(engine._worker, "_compute", held)
    with pooling.admission.enter() as place:
        work = asyncio.create_task(pooling.pool(await pooling.encode(["a dog"]), place=place))
        try:
            await begins(place)
        finally:
            release.set()
        await work
    await pooling.close()
    await host.close()
    await engine.close()


async def test_vectors_behind_the_socket(tmp_path: Path) -> None:
    """Pooling engines without one that generates: the same bits, errors and figures, over two lives."""
    folder, path = make_embedder("qwen3", tmp_path / "m"), tmp_path / "s"
    line = EngineLine(path)
    pooling = RemotePooling(line, 0, num_servers=1, max_waiting=1)
    texts = ["what is it", [9, 10, 11], "the cat sat on the mat"]
    for life in range(2):
        engine = PoolingEngine(PoolingConfig(folder, "embedding", num_threads=1))
        info = await engine.start()
        host = EngineHost(path, None, [engine])
        await host.start()
        if not life:
            assert await pooling.start() == info == pooling.info
        expected = await engine.encode(texts)
        encoded = await pooling.encode(texts)
        assert [text.ids.tolist() for text in encoded] == [text.ids.tolist() for text in expected]
        vectors, cached = await pooling.pool(encoded, owner="ann")
        direct, _ = await engine.pool(expected, owner="bob")
        assert cached == 0 and all(map(np.array_equal, vectors, direct))
        [raw], _ = await pooling.pool([replace(encoded[0], raw=True)], owner="cid")
        assert abs(raw - vectors[0]).max() > 1e-3
        np.testing.assert_allclose(raw / np.linalg.norm(raw), vectors[0], atol=1e-6)
        with pytest.raises(PromptTooLong):
            await pooling.pool([replace(encoded[0], ids=np.zeros(100_000, np.int32))])
        with pytest.raises(DeadlineExceeded):
            await pooling.pool(encoded, deadline=time.monotonic() - 1)
        async with asyncio.timeout(5):
            while pooling.stats() != engine.stats():
                await asyncio.sleep(0.01)
        await host.close()
        await engine.close()
    await pooling.close()
    with pytest.raises(EngineDead):
        await pooling.encode(texts)
