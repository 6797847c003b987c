"""Computes what a request asks of a pooling model, within the limits of whoever asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from engine import PoolingInfo, PromptTooLong, RenderError, TextInput
from server.access import Principal, require_use
from server.errors import ApiError
from server.ignored import ignore
from server.limits import Limiter, Subject
from server.model_registry import PooledModel
from server.pooling.requests import MAX_CHARACTERS, MAX_TOKENS
from server.schema import refuse
from server.telemetry import current, note_end_user
from server.usage import Meter
from storage import Account, Counts

QUERY, DOCUMENT = "query", "document"
PURPOSES = {
    "query": QUERY,
    "search_query": QUERY,
    "retrieval.query": QUERY,
    "document": DOCUMENT,
    "passage": DOCUMENT,
    "search_document": DOCUMENT,
    "retrieval.passage": DOCUMENT,
}
"""How clients of Cohere, Jina and Voyage say what a text is for."""

TASKS = frozenset(
    ("text-matching", "separation", "classification", "clustering", "code", "code.query", "code.passage")
)
"""What clients of Jina say besides: their own models have an adapter for each, and others have nothing."""

DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""The names under which checkpoints have the prompt of documents, in the order of sentence-transformers."""


@dataclass(frozen=True, slots=True)
class Done:
    """A vector, or scores, for each text, and what they took."""

    rows: list[Any]  # float32 arrays
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Work:
    """A request's work. waiting: awaits something for as long as the client is there. user: for whom the
    client says that it asks."""

    served: PooledModel
    principal: Principal
    subjects: tuple[Subject, ...]
    limiter: Limiter
    meter: Meter
    waiting: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]
    user: str | None = None

    async def do(
        self,
        words: Sequence[Any],
        path: Callable[[int], str],
        *,
        prompt: str = "",
        cut: int | Callable[[], Coroutine[Any, Any, int | None]] | None = None,
        raw: bool = False,
    ) -> Done:
        """Compute texts, pairs of texts, or token ids; see `PoolingEngine.encode`. path: where each stands in
        the body. cut: may be what finds it out. raw: see `TextInput`. Raises ApiError 400,
        403 and 429, and the engine's errors."""
        who, served = self.principal, self.served
        require_use(who, served.allowed_as)
        check_length_of_all(words, path)
        person = note_end_user(who.owner, self.user)
        visit = await self.limiter.enter(self.subjects, served.name, person)
        with ExitStack() as stack:
            stack.callback(visit.leave)
            # Before anything is done for it: a refusal must cost next to nothing.
            place = stack.enter_context(served.engine.admission.enter(who.owner, who.service.weight))
            try:
                most = await self.waiting(cut()) if callable(cut) else cut
                texts: list[TextInput] = await self.waiting(
                    served.engine.encode(words, prompt=prompt, cut=most, owner=who.owner)
                )
            except RenderError as error:
                raise ApiError(
                    400, str(error), code="invalid_string", param=path(0).partition("[")[0]
                ) from None
            if raw:
                texts = [replace(text, raw=True) for text in texts]
            num_tokens = check_texts(texts, served, path)
            visit.bring(place, num_tokens)
            await visit.reserve(num_tokens, 0)
            account = Account(who.owner, who.key_id, served.name, "default", kind="embeddings", person=person)
            cached = 0
            try:
                rows, cached = await self.waiting(
                    served.engine.pool(
                        texts,
                        owner=who.owner,
                        weight=who.service.weight,
                        place=place,
                        deadline=served.caps.deadline(),
                    )
                )
            finally:
                if place.has_begun:  # also for a client that has left meanwhile
                    visit.used = lambda: (num_tokens - cached, 0)
                    counts = Counts(requests=1, input_tokens=num_tokens, cached_tokens=cached)
                    self.meter.spend(account, counts)
        if (record := current.get()) is not None:
            record.model, record.prompt_tokens, record.cached_tokens = served.name, num_tokens, cached
        return Done(rows, num_tokens)


def check_length_of_all(words: Sequence[Any], path: Callable[[int], str]) -> None:
    """Refuse what is too much even to be tokenized; a query counts with each document. ApiError 400."""
    texts = [(word,) if isinstance(word, str) else word for word in words if _is_text(word)]
    total = sum(len(text) for pair in texts for text in pair)
    if total > MAX_CHARACTERS:
        field = path(0).partition("[")[0]
        message = (
            f"Invalid '{field}': {total} characters, a query counted with each of its documents; at most"
            f" {MAX_CHARACTERS} can be read at once."
        )
        raise ApiError(400, message, code="max_tokens_per_request", param=field)


