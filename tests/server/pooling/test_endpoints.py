"""The endpoints for vectors, scores and labels, on a server with one tiny model of each kind."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from engine import TextInput
from server.access.keys import owner_of_flag_key
from server.config import Config
from server.errors import ApiError
from server.limits import LimitSet, Subject
from server.model_registry import build_pooling
from server.pooling import Embedder, Reranker, embedder_of, own_use, reranker_of
from server.pooling.own_use import Counted
from server.pooling.work import cut_vectors, prompt_of
from server.telemetry import end_user
from server.vector_stores import Payer
from tests.support.batching import line
from tests.support.blocking import until
from tests.support.libraries import new_store
from tests.support.pooling_checkpoints import make_classifier, make_embedder
from tests.support.running import Running, http_client, live_app
from tests.support.wire import validate, validate_error

GUIDE = Path(__file__).parents[3] / "docs" / "observability.md"

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["the river bank is green", "a dog", "where is the money of the bank"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The decoder embedder says that its vectors can be cut; the encoder does not."""
    folder = tmp_path_factory.mktemp("models")
    made = {
        "embedding": make_embedder("qwen3", folder / "decoder"),
        "encoder": make_embedder("bert", folder / "bert"),
        "rerank": make_classifier("bert", folder / "cross", 1),
        "classification": make_classifier(
            "distilbert", folder / "classes", 3, dim=64, hidden_dim=96, n_layers=2, n_heads=4
        ),
    }
    config = made["embedding"] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"is_matryoshka": True}))
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    async with live_app(
        tmp_path_factory.mktemp("data"),
        embedding_model=(str(folders["embedding"]), f"small={folders['encoder']}"),
        rerank_model=(str(folders["rerank"]),),
        classification_model=(str(folders["classification"]),),
        api_key=("sk-one",),
        owner_limit=("tokens_per_day=100000",),
        num_threads=1,
    ) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(server, authorization="Bearer sk-one") as client:
        yield client


async def _error(client: httpx.AsyncClient, path: str, **body: Any) -> tuple[int, str, str | None]:
    reply = await client.post(path, json=body)
    error = validate_error(reply.json())
    return reply.status_code, error["code"], error["param"]


async def test_the_official_sdk_gets_vectors(server: Running, client: httpx.AsyncClient) -> None:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="sk-one") as sdk:
        default = await sdk.embeddings.create(model="decoder", input=TEXTS)  # in base64, which it decodes
        floats = await sdk.embeddings.create(model="decoder", input=TEXTS, encoding_format="float")
    assert [row.index for row in default.data] == [0, 1, 2]
    for one, other in zip(default.data, floats.data, strict=True):
        assert np.linalg.norm(one.embedding) == pytest.approx(1.0, abs=1e-5)
        np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-7)
    # words, and the end that the tokenizer adds to each text
    assert default.usage.prompt_tokens == default.usage.total_tokens == 6 + 3 + 8
    raw = (await client.post("/v1/embeddings", json={"model": "decoder", "input": TEXTS})).json()
    validate("CreateEmbeddingResponse", raw)
    assert raw["id"].startswith("embd-")
    coded = {"model": "decoder", "input": TEXTS[0], "encoding_format": "base64"}
    vector = (await client.post("/v1/embeddings", json=coded)).json()["data"][0]["embedding"]
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(vector), "<f4"), np.float32(raw["data"][0]["embedding"])
    )


async def test_langchain_gets_vectors(server: Running) -> None:
    from langchain_openai import OpenAIEmbeddings

    # token ids of another model's tokenizer would be sent otherwise
    made: Any = OpenAIEmbeddings
    embeddings = made(
        model="small", base_url=f"{server.base_url}/v1", api_key="sk-one", check_embedding_ctx_length=False
    )
    found = await embeddings.aembed_documents(TEXTS)
    assert len(found) == 3 and len(found[0]) == 64
    assert await embeddings.aembed_query(TEXTS[1]) == pytest.approx(found[1], abs=1e-5)
    await embeddings.async_client._client.close()
    embeddings.client._client.close()


async def test_token_ids_are_taken_as_they_are(client: httpx.AsyncClient) -> None:
    async def vectors(**body: Any) -> Any:
        reply = await client.post("/v1/embeddings", json={"model": "decoder", **body})
        return [row["embedding"] for row in reply.json()["data"]]

    ids = [9, 15, 3]  # "the is", and the end
    assert await vectors(input=[ids, [9]]) == [*(await vectors(input=ids)), *(await vectors(input=[[9]]))]
    [text] = await vectors(input="the is")
    np.testing.assert_allclose((await vectors(input=ids))[0], text, atol=1e-6)


