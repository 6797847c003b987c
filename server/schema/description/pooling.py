"""Describes requests for vectors, scores and labels of texts, and their replies."""

from __future__ import annotations

from collections.abc import Mapping

from server.schema.description.parts import (
    BOOLEAN,
    INTEGER,
    JUDGED,
    NUMBER,
    OBJECT,
    STRING,
    listed,
    mapped,
    of,
)
from server.shapes import Schema

_VECTOR: Schema = {"anyOf": [listed(NUMBER), STRING]}
_POOLED_HEAD: Mapping[str, Schema] = {
    "id": STRING,
    "created": INTEGER,
    "object": {"const": "list"},
    "model": STRING,
    "usage": of({"prompt_tokens": INTEGER, "total_tokens": INTEGER}),
}


def _pooled(kind: str, entry: Mapping[str, Schema]) -> Schema:
    """A list of what was made of each text."""
    row = of({"object": {"const": kind}, "index": INTEGER, **entry})
    return of({**_POOLED_HEAD, "data": listed(row)})


def _asked() -> dict[str, Schema]:
    """Requests for vectors, scores and labels of texts."""
    ids = listed({**INTEGER, "minimum": 0}, minItems=1)
    several = listed({"anyOf": [STRING, of({"text": STRING})]}, minItems=1, maxItems=2048)
    inputs: Schema = {"anyOf": [STRING, several, ids, listed(ids, minItems=1, maxItems=2048)]}
    of_texts: dict[str, Schema] = {
        "truncate_prompt_tokens": {**INTEGER, "minimum": -1},
        "use_activation": BOOLEAN,
        "late_chunking": {"const": False},
        "return_multivector": {"const": False},
        "add_special_tokens": {"const": True},
        "truncation_side": {"const": "right"},
    }
    of_vectors: dict[str, Schema] = {
        "model": STRING,
        "encoding_format": {"enum": ["float", "base64"]},
        "dimensions": {**INTEGER, "minimum": 1},
        "user": STRING,
        "input_type": STRING,
        "task": STRING,
        "prompt_name": STRING,
        "embedding_type": {"enum": ["float", "base64"]},
        "truncate": BOOLEAN,
        "normalize": BOOLEAN,
        "normalized": BOOLEAN,
        **of_texts,
    }
    parts = listed(of({"type": {"const": "text"}, "text": STRING}), minItems=1)
    document: Schema = {"anyOf": [STRING, of({"text": STRING}), of({"content": parts})]}
    documents: Schema = {"anyOf": [*document["anyOf"], listed(document, minItems=1, maxItems=2048)]}
    of_pairs: dict[str, Schema] = {"model": STRING, "instruction": STRING, **of_texts}
    return {
        "CreateEmbedding": {**of({"input": inputs}, of_vectors), "additionalProperties": False},
        "CreateEmbed": of(
            {},
            {
                "model": STRING,
                "texts": listed(STRING, minItems=1, maxItems=2048),
                "inputs": listed(of({"content": listed(OBJECT, minItems=1)}), minItems=1, maxItems=2048),
                "input_type": STRING,
                "embedding_types": listed({"enum": ["float", "base64", "binary", "ubinary"]}),
                "truncate": {"enum": ["NONE", "END"]},
                "max_tokens": {**INTEGER, "minimum": 1},
                "output_dimension": {**INTEGER, "minimum": 1},
            },
        ),
        "CreatePooling": of({"input": inputs}, of_vectors),
        "CreateClassification": of({"input": inputs}, {"model": STRING, **of_texts}),
        "CreateModeration": of(
            {"input": {"anyOf": [STRING, listed({"anyOf": [STRING, OBJECT]}, minItems=1, maxItems=2048)]}},
            {"model": STRING},
        ),
        "CreateReranking": of(
            {"query": document, "documents": documents},
            {
                **of_pairs,
                "top_n": {**INTEGER, "minimum": 1},
                "return_documents": BOOLEAN,
                "max_tokens_per_doc": {**INTEGER, "minimum": 1},
            },
        ),
        "CreateScores": of(
            {},
            {
                **dict.fromkeys(("text_1", "text_2", "queries", "documents"), documents),
                **dict.fromkeys(("items", "data_1", "data_2"), documents),
                **of_pairs,
            },
        ),
    }


_TOLD: Mapping[str, Schema] = {
    "Embeddings": _pooled("embedding", {"embedding": _VECTOR}),
    "EmbeddingsByType": of(
        {
            "response_type": {"enum": ["embeddings_by_type", "embeddings_floats"]},
            "id": STRING,
            "embeddings": {"anyOf": [mapped(listed(_VECTOR)), listed(_VECTOR)]},
            "texts": listed(STRING),
            "meta": of(
                {"api_version": of({"version": STRING}), "billed_units": of({"input_tokens": INTEGER})}
            ),
        }
    ),
    "Pooled": _pooled("pooling", {"data": _VECTOR}),
    "Scores": _pooled("score", {"score": NUMBER}),
    "Classes": _pooled("classification", {"label": STRING, "probs": listed(NUMBER), "num_classes": INTEGER}),
    "Moderations": of(
        {
            "id": STRING,
            "model": STRING,
            "results": listed(of(JUDGED)),
        }
    ),
    "Reranking": of(
        {
            **_POOLED_HEAD,
            "results": listed(
                of({"index": INTEGER, "relevance_score": NUMBER}, {"document": of({"text": STRING})})
            ),
            "meta": of(
                {"billed_units": of({"search_units": INTEGER}), "tokens": of({"input_tokens": INTEGER})}
            ),
        }
    ),
}


def pooling_components() -> Mapping[str, Schema]:
    """The schemas of this family, by name."""
    return {**_asked(), **_TOLD}
