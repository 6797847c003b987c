"""The scripted engine keeps the promises of the engine's door."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any

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
    Fail,
    GenerateRequest,
    PromptTooLong,
    QueueFull,
    ReaderParams,
    Reasoning,
    RenderError,
    RenderInput,
    RequestFailed,
    SamplingParams,
    Say,
    ScriptedEngine,
    Text,
    Tick,
    ToolShape,
    Wait,
)
from engine.backends.script import Step
from engine.backends.scripted_tokens import Speech, scripted_tokenizer
from engine.dialects.table import dialect_named

CITY = '{"properties": {"city": {"type": "string", "minLength": 2}}, "required": ["city"]}'
TOOLS = (ToolShape("get_weather", CITY), ToolShape("now", "{}"))


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with running(ScriptedEngine()) as engine:
        yield engine


class running:
    """An engine, started and closed."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine

    async def __aenter__(self) -> ScriptedEngine:
        await self.engine.start()
        return self.engine

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()
        await asyncio.sleep(0)
        self.engine.check_integrity()
        assert self.engine.stats().running == 0


async def request(engine: ScriptedEngine, text: str = "hello", **changes: Any) -> GenerateRequest:
    prompt = await engine.render(RenderInput([{"role": "user", "content": text}]))
    sampling = SamplingParams(seed=1, max_tokens=1000)
    names = SamplingParams.__dataclass_fields__
    sampling = replace(sampling, **{key: changes.pop(key) for key in list(changes) if key in names})
    reader = ReaderParams(calls=True, starts_in=prompt.starts_in)
    return replace(GenerateRequest("r", prompt.ids, sampling, reader), **changes)


async def run(engine: ScriptedEngine, text: str = "hello", **changes: Any) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(await request(engine, text, **changes))]


def said(chunks: Sequence[Chunk]) -> list[Delta]:
    """All deltas, neighbours joined."""
    out: list[Delta] = []
    for delta in (delta for chunk in chunks for delta in chunk.deltas):
        last = out[-1] if out else None
        if isinstance(delta, Text | Reasoning | CallArgs) and type(delta) is type(last):
            out[-1] = type(delta)(last.text + delta.text)
        else:
            out.append(delta)
    return out


def scripted(*steps: Step, **options: Any) -> ScriptedEngine:
    def script(request: GenerateRequest, prompt: str) -> Iterable[Step]:
        return steps

    return ScriptedEngine(script, **options)


STOP = Done("stop")


# -- what it says --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "deltas"),
    [
        ("hello there", [Text("You said: hello there"), STOP]),
        ("say hi & bye", [Text("hi & bye"), STOP]),
        ("count 4", [Text("1 2 3 4"), STOP]),
        ("say a\ncount 2", [Text("a\n1 2"), STOP]),
        ('call now {"a":[1,"é"]}', [CallStart("now"), CallArgs('{"a": [1, "é"]}'), CallEnd(), STOP]),
        ("call now", [CallStart("now"), CallArgs("{}"), CallEnd(), STOP]),
        ("call now {oops]", [CallStart("now"), CallArgs("{oops]}\n"), CallEnd(False), STOP]),
        ("say I\ncall a\ncall b", [Text("I"), *[CallStart("a"), CallArgs("{}"), CallEnd()],
                                   *[CallStart("b"), CallArgs("{}"), CallEnd()], STOP]),
        ("think hard then hi", [Reasoning("hard"), Text("hi"), STOP]),
        ("think hard then call now", [Reasoning("hard"), CallStart("now"), CallArgs("{}"), CallEnd(), STOP]),
        ("tick 0\nsay x", [Text("x"), STOP]),
    ],
)  # fmt: skip
async def test_directives(engine: ScriptedEngine, message: str, deltas: list[Delta]) -> None:
    chunks = await run(engine, message)
    assert said(chunks) == deltas
    assert chunks[0].cached_tokens == 0
    assert {chunk.cached_tokens for chunk in chunks[1:]} <= {None}


