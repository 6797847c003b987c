"""An embedder and a reranker for what the server itself searches, and what it moderates by.

Nothing of a document is left out because it is longer than the model's context: it is read in windows, which
are parts that fit. A reranker's score is that of the best window, and a vector is the mean of those of the
windows, weighted by their tokens.

Their tokens are those of whoever the search, or the document, belongs to: they count in the usage of that
owner and against its limits, as those of a request for vectors do. They are no request of their own there. A
table of vectors does its work for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine import EngineError, LoadError, TextInput
from server.config import Config
from server.errors import ApiError, to_api_error
from server.limits import Limiter
from server.model_registry import Models, PooledModel
from server.moderation import Moderation, Verdict, unjudged
from server.pooling.work import check_tokens_of_all, cut_vectors, foreign_id, prompt_of
from server.threads import aside
from server.usage import Meter
from server.vector_stores import Payer
from storage import Account, Counts


@dataclass(frozen=True, slots=True)
class Counted:
    """A model whose work counts for whoever pays for it."""

    served: PooledModel
    limiter: Limiter
    meter: Meter
    kind: str = "embeddings"  # of usage

    async def pool(self, texts: Sequence[TextInput], payer: Payer, param: str | None = None) -> list[Any]:
        """What `PoolingEngine.pool` gives. param: the field of a request that has the texts.

        Raises ApiError 429 and 403, 400 for a text of which the tokenizer makes a token that the model does
        not have, and the engine's errors.
        """
        engine, name = self.served.engine, self.served.name
        for text in texts:
            if (id := foreign_id(text, self.served.info)) is not None:
                message = (
                    f"The model '{name}' cannot read the text: its tokenizer makes the token {id} of a part "
                    f"of it, and the model has tokens from 0 to {self.served.info.vocab_size - 1} only."
                )
                raise ApiError(400, message, code="invalid_value", param=param)
        if not payer.counted or self.served.info.engine == "table":
            rows, _ = await engine.pool(texts, owner=payer.owner, weight=payer.weight)
            return rows
        tokens = sum(len(text.ids) for text in texts)
        with engine.admission.enter(payer.owner, payer.weight) as place:
            place.bring(tokens)
            await self.limiter.take_tokens(payer.subjects, name, tokens)
            cached = 0
            try:
                rows, cached = await engine.pool(texts, owner=payer.owner, weight=payer.weight, place=place)
            finally:
                begun = place.has_begun
                self.limiter.give_tokens_back(payer.subjects, name, cached if begun else tokens)
                if begun:
                    account = Account(payer.owner, payer.key_id, name, "default", kind=self.kind)
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
    def is_table(self) -> bool:
        """See `server.vector_stores.Embedder`."""
        return self.served.info.engine == "table"

    @property
    def normalized(self) -> bool:
        """Whether vectors have the length 1, so that their products are cosines."""
        return self.served.info.normalized

    async def embed(
        self, texts: Sequence[str], kind: Literal["query", "document"], *, payer: Payer
    ) -> list[Any]:
        """A float32 array [dimensions] for each text, with the prompt that the checkpoint has for this kind.

        Raises what `Counted.pool` raises; a cancelled call drops its texts.
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
        param = "query" if kind == "query" else None
        rows = await self.counted.pool([window.input for window in windows], payer, param)
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
        """A score from 0 to 1 for each document. Raises what `Counted.pool` raises; a cancelled call drops
        its texts."""
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


