"""Adapters over HTTP: each is a model of its own, beside the one that it adapts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, NotFoundError

from engine import LLM, LoadError, LocalEngine, Options, RequestError
from server.config import Config, ConfigError, load
from server.model_registry import build_engine
from tests.support.adapters import RECIPES, make_adapter
from tests.support.checkpoints import make_checkpoint, oracle_greedy
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import Api, text

MODEL = "base"
BODY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def made(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters, and the models that they make."""
    names = ("sums", "verbs")
    return {name: make_adapter(RECIPES[name], base, tmp_path_factory.mktemp(name)) for name in names}


def engine(base: Path, made: Mapping[str, Path]) -> LocalEngine:
    lora = {name: folder / "adapter" for name, folder in made.items()}
    return LocalEngine(base, name=MODEL, lora=lora, num_threads=1, kv_cache_bytes=16 << 20)


@asynccontextmanager
async def sdk(folder: Path, started: LocalEngine) -> AsyncIterator[AsyncOpenAI]:
    async with (
        live_app(folder, started, served_model_name=(MODEL, "alias")) as server,
        AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


async def test_every_api_takes_an_adapter_as_its_model(
    tmp_path: Path, base: Path, made: dict[str, Path]
) -> None:
    async with sdk(tmp_path, engine(base, made)) as client:
        listed = {model.id: model.to_dict() for model in (await client.models.list()).data}
        assert list(listed) == [MODEL, "alias", "sums", "verbs"]
        assert [(own["root"], own["parent"]) for own in listed.values()] == [(MODEL, None)] * 2 + [
            (MODEL, MODEL)
        ] * 2
        assert (await client.models.retrieve("verbs")).to_dict() == listed["verbs"]

        said = {}
        for model in listed:
            first = await client.responses.create(model=model, input="Hello", max_output_tokens=16, **BODY)
            again = await client.responses.create(
                model=model, input="And?", previous_response_id=first.id, max_output_tokens=16, **BODY
            )
            chat = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=16, **BODY
            )
            plain = await client.completions.create(model=model, prompt=[5, 6, 7], max_tokens=16, **BODY)
            assert first.model == again.model == chat.model == plain.model == model
            assert chat.choices[0].message.content == first.output_text
            said[model] = (first.output_text, again.output_text, plain.choices[0].text)
            assert chat.system_fingerprint
        assert said[MODEL] == said["alias"]
        assert len({own for several in said.values() for own in several}) == 9

        for call in (
            client.responses.create(model="nobody", input="Hello"),
            client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "Hi"}]),
            client.models.retrieve("nobody"),
        ):
            with pytest.raises(NotFoundError, match="'nobody' does not exist"):
                await call


