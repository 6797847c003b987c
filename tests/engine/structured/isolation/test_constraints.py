"""Foreign grammars: whatever they do to the process that compiles or steps them, only they have it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import (
    Constraint,
    ConstraintError,
    GenerateRequest,
    LocalEngine,
    ReaderParams,
    RequestFailed,
    SamplingParams,
    Shape,
)
from engine.backends.scripted_tokens import scripted_tokenizer
from engine.dialects.table import dialect_named
from engine.structured.isolation.child_process import ANSWER, NOBODY, Load, Trial
from engine.structured.isolation.constraints import Constraints, Matcher, Turns
from engine.structured.isolation.nursery import Died, Nursery
from engine.tiny import CHECKPOINT
from engine.types import ToolShape

PLAIN = ReaderParams(dialect=False)
HERMES = dialect_named("hermes")

ENDLESS = 'start: X NL "\\n"\nNL: /\\n+/\nX: /[a-z]{%d}/'
"""Its mask behind so many letters is never made: a line break is forced for ever."""


def lark(source: str) -> Constraint:
    return Constraint(answer=Shape("lark", source))


def shaped(schema: Any) -> Constraint:
    return Constraint(answer=Shape("json", schema if isinstance(schema, str) else json.dumps(schema)))


KILLERS: dict[str, Constraint] = {
    "the least integer": shaped({"const": -(2**63)}),
    "next to it": shaped({"enum": [1, -(2**63) + 1]}),
    "huge bounds": shaped('{"type": "integer", "minimum": -1e308, "maximum": -1e30}'),
    "a multiple": shaped({"type": "integer", "multipleOf": 2**31}),
    "in a grammar": lark('start: %json {"const": -9223372036854775808}'),
    "an endless text": lark('start: NL "\\n"\nNL: /\\n+/'),
    "an endless text, soon": lark(ENDLESS % 1),
    "an endless tag": Constraint(
        answer=Shape(
            "tags",
            json.dumps(
                {"type": "tag", "begin": "", "content": {"type": "regex", "pattern": "a+"}, "end": "a"}
            ),
        )
    ),
    "no rule": lark("root ::= ro/ot"),
    "no such rule": lark("a ::= b"),
    "nested": lark("root ::= " + "(" * 400 + '"a"' + ")" * 400),
}


@pytest.fixture
async def constraints() -> AsyncIterator[Constraints]:
    made = Constraints(scripted_tokenizer(), HERMES)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)


async def walk(matcher: Matcher, limit: int, pick: Callable[[list[int]], int]) -> list[int]:
    """Tokens picked among those that may come next."""
    ids: list[int] = []
    for _ in range(limit):
        allowed = await asyncio.to_thread(matcher.allowed, range(260))
        if not allowed:
            break
        ids.append(pick(allowed))
        await asyncio.to_thread(matcher.take, ids[-1:])
        if matcher.stopped:
            break
    return ids


# -- trials --------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_what_kills_or_hangs_is_refused_and_remembered(constraints: Constraints) -> None:
    sound = await constraints.compile(shaped({"type": "integer", "maximum": 7}), PLAIN)
    pid = constraints.nursery.pid
    for name, killer in KILLERS.items():
        with pytest.raises(ConstraintError) as first:
            await constraints.compile(killer, PLAIN)
        began = time.perf_counter()
        with pytest.raises(ConstraintError) as second:
            await constraints.compile(killer, PLAIN)
        assert time.perf_counter() - began < 0.05, name
        assert str(first.value) == str(second.value) and len(str(first.value)) < 300, name
    assert await walk(sound.matcher(9), 1, max) == [ord("7")]
    assert constraints.nursery.pid == pid


async def test_the_tool_that_kills_is_named(constraints: Constraints) -> None:
    good = ToolShape("good", '{"type": "object", "properties": {"a": {"type": "string"}}}')
    bad = ToolShape("bad", '{"type": "object", "properties": {"a": {"const": -9223372036854775808}}}')
    many = tuple(ToolShape(f"good{n}", good.parameters) for n in range(9))
    for tools in ((bad,), (good, bad), (*many[:7], bad, *many[7:])):
        with pytest.raises(ConstraintError) as caught:
            await constraints.compile(Constraint(tools), ReaderParams(tools=tools))
        assert caught.value.tool == "bad"
    with pytest.raises(ConstraintError) as caught:
        await constraints.compile(
            Constraint((good,), None, Shape("json", '{"const": -9223372036854775808}')), PLAIN
        )
    assert caught.value.tool is None


async def test_many_tools_that_take_too_long_together_are_refused_soon(constraints: Constraints) -> None:
    """Each is taken alone, though not in the short time; tried one by one they would take half a minute."""
    schema = (
        '{"type": "object", "properties": {"n": {"type": "integer", "multipleOf": %d}}, "required": ["n"]}'
    )
    tools = tuple(ToolShape(f"f{n}", schema % (300_007 + 2 * n)) for n in range(64))
    tried = 0
    trial = constraints._trial

    async def counted(*args: Any) -> Any:
        nonlocal tried
        tried += 1
        return await trial(*args)

    constraints._trial = counted
    with pytest.raises(ConstraintError, match="takes too long"):
        await constraints.compile(Constraint(tools), ReaderParams(tools=tools))
    assert tried <= 10  # two of all, then seven halves, and one alone


EDGES = [
    *(sign * (1 << bits) + near for bits in (7, 8, 15, 16, 31, 32, 53, 63, 64) for sign in (1, -1)
      for near in (-1, 0, 1)),
    0, 1, 1e308, -1e308, 5e-324, 1e-7, 0.1, -0.0, 1e30, 2.0**63,
]  # fmt: skip
"""Where numbers end that somebody counts in."""
KEYWORDS = ["enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
COUNTS = ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["integer", "number", "string", "array", "object", None]),
    keywords=st.dictionaries(
        st.sampled_from([*KEYWORDS, *COUNTS]), st.sampled_from(EDGES), min_size=1, max_size=3
    ),
    grammar=st.booleans(),
)
def test_numbers_at_every_edge(
    edges: Callable[[Constraint], None], kind: str | None, keywords: dict[str, Any], grammar: bool
) -> None:
    """A schema with them is refused, or followed as far as a walk goes; either way everybody lives."""
    schema = {key: [value] if key == "enum" else value for key, value in keywords.items()}
    if kind is not None:
        schema["type"] = kind
    written = json.dumps(schema)
    edges(lark(f"start: %json {written}") if grammar else shaped(written))


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "1" * 400])
@pytest.mark.parametrize("keyword", KEYWORDS)
def test_numbers_beyond_every_edge(edges: Callable[[Constraint], None], keyword: str, number: str) -> None:
    edges(shaped(f'{{"{keyword}": {f"[{number}]" if keyword == "enum" else number}, "type": "integer"}}'))


@pytest.fixture(scope="module")
def edges() -> Any:
    """Tries a constraint, and walks if it may; fails if the nursery is another one then."""
    loop = asyncio.new_event_loop()
    made = Constraints(scripted_tokenizer(), HERMES)

    async def attempt(constraint: Constraint) -> None:
        with suppress(ConstraintError):
            grammar = await made.compile(constraint, PLAIN)
            await walk(grammar.matcher(30), 6, lambda allowed: allowed[len(allowed) // 2])

    def run(constraint: Constraint) -> None:
        loop.run_until_complete(attempt(constraint))
        pids.add(made.nursery.pid)
        assert len(pids) == 1 and None not in pids

    pids: set[int | None] = set()
    yield run
    made.close()
    loop.close()


async def test_the_limits_of_a_trial() -> None:
    tokenizer = scripted_tokenizer()
    nursery = Nursery(Load(tokenizer.serialized, tokenizer.eos_token_ids, HERMES))
    try:
        for memory, seconds, cause in ((24 << 20, 60.0, "memory"), (512 << 20, 0.2, "time")):
            worker = nursery.fork(keeps=False)
            trial = Trial(KILLERS["a multiple"], PLAIN, seconds, memory, False)
            with pytest.raises(Died) as caught:
                await asyncio.to_thread(worker.ask, trial, 100)
            assert caught.value.cause == cause
            with pytest.raises(ProcessLookupError):
                os.kill(worker.pid, 0)
    finally:
        nursery.close()


async def test_a_nursery_that_is_lost_is_replaced(constraints: Constraints) -> None:
    before = await constraints.compile(shaped({"type": "null"}), PLAIN)
    pid = constraints.nursery.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await constraints.compile(shaped({"type": "boolean"}), PLAIN)
    assert constraints.nursery.pid not in (None, pid)
    assert bytes(await walk(before.matcher(9), 4, max)) == b"null"


def test_an_answer_that_comes_late_is_not_read_as_that_of_another_order() -> None:
    tokenizer = scripted_tokenizer()
    nursery = Nursery(Load(tokenizer.serialized, tokenizer.eos_token_ids, HERMES))
    try:
        worker, control = nursery.fork(keeps=False), nursery._control
        assert control is not None
        control.settimeout(0)  # the answer to the next order comes later than anybody waits for it
        worker.kill()
        assert worker.bury() == "time"
        with suppress(OSError):
            control.settimeout(30)
        for _ in range(2):
            worker = nursery.fork(keeps=False)
            assert os.getsid(worker.pid) == nursery.pid, f"{worker.pid} is no process of this nursery"
            worker.kill()
            assert worker.bury() == "time"
    finally:
        nursery.close()


@pytest.mark.parametrize("answer", [-1, 0, 1])
def test_no_answer_makes_a_worker_whose_end_would_be_everybodys(
    answer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = scripted_tokenizer()
    nursery = Nursery(Load(tokenizer.serialized, tokenizer.eos_token_ids, HERMES))
    monkeypatch.setattr("engine.structured.isolation.nursery.exactly", lambda *_: ANSWER.pack(answer))
    try:
        with pytest.raises(RequestFailed, match="no process for grammars"):
            nursery.fork(keeps=False)
        assert nursery.pid is None
    finally:
        nursery.close()


def end_for_memory(constraints: Constraints, matcher: int, *, compiled: int = NOBODY) -> None:
    """End the process that steps grammars as one ends that has no memory left, while these are in work."""
    worker = constraints.fast._worker
    assert worker is not None
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.at_work[:] = matcher, compiled


async def test_a_grammar_whose_process_ran_out_of_memory_is_tried_anew(constraints: Constraints) -> None:
    grammar = await constraints.compile(shaped({"type": "null"}), PLAIN)
    matcher = grammar.matcher(9)
    await asyncio.to_thread(matcher.take, b"nu")
    end_for_memory(constraints, matcher.number)
    with pytest.raises(ConstraintError, match="takes too much memory"):
        await asyncio.to_thread(matcher.take, b"l")
    again = await constraints.compile(shaped({"type": "null"}), PLAIN)
    assert bytes(await walk(again.matcher(9), 4, max)) == b"null"


async def test_memory_that_a_grammar_may_have_taken_while_it_was_compiled_condemns_no_row(
    constraints: Constraints,
) -> None:
    grammar = await constraints.compile(shaped({"type": "null"}), PLAIN)
    matcher = grammar.matcher(9)
    await asyncio.to_thread(matcher.take, b"nu")
    end_for_memory(constraints, matcher.number, compiled=grammar.number + 1)
    assert await asyncio.to_thread(matcher.take, b"ll") == 2 and matcher.stopped
    assert await constraints.compile(shaped({"type": "null"}), PLAIN) is grammar


async def test_who_serves_has_the_processes_before_a_request(constraints: Constraints) -> None:
    await asyncio.to_thread(constraints.start)
    worker = constraints.fast._worker
    assert worker is not None
    pids = constraints.nursery.pid, worker.process.pid
    grammar = await constraints.compile(shaped({"type": "null"}), PLAIN)
    assert bytes(await walk(grammar.matcher(9), 4, max)) == b"null"
    assert pids == (constraints.nursery.pid, worker.process.pid) and constraints.fast._worker is worker


async def test_a_server_that_ends_at_once_does_not_wait_for_its_processes(constraints: Constraints) -> None:
    starting = asyncio.create_task(asyncio.to_thread(constraints.start))
    while (process := constraints.nursery._process) is None:
        await asyncio.sleep(0)
    await asyncio.to_thread(constraints.close)
    await starting
    assert process.poll() is not None and constraints.nursery.pid is None


async def test_who_leaves_gives_the_place_back(constraints: Constraints) -> None:
    await constraints.compile(shaped({"type": "null"}), PLAIN)
    killers = [lark(f'start: NL "\\n" "{n}"? \nNL: /\\n+/') for n in range(12)]
    asked = [asyncio.create_task(constraints.compile(killer, PLAIN)) for killer in killers]
    while not constraints._short._waiting:
        await asyncio.sleep(0)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert not constraints._short._waiting or not any(
        not place.done() for places in constraints._short._waiting.values() for place in places
    )
    began = time.perf_counter()
    await constraints.compile(shaped({"type": "boolean"}), PLAIN)
    assert time.perf_counter() - began < 5


async def test_a_flood_of_what_never_ends_holds_up_nobody_else(constraints: Constraints) -> None:
    await constraints.compile(shaped({"type": "null"}), PLAIN)
    killers = [lark(f'start: NL "\\n" "{n}"?\nNL: /\\n+/') for n in range(12)]
    asked = [asyncio.create_task(constraints.compile(killer, PLAIN, "theirs")) for killer in killers]
    await asyncio.sleep(0)
    for n in range(3):
        began = time.perf_counter()
        await constraints.compile(shaped({"type": "integer", "minimum": n}), PLAIN, "mine")
        assert time.perf_counter() - began < 5
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_owners_take_turns() -> None:
    turns, order = Turns(1), []

    async def work(owner: str) -> None:
        async with turns.turn(owner):
            order.append(owner)
            await asyncio.sleep(0)

    await asyncio.gather(*map(work, ["a", "a", "a", "a", "b"]))
    assert order == ["a", "a", "b", "a", "a"]
    left = asyncio.create_task(work("c"))
    async with turns.turn("d"):
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
    await asyncio.wait_for(work("e"), 5)


# -- running rows --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> Any:
    loop = asyncio.new_event_loop()
    engine = LocalEngine(CHECKPOINT, num_threads=1, kv_cache_bytes=16 << 20)
    loop.run_until_complete(engine.start())
    yield lambda work: loop.run_until_complete(work(engine))
    loop.run_until_complete(engine.close())
    loop.close()


async def said(
    engine: LocalEngine,
    constraint: Constraint | None,
    prefix: tuple[tuple[int, ...], ...] = (),
    seed: int = 3,
) -> list[int]:
    prompt = await engine.tokenize("Say something.")
    sampling = SamplingParams(seed=seed, max_tokens=60, min_tokens=0 if constraint else 60, ignore_eos=True)
    request = GenerateRequest("r", prompt, sampling, PLAIN, constraint, prefix=prefix)
    return [token async for chunk in engine.generate(request) for token in chunk.token_ids]


Work = Callable[[Callable[[LocalEngine], Any]], Any]


def test_a_mask_that_is_never_made_fails_its_row_alone(tiny: Work) -> None:
    async def work(engine: LocalEngine) -> None:
        others = [Constraint(answer=Shape("regex", f"[0-9]{{{n}}}x?")) for n in (30, 40)]
        alone = [await said(engine, other) for other in (*others, None)]
        killers = [lark(ENDLESS % n) for n in (20, 24)]
        found = await asyncio.gather(
            *(said(engine, each) for each in (*others, None, *killers)), return_exceptions=True
        )
        assert found[:3] == alone
        for each in found[3:]:
            assert isinstance(each, ConstraintError) and "takes too long" in str(each)
        engine.check_integrity()
        began = time.perf_counter()
        with pytest.raises(ConstraintError, match="takes too long"):
            await said(engine, killers[0])
        assert time.perf_counter() - began < 1  # it is known
        assert await said(engine, others[0]) == alone[0]

    tiny(work)


def test_a_generation_that_goes_on_into_a_killer_fails_alone(tiny: Work) -> None:
    async def work(engine: LocalEngine) -> None:
        letters = await engine.tokenize("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False)
        with pytest.raises(ConstraintError, match="takes too long"):
            await said(engine, lark(ENDLESS % 26), (letters,))
        digits = Constraint(answer=Shape("regex", "[0-9]{12}"))
        whole = await said(engine, digits)
        assert await said(engine, digits, (tuple(whole[:3]), tuple(whole[3:5]))) == whole

    tiny(work)


def test_guesses_behind_a_process_that_died(tiny: Work) -> None:
    """The other rows are caught up with where the next process begins, whatever they had."""

    async def work(engine: LocalEngine) -> None:
        schema = shaped(
            {"type": "array", "items": {"enum": ["again and again"]}, "minItems": 5, "maxItems": 6}
        )
        alone = await said(engine, schema)
        found, *_ = await asyncio.gather(
            said(engine, schema), said(engine, lark(ENDLESS % 18)), return_exceptions=True
        )
        assert found == alone

    tiny(work)


# -- the processes' life -------------------------------------------------------------------------------------

HANGS = """
import asyncio, sys
from engine import Constraint, LocalEngine, Shape
from engine.tiny import CHECKPOINT
import socket

