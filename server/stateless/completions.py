"""Text completions: what `/v1/completions` asks of the engine and answers; nothing is stored.

Prompts are taken as they are, without a chat template, and what comes is text without reasoning or calls.
Log probabilities have the legacy form of this API.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine import (
    Chunk,
    Done,
    Engine,
    GenerateRequest,
    Place,
    ReaderParams,
    Text,
    TokenLogprob,
)
from server.access import Principal, admitted, require_use
from server.model_registry import ServedModel
from server.prompting import (
    Offer,
    check,
    name_capped_limit,
    name_idle_drafts,
    naming_source,
    require_room,
    sampling,
    steady,
    words_of_field,
)
from server.runs.events import encoded
from server.schema import CompletionRequest, completion_name, refuse
from server.stateless.choices import (
    Completion,
    Part,
    Usage,
    check_logprobs,
    check_scores,
    check_search,
    new_head,
    prompt_requests,
    prompt_scores,
)
from server.telemetry import Telemetry
from server.threads import THREADED_TOKENS, aside, in_large_request
from server.usage import Meter
from storage import Account


async def prepare_completion(
    request: CompletionRequest,
    served: ServedModel,
    place: Place,
    *,
    principal: Principal,
    person: str | None,
    telemetry: Telemetry,
    meter: Meter,
) -> Completion:
    """Tokenize every prompt and resolve everything else. person: as `prepare_chat` takes it. Raises ApiError
    400 and 403, and RequestError."""
    require_use(principal, served.allowed_as)
    owner = principal.owner
    named = request.service_tier is not None or request.priority is not None
    request = admitted(principal.service, request)
    check_logprobs(request.logprobs, served)
    check_logprobs(request.prompt_logprobs, served, "prompt_logprobs")
    check_search(request.search, served)
    offered = Offer.of(request.shape)
    await check(offered, served, (), request.shape_param, owner)
    if "max_tokens" in request.model_fields_set:
        name_capped_limit(request.max_tokens, "max_tokens", served.caps)
    name_idle_drafts(served.info, request.sampling)
    seed = secrets.randbits(63)
    completion_id = completion_name("cmpl", request.request_id, secrets.token_hex(12))
    requests: list[GenerateRequest] = []
    writers: list[TextWriter] = []
    counts: list[int] = []
    num_scores = 0
    scores_param = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
    for position, prompt in enumerate(request.prompts):
        path = f"prompt[{position}]" if len(request.prompts) > 1 else "prompt"
        if isinstance(prompt, str):
            with words_of_field(path):
                ids = await served.engine.tokenize(
                    prompt, add_special_tokens=request.add_special_tokens, owner=owner
                )
        else:
            ids = tuple(prompt)
        if request.truncate_prompt_tokens is not None and len(ids) > request.truncate_prompt_tokens:
            ids = ids[-request.truncate_prompt_tokens :]
            prompt = list(ids)
        counts.append(len(ids))
        num_scores = check_scores(sum(counts) * request.n, request.sampling.prompt_logprobs, scores_param)
        much = in_large_request() or len(ids) > THREADED_TOKENS
        requests += await aside(
            much,
            _requests,
            request,
            served,
            offered,
            principal,
            ids,
            path,
            seed,
            completion_id,
            len(requests),
        )
        writers += await _writers(request, served, prompt, ids, first=len(writers), owner=owner)
    return Completion(
        answered=served.answered,
        engine=served.engine,
        telemetry=telemetry,
        meter=meter,
        account=Account(
            owner,
            principal.key_id,
            served.name,
            request.service_tier or "default",
            batch=principal.batch,
            person=person,
        ),
        requests=requests,
        writers=writers,
        head=new_head(completion_id, served) | ({"service_tier": request.service_tier} if named else {}),
        place=place,
        named=lambda error: naming_source(error, offered.constraint, (), request.shape_param),
        usage=Usage(counts, len(writers), place, served.info),
        silent=request.max_tokens == 0,
        search=request.search,
        operation="text_completion",
        num_scores=num_scores,
    )


def _requests(
    request: CompletionRequest,
    served: ServedModel,
    offered: Offer,
    principal: Principal,
    ids: tuple[int, ...],
    path: str,
    seed: int,
    completion_id: str,
    first: int,
) -> list[GenerateRequest]:
    """What the engine is asked for one prompt, which the request has at `path`. first: how many requests
    other prompts have before. Raises ApiError 400 and RequestError."""
    _check_ids(ids, path, served)
    with words_of_field(path):
        params = sampling(request.sampling, served.info, prompt_tokens=len(ids), seed=seed, caps=served.caps)
    if "max_tokens" in request.model_fields_set:
        require_room(request.max_tokens, "max_tokens", prompt_tokens=len(ids), info=served.info)
    params = replace(params, prompt_logprobs=request.sampling.prompt_logprobs)
    asked = GenerateRequest(
        id=completion_id,
        prompt_ids=ids,
        sampling=steady(params, offered.answer),
        reader=ReaderParams(dialect=False, special_tokens=not request.skip_special_tokens),
        constraint=offered.constraint,
        owner=principal.owner,
        cache_salt=request.cache_salt or "",
        weight=principal.service.weight,
        priority=request.priority or 0,
        adapter=served.adapter,
        deadline=served.caps.deadline(),
    )
    return prompt_requests(asked, served, request.search, request.n, first=first)


async def _writers(
    request: CompletionRequest,
    served: ServedModel,
    prompt: str | list[int],
    prompt_ids: tuple[int, ...],
    *,
    first: int,
    owner: str,
) -> list[TextWriter]:
    """The writers of one prompt's choices, which are numbered from `first` on."""
    echoed = None
    if request.echo:
        echoed = (
            prompt if isinstance(prompt, str) else await served.engine.detokenize(prompt_ids, owner=owner)
        )
    return [
        TextWriter(
            first + choice,
            engine=served.engine,
            logprobs=request.logprobs,
            prompt=echoed,
            prompt_ids=prompt_ids,
            silent=request.max_tokens == 0,
            shows_ids=request.return_token_ids,
            names_ids=request.return_tokens_as_token_ids,
            num_scores=request.prompt_logprobs,
        )
        for choice in range(request.n)
    ]