async def test_many_at_once_say_what_each_says_alone(
    tmp_path: Path, base: Path, made: dict[str, Path]
) -> None:
    models = [MODEL, "sums", "verbs"] * 4
    async with sdk(tmp_path, engine(base, made)) as client:

        async def one(index: int, model: str) -> tuple[int, ...]:
            prompt = [*range(40, 50 + index)]
            found = await client.completions.create(
                model=model,
                prompt=prompt,
                max_tokens=10,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
            return tuple(found.choices[0].to_dict()["token_ids"])  # type: ignore[arg-type]

        found = await asyncio.gather(*(one(index, model) for index, model in enumerate(models)))
    folders = {MODEL: base, **{name: folder / "merged" for name, folder in made.items()}}
    assert found == [
        oracle_greedy(folders[model], tuple(range(40, 50 + index)), 10) for index, model in enumerate(models)
    ]


async def test_tokens_are_those_of_the_model(tmp_path: Path, base: Path, made: dict[str, Path]) -> None:
    started = engine(base, made)
    async with (
        running_app(tmp_path, started, served_model_name=(MODEL,)) as server,
        http_client(server) as client,
    ):
        replies = [
            (await client.post("/tokenize", json={"model": model, "prompt": "Hello"})).json()
            for model in (MODEL, "sums")
        ]
        assert replies[0] == replies[1] and replies[0]["count"] == 5
        ready = (await client.get("/ready")).json()
        assert ready["models"] == [MODEL, "sums", "verbs"]


# ------------------------------------------------------------------------------------------------------------
# A process ends


async def left(server: Running, model: str) -> str:
    """A run of this model that its process leaves half-way."""
    body = {"model": model, "max_output_tokens": 300, "temperature": 0, "ignore_eos": True}
    async with http_client(server) as client, Api(client).open("Hello", **body) as live:
        for _ in range(8):
            await live.next()
        await server.context.runs.drain(0)
        await live.cut()
        return live.id


async def test_a_run_goes_on_with_its_adapter(tmp_path: Path, base: Path, made: dict[str, Path]) -> None:
    body = {"max_output_tokens": 300, "temperature": 0, "ignore_eos": True}
    async with live_app(tmp_path, engine(base, made)) as server:
        async with http_client(server) as client:
            whole = {name: text(await Api(client).create("Hello", model=name, **body)) for name in made}
        response_id = await left(server, "verbs")
    async with running_app(tmp_path, engine(base, made)) as server, http_client(server) as client:
        done = await Api(client).ended(response_id)
        assert (done["model"], done["status"]) == ("verbs", "incomplete")
        assert text(done) == whole["verbs"] != whole["sums"]


@pytest.mark.parametrize("after", ["gone", "another"])
async def test_a_run_whose_adapter_is_not_what_it_was_ends_failed(
    tmp_path: Path, base: Path, made: dict[str, Path], after: str
) -> None:
    async with live_app(tmp_path, engine(base, made)) as server:
        response_id = await left(server, "verbs")
    now = {"sums": made["sums"]} if after == "gone" else {"verbs": made["sums"]}
    async with running_app(tmp_path, engine(base, now)) as server, http_client(server) as client:
        done = await Api(client).ended(response_id)
        assert done["status"] == "failed" and text(done)
        assert "The model 'verbs' has changed" in done["error"]["message"]


# ------------------------------------------------------------------------------------------------------------
# How it is said


def test_adapters_are_a_list_of_settings(tmp_path: Path) -> None:
    env = {"ANTIPHON_DATA": str(tmp_path)}
    (tmp_path / "antiphon.toml").write_text('lora = ["a=/x", "b=owner/name"]\n')
    assert load({}, env).config.lora == ("a=/x", "b=owner/name")
    assert load({}, {**env, "ANTIPHON_LORA": "c=/y=1, d=/z"}).config.lora == ("c=/y=1", "d=/z")
    assert load({"lora": ["e=/w"]}, env).config.lora == ("e=/w",)
    for wrong in ("/x", "=/x", "a="):
        with pytest.raises(ConfigError, match=r"lora \(flag --lora\): .*is not of the form NAME=PATH"):
            load({"lora": [wrong]}, env)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"lora": ("a=/x", "a=/y")}, "two models are named 'a'"),
        ({"lora": ("a=/x",), "served_model_name": ("b", "a")}, "two models are named 'a'"),
        ({"lora": ("antiphon-tiny=/x",)}, "two models are named 'antiphon-tiny'"),
        ({"lora": ("a=/x",), "engine": "scripted"}, "not with engine scripted"),
    ],
)
def test_what_cannot_be_served_is_refused_at_start(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(LoadError, match=match):
        build_engine(Config(**settings))


async def test_an_adapter_that_does_not_fit_keeps_the_server_from_starting(
    tmp_path: Path, made: dict[str, Path]
) -> None:
    started = build_engine(Config(lora=(f"verbs={made['verbs'] / 'adapter'}",)))
    with pytest.raises(LoadError, match=r"the adapter 'verbs' .* is not served: "):
        await started.start()
    await started.close()


def test_batches_choose_by_prompt(base: Path, made: dict[str, Path]) -> None:
    prompt = list(range(40, 60))
    lora = {name: folder / "adapter" for name, folder in made.items()}
    asked = [
        Options(max_tokens=10, temperature=0, adapter=name) for name in ("sums", None, "verbs", "nobody")
    ]
    with LLM(base, lora=lora, num_threads=1) as llm:
        found = llm.generate([prompt] * 4, asked)
    folders = [made["sums"] / "merged", base, made["verbs"] / "merged"]
    assert [own.token_ids for own in found[:3]] == [
        oracle_greedy(folder, tuple(prompt), 10) for folder in folders
    ]
    assert isinstance(found[3].error, RequestError) and "no adapter 'nobody'" in str(found[3].error)
