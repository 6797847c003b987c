"""Chat completions and messages that are judged: the input before a model is asked, the answers before their
last part."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from server.moderation import Moderation, Verdict, blocks, unjudged
from server.pooling import Moderator, judged
from server.vector_stores import Payer

Part = dict[str, Any]

UNASKED = unjudged("not_moderated", "The completion ended before there was anything to be judged.")


class Judged(Protocol):
    """How a choice is written that is judged."""

    def said(self, part: Part) -> str:
        """All that a part says."""
        ...

    def withheld(self) -> list[Part]:
        """The parts of an answer without words that moderation has ended."""
        ...


@dataclass(slots=True, eq=False)
class Moderated:
    """The moderation of one completion. text: what is asked. payer: whose use the judging is. writers: one a
    choice."""

    asked: Moderation
    moderator: Moderator
    payer: Payer
    text: str
    writers: Sequence[Judged]
    _input: Verdict | None = None
    _outputs: list[Verdict] = field(default_factory=list)

    async def judge(self, parts: AsyncGenerator[list[Part]]) -> AsyncGenerator[list[Part]]:
        """The parts of all choices, of which the last come once everything is judged. With a policy that
        blocks, what is flagged is withheld, and the parts of an output come all together."""
        async with aclosing(parts) as stream:
            [self._input] = await judged(self.moderator, [self.text], self.payer)
            if blocks(self.asked.input, self._input):
                yield [part for writer in self.writers for part in writer.withheld()]
                return
            gathered: list[list[Part]] = [[] for _ in self.writers]
            left = len(self.writers)
            async for together in stream:
                for part in together:
                    gathered[part["index"]].append(part)
                    left -= part["finish_reason"] is not None
                if not left:
                    written = zip(self.writers, gathered, strict=True)
                    texts = ["".join(map(writer.said, parts)) for writer, parts in written]
                    self._outputs = await judged(self.moderator, texts, self.payer)
                if self.asked.output == "score":
                    yield together
        if self.asked.output == "block":
            for writer, parts_of_one, verdict in zip(self.writers, gathered, self._outputs, strict=True):
                yield writer.withheld() if blocks("block", verdict) else parts_of_one

    def members(self) -> dict[str, Any]:
        """The member of a body, or of the chunk behind all parts, that says what was judged."""
        inputs = [] if self._input is None else [self._input]
        return {"moderation": {"input": _results(inputs), "output": _results(self._outputs)}}


def told_of_response(moderation: Mapping[str, Verdict] | None) -> dict[str, Any]:
    """The same member of a completion that a response makes; nothing where none was asked for."""
    if moderation is None:
        return {}
    return {"moderation": {half: _results([verdict]) for half, verdict in moderation.items()}}


def _results(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdicts on one half in the form of chat; the error that stands for one stands for all."""
    for verdict in verdicts or [UNASKED]:
        if verdict["type"] == "error":
            return verdict
    return {"type": "moderation_results", "model": verdicts[0]["model"], "results": list(verdicts)}
