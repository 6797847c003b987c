"""Runs a measurement: each load in rounds, after requests that do not count, one server after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from server.bench.figures import Figures, Sample, figures
from server.bench.load import Ask, Load, Prompts, drive
from server.progress import Progress


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask, and what it is called in the report. remote: it works in another process."""

    label: str
    ask: Ask
    remote: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. requests: a round, None: by the load. warmup: requests before each load that count
    for nothing, None: one for each place (at most 16). num_output: tokens asked for."""

    loads: Sequence[Load]
    prompts: Prompts
    num_output: int
    rounds: int
    requests: int | None = None
    warmup: int | None = None
    seed: int = 0


@dataclass(slots=True)
class Case:
    """One server under one load. spent: processor seconds of this process, where the work is another's."""

    label: str
    load: Load
    num_output: int
    spent: float | None = None
    samples: list[list[Sample]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def rounds(self) -> list[Figures]:
        """Figures of each round."""
        return [
            figures(samples, seconds, asked=self.num_output)
            for samples, seconds in zip(self.samples, self.seconds, strict=True)
        ]

    @property
    def figures(self) -> Figures:
        """Figures of all rounds together."""
        samples = [sample for in_round in self.samples for sample in in_round]
        return figures(samples, sum(self.seconds), asked=self.num_output)


async def measure(targets: Sequence[Target], plan: Plan) -> list[Case]:
    """Put each load on each target, in turn within a round, so that a drift of the machine's speed hits all
    alike.

    All targets get the same prompts. How far it is, is shown on standard error.
    """
    run = str(time.time_ns())  # no prefix cache has seen these prompts, also none of an earlier run
    counts = [(load.requests(plan.requests), _warmup(load, plan)) for load in plan.loads]
    total = len(targets) * sum(plan.rounds * count + warm for count, warm in counts)
    cases: list[Case] = []
    with Progress("measuring", total=total, unit="requests") as progress:
        for load, (count, warm) in zip(plan.loads, counts, strict=True):
            load_cases = [
                Case(target.label, load, plan.num_output, 0.0 if target.remote else None)
                for target in targets
            ]
            cases += load_cases
            progress.now(f"measuring {load}")
            for number in range(-1, plan.rounds):
                prompts = plan.prompts.make(count if number >= 0 else warm, f"{run} {load} {number}")
                pairs = list(zip(targets, load_cases, strict=True))
                for target, case in pairs if number % 2 == 0 else reversed(pairs):
                    if not prompts:
                        continue
                    before = time.process_time()
                    samples, seconds = await drive(
                        target.ask, prompts, load, seed=plan.seed + number, done=lambda _: progress.add()
                    )
                    if number >= 0:
                        case.samples.append(samples)
                        case.seconds.append(seconds)
                        if case.spent is not None:
                            case.spent += time.process_time() - before
    return cases


def _warmup(load: Load, plan: Plan) -> int:
    return min(max(load.concurrency, 2), 16) if plan.warmup is None else plan.warmup
