"""The engine's step loop without its thread: a test submits requests, takes steps and looks between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from engine.config import EngineConfig
from engine.core.loop import EngineLoop, build_loop
from engine.core.messages import Abort, Inbox, Submit
from engine.step import RowOutput
from engine.types import Done, GenerateRequest, SamplingParams
from tests.support.checkpoints import VOCAB_SIZE

EOS = 299


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    """Greedy sampling params."""
    return SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, **fields)


class Driver:
    """One engine loop, stepped by hand; `tokens[handle]` gathers what came out."""

    def __init__(
        self, folder: Path, draft: Path | None = None, vocab_size: int = VOCAB_SIZE, **settings: Any
    ) -> None:
        self.inbox: Inbox = SimpleQueue()
        self.outputs: dict[int, list[RowOutput]] = defaultdict(list)
        self.loop: EngineLoop = build_loop(
            EngineConfig(folder, draft_model=draft, **{"num_threads": 1, **settings}),
            vocab_size=vocab_size,
            eos_token_ids=(EOS,),
            inbox=self.inbox,
            deliver=self._receive,
        )
        self._next = 0

    def _receive(self, outputs: list[RowOutput]) -> None:
        for output in outputs:
            self.outputs[output.handle].append(output)

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        matcher: Any = None,
        banned: Any = None,
        **fields: Any,
    ) -> int:
        """Hand a request to the loop, with what its output must not say; returns its handle."""
        self._next += 1
        request = GenerateRequest(id=str(self._next), prompt_ids=tuple(prompt), sampling=sampling, **fields)
        self.inbox.put(Submit(self._next, request, matcher, banned))
        return self._next

    def abort(self, handle: int) -> None:
        """Forget a request."""
        self.inbox.put(Abort(handle))

    def step(self) -> bool:
        """Obey what was submitted and do one step; False when there was nothing to compute."""
        with torch.inference_mode():
            self.loop.handle_commands()
            worked = self.loop.step()
        self.loop.scheduler.check_integrity()
        return worked

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.step():
            pass

    def tokens(self, handle: int) -> tuple[int, ...]:
        """The output tokens of a request so far."""
        return tuple(token for output in self.outputs[handle] for token in output.token_ids)

    def end(self, handle: int) -> Done | None:
        """How a request ended."""
        error = self.outputs[handle][-1].error
        if error is not None:
            raise error
        return self.outputs[handle][-1].finish

    def generate(self, prompt: Sequence[int], sampling: SamplingParams, **fields: Any) -> tuple[int, ...]:
        """Run one request alone to its end."""
        handle = self.submit(prompt, sampling, **fields)
        self.run()
        self.end(handle)
        return self.tokens(handle)
