"""Decides what a run does next, as a pure function of its plan, its output so far and its counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import orjson

from server.items import (
    Item,
    Route,
    approves,
    asks_approval,
    broken_in_a_row,
    compacted,
    execution_of,
    is_client_call,
    is_output,
    is_running,
    is_unfinished_compaction,
    key_of,
    link_of,
    source_of,
)
from storage import TERMINAL_STATUSES

TERMINAL = frozenset(TERMINAL_STATUSES)
"""Statuses that a response never leaves."""

CALLS_AT_ONCE = 8
"""Calls of one turn that are made side by side."""

MAX_BROKEN_CALLS = 3
"""A model that breaks this many of its calls in a row, and was told so, ends its response `incomplete`."""


@dataclass(slots=True)
class Turn:
    """The counters of one generation. input_tokens: the length of its prompt. first_item: the output index of
    its first item. summarises: of a compaction, which of the conversation's messages it reads: from the first
    up to the second index; None for a generation that answers."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int = 0
    first_item: int = 0
    summarises: tuple[int, int] | None = None

    @property
    def num_limited(self) -> int:
        """Tokens that count against limits: prompt tokens that the engine had cached do not."""
        return self.input_tokens - self.cached_tokens + self.output_tokens


@dataclass(slots=True)
class Progress:
    """A run's counters, over all its generations; rebuilt from its records when another owner goes on.

    input_tokens: sum of the prompts' lengths. first_item: the output index of the last generation's first
    item. generation_tokens: output tokens of that generation. ended: how it ended, None while it is at work.
    turns: the generations one by one. summary: of the messages before `num_summarised`, while a compaction
    goes on that summarises in several parts. asked: the verdict on its input, on which are the first
    `num_asked` items of its output as far as they are its client's; None where there is none yet. is_full:
    what the tools returned leaves the context no room for another generation.
    """

    generations: int = 0
    first_item: int = 0
    generation_tokens: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    ended: Literal["stop", "length"] | None = None
    turns: list[Turn] = field(default_factory=list)
    summary: str | None = None
    num_summarised: int = 0
    asked: dict[str, Any] | None = None
    num_asked: int = 0
    is_full: bool = False

    @classmethod
    def of(cls, log: Iterable[tuple[int, bytes | None]]) -> Progress:
        """The counters of a log: by the number of tokens and the facts of each record, in order."""
        progress = cls()
        for num_tokens, facts in log:
            progress.add(orjson.loads(facts) if facts else {}, num_tokens)
        return progress

    def add(self, facts: Mapping[str, Any], num_tokens: int) -> None:
        """Count a record's tokens and facts: `generation`, `first_item`, `input_tokens`, `cached_tokens` come
        with the first one of a generation, `cache_write_tokens` too where there were any, `asked` where its
        input was judged, `ended` with the last, `reasoning_tokens` where there were any. A generation of a
        compaction has `summarises` besides, and in its last record, where another one follows, `summary`."""
        if "generation" in facts:
            self.generation_tokens = 0
        self.generation_tokens += num_tokens
        self.output_tokens += num_tokens
        self.reasoning_tokens += facts.get("reasoning_tokens", 0)
        if "generation" in facts:
            self.generations = facts["generation"] + 1
            self.first_item = facts["first_item"]
            self.input_tokens += facts["input_tokens"]
            self.cached_tokens += facts["cached_tokens"]
            self.cache_write_tokens += facts.get("cache_write_tokens", 0)
            self.ended = None
            if "asked" in facts:
                self.asked, self.num_asked = facts["asked"], facts["first_item"]
            turn = Turn(facts["input_tokens"], facts["cached_tokens"], first_item=facts["first_item"])
            if "summarises" in facts:
                first, end = facts["summarises"]
                turn.summarises = (first, end)
            self.turns.append(turn)
        if self.turns:
            self.turns[-1].output_tokens = self.generation_tokens
        if "ended" in facts:
            self.ended = facts["ended"]
            part = self.turns[-1].summarises
            self.summary = facts.get("summary")
            self.num_summarised = part[1] if part is not None and self.summary is not None else 0

    @property
    def answers(self) -> int:
        """The generations that answer."""
        return sum(turn.summarises is None for turn in self.turns)

    @property
    def answer_tokens(self) -> int:
        """The output tokens of those."""
        summaries = (turn.output_tokens for turn in self.turns if turn.summarises is not None)
        return self.output_tokens - sum(summaries)

    @property
    def has_summarised(self) -> bool:
        """Whether the last generation was one of a compaction, and has ended."""
        return bool(self.turns) and self.turns[-1].summarises is not None and self.ended is not None

    @property
    def num_limited(self) -> int:
        """Tokens that count against limits, of all generations."""
        return sum(turn.num_limited for turn in self.turns)

    def limited_before(self, index: int) -> int:
        """The same of those generations that had begun before the output's item of this index was there."""
        return sum(turn.num_limited for turn in self.turns if turn.first_item <= index)

    def usage(self) -> dict[str, Any]:
        """The official usage object, and the same by turn: a list has one number for each generation.

        The details have numbers alone: clients refuse lists there, such as the Agents SDK for JavaScript.
        """
        tool_output = self._tool_output_tokens()
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cache_write_tokens": self.cache_write_tokens,
            },
            "output_tokens": self.output_tokens,
            "output_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "tool_output_tokens": sum(tool_output),
            },
            "total_tokens": self.input_tokens + self.output_tokens,
            "input_tokens_per_turn": [turn.input_tokens for turn in self.turns],
            "cached_tokens_per_turn": [turn.cached_tokens for turn in self.turns],
            "output_tokens_per_turn": [turn.output_tokens for turn in self.turns],
            "tool_output_tokens_per_turn": tool_output,
        }

    def _tool_output_tokens(self) -> list[int]:
        """By how much each prompt is longer than the one before it and what was generated upon that: what
        tools returned, as the model is shown it. A template that drops earlier thoughts makes it less."""
        first = [0] * min(len(self.turns), 1)
        return first + [
            0
            if turn.summarises or before.summarises  # a prompt of its own, and one that it has made shorter
            else max(0, turn.input_tokens - before.input_tokens - before.output_tokens)
            for before, turn in pairwise(self.turns)
        ]


