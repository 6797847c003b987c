"""The run loop's decisions: a function of output and counters alone."""

from __future__ import annotations

from typing import Any

import orjson

from server.items import ABANDONED, Compacted, Route, with_private
from server.runs.planning import steps
from server.runs.planning.steps import AwaitClient, CallTools, Compact, Finish, Generate, ListTools, Progress

MESSAGE = {"type": "message", "id": "m"}
CALL = {"type": "function_call", "id": "f", "call_id": "c1", "name": "look_up"}
OUTPUT = {"type": "function_call_output", "id": "o", "call_id": "c1", "output": "x"}
SERVER_CALL = {"type": "mcp_call", "id": "s", "name": "calculator", "status": "calling"}
BEGUN = {"type": "compaction", "id": "k", "encrypted_content": ""}
MADE = with_private({**BEGUN, "encrypted_content": "x"}, Compacted(summary="s").dump())
SETTINGS = {"type": "configuration_update", "id": "u", "reasoning": {"effort": "low"}}
LISTED = Route("mcp_call", {"server_label": "antiphon"})


def decide(output: list[dict[str, Any]], progress: Progress, **given: Any) -> steps.Step:
    defaults: dict[str, Any] = {
        "unlisted": (),
        "waits": False,
        "max_output_tokens": None,
        "max_generations": 1000,
    }
    return steps.next_step(output, progress, **(defaults | given))


def ended(reason: Any = "stop", generations: int = 1, output_tokens: int = 0) -> Progress:
    return Progress(generations=generations, ended=reason, output_tokens=output_tokens)


def test_a_fresh_run_lists_tools_once_and_generates() -> None:
    assert decide([], Progress(), unlisted=(LISTED,)) == ListTools((LISTED,))
    assert decide([], Progress(), max_output_tokens=20) == Generate(0, max_tokens=20)


def test_a_turn_that_said_something_is_over() -> None:
    assert decide([MESSAGE], ended()) == Finish("completed")
    assert decide([MESSAGE], ended("length")) == Finish("incomplete", "max_output_tokens")


def test_server_calls_run_before_the_client_is_waited_for() -> None:
    assert decide([CALL, SERVER_CALL], ended(), waits=True) == CallTools((SERVER_CALL,))


def test_client_calls_complete_the_response_or_are_waited_for() -> None:
    assert decide([CALL], ended()) == Finish("completed")
    assert decide([CALL], ended(), waits=True) == AwaitClient(("c1",))
    assert decide([CALL, OUTPUT], ended(), waits=True) == Generate(1, max_tokens=None)


def test_output_tokens_count_over_the_whole_run() -> None:
    done = {**SERVER_CALL, "status": "completed"}
    assert decide([done], ended(output_tokens=12), max_output_tokens=20) == Generate(1, max_tokens=8)
    assert decide([done], ended(output_tokens=20), max_output_tokens=20) == Finish(
        "incomplete", "max_output_tokens"
    )


def test_a_call_that_is_not_whole_asks_nobody_for_an_answer() -> None:
    torn = {**CALL, "status": "incomplete"}
    assert decide([torn], ended(), waits=True) == Finish("completed")
    assert decide([{**CALL, "call_id": "c0"}, torn], ended(), waits=True) == AwaitClient(("c0",))
    broken = {**SERVER_CALL, "status": "incomplete"}
    assert decide([broken], ended()) == Generate(1, max_tokens=None), "the model is told"


def test_a_generation_that_was_left_goes_on_within_its_own_limit() -> None:
    progress = Progress(generations=2, output_tokens=15, generation_tokens=3)
    assert decide([MESSAGE], progress, max_output_tokens=20) == Generate(1, max_tokens=8)
    assert decide([MESSAGE], progress) == Generate(1, max_tokens=None)


def test_a_loop_of_tools_ends() -> None:
    done = {**SERVER_CALL, "status": "completed"}
    assert decide([done], ended(generations=6), max_generations=7) == Generate(6, max_tokens=None)
    stopped = decide([done], ended(generations=7), max_generations=7)
    assert isinstance(stopped, Finish) and stopped.message is not None
    assert (stopped.status, "7 times" in stopped.message) == ("incomplete", True)
    by_tokens = decide([done], ended(generations=7, output_tokens=9), max_generations=7, max_output_tokens=9)
    assert by_tokens == Finish("incomplete", "max_output_tokens"), "it is the limit on tokens that ended it"


def test_a_run_without_room_ends_whatever_it_was_at() -> None:
    """Also a generation that another process began, behind which the context is smaller now."""
    for progress in (ended(), ended(reason=None, generations=2)):
        progress.is_full = True
        stopped = decide([MESSAGE], progress)
        assert isinstance(stopped, Finish) and stopped.status == "incomplete"