async def test_the_last_user_message_counts_and_tool_outputs_are_told(engine: ScriptedEngine) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "call now"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "now", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]
    prompt = await engine.render(RenderInput(messages))
    asked = await request(engine)
    chunks = [chunk async for chunk in engine.generate(replace(asked, prompt_ids=prompt.ids))]
    assert said(chunks) == [Text("The tool said: noon"), STOP]


async def test_a_bare_prompt_is_the_message(engine: ScriptedEngine) -> None:
    ids = await engine.tokenize("say plain")
    asked = replace(await request(engine), prompt_ids=ids, reader=ReaderParams(dialect=False))
    assert said([chunk async for chunk in engine.generate(asked)]) == [Text("plain"), STOP]


async def test_random_words_depend_on_seed_choice_and_generation(engine: ScriptedEngine) -> None:
    said_by = [
        str(said(await run(engine, "random 12", **changes)))
        for changes in ({}, {}, {"seed": 2}, {"choice": 1}, {"generation": 1})
    ]
    assert said_by[0] == said_by[1]
    assert len(set(said_by)) == 4


async def test_failing(engine: ScriptedEngine) -> None:
    with pytest.raises(RequestFailed, match="boom"):
        await run(engine, "fail boom")
    async with running(scripted(Say("a"), Fail(ValueError("odd")))) as other:
        with pytest.raises(RequestFailed, match="odd"):
            await run(other)
    async with running(scripted(Fail(PromptTooLong(5, 4)))) as other:
        with pytest.raises(PromptTooLong):
            await run(other)


@pytest.mark.parametrize(
    ("chunk", "sizes"), [("word", [1, 4, 1]), (2, [2, 2, 1, 1]), (1, [1, 1, 1, 1, 1, 1])]
)
async def test_chunks(chunk: Any, sizes: list[int]) -> None:
    async with running(scripted(Say("a bcd"), chunk=chunk)) as engine:
        assert [len(each.token_ids) for each in await run(engine)] == sizes
    async with running(scripted(Say("a bcd", whole=True), chunk=chunk)) as engine:
        assert [len(each.token_ids) for each in await run(engine)] == [5, 1]


# -- limits and ends -----------------------------------------------------------------------------------------


async def test_max_tokens(engine: ScriptedEngine) -> None:
    chunks = await run(engine, "say hello world", max_tokens=7)
    assert said(chunks) == [Text("hello w"), Done("length")]
    assert sum(len(chunk.token_ids) for chunk in chunks) == 7


async def test_no_tokens_at_all(engine: ScriptedEngine) -> None:
    chunks = await run(engine, max_tokens=0, prompt_logprobs=0)
    assert said(chunks) == [Done("length")] and chunks[0].prompt_logprobs is not None


async def test_the_context_is_a_limit() -> None:
    async with running(ScriptedEngine(max_model_len=100)) as engine:
        asked = await request(engine, "count 50")
        chunks = [chunk async for chunk in engine.generate(asked)]
        assert len(asked.prompt_ids) + sum(len(chunk.token_ids) for chunk in chunks) == 100
        assert said(chunks)[-1] == Done("length")
        with pytest.raises(PromptTooLong):
            await run(engine, "x" * 100)


async def test_stops(engine: ScriptedEngine) -> None:
    chunks = await run(engine, "say hello world", stop=("o w",))
    assert said(chunks) == [Text("hell"), Done("stop", "o w")]
    assert sum(len(chunk.token_ids) for chunk in chunks) == 7
    chunks = await run(engine, "say hello world", stop_token_ids=(ord("o"),))
    assert said(chunks) == [Text("hell"), Done("stop", ord("o"))]


