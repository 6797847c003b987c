"""What turns texts into vectors, and what orders texts by how well they answer a query: both are optional."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

Kind = Literal["query", "document"]
"""Many models embed a question otherwise than the text that answers it."""


class Embedder(Protocol):
    """A model that embeds texts. A store takes the name and the dimensions of the model that it is made
    with, and vectors of another one never come near it."""

    @property
    def model(self) -> str:
        """Its name, which changes whenever its vectors do."""

    @property
    def dimensions(self) -> int:
        """How many numbers a vector has."""

    async def embed(self, texts: Sequence[str], kind: Kind) -> Sequence[Sequence[float]]:
        """A vector for each text, in their order."""


class Reranker(Protocol):
    """A model that reads a query beside a text."""

    async def score(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        """How well each text answers the query, from 0 to 1, in their order."""
