"""An embedder and a reranker for what the server itself searches.

Their tokens are those of whoever the search, or the document, belongs to: they count in the usage of that
owner and against its limits, as those of a request for vectors do. They are no request of their own there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine import TextInput
from server.limits import Limiter
from server.model_registry import Models, PooledModel
from server.pooling.work import cut_vectors, prompt_of
from server.usage import Meter
from server.vector_stores import Payer
from storage import Account, Counts


@dataclass(frozen=True, slots=True)
class Counted:
    """A model whose work counts for whoever pays for it."""

    served: PooledModel
    limiter: Limiter
    meter: Meter

    async def pool(self, texts: Sequence[TextInput], payer: Payer) -> list[Any]:
        """What `PoolingEngine.pool` gives. Raises ApiError 429 and 403, and the engine's errors."""
        engine, name = self.served.engine, self.served.name
        if not payer.counted:
            rows, _ = await engine.pool(texts, owner=payer.owner, weight=payer.weight)
            return rows
        tokens = sum(len(text.ids) for text in texts)
        with engine.admission.enter(payer.owner, payer.weight) as place:
            place.bring(tokens)
            await self.limiter.take_tokens(payer.subjects, name, tokens)
            rows, cached = await engine.pool(texts, owner=payer.owner, weight=payer.weight, place=place)
        self.limiter.give_tokens_back(payer.subjects, name, cached)
        account = Account(payer.owner, payer.key_id, name, "default", kind="embeddings")
        self.meter.spend(account, Counts(requests=1, input_tokens=tokens, cached_tokens=cached))
        return rows


@dataclass(frozen=True, slots=True)
class Embedder:
    """A model that makes vectors of texts. A text that is too long for it is cut at its end."""

    served: PooledModel
    counted: Counted

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
        self, texts: Sequence[str], kind: Literal["query", "document"], *, payer: Payer
    ) -> list[Any]:
        """A float32 array [dimensions] for each text, with the prompt that the checkpoint has for this kind.

        Raises ApiError 429 and 403, and the engine's errors; a cancelled call drops its texts.
        """
        info, engine = self.served.info, self.served.engine
        # a text without any token has no vector: a space stands for it, or else the token 0
        words = [text or " " for text in texts]
        prompt = prompt_of(info, ("input_type", kind))
        encoded = await engine.encode(words, prompt=prompt, cut=info.max_model_len, owner=payer.owner)
        for index, text in enumerate(encoded):
            if not len(text.ids):
                encoded[index] = (await engine.encode([(0,)]))[0]
        return cut_vectors(await self.counted.pool(encoded, payer), info, None)


@dataclass(frozen=True, slots=True)
class Reranker:
    """A model that says how well documents answer a query. A document that is too long for it is cut."""

    served: PooledModel
    counted: Counted

    @property
    def model(self) -> str:
        """The name under which it is served."""
        return self.served.name

    async def rerank(self, query: str, documents: Sequence[str], *, payer: Payer) -> list[float]:
        """A score from 0 to 1 for each document. Raises ApiError 429 and 403, and the engine's errors; a
        cancelled call drops its texts."""
        engine = self.served.engine
        pairs = [(query, document) for document in documents]
        encoded = await engine.encode(pairs, cut=self.served.info.max_model_len, owner=payer.owner)
        return relevance(await self.counted.pool(encoded, payer), self.served)


def relevance(rows: Sequence[Any], served: PooledModel) -> list[float]:
    """Scores from 0 to 1: where the checkpoint's own have no bounds, their sigmoid."""
    scores = [float(row[0]) for row in rows]
    if served.info.activation == "sigmoid":
        return scores
    return [0.5 * (1.0 + math.tanh(0.5 * score)) for score in scores]


def embedder_of(models: Models, limiter: Limiter, meter: Meter) -> Embedder | None:
    """The first model for embeddings that is served, if there is one."""
    found = (model for model in models.pooled if model.info.kind == "embedding")
    return next((Embedder(model, Counted(model, limiter, meter)) for model in found), None)


def reranker_of(models: Models, limiter: Limiter, meter: Meter) -> Reranker | None:
    """The first reranker that is served, if there is one."""
    found = (model for model in models.pooled if model.info.kind == "rerank")
    return next((Reranker(model, Counted(model, limiter, meter)) for model in found), None)