def _is_text(word: Any) -> bool:
    """Whether it is a text or a pair of texts, and no token ids."""
    return isinstance(word, str) or (bool(word) and isinstance(word[0], str))


def check_texts(texts: Sequence[TextInput], served: PooledModel, path: Callable[[int], str]) -> int:
    """The tokens of all texts. ApiError 400, or PromptTooLong, for one that the model cannot take."""
    info, total = served.info, 0
    for index, text in enumerate(texts):
        count = len(text.ids)
        if not count:
            refuse(path(index), f"Invalid '{path(index)}': it has no tokens.")
        most = min(info.max_model_len, served.caps.prompt_tokens or info.max_model_len)
        if count > most:
            error = PromptTooLong(count, most)
            error.param = path(index)
            raise error
        if foreign_id(text, info) is not None:
            refuse(path(index), f"Invalid '{path(index)}': token ids are from 0 to {info.vocab_size - 1}.")
        total += count
    check_tokens_of_all(total, path(0).partition("[")[0])
    return total


def check_tokens_of_all(total: int, field: str) -> None:
    """Refuse what is too much to be computed for one request. ApiError 400."""
    if total > MAX_TOKENS:
        message = f"Invalid '{field}': {total} tokens; at most {MAX_TOKENS} can be computed at once."
        raise ApiError(400, message, code="max_tokens_per_request", param=field)


def foreign_id(text: TextInput, info: PoolingInfo) -> int | None:
    """A token id of a text that the model has no vector for: of a client, or of a tokenizer that has more
    tokens than the model has rows. None where there is none."""
    ends = (int(text.ids.min()), int(text.ids.max())) if len(text.ids) else ()
    return next((id for id in ends if not 0 <= id < info.vocab_size), None)


def prompt_of(info: PoolingInfo, purpose: tuple[str, str] | None) -> str:
    """The text that the checkpoint puts before a text of this purpose: (field, what it says). Nothing for a
    query or a document where the checkpoint has no prompt for it, nor for another task of Jina's, which is
    named as ignored. ApiError 400 for a name that is none."""
    if purpose is None:
        return ""
    field, said = purpose
    if said in info.prompts:
        return info.prompts[said]
    meant = PURPOSES.get(said.lower()) if field != "prompt_name" else None
    if meant == QUERY:
        return info.prompts.get(QUERY, "")
    if meant == DOCUMENT:
        return next((info.prompts[name] for name in DOCUMENT_PROMPTS if name in info.prompts), "")
    if field == "task" and said in TASKS:
        ignore("task")
        return ""
    known = ", ".join(f"'{name}'" for name in info.prompts) or "none"
    message = f"Invalid '{field}': the model '{info.name}' has no such prompt. It has: {known}."
    refuse(field, f"{message} 'query' and 'document' are taken by every model.")


def cut_of(info: PoolingInfo, truncate: int | None) -> int | None:
    """The tokens that longer texts are cut to: `truncate_prompt_tokens`, where -1 is as many as the model
    takes, and None leaves them whole. ApiError 400 for more than the model takes."""
    if truncate is None:
        return None
    if truncate > info.max_model_len:
        message = f"Invalid 'truncate_prompt_tokens': the model takes {info.max_model_len} tokens at most."
        refuse("truncate_prompt_tokens", message)
    return info.max_model_len if truncate == -1 else truncate


def cut_vectors(
    rows: list[Any],
    info: PoolingInfo,
    dimensions: int | None,
    field: str = "dimensions",
    *,
    unit: bool | None = None,
) -> list[Any]:
    """Vectors of so many dimensions. unit: whether they are brought to the length 1; None: where those of the
    model have it. ApiError 400 for dimensions that the checkpoint does not declare; field: their name."""
    wanted = info.default_dimensions if dimensions is None else dimensions
    if wanted == info.dimensions:
        return _of_length_1(rows) if unit and not info.normalized else rows
    if dimensions is not None and (
        wanted > info.dimensions or (info.cuts is not None and wanted not in info.cuts)
    ):
        allowed = f"from 1 to {info.dimensions}"
        if info.cuts is not None:
            allowed = " or ".join(map(str, sorted({*info.cuts, info.dimensions})))
        message = f"Invalid '{field}': vectors of the model '{info.name}' have {allowed} dimensions"
        why = "" if info.cuts != () else "; its checkpoint does not say that they can be cut (is_matryoshka)"
        refuse(field, f"{message}{why}.")
    rows = [row[:wanted] for row in rows]
    return _of_length_1(rows) if (info.normalized if unit is None else unit) else rows


def _of_length_1(rows: list[Any]) -> list[Any]:
    # of a vector of zeros there is no direction to keep
    return [row / (float((row.astype("f8") ** 2).sum() ** 0.5) or 1.0) for row in rows]