@dataclass(frozen=True, slots=True)
class ListTools:
    """Show the functions that lead to these routes as items, once."""

    routes: tuple[Route, ...]


@dataclass(frozen=True, slots=True)
class Generate:
    """Run the model. generation: which of the run's, from 0; the one at work goes on where it was left.

    max_tokens: for the whole generation, what was made of it already included.
    """

    generation: int
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class Compact:
    """Make a compaction, or go on with the one that is begun. generation: which of the run's it runs next,
    where the model has to summarise; one at work goes on where it was left."""

    generation: int


@dataclass(frozen=True, slots=True)
class MakeCalls:
    """Make the calls that these items asked for, because the client approved them."""

    requests: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class CallTools:
    """Run these server tools."""

    calls: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class AwaitClient:
    """Wait for the client's answers to these calls."""

    call_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over."""

    status: Literal["completed", "incomplete"]
    reason: str | None = None  # incomplete_details.reason
    message: str | None = None  # incomplete_details.message


Step = ListTools | MakeCalls | Generate | Compact | CallTools | AwaitClient | Finish


def pending_calls(items: Sequence[Item]) -> dict[str, str]:
    """What the client has not answered: key -> name of the call, oldest first. A call that is not whole needs
    no answer, though it may have one."""
    answered = {link_of(item) for item in items if is_output(item)}
    return {
        str(key_of(item)): item.get("name") or item["type"]
        for item in items
        if is_client_call(item) and link_of(item) not in answered and item.get("status") != "incomplete"
    }


def approved_calls(approved: Sequence[str], context: Sequence[Item], output: Sequence[Item]) -> list[Item]:
    """The items that asked for calls which the client has approved and which are not made yet, in the order
    of its answers. approved: ids of those that the run's input approves."""
    made = {source_of(item) for item in output}
    granted = [*approved, *(key_of(item) for item in output if approves(item))]
    wanted = [key for key in granted if key not in made]
    if not wanted:
        return []
    asked = {key_of(item): item for item in (*context, *output) if asks_approval(item)}
    return [asked[key] for key in wanted]


