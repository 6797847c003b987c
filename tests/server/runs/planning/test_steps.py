"""The run loop's decisions: a function of output and counters alone."""

from __future__ import annotations

from typing import Any

from server.items import Route
from server.runs.planning import steps
from server.runs.planning.steps import AwaitClient, CallTools, Finish, Generate, ListTools, Progress

MESSAGE = {"type": "message", "id": "m"}
CALL = {"type": "function_call", "id": "f", "call_id": "c1", "name": "look_up"}
OUTPUT = {"type": "function_call_output", "id": "o", "call_id": "c1", "output": "x"}
SERVER_CALL = {"type": "mcp_call", "id": "s", "name": "calculator", "status": "calling"}
LISTED = Route("mcp_call", {"server_label": "antiphon"})


def decide(output: list[dict[str, Any]], progress: Progress, **given: Any) -> steps.Step:
    defaults: dict[str, Any] = {"unlisted": (), "waits": False, "max_output_tokens": None}
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
    assert decide([done], ended(generations=steps.MAX_GENERATIONS)) == Finish(
        "incomplete", "max_output_tokens"
    )


def test_a_loop_of_broken_calls_ends_once_the_model_was_told() -> None:
    broken = {**SERVER_CALL, "status": "incomplete"}
    row = [broken] * steps.MAX_BROKEN_CALLS
    goes_on = Generate(1, max_tokens=None)
    assert decide(row, ended()) == goes_on, "all of one generation"
    told = Progress(generations=1, ended="stop", first_item=1)
    assert decide(row, told) == Finish("incomplete", "max_output_tokens")
    assert decide(row[1:], told) == goes_on
    whole = {**SERVER_CALL, "status": "failed"}
    assert decide([*row, whole, broken], Progress(generations=1, ended="stop", first_item=4)) == goes_on


def test_progress_is_rebuilt_from_facts() -> None:
    progress = Progress()
    progress.add({"generation": 0, "first_item": 1, "input_tokens": 7, "cached_tokens": 4}, 2)
    assert (progress.ended, progress.first_item) == (None, 1)
    assert progress.generation_tokens == 2
    progress.add({"reasoning_tokens": 1}, 0)
    progress.add({"ended": "stop"}, 3)
    assert progress.usage() == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
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
        (4, b'{"generation":1,"first_item":2,"input_tokens":20,"cached_tokens":12,"ended":"stop"}'),
        (1, b'{"generation":2,"first_item":4,"input_tokens":21,"cached_tokens":0,"reasoning_tokens":1}'),
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
    assert Progress().usage()["output_tokens_per_turn"] == []