def _check_ids(ids: tuple[int, ...], path: str, served: ServedModel) -> None:
    if not ids:
        refuse(path, f"Invalid '{path}': the prompt is empty.")
    if min(ids) < 0 or max(ids) >= served.info.vocab_size:
        refuse(path, f"Invalid '{path}': token ids are from 0 to {served.info.vocab_size - 1}.")


class TextWriter:
    """One choice: text to the parts of chunks, and those to the whole.

    logprobs: how many alternatives a token shows; None is off. prompt: the text to begin with, None without
    echo. silent: the generated text is not part of the answer. shows_ids: parts have the ids of their tokens
    (the first one those of the prompt too), and log probabilities go with these and not with the text.
    names_ids: log probabilities write a token as its id. num_scores: how many alternatives each token of the
    prompt shows in the whole choice; None is off.
    """

    def __init__(
        self,
        index: int,
        *,
        engine: Engine,
        logprobs: int | None,
        prompt: str | None,
        prompt_ids: Sequence[int],
        silent: bool,
        shows_ids: bool,
        names_ids: bool,
        num_scores: int | None = None,
    ) -> None:
        self._index = index
        self._engine = engine
        self._logprobs = logprobs
        self._prompt = prompt
        self._prompt_ids = prompt_ids
        self._silent = silent
        self._shows_ids = shows_ids
        self._names_ids = names_ids
        self._num_scores = num_scores
        self._scores: list[dict[str, Any] | None] | None = None
        self._begun = False
        self._offset = 0

    # -- writing ---------------------------------------------------------------------------------------------

    def write(self, chunk: Chunk) -> list[Part]:
        """At most one part; none for a chunk whose tokens show no text yet."""
        if chunk.prompt_logprobs is not None and self._num_scores is not None:
            self._scores = prompt_scores(chunk.prompt_logprobs, self._num_scores)
        text: list[str] = []
        finish: str | None = None
        stop: str | int | None = None
        logprobs = None if self._logprobs is None else _empty_logprobs()
        if self._prompt is not None:
            text.append(self._prompt)
            self._prompt_logprobs(logprobs, chunk)
            self._prompt = None
        entries: Sequence[TokenLogprob] = ()
        for delta in chunk.deltas:
            if isinstance(delta, Text) and not self._silent:
                text.append(delta.text)
                entries = (*entries, *delta.logprobs)
            elif isinstance(delta, Done):
                finish = "length" if self._silent else delta.reason
                stop = None if self._silent else delta.stop
        part: Part = {"index": self._index, "text": "".join(text), "logprobs": logprobs}
        part["finish_reason"] = finish
        if finish is not None:
            part["stop_reason"] = stop
        if self._shows_ids:
            part["token_ids"] = [] if self._silent else list(chunk.token_ids)
            entries = () if self._silent else chunk.logprobs
            if not self._begun:
                part["prompt_token_ids"] = list(self._prompt_ids)
        elif not text and finish is None:
            return []
        for entry in entries if logprobs is not None else ():
            self._add(logprobs, entry.token_id, entry.token, entry)
        self._begun = True
        return [part]

    def _prompt_logprobs(self, into: dict[str, list[Any]] | None, chunk: Chunk) -> None:
        """The prompt's own tokens; nothing was known before the first, so it has no log probability."""
        if into is None:
            return
        entries = chunk.prompt_logprobs or (None,) * len(self._prompt_ids)
        for token_id, entry in zip(self._prompt_ids, entries, strict=True):
            self._add(into, token_id, self._engine.token_text(token_id), entry)

    def _add(
        self, into: dict[str, list[Any]] | None, token_id: int, token: str, entry: TokenLogprob | None
    ) -> None:
        assert into is not None
        name = self._name(token_id, token)
        into["tokens"].append(name)
        into["text_offset"].append(self._offset)
        self._offset += len(token)
        if entry is None:
            into["token_logprobs"].append(None)
            into["top_logprobs"].append(None)
            return
        into["token_logprobs"].append(entry.logprob)
        # The chosen token is always among the alternatives, likely or not.
        top = {self._name(other, text): value for other, text, _, value in entry.top[: self._logprobs]}
        into["top_logprobs"].append(encoded(top if name in top or not top else {**top, name: entry.logprob}))

    def _name(self, token_id: int, token: str) -> str:
        return f"token_id:{token_id}" if self._names_ids else token

    # -- folding ---------------------------------------------------------------------------------------------

    def fold(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The choice that its parts make."""
        logprobs = None if self._logprobs is None else _empty_logprobs()
        for part in parts:
            for name, values in (logprobs or {}).items():
                values += part["logprobs"][name]
        choice = {
            "index": self._index,
            "text": "".join(part["text"] for part in parts),
            "logprobs": logprobs,
            "finish_reason": parts[-1]["finish_reason"],
            "stop_reason": parts[-1]["stop_reason"],
        }
        if self._scores is not None:
            choice["prompt_logprobs"] = self._scores
        if self._shows_ids:
            choice["prompt_token_ids"] = parts[0]["prompt_token_ids"]
            choice["token_ids"] = [token_id for part in parts for token_id in part["token_ids"]]
        return choice


def _empty_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