def test_a_loop_of_broken_calls_ends_once_the_model_was_told() -> None:
    broken = {**SERVER_CALL, "status": "incomplete"}
    row = [broken] * steps.MAX_BROKEN_CALLS
    goes_on = Generate(1, max_tokens=None)
    assert decide(row, ended()) == goes_on, "all of one generation"
    told = Progress(generations=1, ended="stop", first_item=1)
    message = f"The model broke {steps.MAX_BROKEN_CALLS} of its calls in a row."
    assert decide(row, told) == Finish("incomplete", "max_output_tokens", message)
    assert decide(row[1:], told) == goes_on
    whole = {**SERVER_CALL, "status": "failed"}
    assert decide([*row, whole, broken], Progress(generations=1, ended="stop", first_item=4)) == goes_on


def test_progress_is_rebuilt_from_facts() -> None:
    progress = Progress()
    first = {"generation": 0, "first_item": 1, "input_tokens": 7, "cached_tokens": 4}
    progress.add({**first, "cache_write_tokens": 2}, 2)
    assert (progress.ended, progress.first_item) == (None, 1)
    assert progress.generation_tokens == 2
    progress.add({"reasoning_tokens": 1}, 0)
    progress.add({"ended": "stop"}, 3)
    assert progress.usage() == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 2},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 1, "tool_output_tokens": 0},
        "total_tokens": 12,
        "input_tokens_per_turn": [7],
        "cached_tokens_per_turn": [4],
        "output_tokens_per_turn": [5],
        "tool_output_tokens_per_turn": [0],
    }


def test_usage_by_turn() -> None:
    log = [
        (2, b'{"generation":0,"first_item":1,"input_tokens":7,"cached_tokens":4}'),
        (3, b'{"ended":"stop"}'),
        (
            4,
            b'{"generation":1,"first_item":2,"input_tokens":20,"cached_tokens":12,'
            b'"cache_write_tokens":4,"ended":"stop"}',
        ),
        (
            1,
            b'{"generation":2,"first_item":4,"input_tokens":21,"cached_tokens":0,'
            b'"cache_write_tokens":16,"reasoning_tokens":1}',
        ),
        (6, None),
    ]
    usage = Progress.of(log).usage()
    assert usage["input_tokens_per_turn"] == [7, 20, 21]
    assert usage["cached_tokens_per_turn"] == [4, 12, 0]
    assert usage["output_tokens_per_turn"] == [5, 4, 7]
    # 20 - 7 - 5; a template may drop thoughts: never below 0
    assert usage["tool_output_tokens_per_turn"] == [0, 8, 0]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 1, "tool_output_tokens": 8}
    assert (usage["input_tokens"], usage["output_tokens"]) == (48, 16)
    # A log of a version that did not count what was written says nothing of it.
    assert usage["input_tokens_details"] == {"cached_tokens": 16, "cache_write_tokens": 20}
    assert Progress().usage()["output_tokens_per_turn"] == []


def summarised(*parts: dict[str, Any]) -> Progress:
    """The counters behind generations of a compaction, each as the facts of its only record, of 5 tokens."""
    first = {"first_item": 1, "input_tokens": 50, "cached_tokens": 40}
    return Progress.of((5, orjson.dumps({"generation": n, **first, **part})) for n, part in enumerate(parts))


def test_a_compaction_that_is_begun_is_what_comes_next() -> None:
    assert decide([BEGUN], Progress()) == Compact(0)
    assert decide([MESSAGE, BEGUN], ended()) == Compact(1)
    at_work = summarised({"summarises": [0, 4]})
    assert decide([BEGUN], at_work) == Compact(0), "it goes on where it was left"
    part = summarised({"summarises": [0, 4], "ended": "stop", "summary": "so far"})
    assert decide([BEGUN], part) == Compact(1)
    assert (part.num_summarised, part.summary) == (4, "so far")


def test_behind_a_compaction_comes_the_answer() -> None:
    done = summarised({"summarises": [0, 4], "ended": "length"})
    assert decide([MADE], done, max_output_tokens=20) == Generate(1, max_tokens=20), "it has its tokens alone"
    assert (done.num_summarised, done.summary, done.output_tokens) == (0, None, 5)
    assert decide([MADE], Progress()) == Generate(0, max_tokens=None), "nothing had to be summarised"
    assert done.usage()["tool_output_tokens_per_turn"] == [0]


def test_a_run_that_only_compacts() -> None:
    assert decide([], Progress(), unlisted=(LISTED,), compacts=True) == Compact(0)
    assert decide([MADE], summarised({"summarises": [0, 4], "ended": "stop"}), compacts=True) == Finish(
        "completed"
    )
    assert decide([MADE, SETTINGS], Progress(), compacts=True) == Finish("completed")


def test_a_compaction_is_due_once() -> None:
    assert not steps.is_due([MESSAGE], 5000, None)
    assert steps.is_due([MESSAGE], 1000, 1000) and not steps.is_due([MESSAGE], 999, 1000)
    assert steps.is_due([], None, 1000), "it could not even be counted"
    assert not steps.is_due([MADE], 5000, 1000) and not steps.is_due([MADE, SETTINGS], 5000, 1000)
    assert steps.is_due([MADE, MESSAGE], 5000, 1000)
    assert steps.is_due([with_private(dict(MADE), ABANDONED)], 5000, 1000), "it stands for nothing"
