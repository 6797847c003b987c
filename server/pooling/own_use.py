"""An embedder and a reranker for what the server itself searches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from server.model_registry import Models, PooledModel
from server.pooling.work import cut_vectors, prompt_of


@dataclass(frozen=True, slots=True)
class Embedder:
    """A model that makes vectors of texts. A text that is too long for it is cut at its end."""

    served: PooledModel

    @property
    def model(self) -> str:
        """The name under which it is served."""
        return self.served.name

    @property
    def dimensions(self) -> int:
        """Of a vector."""
        return self.served.info.default_dimensions

    @property
    def identity(self) -> str:
        """The name, and a digest of weights, tokenizer and pooling: vectors of others do not compare."""
        return f"{self.model}@{self.served.info.fingerprint}"

    @property
    def normalized(self) -> bool:
        """Whether vectors have the length 1, so that their products are cosines."""
        return self.served.info.normalized

    async def embed(
        self, texts: Sequence[str], kind: Literal["query", "document"], *, owner: str = ""
    ) -> list[Any]:
        """A float32 array [dimensions] for each text, with the prompt that the checkpoint has for this kind.

        owner: whose share of the engine it takes. Raises the engine's errors; a cancelled call drops its
        texts.
        """
        info, engine = self.served.info, self.served.engine
        # a text without any token has no vector: a space stands for it, or else the token 0
        words = [text or " " for text in texts]
        prompt = prompt_of(info, ("input_type", kind))
        encoded = await engine.encode(words, prompt=prompt, cut=info.max_model_len, owner=owner)
        for index, text in enumerate(encoded):
            if not len(text.ids):
                encoded[index] = (await engine.encode([(0,)]))[0]
        rows, _ = await engine.pool(encoded, owner=owner)
        return cut_vectors(rows, info, None)


@dataclass(frozen=True, slots=True)
class Reranker:
    """A model that says how well documents answer a query. A document that is too long for it is cut."""

    served: PooledModel

    @property
    def model(self) -> str:
        """The name under which it is served."""
        return self.served.name

    async def rerank(self, query: str, documents: Sequence[str], *, owner: str = "") -> list[float]:
        """A score from 0 to 1 for each document. owner: whose share of the engine it takes. Raises the
        engine's errors; a cancelled call drops its texts."""
        engine = self.served.engine
        pairs = [(query, document) for document in documents]
        encoded = await engine.encode(pairs, cut=self.served.info.max_model_len, owner=owner)
        rows, _ = await engine.pool(encoded, owner=owner)
        return relevance(rows, self.served)


def relevance(rows: Sequence[Any], served: PooledModel) -> list[float]:
    """Scores from 0 to 1: where the checkpoint's own have no bounds, their sigmoid."""
    scores = [float(row[0]) for row in rows]
    if served.info.activation == "sigmoid":
        return scores
    return [0.5 * (1.0 + math.tanh(0.5 * score)) for score in scores]


def embedder_of(models: Models) -> Embedder | None:
    """The first model for embeddings that is served, if there is one."""
    return next((Embedder(model) for model in models.pooled if model.info.kind == "embedding"), None)


def reranker_of(models: Models) -> Reranker | None:
    """The first reranker that is served, if there is one."""
    return next((Reranker(model) for model in models.pooled if model.info.kind == "rerank"), None)