@dataclass(frozen=True, slots=True)
class Moderator:
    """A classifier that judges texts, by the worst window of a long one. threshold: a label that is at least
    this probable flags a text. safe: labels that flag nothing, in lower case."""

    served: PooledModel
    counted: Counted
    threshold: float
    safe: frozenset[str]

    @property
    def model(self) -> str:
        """The name under which it is served."""
        return self.served.name

    @property
    def categories(self) -> list[str]:
        """The labels that flag."""
        return [label for label in self.served.info.labels if label.lower() not in self.safe]

    def require(self, model: str, param: str) -> None:
        """Raise ApiError 404 for the name of a model that does not moderate here; official names of models
        for that stand for the one that does."""
        if model != self.model and not model.startswith(OFFICIAL_NAMES):
            message = f"The model '{model}' does not moderate here. The model for it is '{self.model}'."
            raise ApiError(404, message, code="model_not_found", param=param)

    async def moderate(
        self, texts: Sequence[str], *, payer: Payer, param: str | None = None
    ) -> list[Verdict]:
        """The verdict on each text. param: the field that has them, of a request for nothing else, which may
        have so many tokens. Raises what `Counted.pool` raises; a cancelled call drops its texts."""
        engine, info = self.served.engine, self.served.info
        worst = [dict.fromkeys(self.categories, 0.0) for _ in texts]
        said = [(place, text) for place, text in enumerate(texts) if text.strip()]

        async def encode(parts: Sequence[str], cut: int | None) -> Sequence[TextInput]:
            return await engine.encode(parts, cut=cut, owner=payer.owner)

        windows = await _windows([text for _, text in said], info.max_model_len, encode)
        windows = [window for window in windows if len(window.input.ids)]
        if param is not None:
            check_tokens_of_all(sum(len(window.input.ids) for window in windows), param)
        rows = await self.counted.pool([window.input for window in windows], payer, param) if windows else []
        for window, row in zip(windows, rows, strict=True):
            scores = worst[said[window.of][0]]
            for label, score in zip(info.labels, row, strict=True):
                if label in scores:
                    scores[label] = max(scores[label], float(score))
        return [self._verdict(scores) for scores in worst]

    def _verdict(self, scores: dict[str, float]) -> Verdict:
        flags = {label: score >= self.threshold for label, score in scores.items()}
        return {
            "type": "moderation_result",
            "model": self.model,
            "flagged": any(flags.values()),
            "categories": flags,
            "category_scores": scores,
            "category_applied_input_types": {label: ["text"] for label in scores},
        }


OFFICIAL_NAMES = ("omni-moderation", "text-moderation")


def require_moderator(asked: Moderation | None, moderator: Moderator | None) -> None:
    """Raise ApiError 400 `unsupported_parameter` for a moderation where no model is there for it, 404 where
    another model is asked for."""
    if asked is None:
        return
    if moderator is None:
        message = (
            "Unsupported parameter: 'moderation' needs a classifier, and this server has none: the operator "
            "names one by the setting moderation_model."
        )
        raise ApiError(400, message, code="unsupported_parameter", param="moderation")
    moderator.require(asked.model, "moderation.model")


async def judged(moderator: Moderator, texts: Sequence[str], payer: Payer) -> list[Verdict]:
    """The verdict on each text, or why there is none."""
    try:
        return await moderator.moderate(texts, payer=payer)
    except (ApiError, EngineError) as failure:
        error = to_api_error(failure)
        return [unjudged(error.code or error.type, error.message) for _ in texts]


@dataclass(slots=True)
class _Window:
    """A part of a text that fits a model. of: the place of the text among all."""

    of: int
    input: TextInput


SMALLEST = 16
"""Characters of a window that is not halved any more; what does not fit even so is cut."""

REACH = 1000
"""Characters from the middle of a text within which it is parted at a blank: no word is longer."""

LARGE = 100_000
"""Characters of texts that are halved in a thread."""


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
        long: list[tuple[int, str]] = []
        for (of, part), input in zip(parts, encoded, strict=True):
            if len(input.ids) <= most:
                windows.append(_Window(of, input))
            elif len(part) <= SMALLEST:
                windows += [_Window(of, cut) for cut in await encode([part], most)]
            else:
                long.append((of, part))
        parts = await aside(sum(len(part) for _, part in long) > LARGE, _halved, long)
    return windows


def _halved(parts: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    return [(of, half) for of, part in parts for half in _halves(part) if half.strip()]


def _halves(text: str) -> tuple[str, str]:
    """A text in two parts, at the blank that is nearest to its middle, if there is one near it."""
    middle = len(text) // 2
    reach = min(middle - len(text) // 4, REACH)
    places = (place for away in range(reach) for place in (middle - away, middle + away))
    at = next((place for place in places if text[place].isspace()), middle)
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


def moderator_of(models: Models, config: Config, limiter: Limiter, meter: Meter) -> Moderator | None:
    """The classifier that the settings name for moderation, if they name one. Raises LoadError where it is
    not served, or all of its labels are safe."""
    name = config.moderation_model
    if name is None:
        return None
    found = [model for model in models.pooled if model.info.kind == "classification" and model.name == name]
    if not found:
        raise LoadError(f"moderation_model {name!r} is not served: name it by classification_model, too")
    safe = frozenset(label.lower() for label in config.moderation_safe_label)
    counted = Counted(found[0], limiter, meter, "moderations")
    moderator = Moderator(found[0], counted, config.moderation_threshold, safe)
    if not moderator.categories:
        raise LoadError(f"moderation_model {name!r} has no label that is not safe: {found[0].info.labels}")
    return moderator
