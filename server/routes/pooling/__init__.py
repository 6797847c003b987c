"""Vectors, scores and labels of texts: /v1/embeddings, /v1/rerank, /v1/score, /v1/classify and /pooling."""

from __future__ import annotations

from fastapi import APIRouter

from server.routes.pooling import embeddings, rerank

ROUTERS: tuple[APIRouter, ...] = (embeddings.router, rerank.router)

__all__ = ["ROUTERS"]
