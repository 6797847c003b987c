"""What turns texts into vectors, and what orders texts by how well they answer a query: both are optional."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

Kind = Literal["query", "document"]
"""Many models embed a question otherwise than the text that answers it."""


class Embedder(Protocol):
    """A model that embeds texts. A store takes the identity and the dimensions of the model that it is made
    with, and vectors of another one never come near it."""

    @property
    def identity(self) -> str:
        """Its name, with what changes whenever its vectors do."""

    @property
    def dimensions(self) -> int:
        """How many numbers a vector has."""

    async def embed(self, texts: Sequence[str], kind: Kind, *, owner: str) -> Sequence[Sequence[float]]:
        """A vector for each text, in their order. owner: whose work it is."""


class Reranker(Protocol):
    """A model that reads a query beside a text."""

    async def rerank(self, query: str, documents: Sequence[str], *, owner: str) -> Sequence[float]:
        """How well each document answers the query, from 0 to 1, in their order. owner: whose work it is."""
