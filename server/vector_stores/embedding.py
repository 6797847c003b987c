"""What turns texts into vectors, and what orders texts by how well they answer a query: both are optional."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from server.limits import Subject

Kind = Literal["query", "document"]
"""Many models embed a question otherwise than the text that answers it."""


@dataclass(frozen=True, slots=True)
class Payer:
    """Whose work a model does: its tokens count in the usage of the owner and of the key, where one is known,
    and against the limits of `subjects`. weight: of the owner's share of the engine. counted: False for what
    the operator brought about, which is nobody's usage."""

    owner: str
    subjects: tuple[Subject, ...] = ()
    key_id: str | None = None
    weight: float = 1.0
    counted: bool = True


class Embedder(Protocol):
    """A model that embeds texts. Each file of a store names the identity of the model that its vectors are
    of, and vectors of another one never come near them."""

    @property
    def identity(self) -> str:
        """Its name, with what changes whenever its vectors do."""

    @property
    def dimensions(self) -> int:
        """How many numbers a vector has."""

    @property
    def is_table(self) -> bool:
        """Whether it has a vector for each word, and computes next to nothing."""

    async def embed(self, texts: Sequence[str], kind: Kind, *, payer: Payer) -> Sequence[Sequence[float]]:
        """A vector for each text, in their order. Raises ApiError 429 and 403 where the payer's limits are in
        the way, 400 for a text that the model cannot read, and the engine's errors; a cancelled call drops
        its texts."""


class Reranker(Protocol):
    """A model that reads a query beside a text."""

    async def rerank(self, query: str, documents: Sequence[str], *, payer: Payer) -> Sequence[float]:
        """How well each document answers the query, from 0 to 1, in their order. Raises as `embed` does."""