async def test_dimensions_are_cut_and_have_the_length_1_again(client: httpx.AsyncClient) -> None:
    whole = (await client.post("/v1/embeddings", json={"model": "decoder", "input": "a dog"})).json()
    cut = (
        await client.post("/v1/embeddings", json={"model": "decoder", "input": "a dog", "dimensions": 16})
    ).json()
    expected = np.array(whole["data"][0]["embedding"][:16])
    np.testing.assert_allclose(cut["data"][0]["embedding"], expected / np.linalg.norm(expected), atol=1e-6)
    asked = {"model": "small", "input": "a dog"}
    assert (await client.post("/v1/embeddings", json={**asked, "dimensions": 64})).status_code == 200
    assert await _error(client, "/v1/embeddings", **asked, dimensions=16) == (
        400,
        "invalid_value",
        "dimensions",
    )
    assert await _error(client, "/v1/embeddings", model="decoder", input="a", dimensions=65) == (
        *(400, "invalid_value"),
        "dimensions",
    )


async def test_prompts_are_put_before_a_text_only_where_they_are_asked_for(client: httpx.AsyncClient) -> None:
    async def vector(text: str, **fields: Any) -> Any:
        reply = await client.post("/v1/embeddings", json={"model": "small", "input": text, **fields})
        return reply.json()["data"][0]["embedding"]

    plain = await vector("search query : a dog")
    for asked in ({"input_type": "search_query"}, {"task": "retrieval.query"}, {"prompt_name": "query"}):
        np.testing.assert_allclose(await vector("a dog", **asked), plain, atol=1e-5)
    assert abs(np.array(await vector("a dog")) - plain).max() > 1e-3
    assert await _error(client, "/v1/embeddings", model="small", input="a", input_type="poem") == (
        *(400, "invalid_value"),
        "input_type",
    )


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "input"),
        ({"input": ""}, "empty_string", "input"),
        ({"input": []}, "empty_array", "input"),
        ({"input": ["a", ""]}, "empty_string", "input[1]"),
        ({"input": [[]]}, "empty_array", "input[0]"),
        ({"input": [1.5]}, "invalid_type", "input[0]"),
        ({"input": [True]}, "invalid_type", "input[0]"),
        ({"input": [3, -1]}, "invalid_value", "input[1]"),
        ({"input": [3, 70000]}, "invalid_value", "input"),
        ({"input": [[3], [10**12]]}, "invalid_value", "input[1][0]"),
        ({"input": ["a"] * 2049}, "array_above_max_length", "input"),
        ({"input": ["a", "a " * 200]}, "context_length_exceeded", "input[1]"),
        ({"input": 7}, "invalid_type", "input"),
        ({"input": "a", "encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ({"input": "a", "dimensions": 0}, "invalid_value", "dimensions"),
        ({"input": "a", "dimensions": "8"}, "invalid_type", "dimensions"),
        ({"input": "a", "colour": 1}, "unknown_parameter", "colour"),
        ({"input": "a", "truncate_prompt_tokens": 4000}, "invalid_value", "truncate_prompt_tokens"),
        ({"input": "a", "task": "query", "input_type": "query"}, "mutually_exclusive_parameters", "task"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_bad_input_is_a_400(client: httpx.AsyncClient, body: Any, code: str, param: str) -> None:
    assert await _error(client, "/v1/embeddings", model="decoder", **body) == (400, code, param)


async def test_broken_json_is_a_400(client: httpx.AsyncClient) -> None:
    for broken in (b'{"input": [NaN]}', b'{"input": "\\ud800"}'):
        reply = await client.post(
            "/v1/embeddings", content=broken, headers={"content-type": "application/json"}
        )
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")


async def test_a_long_text_is_cut_where_that_is_asked_for(client: httpx.AsyncClient) -> None:
    body = {"model": "decoder", "input": "a " * 200, "truncate_prompt_tokens": -1}
    assert (await client.post("/v1/embeddings", json=body)).json()["usage"]["prompt_tokens"] == 120
    reply = await client.post("/v1/embeddings", json={**body, "truncate_prompt_tokens": 7})
    assert reply.json()["usage"]["prompt_tokens"] == 7


async def test_a_model_of_another_kind_is_a_400_that_says_what_would_help(client: httpx.AsyncClient) -> None:
    for path, body, model, instead in (
        ("/v1/embeddings", {"input": "a"}, "antiphon-scripted", "'decoder', 'small'"),
        ("/v1/embeddings", {"input": "a"}, "cross", "/v1/rerank"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "small", "'cross'"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "small", "/v1/embeddings"),
        ("/v1/responses", {"input": "a"}, "cross", "antiphon-scripted"),
    ):
        reply = await client.post(path, json={"model": model, **body})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, "unsupported_model", "model")
        assert instead in error["message"]
    assert await _error(client, "/v1/embeddings", model="none", input="a") == (
        404,
        "model_not_found",
        "model",
    )


async def test_models_say_what_they_are_for(client: httpx.AsyncClient) -> None:
    models = {model["id"]: model for model in (await client.get("/v1/models")).json()["data"]}
    assert next(iter(models)) == "antiphon-scripted"
    assert models["decoder"]["pooling"] == {
        "modes": ["lasttoken"],
        "source": "1_Pooling/config.json",
        "normalized": True,
        "attention": "causal",
    }
    assert (models["decoder"]["engine"], models["small"]["engine"]) == ("paged", "transformers")
    assert (models["small"]["dimensions"], models["small"]["max_model_len"]) == (64, 120)
    assert models["small"]["prompts"]["query"] == "search query : "
    assert (models["cross"]["used_for"], models["cross"]["labels"]) == ("rerank", ["label-0"])
    assert (await client.get("/v1/models/cross")).json() == models["cross"]


async def test_documents_are_ranked_for_clients_of_jina_cohere_and_vllm(client: httpx.AsyncClient) -> None:
    body = {
        "model": "cross",
        "query": "where is the bank",
        "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]],
    }
    whole = (await client.post("/v1/rerank", json=body)).json()
    assert sorted(row["index"] for row in whole["results"]) == [0, 1, 2]
    scores = [row["relevance_score"] for row in whole["results"]]
    assert scores == sorted(scores, reverse=True) and min(scores) > 0 and max(scores) < 1
    for row in whole["results"]:
        assert row["document"]["text"] == TEXTS[row["index"]]
    second = (await client.post("/v2/rerank", json={**body, "top_n": 2, "max_tokens_per_doc": 50})).json()
    assert second["results"] == [
        {"index": row["index"], "relevance_score": row["relevance_score"]} for row in whole["results"][:2]
    ]
    pairs = {"model": "cross", "text_1": body["query"], "text_2": TEXTS}
    scored = (await client.post("/score", json=pairs)).json()
    by_index = {row["index"]: row["relevance_score"] for row in whole["results"]}
    assert [row["score"] for row in scored["data"]] == pytest.approx(
        [by_index[i] for i in range(3)], abs=1e-6
    )
    assert scored["usage"] == whole["usage"]
    ignored = await client.post("/rerank", json={**body, "instruction": "x", "colour": 1})
    assert set(ignored.headers["x-antiphon-ignored"].split(",")) == {"instruction", "colour"}


async def _scores(client: httpx.AsyncClient, **body: Any) -> list[float]:
    reply = await client.post("/score", json={"model": "cross", **body})
    assert reply.status_code == 200 and "x-antiphon-ignored" not in reply.headers, reply.text
    return [row["score"] for row in reply.json()["data"]]


async def test_pairs_have_the_names_and_forms_that_vllm_has_for_them(client: httpx.AsyncClient) -> None:
    query, parts = "where is the bank", [{"type": "text", "text": TEXTS[0]}]
    wanted = await _scores(client, text_1=query, text_2=TEXTS)
    for one, two in (("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
        assert await _scores(client, **{one: query, two: TEXTS}) == wanted
    told = [{"content": parts}, {"text": TEXTS[1]}, TEXTS[2]]
    assert await _scores(client, data_1={"content": [{"type": "text", "text": query}]}, data_2=told) == wanted
    assert await _scores(client, queries=query, items={"content": parts}) == pytest.approx(wanted[:1])
    body = {"query": {"text": query}, "documents": told}
    ranked = (await client.post("/rerank", json=body)).json()["results"]
    assert {row["index"]: row["document"]["text"] for row in ranked} == dict(enumerate(TEXTS))
    found = {row["index"]: row["relevance_score"] for row in ranked}
    assert [found[index] for index in range(3)] == pytest.approx(wanted, abs=1e-6)
    both = await client.post("/score", json={"data_1": "a", "data_2": "a", "text_2": "b"})
    assert both.headers["x-antiphon-ignored"] == "text_2"
    for path, wrong, code, param in (
        ("/score", {"queries": "a"}, "missing_required_parameter", "documents"),
        ("/score", {"queries": "a", "items": [{}]}, "missing_required_parameter", "items[0].text"),
        ("/score", {"data_1": "a", "data_2": {"content": []}}, "empty_array", "data_2.content"),
        ("/score", {"data_1": "a", "data_2": "a " * 200}, "context_length_exceeded", "data_2"),
        (
            "/rerank",
            {"query": "a", "documents": [{"content": [{"type": "image_url"}]}]},
            *("invalid_value", "documents[0].content[0].type"),
        ),
    ):
        assert await _error(client, path, **wrong) == (400, code, param)


async def test_numbers_are_given_without_their_activation(client: httpx.AsyncClient) -> None:
    asked = {"text_1": "where is the bank", "text_2": TEXTS}
    raw, scores = await _scores(client, **asked, use_activation=False), await _scores(client, **asked)
    assert scores == pytest.approx([1 / (1 + np.exp(-each)) for each in raw], abs=1e-5)
    assert await _scores(client, **asked, use_activation=True) == pytest.approx(scores, abs=1e-6)
    ranked = {"query": asked["text_1"], "documents": TEXTS, "use_activation": False}
    found = {
        row["index"]: row["relevance_score"]
        for row in (await client.post("/rerank", json=ranked)).json()["results"]
    }
    assert [found[index] for index in range(3)] == pytest.approx(raw, abs=1e-5)

    text = {"model": "classes", "input": TEXTS[0]}
    [plain] = (await client.post("/classify", json=text)).json()["data"]
    logits = np.array(
        (await client.post("/classify", json={**text, "use_activation": False})).json()["data"][0]["probs"]
    )
    np.testing.assert_allclose(np.exp(logits) / np.exp(logits).sum(), plain["probs"], atol=1e-5)
    pooled = await client.post("/pooling", json={**text, "use_activation": False})
    assert pooled.json()["data"][0]["data"] == pytest.approx(logits.tolist(), abs=1e-5)
    assert await _error(client, "/pooling", **text, normalize=False) == (
        400,
        "unsupported_parameter",
        "normalize",
    )


async def test_vectors_are_given_without_their_norm(server: Running, client: httpx.AsyncClient) -> None:
    async def vector(path: str = "/v1/embeddings", **fields: Any) -> Any:
        reply = await client.post(path, json={"model": "decoder", "input": "a dog", **fields})
        assert reply.status_code == 200 and "x-antiphon-ignored" not in reply.headers, reply.text
        [row] = reply.json()["data"]
        return np.array(row["data" if path == "/pooling" else "embedding"])

    normal, raw = await vector(), await vector(normalize=False)
    assert abs(np.linalg.norm(raw) - 1) > 1e-3
    np.testing.assert_allclose(raw / np.linalg.norm(raw), normal, atol=1e-6)
    np.testing.assert_allclose(await vector(normalized=False, dimensions=16), raw[:16], atol=1e-6)
    np.testing.assert_allclose(await vector("/pooling", use_activation=False), raw, atol=1e-6)
    for same in ({"normalized": True}, {"normalize": True}, {"use_activation": True}):
        np.testing.assert_allclose(await vector(**same), normal, atol=1e-6)
    both = {"model": "small", "input": "a", "normalize": True, "normalized": True}
    assert await _error(client, "/v1/embeddings", **both) == (
        400,
        "mutually_exclusive_parameters",
        "normalized",
    )
    # a model whose vectors have no such length gives ones that do where a request says so
    info = replace((await server.context.models.load_pooled("decoder", "embedding")).info, normalized=False)
    rows = [raw.astype(np.float32)]
    assert cut_vectors(rows, info, None) is rows and cut_vectors(rows, info, None, unit=False) is rows
    np.testing.assert_allclose(cut_vectors(rows, info, None, unit=True)[0], normal, atol=1e-6)


async def test_bodies_of_jina_are_taken(client: httpx.AsyncClient) -> None:
    body = {
        "model": "decoder",
        "task": "text-matching",
        "dimensions": 16,
        "late_chunking": False,
        "embedding_type": "float",
        "normalized": True,
        "truncate": True,
        "input": [{"text": TEXTS[1]}, "a " * 200],
    }
    reply = await client.post("/v1/embeddings", json=body)
    assert reply.headers["x-antiphon-ignored"] == "task"
    plain = {"model": "decoder", "input": TEXTS[1], "dimensions": 16}
    wanted = (await client.post("/v1/embeddings", json=plain)).json()["data"][0]["embedding"]
    np.testing.assert_allclose(reply.json()["data"][0]["embedding"], wanted, atol=1e-6)
    coded = (await client.post("/v1/embeddings", json={**body, "embedding_type": "base64"})).json()["data"][0]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(coded["embedding"]), "<f4"), wanted, atol=1e-6)
    told = {"model": "classes", "input": [{"text": TEXTS[0]}, TEXTS[0]]}
    one, two = (await client.post("/v1/classify", json=told)).json()["data"]
    assert one["probs"] == pytest.approx(two["probs"], abs=1e-6)


@pytest.mark.parametrize(
    ("path", "fields", "code", "param"),
    [
        ("/v1/embeddings", {"late_chunking": True}, "unsupported_parameter", "late_chunking"),
        ("/v1/embeddings", {"return_multivector": True}, "unsupported_parameter", "return_multivector"),
        ("/v1/embeddings", {"embedding_type": "ubinary"}, "invalid_value", "embedding_type"),
        (
            "/v1/embeddings",
            {"embedding_type": "float", "encoding_format": "base64"},
            *("mutually_exclusive_parameters", "embedding_type"),
        ),
        ("/v1/embeddings", {"normalized": "yes"}, "invalid_type", "normalized"),
        ("/v1/embeddings", {"task": "poem"}, "invalid_value", "task"),
        ("/v1/embeddings", {"messages": []}, "unknown_parameter", "messages"),
        ("/v1/embeddings", {"input": [{"image": "x"}]}, "missing_required_parameter", "input[0].text"),
        ("/v1/classify", {"labels": ["good", "bad"]}, "unsupported_parameter", "labels"),
        ("/classify", {"add_special_tokens": False}, "unsupported_parameter", "add_special_tokens"),
        ("/pooling", {"truncation_side": "left"}, "unsupported_parameter", "truncation_side"),
        ("/pooling", {"use_activation": 0}, "invalid_type", "use_activation"),
    ],
)
async def test_what_would_give_other_numbers_is_refused(
    client: httpx.AsyncClient, path: str, fields: Any, code: str, param: str
) -> None:
    assert await _error(client, path, **{"input": "a", **fields}) == (400, code, param)


async def test_cohere_gets_vectors(client: httpx.AsyncClient) -> None:
    """Bodies as cohere 5.21.1 sends them, and what it reads of the replies."""
    plain = (await client.post("/v1/embeddings", json={"model": "decoder", "input": TEXTS})).json()
    vectors = np.array([row["embedding"] for row in plain["data"]], np.float32)
    asked = {"model": "decoder", "texts": TEXTS, "input_type": "classification"}
    types = ["float", "base64", "ubinary", "binary"]
    second = (await client.post("/v2/embed", json={**asked, "embedding_types": types})).json()
    assert (second["response_type"], second["texts"]) == ("embeddings_by_type", TEXTS)
    assert second["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"input_tokens": plain["usage"]["prompt_tokens"]},
    }
    made = second["embeddings"]
    assert sorted(made) == sorted(types)
    np.testing.assert_allclose(made["float"], vectors, atol=1e-6)
    np.testing.assert_allclose(
        np.frombuffer(base64.b64decode(made["base64"][1]), "<f4"), vectors[1], atol=1e-6
    )
    signs = np.packbits(np.array(made["float"]) > 0, axis=-1)
    assert made["ubinary"] == signs.tolist()
    assert made["binary"] == (signs.astype(int) - 128).tolist()
    first = (await client.post("/v1/embed", json=asked)).json()
    assert (first["response_type"], len(first["embeddings"])) == ("embeddings_floats", len(TEXTS))
    parts = [{"content": [{"type": "text", "text": TEXTS[0]}]}]
    query = {"model": "decoder", "inputs": parts, "input_type": "search_query", "output_dimension": 16}
    short = (await client.post("/v2/embed", json=query)).json()["embeddings"]["float"]
    same = {"model": "decoder", "input": TEXTS[0], "input_type": "query", "dimensions": 16}
    wanted = (await client.post("/v1/embeddings", json=same)).json()["data"][0]["embedding"]
    np.testing.assert_allclose(short[0], wanted, atol=1e-6)
    long = {"model": "decoder", "texts": ["river " * 500], "input_type": "search_document"}
    assert (await client.post("/v2/embed", json=long)).status_code == 200, (
        "texts are cut where nothing is said"
    )
    for changed, code, param in (
        ({"truncate": "NONE"}, "context_length_exceeded", "texts[0]"),
        ({"truncate": "START"}, "invalid_value", "truncate"),
        ({"embedding_types": ["int8"]}, "invalid_value", "embedding_types[0]"),
        ({"images": ["data:image/png;base64,"]}, "unsupported_parameter", "images"),
        ({"texts": None}, "missing_required_parameter", "texts"),
        ({"texts": None, "inputs": [{"content": [{"type": "image_url"}]}]}, "invalid_value", PART_TYPE),
        ({"output_dimension": 4096}, "invalid_value", "output_dimension"),
    ):
        assert await _error(client, "/v2/embed", **{**long, **changed}) == (400, code, param)


PART_TYPE = "inputs[0].content[0].type"


async def test_every_route_names_what_it_does_not_read(client: httpx.AsyncClient) -> None:
    pairs, ranked = {"text_1": "a", "text_2": "a"}, {"query": "a", "documents": ["a"]}
    bodies: dict[str, Any] = {"/v1/score": pairs, "/score": pairs}
    bodies |= {path: {"model": "decoder", "texts": ["a"]} for path in ("/v1/embed", "/v2/embed")}
    bodies |= {"/v1/rerank": ranked, "/rerank": ranked, "/v2/rerank": ranked}
    bodies |= {path: {"input": "a"} for path in ("/v1/classify", "/classify", "/pooling")}
    for path, body in bodies.items():
        reply = await client.post(path, json={**body, "unheard_of": 1}, params={"unheard_of": ""})
        assert reply.status_code == 200, (path, reply.text)
        assert reply.headers["x-antiphon-ignored"] == "unheard_of,?unheard_of", path
    reply = await client.post("/v1/embeddings", json={"input": "a"}, params={"unheard_of": ""})
    assert reply.headers["x-antiphon-ignored"] == "?unheard_of"


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "missing_required_parameter", "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "empty_array", "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{}]}, "missing_required_parameter", "documents[0].text"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "invalid_value", "top_n"),
        (
            "/v1/rerank",
            {"query": "a", "documents": ["a", "a " * 200]},
            "context_length_exceeded",
            "documents[1]",
        ),
        (
            "/v1/rerank",
            {"query": "a" * 3000, "documents": ["b"] * 2000},
            "max_tokens_per_request",
            "documents",
        ),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "invalid_value", "text_2"),
        ("/classify", {"input": ""}, "empty_string", "input"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "invalid_value", "task"),
    ],
)
async def test_bad_pairs_are_a_400(
    client: httpx.AsyncClient, path: str, body: Any, code: str, param: str
) -> None:
    assert await _error(client, path, **body) == (400, code, param)


