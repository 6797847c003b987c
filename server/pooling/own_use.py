"""An embedder and a reranker for what the server itself searches.

Nothing of a document is left out because it is longer than the model's context: it is read in windows, which
are parts that fit. A reranker's score is that of the best window, and a vector is the mean of those of the
windows, weighted by their tokens.

Their tokens are those of whoever the search, or the document, belongs to: they count in the usage of that
owner and against its limits, as those of a request for vectors do. They are no request of their own there.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
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
    """A model that makes vectors of texts, of long ones in windows."""

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
        """The name, and a digest of weights, tokenizer and pooling: vectors of others do not compare.

        The mark at the end says that long texts were read in windows; vectors without it are made anew.
        """
        return f"{self.model}@{self.served.info.fingerprint}w"

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

        async def encode(parts: Sequence[str], cut: int | None) -> Sequence[TextInput]:
            return await engine.encode(parts, prompt=prompt, cut=cut, owner=payer.owner)

        windows = await _windows(words, info.max_model_len, encode)
        for window in windows:
            if not len(window.input.ids):
                window.input = (await engine.encode([(0,)]))[0]
        rows = await self.counted.pool([window.input for window in windows], payer)
        sums: list[Any] = [0.0] * len(texts)
        weights = [0] * len(texts)
        for window, row in zip(windows, rows, strict=True):
            sums[window.of] = sums[window.of] + len(window.input.ids) * row
            weights[window.of] += len(window.input.ids)
        means = [(each / weight).astype("f4") for each, weight in zip(sums, weights, strict=True)]
        if info.normalized:
            # of a vector of zeros there is no direction to keep
            means = [mean / (float((mean.astype("f8") ** 2).sum() ** 0.5) or 1.0) for mean in means]
        return cut_vectors(means, info, None)


@dataclass(frozen=True, slots=True)
class Reranker:
    """A model that says how well documents answer a query, by the best window of a long one."""

    served: PooledModel
    counted: Counted

    @property
    def model(self) -> str:
        """The name under which it is served."""
        return self.served.name

    async def rerank(self, query: str, documents: Sequence[str], *, payer: Payer) -> list[float]:
        """A score from 0 to 1 for each document. Raises ApiError 429 and 403, and the engine's errors; a
        cancelled call drops its texts."""
        engine, most = self.served.engine, self.served.info.max_model_len
        query = await self._fitting(query, most // 2, payer)

        async def encode(parts: Sequence[str], cut: int | None) -> Sequence[TextInput]:
            return await engine.encode([(query, part) for part in parts], cut=cut, owner=payer.owner)

        windows = await _windows(documents, most, encode)
        rows = await self.counted.pool([window.input for window in windows], payer)
        best = [0.0] * len(documents)
        for window, score in zip(windows, relevance(rows, self.served), strict=True):
            best[window.of] = max(best[window.of], score)
        return best

    async def _fitting(self, query: str, most: int, payer: Payer) -> str:
        """The beginning of a query that takes at most so many tokens, lest no room is left for documents."""
        while query:
            [asked] = await self.served.engine.encode([(query, "")], owner=payer.owner)
            if len(asked.ids) <= most:
                break
            query = query[: len(query) * most // len(asked.ids)]
        return query


@dataclass(slots=True)
class _Window:
    """A part of a text that fits a model. of: the place of the text among all."""

    of: int
    input: TextInput


SMALLEST = 16
"""Characters of a window that is not halved any more; what does not fit even so is cut."""


async def _windows(
    texts: Sequence[str],
    most: int,
    encode: Callable[[Sequence[str], int | None], Awaitable[Sequence[TextInput]]],
) -> list[_Window]:
    """All texts in windows of at most so many tokens, with what stands around each. encode: makes tokens of
    texts, cut to so many where a number is given."""
    windows: list[_Window] = []
    parts = [*enumerate(texts)]
    while parts:
        encoded = await encode([part for _, part in parts], None)
        halves: list[tuple[int, str]] = []
        for (of, part), input in zip(parts, encoded, strict=True):
            if len(input.ids) <= most:
                windows.append(_Window(of, input))
            elif len(part) <= SMALLEST:
                windows += [_Window(of, cut) for cut in await encode([part], most)]
            else:
                halves += [(of, half) for half in _halves(part) if half.strip()]
        parts = halves
    return windows


def _halves(text: str) -> tuple[str, str]:
    """A text in two parts, at the blank that is nearest to its middle, if there is one in its middle half."""
    quarter, middle = len(text) // 4, len(text) // 2
    places = (place for place in range(quarter, len(text) - quarter) if text[place].isspace())
    at = min(places, key=lambda place: abs(place - middle), default=middle)
    return text[:at], text[at:]


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