async def main():
    listening = socket.create_server(("127.0.0.1", 0))
    engine = LocalEngine(CHECKPOINT, num_threads=1, kv_cache_bytes=16 << 20)
    await engine.start()
    await engine.check(Constraint(answer=Shape("json", "{}")))
    constraints = engine._constraints
    fork, pids = constraints.nursery.fork, [constraints.nursery.pid, constraints.fast._worker.process.pid]

    def told(**asked):
        worker = fork(**asked)
        print(*pids, worker.pid, flush=True)
        return worker

    constraints.nursery.fork = told
    await engine.check(Constraint(answer=Shape("lark", sys.argv[1])))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_outlives_a_server_that_is_killed() -> None:
    command = [sys.executable, "-c", HANGS, 'start: NL "\\n"\nNL: /\\n+/']
    server = subprocess.Popen(command, cwd=Path(__file__).parents[4], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pids = [int(pid) for pid in server.stdout.readline().split()]
    assert len(pids) == 3
    for pid in pids:
        held = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.exists()]
        ours = {os.readlink(each) for each in Path(f"/proc/{server.pid}/fd").iterdir() if each.exists()}
        assert not any(each.startswith("socket:") and each in ours for each in held)
    server.kill()
    server.wait()
    server.stdout.close()
    deadline = time.monotonic() + 20
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
