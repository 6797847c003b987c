"""Faults that hit one request of a batch, one fault for every stage of a step.

Each fault is raised for the request with the id `VICTIM` and for no other; the tests say what must come of
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine import Constraint, GenerateRequest, LocalEngine, ToolShape
from engine.backends.generation import Generation, Mailbox
from engine.core import loop as engine_loop
from engine.core.batch_state import noise_key
from engine.kernels import sampler

VICTIM = "victim"
Undo = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault. `put(engine, victim, call)` makes the stage raise at its `call`-th time for the victim and at
    every later one; it returns how to undo that. `change`: what the victim must ask for to get there. fails:
    False where the request goes on without the stage.
    """

    put: Callable[[LocalEngine, GenerateRequest, int], Undo]
    change: Callable[[GenerateRequest], GenerateRequest] = lambda request: request
    fails: bool = True


def raising(owner: Any, name: str, hits: Callable[..., bool], call: int) -> Undo:
    """Have a function raise from its `call`-th call on that `hits`."""
    real, left = getattr(owner, name), call

    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal left
        if hits(*args, **options):
            left -= 1
            if left <= 0:
                raise ValueError(f"injected into {name}")
        return real(*args, **options)

    setattr(owner, name, wrapped)
    return lambda: setattr(owner, name, real)


def _slot(engine: LocalEngine) -> int | None:
    running = engine._loop.scheduler.running
    return next((each.slot for each in running if each.request.id == VICTIM), None)


def _request(each: Any) -> Any:
    return getattr(each, "request", each)


def _for_slots(owner: Callable[[LocalEngine], Any], name: str, at: int) -> Injection:
    """Raised when the victim's slot is among the slots that are argument number `at`."""

    def put(engine: LocalEngine, victim: GenerateRequest, call: int) -> Undo:
        def hits(*args: Any, **_: Any) -> bool:
            slots = args[at]
            return _slot(engine) in (slots.tolist() if hasattr(slots, "tolist") else [slots])

        return raising(owner(engine), name, hits, call)

    return Injection(put)


def _for_sequence(owner: Callable[[LocalEngine], Any], name: str, *, once: bool = False) -> Injection:
    """Raised when the first argument is the victim's sequence or request, or a list with it."""

    def put(engine: LocalEngine, victim: GenerateRequest, call: int) -> Undo:
        def hits(first: Any, *_: Any, **__: Any) -> bool:
            several = first if isinstance(first, list) else [first]
            return any(_request(each).id == VICTIM for each in several)

        return raising(owner(engine), name, hits, 1 if once else call)

    return Injection(put)


def _for_plan(name: str, at: int) -> Injection:
    """Raised when the plan, argument number `at`, draws for the victim."""

    def put(engine: LocalEngine, victim: GenerateRequest, call: int) -> Undo:
        key = noise_key(victim.sampling.seed, victim.choice, victim.generation)
        return raising(engine._loop.runner, name, lambda *args: key in args[at].draw.noise, call)

    return Injection(put)


def _scores(engine: LocalEngine, victim: GenerateRequest, call: int) -> Undo:
    return raising(sampler, "score", lambda *_, **__: True, 1)


def _scored(request: GenerateRequest) -> GenerateRequest:
    return replace(request, sampling=replace(request.sampling, prompt_logprobs=1))


def _delivered(engine: LocalEngine, victim: GenerateRequest, call: int) -> Undo:
    def hits(_: Any, output: Any, **_options: Any) -> bool:
        live = engine._loop.scheduler.find(output.handle)
        return live is not None and live.request.id == VICTIM

    return raising(Mailbox, "put", hits, call)


def _read(engine: LocalEngine, victim: GenerateRequest, call: int) -> Undo:
    return raising(Generation, "read", lambda self, _: self._request.id == VICTIM, call)


def _not_finite(engine: LocalEngine, victim: GenerateRequest, call: int) -> Undo:
    """The logits of the victim's row are NaN at one step."""
    runner: Any = engine._loop.runner
    draw, left = runner.draw, call
    key = noise_key(victim.sampling.seed, victim.choice, victim.generation)

    def drawing(forwarded: Any, plan: Any, *rest: Any) -> Any:
        nonlocal left
        for drawn in (plan.draw.noise == key).nonzero()[0]:
            left -= 1
            if left == 0:
                forwarded.logits[drawn] = math.nan
        return draw(forwarded, plan, *rest)

    runner.draw = drawing
    return lambda: setattr(runner, "draw", draw)


class _Broken:
    """A grammar that cannot say what may follow."""

    stopped = False

    def fill(self, mask: Any) -> None:
        raise ValueError("out of fuel")


def _bad_grammar(engine: LocalEngine, victim: GenerateRequest, call: int) -> Undo:
    matcher = engine._matcher

    async def broken(*_: object) -> Any:
        return _Broken(), False

    engine._matcher = broken  # type: ignore[method-assign]
    return lambda: setattr(engine, "_matcher", matcher)


def _constrained(request: GenerateRequest) -> GenerateRequest:
    return replace(request, constraint=Constraint("calls", (ToolShape("f", "{}"),)))


INJECTIONS: Mapping[str, Injection] = {
    "queueing": _for_sequence(lambda engine: engine._loop.scheduler, "add", once=True),
    "guessing": replace(
        _for_slots(lambda engine: engine._loop._speculation._drafter, "draft", 1), fails=False
    ),
    "admission": _for_sequence(lambda engine: engine._loop.scheduler.rows, "take", once=True),
    "scheduling": _for_slots(lambda engine: engine._loop.scheduler.kv, "grow", 0),
    "the plan": _for_slots(lambda engine: engine._loop.scheduler.rows, "plan", 1),
    "the forward": _for_plan("forward", 0),
    "prompt log probabilities": Injection(_scores, _scored),
    "all masks": _for_sequence(lambda _: engine_loop, "make_masks"),
    "a mask": Injection(_bad_grammar, _constrained),
    "the draw": _for_plan("draw", 1),
    "logits that are not finite": Injection(_not_finite),
    "appending": _for_slots(lambda engine: engine._loop.scheduler.rows, "append", 0),
    "publishing blocks": _for_sequence(lambda engine: engine._loop.scheduler, "_publish", once=True),
    "output": _for_sequence(lambda engine: engine._loop, "_output"),
    "delivery": Injection(_delivered),
    "reading": Injection(_read),
}
