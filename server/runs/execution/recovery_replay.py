"""Resumes a half-finished generation by replaying its recorded tokens, and checks the result against the log.

The events made from the replayed tokens must equal the recorded ones, byte for byte; otherwise the run cannot
go on. Replayed events are not written again, because readers have seen them already.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import replace

import orjson

from engine import Chunk, GenerateRequest
from server.runs.events import Assembler, stamped
from server.runs.execution.logprobs import load_logprobs
from server.runs.execution.run import Unfinished


class Diverged(Exception):
    """What a run is made of gives something else than it did; the message says what, for the client."""


def fingerprint(prompt_ids: Sequence[int]) -> str:
    """Names a prompt: the first record of a generation holds it."""
    return hashlib.blake2b(array("i", prompt_ids), digest_size=16).hexdigest()


def _is_named(prompt_ids: Sequence[int], name: str | None) -> bool:
    """Whether a record's name is that of a prompt. Earlier versions named the ids as JSON."""
    written = orjson.dumps(list(prompt_ids))
    return name in (fingerprint(prompt_ids), hashlib.blake2b(written, digest_size=16).hexdigest())


class Replay:
    """A generation taken up again. Fed with the engine's replayed chunks, one for each record."""

    def __init__(self, left: Unfinished) -> None:
        self.assembler: Assembler = left.assembler  # where the log ends, once all is replayed
        self._records = left.records
        self._num_done = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens the records hold."""
        return sum(len(record.token_ids) for record in self._records)

    def request(self, request: GenerateRequest) -> GenerateRequest:
        """The generation's request, to go on behind the records. Diverged where its prompt is another one."""
        facts = orjson.loads(self._records[0].facts or b"{}")
        if not _is_named(request.prompt_ids, facts.get("prompt")):
            raise Diverged("The prompt of this response comes out differently now, so it cannot go on.")
        prefix = tuple(record.token_ids for record in self._records)
        if request.sampling.logprobs is None:
            return replace(request, prefix=prefix)
        logprobs = tuple(load_logprobs(record.logprobs or b"[]") for record in self._records)
        return replace(request, prefix=prefix, prefix_logprobs=logprobs)

    def take(self, chunk: Chunk) -> bool:
        """Take the next replayed chunk in; True for the last. Diverged where its events are not the
        record's."""
        record = self._records[self._num_done]
        drafts = self.assembler.feed(chunk.deltas)
        if stamped(drafts, record.first_seq) != record.events:
            raise Diverged("The events of this response come out differently now, so it cannot go on.")
        self._num_done += 1
        self.assembler.take_closed()  # the log has these items
        return self._num_done == len(self._records)