async def test_the_end_of_turn_can_be_held_off(engine: ScriptedEngine) -> None:
    chunks = await run(engine, "say hi", min_tokens=10)
    assert said(chunks) == [Text("hi more more"), STOP]
    chunks = await run(engine, "say hi", ignore_eos=True, max_tokens=20)
    assert said(chunks) == [Text("hi more more more mo"), Done("length")]


async def test_max_calls(engine: ScriptedEngine) -> None:
    chunks = await run(engine, "call a\ncall b", reader=ReaderParams(calls=True, max_calls=1))
    assert said(chunks) == [CallStart("a"), CallArgs("{}"), CallEnd(), STOP]


async def test_reasoning_tokens(engine: ScriptedEngine) -> None:
    chunks = await run(engine, "think abc then d")
    assert sum(chunk.reasoning_tokens for chunk in chunks) == len("-\nabc\n-")


async def test_logprobs(engine: ScriptedEngine) -> None:
    chunks = await run(engine, "say ab cd", logprobs=2, prompt_logprobs=1)
    for chunk in chunks:
        assert [logprob.token_id for logprob in chunk.logprobs] == list(chunk.token_ids)
        assert all(len(logprob.top) == 2 for logprob in chunk.logprobs)
    texts = [delta for chunk in chunks for delta in chunk.deltas if isinstance(delta, Text)]
    assert b"".join(logprob.data for text in texts for logprob in text.logprobs) == b"ab cd"
    prompt = chunks[0].prompt_logprobs
    assert prompt is not None and prompt[0] is None
    assert len(prompt) == len((await request(engine, "say ab cd")).prompt_ids)
    assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])


# -- constraints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "calls"),
    [
        ("hello", [("get_weather", {"city": "aa"})]),
        ('call get_weather {"city":"Rom"}', [("get_weather", {"city": "Rom"})]),
        ("call now", [("now", {})]),
        ('call get_weather {"city": 5}', [("get_weather", {"city": "aa"})]),
        ("call nothing", [("now", {})]),
        ("think so then call now", [("now", {})]),
        ('call now\ncall get_weather {"city": "Rom"}', [("now", {}), ("get_weather", {"city": "Rom"})]),
        (
            'call get_weather {"city": 5}\ncall nothing at all\ncall get_weather {"city": "Rom"}',
            [("get_weather", {"city": "aa"}), ("now", {}), ("get_weather", {"city": "Rom"})],
        ),
    ],
)
async def test_a_constraint_holds(engine: ScriptedEngine, message: str, calls: list[Any]) -> None:
    chunks = await run(engine, message, constraint=Constraint(TOOLS))
    deltas = said(chunks)
    names = [delta.name for delta in deltas if isinstance(delta, CallStart)]
    arguments = [json.loads(delta.text) for delta in deltas if isinstance(delta, CallArgs)]
    assert list(zip(names, arguments, strict=True)) == calls
    assert not any(isinstance(delta, Text) for delta in deltas)
    assert deltas[-1] == STOP


async def test_a_constraint_that_cannot_be_honoured(engine: ScriptedEngine) -> None:
    bad = Constraint((ToolShape("f", '{"not": {}}'),))
    with pytest.raises(ConstraintError, match="not"):
        await engine.check(bad)
    with pytest.raises(ConstraintError, match="not"):
        await run(engine, constraint=bad)
    await engine.check(Constraint(TOOLS))


# -- replay --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("think a while then count 9", {}),
        ("say before\ncall now {\"a\": 1}", {}),
        ("count 30", {"max_tokens": 17}),
        ("count 30", {"stop": ("12",)}),
        ("random 8", {"seed": 77}),
        ("hello", {"constraint": Constraint(TOOLS, 2)}),
        ("call nothing at all\ncall now", {"constraint": Constraint(TOOLS)}),
        ("hello", {"constraint": Constraint(TOOLS, 1)}),
        ("say hi", {"logprobs": 1, "min_tokens": 9}),
    ],
)  # fmt: skip
async def test_a_prefix_is_replayed_and_gone_on_from(message: str, changes: dict[str, Any]) -> None:
    async with running(ScriptedEngine()) as first:
        whole = await run(first, message, **changes)
    prefix = tuple(chunk.token_ids for chunk in whole)
    for count in range(len(prefix) + 1):
        async with running(ScriptedEngine()) as second:
            again = await run(second, message, prefix=prefix[:count], **changes)
        assert [chunk.replayed for chunk in again] == [index < count for index in range(len(again))]
        assert [replace(chunk, replayed=False) for chunk in again] == whole


