"""Vectors, scores and labels of texts: what a request for them says, doing it, and how it is answered.

`Embedder`, `Reranker` and `Moderator` are for the server's own use.
"""

from __future__ import annotations

from server.pooling.answers import (
    classes_json,
    embeddings_json,
    pooling_json,
    rerank_json,
    scores_json,
)
from server.pooling.cohere import EmbedRequest, embed_json, parse_embed
from server.pooling.own_use import (
    Embedder,
    Moderator,
    Reranker,
    embedder_of,
    judged,
    moderator_of,
    relevance,
    require_moderator,
    reranker_of,
)
from server.pooling.requests import (
    ClassifyRequest,
    EmbeddingsRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    parse_classify,
    parse_embeddings,
    parse_pooling,
    parse_rerank,
    parse_score,
)
from server.pooling.work import Done, Work, check_length_of_all, cut_of, cut_vectors, prompt_of

__all__ = [
    "ClassifyRequest",
    "Done",
    "EmbedRequest",
    "Embedder",
    "EmbeddingsRequest",
    "Moderator",
    "PoolingRequest",
    "RerankRequest",
    "Reranker",
    "ScoreRequest",
    "Work",
    "check_length_of_all",
    "classes_json",
    "cut_of",
    "cut_vectors",
    "embed_json",
    "embedder_of",
    "embeddings_json",
    "judged",
    "moderator_of",
    "parse_classify",
    "parse_embed",
    "parse_embeddings",
    "parse_pooling",
    "parse_rerank",
    "parse_score",
    "pooling_json",
    "prompt_of",
    "relevance",
    "require_moderator",
    "rerank_json",
    "reranker_of",
    "scores_json",
]
