"""POST /v1/rerank, /rerank and /v2/rerank, as Jina, Cohere and vLLM have it, and /v1/score and /score."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine import PoolingInfo
from server.access import require_use
from server.http import context, json_reply, principal, read_as
from server.ignored import ignore
from server.model_registry import PooledModel
from server.pooling import (
    RerankRequest,
    cut_of,
    parse_rerank,
    parse_score,
    relevance,
    rerank_json,
    scores_json,
)
from server.routes.chosen_model import chosen_pooled
from server.routes.documented import documented
from server.routes.pooling.embeddings import work_of

router = APIRouter(tags=["Ranking"])


@router.post("/v1/rerank", **documented("Reranking", "embeddings.write", body="CreateReranking"))
@router.post("/rerank", **documented("Reranking", "embeddings.write", body="CreateReranking"))
async def rerank(request: Request) -> Response:
    """The documents that answer a query best, best first, with their texts."""
    return await _rerank(request, returns=True)


@router.post("/v2/rerank", **documented("Reranking", "embeddings.write", body="CreateReranking"))
async def rerank_without_texts(request: Request) -> Response:
    """The same as clients of Cohere's second version ask it: documents come back by their index alone."""
    return await _rerank(request, returns=False)


async def _rerank(request: Request, *, returns: bool) -> Response:
    asked = await read_as(request, partial(parse_rerank, returns=returns))
    served = await chosen_pooled(request, asked.model, "rerank")
    require_use(principal(request), served.allowed_as)
    done = await work_of(request, served).do(
        [(asked.query, document) for document in asked.documents],
        lambda index: f"documents[{index}]",
        prompt=_instruction(asked.instruction, served.info),
        cut=partial(_cut, asked, served, principal(request).owner),
        raw=asked.raw,
    )
    scores = [float(row[0]) for row in done.rows] if asked.raw else relevance(done.rows, served)
    body = rerank_json(scores, asked, served.name, done.num_tokens)
    return json_reply(body, context(request).models.headers(served.name))


async def _cut(asked: RerankRequest, served: PooledModel, owner: str) -> int | None:
    """The tokens that a pair is cut to."""
    if not asked.per_document or asked.truncate is None:
        return cut_of(served.info, asked.truncate)
    instruction = _instruction(asked.instruction, served.info)
    [query] = await served.engine.encode([(asked.query, "")], prompt=instruction, owner=owner)
    return min(served.info.max_model_len, len(query.ids) + asked.truncate)


@router.post("/v1/score", **documented("Scores", "embeddings.write", body="CreateScores"))
@router.post("/score", **documented("Scores", "embeddings.write", body="CreateScores"))
async def score(request: Request) -> Response:
    """How well the second text of each pair answers the first, as the checkpoint itself counts it."""
    asked = await read_as(request, parse_score)
    served = await chosen_pooled(request, asked.model, "rerank")
    done = await work_of(request, served).do(
        asked.pairs,
        lambda index: asked.field if asked.single else f"{asked.field}[{index}]",
        prompt=_instruction(asked.instruction, served.info),
        cut=cut_of(served.info, asked.truncate),
        raw=asked.raw,
    )
    body = scores_json(done.rows, served.name, done.num_tokens)
    return json_reply(body, context(request).models.headers(served.name))


def _instruction(asked: str, info: PoolingInfo) -> str:
    """The instruction of a reranker that takes one; of another it is named as ignored."""
    if asked and info.instructed:
        return asked
    if asked:
        ignore("instruction")
    return ""
