"""How long agents wait for the first token of each turn: the scheduler on made-up machines."""

from __future__ import annotations

import heapq
import statistics
from dataclasses import dataclass, field

import pytest

from engine.core.prefill_budget import Pace
from engine.core.scheduler import Batch
from tests.support.scheduling import Bench

SYSTEM, RESULT, ANSWER = 1000, 440, 32  # tokens before the first turn, and of each turn
TURNS, THINK_S = 5, 0.2


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds: of reading the weights, a token's products, a prompt's token by one key, and a key read."""

    weights: float
    token: float
    prompt_key: float
    key: float

    def seconds(self, bench: Bench, batch: Batch) -> float:
        """What a step takes."""
        keys = bench.scheduler.rows.num_computed[batch.slots].tolist()
        took = max(self.weights, self.token * int(batch.counts.sum()))
        for num_keys, count in zip(keys, batch.counts.tolist(), strict=True):
            took += self.key * num_keys if count == 1 else self.prompt_key * count * (num_keys + count / 2)
        return took


TILES = Machine(45e-3, 0.4e-3, 0.13e-6, 4.4e-6)  # Qwen3-0.6B's shape on two cores with AMX
WIDE = Machine(50e-3, 1.9e-3, 0.75e-6, 5.2e-6)  # the same with AVX-512 alone


class Unpaced(Pace):
    """As many tokens of prompts as fit into a step, in the order in which they came."""

    def allowance(self, num_prompts: int, num_decodes: int) -> int:
        return self.most

    def took_alone(self, num_tokens: int, seconds: float) -> None:
        pass


@dataclass(slots=True)
class Agent:
    """One that takes its turns: what it has said and was told, and the turn that it is in."""

    history: list[int]
    turn: int = 0
    asked: float = 0.0
    output: list[int] = field(default_factory=list)


class Trace:
    """Agents that begin together and ask again as soon as they have their answers."""

    def __init__(self, num_agents: int, pace: Pace) -> None:
        self.bench = Bench(num_blocks=num_agents * 1000, budget=2048, max_seqs=num_agents, max_len=4096)
        self.bench.scheduler.pace = pace
        self.now = 0.0
        self.firsts: list[list[float]] = [[] for _ in range(TURNS)]  # seconds, by turn
        self._due = [(0.0, number) for number in range(num_agents)]
        self._agents = [Agent([1000 + number] * SYSTEM) for number in range(num_agents)]
        self._asking: dict[int, Agent] = {}

    def run(self, machine: Machine) -> Trace:
        """Until all turns are taken."""
        scheduler = self.bench.scheduler
        while self._due or self._asking:
            if not self._asking:
                self.now = max(self.now, self._due[0][0])
            while self._due and self._due[0][0] <= self.now:
                self._ask(*heapq.heappop(self._due))
            batch = scheduler.schedule()
            assert batch is not None
            seconds = machine.seconds(self.bench, batch)
            self.now += seconds
            scheduler.took(batch, seconds)
            self._book(batch)
        return self

    def _ask(self, due: float, number: int) -> None:
        agent = self._agents[number]
        agent.asked, agent.output = due, []
        agent.history += [2000 + 100 * number + agent.turn] * RESULT
        handle = self.bench.add(agent.history, max_tokens=ANSWER)
        self._asking[handle] = agent

    def _book(self, batch: Batch) -> None:
        scheduler = self.bench.scheduler
        lengths = scheduler.rows.num_tokens[batch.slots].copy()
        self.bench.book(batch)
        for sequence, length in zip(batch.sequences, lengths.tolist(), strict=True):
            sequence.credit = ANSWER
            if scheduler.rows.num_tokens[sequence.slot] == length:
                continue
            agent = self._asking[sequence.handle]
            if not agent.output:
                self.firsts[agent.turn].append(self.now - agent.asked)
            agent.output.append(1)
            if len(agent.output) == ANSWER:
                self._end(sequence.handle, agent)

    def _end(self, handle: int, agent: Agent) -> None:
        self.bench.scheduler.finish(self.bench.sequence(handle))
        del self._asking[handle]
        agent.history += agent.output
        agent.turn += 1
        if agent.turn < TURNS:
            heapq.heappush(self._due, (self.now + THINK_S, self._agents.index(agent)))

    @property
    def late(self) -> float:
        """Seconds to the first token of the last two turns, the median."""
        return statistics.median(self.firsts[-1] + self.firsts[-2])


@pytest.mark.parametrize(
    ("machine", "num_agents", "share"), [(TILES, 4, 0.7), (TILES, 8, 0.6), (WIDE, 8, 0.6), (WIDE, 16, 1.2)]
)
def test_agents_do_not_wait_for_each_other_s_prompts(machine: Machine, num_agents: int, share: float) -> None:
    """They begin together, and if their turns went on together, each would wait for the prompts of all.

    share: of the time that they wait where prompts take all they can; sixteen leave no room between.
    """
    paced = Trace(num_agents, Pace(2048)).run(machine)
    unpaced = Trace(num_agents, Unpaced(2048)).run(machine)
    assert all(len(firsts) == num_agents for firsts in paced.firsts)
    assert paced.late < share * unpaced.late
    assert paced.now < 1.01 * unpaced.now, "all turns together take no longer"