async def test_a_prefix_may_end_within_a_word() -> None:
    async with running(ScriptedEngine(chunk=3)) as first:
        whole = await run(first, "count 12")
    async with running(ScriptedEngine()) as second:
        again = await run(second, "count 12", prefix=tuple(chunk.token_ids for chunk in whole[:4]))
    assert said(again) == said(whole)
    assert [each for chunk in again for each in chunk.token_ids] == [
        each for chunk in whole for each in chunk.token_ids
    ]


async def test_gates_before_the_prefix_s_end_stay_open() -> None:
    steps = (Say("one"), Wait(asyncio.Event()), Say(" two"))
    async with running(scripted(*steps)) as engine:
        prefix = ((*b"one",), (ord(" "),))
        assert said(await run(engine, prefix=prefix)) == [Text("one two"), STOP]


# -- gates, abort, queue, death ------------------------------------------------------------------------------


async def test_gates() -> None:
    gate = Wait(asyncio.Event(), asyncio.Event())
    assert gate.reached is not None
    async with running(scripted(Say("one"), gate, Say(" two"))) as engine:
        task = asyncio.create_task(run(engine))
        await gate.reached.wait()
        assert engine.stats().running == 1 and not task.done()
        gate.release.set()
        assert said(await task) == [Text("one two"), STOP]


async def test_closing_the_generator_aborts() -> None:
    async with running(scripted(Say("one"), Wait(asyncio.Event()))) as engine:
        stream = engine.generate(await request(engine))
        assert (await anext(stream)).deltas == (Text("one"),)
        await stream.aclose()
        assert engine.stats().running == 0
        task = asyncio.create_task(run(engine))
        while engine.stats().running == 0:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.stats().running == 0


async def test_the_queue_fills_and_drains_in_order() -> None:
    gate = Wait(asyncio.Event())
    async with running(scripted(gate, Say("x"), max_running=1, max_waiting=2)) as engine:
        ended: list[int] = []

        async def one(number: int) -> None:
            await run(engine)
            ended.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(3)]
        while engine.stats().waiting < 2:
            await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await run(engine)
        tasks[1].cancel()
        while engine.stats().waiting > 1:
            await asyncio.sleep(0)
        late = asyncio.create_task(one(3))
        gate.release.set()
        await asyncio.gather(tasks[0], tasks[2], late)
        assert ended == [0, 2, 3]


async def test_owners_take_turns_however_many_of_each_wait() -> None:
    gate = Wait(asyncio.Event())
    async with running(scripted(gate, Say("x"), max_running=1, max_waiting=9)) as engine:
        ended: list[str] = []

        async def one(owner: str) -> None:
            await run(engine, owner=owner)
            ended.append(owner)

        tasks = [asyncio.create_task(one(owner)) for owner in "aaaaabb"]
        while engine.stats().waiting < 6:
            await asyncio.sleep(0)
        gate.release.set()
        await asyncio.gather(*tasks)
        assert "".join(ended) == "ababaaa"


async def test_a_place_given_to_one_who_leaves_goes_on() -> None:
    gates = [Wait(asyncio.Event()), Wait(asyncio.Event())]
    engine = ScriptedEngine(lambda request, prompt: [gates[request.choice]], max_running=1)
    async with running(engine):
        first, second, third = (asyncio.create_task(run(engine, choice=choice)) for choice in (0, 1, 1))
        while engine.stats().waiting < 2:
            await asyncio.sleep(0)
        gates[0].release.set()
        await first  # its place is the second's now
        second.cancel()
        gates[1].release.set()
        assert said(await third) == [STOP]