async def test_texts_get_labels_and_pooling_gives_what_the_model_makes(client: httpx.AsyncClient) -> None:
    [one, two] = (await client.post("/classify", json={"input": TEXTS[:2]})).json()["data"]
    assert one["label"] == f"label-{int(np.argmax(one['probs']))}" and one["num_classes"] == 3
    assert sum(two["probs"]) == pytest.approx(1.0, abs=1e-5)
    [pooled] = (await client.post("/pooling", json={"model": "classes", "input": TEXTS[0]})).json()["data"]
    assert pooled["data"] == pytest.approx(one["probs"], abs=1e-6)
    [vector] = (await client.post("/pooling", json={"model": "small", "input": TEXTS[0]})).json()["data"]
    same = (await client.post("/v1/embeddings", json={"model": "small", "input": TEXTS[0]})).json()
    assert vector["data"] == pytest.approx(same["data"][0]["embedding"], abs=1e-6)


async def test_tokens_count_for_limits_usage_and_metrics(server: Running, client: httpx.AsyncClient) -> None:
    text = "the river and the boat and the tree and the cat and the dog and the house and the water"
    began = int(time.time()) - 60

    async def counted() -> tuple[int, int]:
        await server.context.meter.flush()
        sums = await server.context.storage.usage_sums(_embeddings(began), ("model",), 1 << 62)
        found = [one.counts for one in sums if one.by["model"] == "small"]
        return (found[0].requests, found[0].input_tokens) if found else (0, 0)

    requests, tokens = await counted()
    reply = await client.post("/v1/embeddings", json={"model": "small", "input": [text, text]})
    used = reply.json()["usage"]["prompt_tokens"]
    assert await counted() == (requests + 1, tokens + used)
    limit = int(reply.headers["x-ratelimit-limit-tokens"])
    assert limit == 100000 and int(reply.headers["x-ratelimit-remaining-tokens"]) <= limit - used
    metrics = (await client.get("/metrics")).text
    assert 'antiphon_pooling_texts_total{model="small"}' in metrics
    assert 'antiphon_pooling_texts_total{model="decoder"}' in metrics
    shown = re.findall(r"^# TYPE antiphon_pooling_(\w+)", metrics, re.MULTILINE)
    rows = [row for row in GUIDE.read_text("utf-8").splitlines() if row.startswith("| `antiphon_pooling_")]
    explained = re.findall(r"`(?:antiphon_pooling)?_(\w+)`", "".join(row.split("|")[1] for row in rows))
    assert sorted(shown) == sorted(explained)


