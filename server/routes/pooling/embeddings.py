"""POST /v1/embeddings, /v1/embed and /v2/embed, /v1/classify and /classify, and /pooling.

A client that leaves ends its work.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.http import (
    Outcome,
    context,
    json_reply,
    limited,
    principal,
    read_as,
    tell_outcome,
    while_connected,
)
from server.model_registry import PooledModel
from server.pooling import (
    Work,
    classes_json,
    cut_of,
    cut_vectors,
    embed_json,
    embeddings_json,
    parse_classify,
    parse_embed,
    parse_embeddings,
    parse_pooling,
    pooling_json,
    prompt_of,
)
from server.routes.chosen_model import chosen_pooled
from server.routes.documented import documented
from server.schema import refuse
from server.threads import aside

router = APIRouter(tags=["Embeddings"])

UNPROMPTED = ("classification", "clustering")

MANY_NUMBERS = 100_000
"""Numbers of a reply above this are written in a thread; each takes some 0.1 us."""


def work_of(request: Request, served: PooledModel, user: str | None = None) -> Work:
    """What a request asks of a model, for whoever makes it. user: for whom it says that it asks."""
    here = context(request)
    return Work(
        served,
        principal(request),
        limited(request, served.name),
        here.limiter,
        here.meter,
        partial(while_connected, request),
        user,
    )


@router.post("/v1/embeddings", **documented("Embeddings", "embeddings.write", body="CreateEmbedding"))
async def create_embeddings(request: Request) -> Response:
    """A vector for each input."""
    asked = await read_as(request, parse_embeddings)
    served = await chosen_pooled(request, asked.model, "embedding")
    prompt, cut = prompt_of(served.info, asked.purpose), cut_of(served.info, asked.truncate)
    cut_vectors([], served.info, asked.dimensions)  # refused before anything is computed
    work = work_of(request, served, asked.user)
    done = await work.do(asked.inputs, asked.path, prompt=prompt, cut=cut, raw=asked.raw)
    much = len(done.rows) * served.info.dimensions > MANY_NUMBERS

    def write() -> bytes:
        rows = cut_vectors(done.rows, served.info, asked.dimensions, unit=asked.unit)
        return embeddings_json(rows, served.name, asked.encoding_format, done.num_tokens)

    usage = {"prompt_tokens": done.num_tokens, "total_tokens": done.num_tokens}
    tell_outcome(request, Outcome(served.name, usage))
    return json_reply(await aside(much, write), context(request).models.headers(served.name))


@router.post("/v1/embed", **documented("EmbeddingsByType", "embeddings.write", body="CreateEmbed"))
async def embed_first_version(request: Request) -> Response:
    """A vector for each text, as clients of Cohere's first version ask it."""
    return await _embed(request, version=1)


@router.post("/v2/embed", **documented("EmbeddingsByType", "embeddings.write", body="CreateEmbed"))
async def embed(request: Request) -> Response:
    """A vector for each text, as clients of Cohere's second version ask it."""
    return await _embed(request, version=2)


async def _embed(request: Request, *, version: Literal[1, 2]) -> Response:
    asked = await read_as(request, parse_embed)
    served = await chosen_pooled(request, asked.model, "embedding")
    info, said = served.info, asked.input_type
    # these two of Cohere's words mean neither a query nor a document
    purpose = None if said is None or (said in UNPROMPTED and said not in info.prompts) else said
    prompt = prompt_of(info, None if purpose is None else ("input_type", purpose))
    cut = None if asked.whole else min(asked.max_tokens or info.max_model_len, info.max_model_len)
    cut_vectors([], info, asked.dimensions, "output_dimension")
    done = await work_of(request, served).do(asked.texts, asked.path, prompt=prompt, cut=cut)
    much = len(done.rows) * info.dimensions > MANY_NUMBERS

    def write() -> bytes:
        rows = cut_vectors(done.rows, info, asked.dimensions)
        return embed_json(rows, asked, done.num_tokens, version=version)

    return json_reply(await aside(much, write), context(request).models.headers(served.name))


@router.post("/v1/classify", **documented("Classes", "embeddings.write", body="CreateClassification"))
@router.post("/classify", **documented("Classes", "embeddings.write", body="CreateClassification"))
async def classify(request: Request) -> Response:
    """The likeliest label of each input, and the probabilities of all labels."""
    asked = await read_as(request, parse_classify)
    served = await chosen_pooled(request, asked.model, "classification")

    def path(index: int) -> str:
        return "input" if asked.single else f"input[{index}]"

    cut = cut_of(served.info, asked.truncate)
    done = await work_of(request, served).do(asked.inputs, path, cut=cut, raw=asked.raw)
    body = classes_json(done.rows, served.info.labels, served.name, done.num_tokens)
    return json_reply(body, context(request).models.headers(served.name))


@router.post("/pooling", **documented("Pooled", "embeddings.write", body="CreatePooling"))
async def create_pooling(request: Request) -> Response:
    """What the model makes of each input: a vector, or the probabilities of its labels."""
    pooling = await read_as(request, parse_pooling)
    asked = pooling.asked
    if pooling.task == "classify":
        served = await chosen_pooled(request, asked.model, "classification")
    elif pooling.task == "embed":
        served = await chosen_pooled(request, asked.model, "embedding")
    else:
        served = await chosen_pooled(request, asked.model, "embedding", "classification")
    if asked.norm is not None and asked.norm[0] != "use_activation" and served.info.kind != "embedding":
        message = f"Invalid '{asked.norm[0]}': '{served.name}' gives no vectors; see 'use_activation'."
        refuse(asked.norm[0], message, "unsupported_parameter")
    prompt, cut = prompt_of(served.info, asked.purpose), cut_of(served.info, asked.truncate)
    cut_vectors([], served.info, asked.dimensions)
    work = work_of(request, served, asked.user)
    done = await work.do(asked.inputs, asked.path, prompt=prompt, cut=cut, raw=asked.raw)
    much = len(done.rows) * max(served.info.dimensions, 1) > MANY_NUMBERS

    def write() -> bytes:
        rows = cut_vectors(done.rows, served.info, asked.dimensions, unit=asked.unit)
        return pooling_json(rows, served.name, asked.encoding_format, done.num_tokens)

    return json_reply(await aside(much, write), context(request).models.headers(served.name))
