"""Writes the replies of the endpoints for vectors and scores."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Sequence
from typing import Any

import orjson

from server.pooling.requests import Format, RerankRequest

Row = Any
"""A float32 array."""


def embeddings_json(rows: Sequence[Row], model: str, form: Format, num_tokens: int) -> bytes:
    """The official list of embeddings, with an id of its own, as vLLM's has one."""
    data = [
        {"object": "embedding", "index": index, "embedding": _written(row, form)}
        for index, row in enumerate(rows)
    ]
    return _dumps({**_head("embd", model), "data": data, "usage": _usage(num_tokens)})


def pooling_json(rows: Sequence[Row], model: str, form: Format, num_tokens: int) -> bytes:
    """The same vectors, or the scores of classes, as vLLM's /pooling has them."""
    data = [
        {"object": "pooling", "index": index, "data": _written(row, form)} for index, row in enumerate(rows)
    ]
    return _dumps({**_head("pool", model), "data": data, "usage": _usage(num_tokens)})


def classes_json(rows: Sequence[Row], labels: Sequence[str], model: str, num_tokens: int) -> bytes:
    """The likeliest label of each text, and the probabilities of all, as vLLM's /classify has them."""
    data = [
        {
            "object": "classification",
            "index": index,
            "label": labels[int(row.argmax())],
            "probs": row,
            "num_classes": len(row),
        }
        for index, row in enumerate(rows)
    ]
    return _dumps({**_head("classify", model), "data": data, "usage": _usage(num_tokens)})


def scores_json(rows: Sequence[Row], model: str, num_tokens: int) -> bytes:
    """The score of each pair, as vLLM's /score has it."""
    data = [{"object": "score", "index": index, "score": float(row[0])} for index, row in enumerate(rows)]
    return _dumps({**_head("score", model), "data": data, "usage": _usage(num_tokens)})


def rerank_json(scores: Sequence[float], asked: RerankRequest, model: str, num_tokens: int) -> bytes:
    """The best documents, best first, in a form that clients of Jina, Cohere and vLLM read. Of documents with
    the same score the first one comes first."""
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n]
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": asked.documents[index]}} if asked.return_documents else {})
        for index in best
    ]
    meta = {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": num_tokens}}
    return _dumps({**_head("rerank", model), "results": results, "usage": _usage(num_tokens), "meta": meta})


def _head(kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"{kind}-{secrets.token_hex(12)}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
    }


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _written(row: Row, form: Format) -> Any:
    """Numbers, or the bytes of float32 numbers, the least significant first."""
    return base64.b64encode(row.astype("<f4").tobytes()).decode() if form == "base64" else row.astype("f4")


def _dumps(reply: dict[str, Any]) -> bytes:
    return orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)