def under_way(output: Sequence[Item]) -> list[Item]:
    """The calls of this server's tools that are being made, or are about to begin: those without an outcome
    that wait for none of another call. The others begin once such an outcome is durable, so that after a
    crash these may have begun, and no others have."""
    beside: list[Item] = []
    after: list[Item] = []
    for item in output:
        if is_running(item):
            execution = execution_of(item)
            (beside if execution is not None and execution.side_by_side else after).append(item)
    return [*beside[:CALLS_AT_ONCE], *after[:1]]


def is_due(output: Sequence[Item], num_tokens: int | None, threshold: int | None) -> bool:
    """Whether a compaction comes before the next generation. num_tokens: of its prompt, None for one that is
    longer than any model's. threshold: tokens from which on a prompt is compacted; None for never. What was
    compacted just now is not compacted again."""
    if threshold is None:
        return False
    settings = (item for item in reversed(output) if item["type"] != "configuration_update")
    if (last := next(settings, None)) is not None and compacted(last) is not None:
        return False
    return num_tokens is None or num_tokens >= threshold


def next_step(
    output: Sequence[Item],
    progress: Progress,
    *,
    unlisted: Sequence[Route],
    approved: Sequence[Item] = (),
    waits: bool,
    max_output_tokens: int | None,
    max_generations: int,
    compacts: bool = False,
) -> Step:
    """Decide. unlisted: routes whose functions were not shown yet. approved: what asked for calls that are
    approved and not made yet. waits: the client feeds outputs. max_generations: a loop of tools ends
    `incomplete` after so many. compacts: a compaction is all that the run is to make."""
    if progress.is_full:
        return _stopped("What its tools returned fills the model's context.")
    left = None if max_output_tokens is None else max_output_tokens - progress.answer_tokens
    if any(map(is_unfinished_compaction, output)) or (compacts and not output):
        at_work = progress.generations > 0 and progress.ended is None
        return Compact(progress.generations - 1 if at_work else progress.generations)
    if compacts:
        return Finish("completed")
    if progress.generations == 0 and unlisted:
        return ListTools(tuple(unlisted))
    if progress.generations > 0 and progress.ended is None:  # an earlier owner of the run began it
        begun = progress.generation_tokens
        return Generate(progress.generations - 1, None if left is None else left + begun)
    if progress.has_summarised:
        return Generate(progress.generations, left)
    if progress.ended == "length":
        return Finish("incomplete", "max_output_tokens")
    running = tuple(item for item in output if is_running(item))
    if running:
        return CallTools(running)
    if approved:
        return MakeCalls(tuple(approved))
    if progress.generations == 0:
        return Generate(0, left)
    waiting = tuple(pending_calls(output))
    if waiting:
        return AwaitClient(waiting) if waits else Finish("completed")
    return _answered(output, progress, left, max_generations)


def _answered(output: Sequence[Item], progress: Progress, left: int | None, max_generations: int) -> Step:
    """What comes next where all calls are answered; the model has seen the answers to those that it made
    before its last generation."""
    new = output[progress.first_item :]
    if not any(is_output(item) or execution_of(item) is not None for item in new):
        return Finish("completed")
    told = broken_in_a_row(output[: progress.first_item]) > 0
    if told and broken_in_a_row(output) >= MAX_BROKEN_CALLS:
        return _stopped(f"The model broke {MAX_BROKEN_CALLS} of its calls in a row.")
    if left is not None and left < 1:
        return Finish("incomplete", "max_output_tokens")
    if progress.generations >= max_generations:
        return _stopped(f"The model was asked {max_generations} times, as often as `max_generations` allows.")
    return Generate(progress.generations, left)


def _stopped(message: str) -> Finish:
    """An end that no limit on tokens makes. The API knows of no other reason that it could have."""
    return Finish("incomplete", "max_output_tokens", message)