async def test_vectors_count_for_the_person_whom_they_are_for(
    server: Running, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    from storage import UsageFilter

    caplog.set_level(logging.INFO)
    for path, body in (("/v1/embeddings", {"user": "ann"}), ("/pooling", {"user": "ann"}), ("/pooling", {})):
        reply = await client.post(path, json={"model": "small", "input": "a dog", **body})
        assert reply.status_code == 200 and "x-antiphon-ignored" not in reply.headers
    await server.context.meter.flush()
    ann = end_user(owner_of_flag_key("sk-one"), "ann")
    assert ann is not None
    wanted = UsageFilter("embeddings", 0, 1 << 62, persons=(ann,))
    [sum] = await server.context.storage.usage_sums(wanted, (), 1 << 62)
    assert sum.counts.requests == 2 and sum.counts.input_tokens > 0
    told = [getattr(record, "safety_identifier", None) for record in caplog.records]
    assert told.count(ann) == 2
    long = await client.post("/v1/embeddings", json={"model": "small", "input": "a", "user": "u" * 1025})
    assert validate_error(long.json())["param"] == "user"


def _embeddings(since_s: int) -> Any:
    from storage import UsageFilter

    return UsageFilter("embeddings", (since_s - since_s % 60) * 1_000_000, 1 << 62)


@pytest.mark.parametrize("by", ["a request", "the server itself"])
async def test_what_is_given_up_counts_once_the_model_has_begun_with_it(
    server: Running, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    here, owner = server.context, owner_of_flag_key("sk-one")
    served = await here.models.load_pooled("small", "embedding")
    embedder = Embedder(served, Counted(served, here.limiter, here.meter))
    payer = Payer(owner, (Subject("owner", owner, LimitSet()),), None)
    engine: Any = served.engine
    compute, reached, release = engine._worker._compute, threading.Event(), threading.Event()

    def held(batch: Any) -> Any:
        reached.set()
        assert release.wait(60)
        return compute(batch)

    async def counted() -> int:
        await here.meter.flush()
        sums = await here.storage.usage_sums(_embeddings(0), ("model",), 1 << 62)
        return sum(one.counts.input_tokens for one in sums if one.by["model"] == "small")

    def left() -> int:
        [meter] = here.limiter.meters_of(payer.subjects, "small", "tokens")
        return meter.remaining(here.limiter.meters.now())

    async def work() -> None:
        if by == "a request":
            body = {"model": "small", "input": words, "input_type": "document"}
            await client.post("/v1/embeddings", json=body)
        else:
            await embedder.embed([words], "document", payer=payer)

    words = "river bank " * 20
    [text] = await engine.encode([words], prompt=prompt_of(served.info, ("input_type", "document")))
    before = await counted(), left()
    with monkeypatch.context() as patch:
        patch.setattr(engine._worker, "_compute", held)
        try:
            tasks = [asyncio.create_task(work())]
            await asyncio.to_thread(reached.wait, 60)
            tasks.append(asyncio.create_task(work()))
            await until(lambda: engine.stats().texts_waiting == 2, 30)
            for task in tasks:
                task.cancel()
            await until(lambda: not engine.admission.num_places, 30)
        finally:
            release.set()
    assert await counted() == before[0] + len(text.ids), "the model had begun with one of two"
    assert abs(before[1] - len(text.ids) - left()) <= 5, "a few come back meanwhile"


async def test_a_key_without_the_scope_is_refused(server: Running) -> None:
    async with http_client(server, authorization="Bearer wrong") as stranger:
        assert (await stranger.post("/v1/embeddings", json={"input": "a"})).status_code == 401


async def test_the_servers_own_embedder_and_reranker(server: Running) -> None:
    here = server.context
    embedder = embedder_of(here.models, here.limiter, here.meter)
    reranker = reranker_of(here.models, here.limiter, here.meter)
    payer = Payer("dora", (), "key_1")
    assert isinstance(embedder, Embedder) and isinstance(reranker, Reranker)
    assert (embedder.model, embedder.dimensions) == ("decoder", 64)
    vectors = await embedder.embed(["", "a " * 500, "a dog"], "document", payer=payer)
    again = await embedder.embed(["a dog"], "document", payer=payer)
    np.testing.assert_allclose(vectors[2], again[0], atol=1e-6)
    assert vectors[0].dtype == np.float32 and all(np.isfinite(vector).all() for vector in vectors)
    assert abs((await embedder.embed(["a dog"], "query", payer=payer))[0] - again[0]).max() > 1e-3
    scores = await reranker.rerank("where is the bank", [*TEXTS, "a " * 500], payer=payer)
    assert len(scores) == 4 and all(0 <= score <= 1 for score in scores)


async def test_the_server_reads_texts_beyond_a_models_context_in_windows(server: Running) -> None:
    """What stands at the end of a long text counts as much as its beginning."""
    here, payer = server.context, Payer("dora", (), None, counted=False)
    reranker = reranker_of(here.models, here.limiter, here.meter)
    assert reranker is not None
    most = reranker.served.info.max_model_len
    filler, end = "a dog " * most, "where is the money of the bank"
    query = "where is the bank"
    scores = await reranker.rerank(query, [filler, f"{filler}{end}", f"{end} {filler}"], payer=payer)
    assert len(set(scores)) == 3, "the model has read both ends"
    long_query = await reranker.rerank(f"{query} {filler}", [f"{filler}{end}", end], payer=payer)
    assert len(long_query) == 2 and all(0 < score <= 1 for score in long_query)

    served = await here.models.load_pooled("small", "embedding")
    embedder = Embedder(served, Counted(served, here.limiter, here.meter))
    filler = "a dog " * embedder.served.info.max_model_len
    mixed, first, same = await embedder.embed([f"{filler}{end}", filler, "a dog"], "document", payer=payer)
    assert abs(mixed - first).max() > 1e-4, "the end counts"
    for vector in (mixed, first):
        assert vector.dtype == np.float32 and vector.shape == same.shape
        if embedder.normalized:
            assert abs(float((vector**2).sum()) - 1) < 1e-5


async def test_a_long_text_is_parted_near_its_middle() -> None:
    for text, first in (
        ("one two three four", "one two"),
        ("abcdefghijklmn o", "abcdefgh"),
        ("a " * 4, "a a"),
        ("x" * 5000 + " " + "y" * 6500, "x" * 5000),
        ("x" * 4000 + " " + "y" * 6500, "x" * 4000 + " " + "y" * 1249),
    ):
        assert own_use._halves(text) == (first, text[len(first) :])
    long = "x" * 4_800_000
    began = time.thread_time()  # of the processor: other threads do not count
    assert own_use._halves(long) == (long[:2_400_000], long[2_400_000:])
    assert time.thread_time() - began < 0.1


async def test_long_texts_are_parted_in_a_thread(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await server.context.models.load_pooled("small", "embedding")
    halves, threads = own_use._halves, set()

    def noted(text: str) -> tuple[str, str]:
        threads.add(threading.current_thread())
        return halves(text)

    monkeypatch.setattr(own_use, "_halves", noted)
    monkeypatch.setattr(own_use, "LARGE", 50)
    windows = await own_use._windows(["a dog " * 100], 50, _encoding(served.engine))
    assert len(windows) > 2 and threads and threading.main_thread() not in threads


async def test_a_long_text_is_the_mean_of_its_windows(server: Running) -> None:
    here, payer = server.context, Payer("dora", (), None, counted=False)
    served = await here.models.load_pooled("small", "embedding")
    embedder = Embedder(served, Counted(served, here.limiter, here.meter))
    half = ("a dog " * served.info.max_model_len)[: 4 * served.info.max_model_len].strip()
    windows = await own_use._windows([f"{half} {half}", "a dog"], 50, _encoding(served.engine))
    assert all(len(window.input.ids) <= 50 for window in windows)
    assert [window.of for window in windows].count(1) == 1 < [window.of for window in windows].count(0)
    inputs = [window.input for window in windows if window.of == 0]
    num = sum(len(each.ids) - 2 for each in inputs)  # less [CLS] and [SEP] of each
    [whole] = await served.engine.encode([f"{half} {half}"])
    assert num == len(whole.ids) - 2, "nothing is left out, and nothing comes twice"
    [short] = await embedder.embed(["a dog"], "document", payer=payer)
    prompt = prompt_of(served.info, ("input_type", "document"))
    [plain], _ = await served.engine.pool(await served.engine.encode(["a dog"], prompt=prompt))
    np.testing.assert_allclose(short, plain, atol=1e-6)


async def test_tokens_that_a_model_does_not_have_are_no_fault_of_the_server(tmp_path: Path) -> None:
    """A tokenizer with more tokens than the model has rows: what has such a token has no vector."""
    model = make_embedder("bert", tmp_path / "narrow")
    tokenizer = model / "tokenizer.json"
    told = json.loads(tokenizer.read_text())
    told["model"]["vocab"]["zebra"] = 5000
    tokenizer.write_text(json.dumps(told))
    async with (
        live_app(tmp_path / "data", embedding_model=(str(model),)) as running,
        http_client(running) as http,
    ):
        assert await _error(http, "/v1/embeddings", input="a zebra") == (400, "invalid_value", "input")
        store = await new_store(running, http, dog_txt="a dog runs", zebra_txt="a zebra runs")
        files = (await http.get(f"/v1/vector_stores/{store}/files")).json()["data"]
        failed = [file["last_error"] for file in files if file["status"] == "failed"]
        assert [error["code"] for error in failed] == ["server_error"] and "the token 5000" in failed[0][
            "message"
        ]
        search = f"/v1/vector_stores/{store}/search"
        assert await _error(http, search, query="where is the zebra") == (400, "invalid_value", "query")
        [hit] = (await http.post(search, json={"query": "where is the dog"})).json()["data"]
        assert hit["filename"] == "dog.txt"


def _encoding(engine: Any) -> Any:
    async def encode(parts: Sequence[str], cut: int | None) -> Any:
        return await engine.encode(parts, cut=cut)

    return encode


async def test_what_the_server_embeds_counts_for_whoever_it_is_done_for(server: Running) -> None:
    from storage import UsageFilter

    here = server.context
    embedder = embedder_of(here.models, here.limiter, here.meter)
    assert embedder is not None
    emma = Payer("emma", (), "key_1")

    async def used() -> list[tuple[int, int]]:
        await here.meter.flush()
        wanted = UsageFilter("embeddings", 0, 1 << 62, owners=("emma",), key_ids=("key_1",))
        found = await here.storage.usage_sums(wanted, (), 1 << 60)
        return [(one.counts.requests, one.counts.input_tokens) for one in found]

    await embedder.embed(["a dog"], "query", payer=emma)
    [(requests, tokens)] = await used()
    assert requests == 1 and tokens > 0
    # What the operator brought about is nobody's.
    await embedder.embed(["a dog"], "query", payer=replace(emma, counted=False))
    assert await used() == [(1, tokens)]
    # A limit that is smaller than a text lets one through at a time, lest it could never be embedded.
    tight = replace(emma, subjects=(Subject("owner", "emma", LimitSet(tokens_per_minute=1)),))
    await embedder.embed(["a cat and a dog"], "query", payer=tight)
    with pytest.raises(ApiError) as refused:
        await embedder.embed(["a cat and a dog"], "query", payer=tight)
    assert refused.value.status == 429 and refused.value.retry_after_s is not None
    assert [requests for requests, _ in await used()] == [2]


async def test_texts_of_whoever_left_are_dropped(server: Running) -> None:
    engine = (await server.context.models.load_pooled("small", "embedding")).engine
    long = [TextInput(np.full(120, 9, np.int32))] * 2000
    work = asyncio.ensure_future(engine.pool(long))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    before = engine.stats().steps_total
    await engine.pool([TextInput(np.array([9], np.int32))])
    assert engine.stats().texts_waiting == 0
    assert engine.stats().steps_total - before < 20  # not the hundred that all would have taken


async def test_two_models_of_one_name_are_refused() -> None:
    from engine import LoadError

    with pytest.raises(LoadError, match="two models are named 'm'; give one another name"):
        build_pooling(Config(embedding_model=("a/m", "b/m")))
    with pytest.raises(LoadError, match="two models are named 'antiphon-tiny'"):
        build_pooling(Config(rerank_model=("antiphon-tiny=b/m",)))


async def test_a_batch_of_texts_gets_their_vectors(client: httpx.AsyncClient) -> None:
    lines = [
        line(f"r{n}", "/v1/embeddings", {"model": "small", "input": text}) for n, text in enumerate(TEXTS)
    ]
    sent = {"files": {"file": ("in.jsonl", "\n".join(lines))}, "data": {"purpose": "batch"}}
    file = (await client.post("/v1/files", **sent)).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
    batch = (await client.post("/v1/batches", json=asked)).json()
    async with asyncio.timeout(20):
        while batch["status"] not in ("completed", "failed"):
            await asyncio.sleep(0.02)
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}, batch
    output = (await client.get(f"/v1/files/{batch['output_file_id']}/content")).text.splitlines()
    bodies = [json.loads(each)["response"]["body"] for each in output]
    assert {body["object"] for body in bodies} == {"list"}
    used = sum(body["usage"]["total_tokens"] for body in bodies)
    assert (batch["model"], batch["usage"]["total_tokens"]) == ("small", used) and used > 0
