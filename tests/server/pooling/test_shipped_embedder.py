"""The model for vectors that ships: served where nothing else is named, and good enough to search by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from engine.tiny_embedder import CHECKPOINT
from server.config import SHIPPED_EMBEDDER, Config
from server.settings import ModelEntry, ModelsFile
from tests.support.libraries import new_store
from tests.support.running import http_client, running_app

MOST_BYTES = 12_000_000


def test_it_is_served_where_one_model_is_computed_here() -> None:
    assert Config().embedding_model == (SHIPPED_EMBEDDER,)
    assert Config(engine="scripted").embedding_model == ()
    assert Config(engine="upstream", upstream="http://127.0.0.1:1").embedding_model == ()
    assert Config(embedding_model="none").embedding_model == ()
    assert Config(embedding_model=["/a/model"]).embedding_model == ("/a/model",)
    with pytest.raises(ValidationError, match="'none' stands alone"):
        Config(embedding_model="none,/a/model")


def test_models_of_a_file_choose_their_own() -> None:
    entries = ModelsFile(models=(ModelEntry(name="m", path="/a/m"),))
    assert Config(entries=entries).embedding_model == ()


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= MOST_BYTES


async def test_a_passage_in_other_words_is_found_and_nobody_pays(tmp_path: Path) -> None:
    shelf = {
        "health_txt": "The physician examined every patient of the hospital before noon.",
        "sailing_txt": "The ship left the harbour and sailed across the ocean with its crew.",
        "baking_txt": "Mix flour, butter and sugar, and put the dough into a hot oven.",
        "garden_txt": "Roses want sun, and their branches are cut back before spring.",
    }
    asked = {
        "Which doctor treated sick people?": "health.txt",
        "boat on the sea": "sailing.txt",
        "recipe for a cake": "baking.txt",
        "pruning flowers": "garden.txt",
    }
    limits = ("tokens_per_minute=1",)
    async with (
        running_app(tmp_path, embedding_model=SHIPPED_EMBEDDER, owner_limit=limits) as running,
        http_client(running) as http,
    ):
        shown = (await http.get(f"/v1/models/{SHIPPED_EMBEDDER}")).json()
        assert shown["used_for"] == "embedding" and shown["engine"] == "table"
        store = await new_store(running, http, **shelf)
        for query, filename in asked.items():
            found = await http.post(f"/v1/vector_stores/{store}/search", json={"query": query})
            assert found.json()["data"][0]["filename"] == filename, query
        embedding = (await http.get(f"/v1/vector_stores/{store}")).json()["embedding"]
        assert (embedding["completed"], embedding["total"]) == (4, 4)
        await running.context.meter.flush()
        usage = (await http.get("/v1/organization/usage/embeddings", params={"start_time": 0})).json()
        assert not any(bucket["results"] for bucket in usage["data"])


async def test_vectors_can_be_asked_for_without_a_model_of_ones_own(tmp_path: Path) -> None:
    async with (
        running_app(tmp_path, embedding_model=SHIPPED_EMBEDDER) as running,
        http_client(running) as http,
    ):
        wanted = {"input": ["dog", "two dogs", "the tax office"], "dimensions": 192}
        reply = (await http.post("/v1/embeddings", json=wanted)).json()
        dog, dogs, taxes = (np.array(row["embedding"]) for row in reply["data"])
        assert reply["model"] == SHIPPED_EMBEDDER and dog @ dogs > dog @ taxes + 0.2
        assert reply["usage"]["prompt_tokens"] == 6  # words, none of them cut and nothing added
        nothing = await http.post("/v1/embeddings", json={"input": ["\x00"]})
        assert nothing.status_code == 400, "a text without tokens has no vector"
        foreign = (await http.post("/v1/embeddings", json={"input": ["言葉"]})).json()
        assert set(foreign["data"][0]["embedding"]) == {0.0}  # no word of it is known
