"""Vectors, scores and labels of texts: /v1/embeddings, /v1/rerank, /v1/score, /v1/classify, /pooling and
/v1/moderations."""

from __future__ import annotations

from fastapi import APIRouter

from server.routes.pooling import embeddings, moderations, rerank

ROUTERS: tuple[APIRouter, ...] = (embeddings.router, rerank.router, moderations.router)

__all__ = ["ROUTERS"]