async def test_deadlines() -> None:
    async with running(scripted(Wait(asyncio.Event()))) as engine:
        with pytest.raises(DeadlineExceeded):
            await run(engine, deadline=time.monotonic() + 0.01)
        with pytest.raises(DeadlineExceeded):
            await run(engine, deadline=time.monotonic() - 1)


async def test_death_reaches_everyone() -> None:
    gate = Wait(asyncio.Event(), asyncio.Event())
    assert gate.reached is not None
    engine = scripted(gate)
    await engine.start()
    watcher = asyncio.create_task(engine.dead())
    task = asyncio.create_task(run(engine))
    await gate.reached.wait()
    error = RuntimeError("out of memory")
    engine.kill(error)
    with pytest.raises(EngineDead, match="out of memory"):
        await task
    with pytest.raises(EngineDead):
        await run(engine)
    assert await watcher is error
    await engine.close()


async def test_closing_is_not_dying() -> None:
    engine = ScriptedEngine()
    await engine.start()
    watcher = asyncio.create_task(engine.dead())
    await engine.close()
    with pytest.raises(EngineDead, match="closed"):
        await run(engine)
    assert not watcher.done()
    watcher.cancel()


async def test_an_engine_that_has_not_started() -> None:
    engine = ScriptedEngine()
    with pytest.raises(EngineDead, match="not started"):
        await run(engine)
    await engine.close()


async def test_ticks_pace_the_chunks() -> None:
    async with running(scripted(Say("a b"), Tick(0.0), Say(" c d"), tick_s=0.005)) as engine:
        start = time.monotonic()
        await run(engine)
        assert time.monotonic() - start >= 0.01


# -- the rest of the door ------------------------------------------------------------------------------------


async def test_the_door(engine: ScriptedEngine) -> None:
    door: Engine = engine  # the type checker's proof
    info = door.info
    assert info.vocab_size == 263 and info.dialect == "hermes"
    assert info.capabilities >= {"exact_resume", "grammar", "token_ids"}
    ids = await door.tokenize("Hé<|im_end|>")
    assert await door.detokenize(ids) == "Hé<|im_end|>"
    assert [door.token_text(each) for each in ids] == ["H", "\ufffd", "\ufffd", "<|im_end|>"]
    await run(engine, "say hi")
    stats = door.stats()
    assert stats.output_tokens_total == 3 and stats.prompt_tokens_total > 10
    assert engine.requests[-1].sampling.seed == 1
    with pytest.raises(RenderError):
        await door.render(RenderInput([]))


async def test_many_at_once(engine: ScriptedEngine) -> None:
    chunks = await asyncio.gather(*(run(engine, f"say number {index}") for index in range(64)))
    assert [said(each) for each in chunks] == [[Text(f"number {index}"), STOP] for index in range(64)]


def test_a_long_chunk_is_looked_at_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = scripted_tokenizer()
    speech = Speech(tokenizer, dialect_named("hermes"), "word")
    seen = 0
    finish = Speech.finish

    def counted(self: Speech, sampling: Any, token_ids: tuple[int, ...], *rest: Any) -> Done | None:
        nonlocal seen
        seen += len(token_ids)
        return finish(self, sampling, token_ids, *rest)

    monkeypatch.setattr(Speech, "finish", counted)
    request = GenerateRequest("r", (1,), SamplingParams(seed=0, max_tokens=5000, min_tokens=4000))
    steps = [Say("a" * 3000 + " b", whole=True)]
    said = list(speech.chunks(request, "", lambda *_: iter(steps), None, 5000))
    num_tokens = sum(len(chunk[0]) for chunk in said if isinstance(chunk, tuple))
    assert 4000 < num_tokens < 4010 and seen <= num_tokens + 10
