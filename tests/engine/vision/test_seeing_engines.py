"""Prompts with images through whole engines: in this process, and in another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import (
    EngineHost,
    EngineLine,
    GenerateRequest,
    LocalEngine,
    Prompt,
    ReaderParams,
    RemoteEngine,
    RenderError,
    RenderInput,
    RequestError,
    SamplingParams,
)
from engine.interface import Engine
from engine.vision import features
from tests.support.seeing_checkpoints import picture

Find = Callable[[str], Path]


def shown(*seeds: int, text: str = "what is it") -> RenderInput:
    """A system's text, and a user's images with a text behind them."""
    images: list[Any] = [{"type": "image", "image": picture(seed)} for seed in seeds]
    content = [*images, {"type": "text", "text": text}]
    return RenderInput([{"role": "system", "content": "look"}, {"role": "user", "content": content}])


async def said(engine: Engine, prompt: Prompt, prefix: tuple[tuple[int, ...], ...] = ()) -> list[int]:
    """Eight greedy tokens, of which `prefix` has the first."""
    params = SamplingParams(seed=0, max_tokens=8, temperature=0, ignore_eos=True)
    reader = ReaderParams(dialect=False)
    request = GenerateRequest("r", prompt.ids, params, reader, prefix=prefix, media=prompt.media)
    return [token async for chunk in engine.generate(request) for token in chunk.token_ids]


async def test_an_engine_in_another_process_sees_the_same(seeing: Find, tmp_path: Path) -> None:
    folder, path = seeing("qwen2_5_vl"), tmp_path / "s"
    engine = LocalEngine(folder, num_blocks=64, kv_disk_folder=tmp_path / "kv", kv_disk_bytes=1 << 20)
    info = await engine.start()
    assert info.modalities == {"text", "image"} and info.image_options == {"max_pixels", "min_pixels"}
    host = EngineHost(path, engine)
    await host.start()
    client = RemoteEngine(EngineLine(path), folder, num_servers=1)
    try:
        await client.start()
        prompt = await client.render(shown(0, 1))
        assert prompt == await engine.render(shown(0, 1)) and len(prompt.media) == 2
        tokens = await said(client, prompt)
        assert tokens == await said(engine, prompt)
        # As a run that is taken up again: behind the tokens that it has.
        first = tuple(tokens[:2]), tuple(tokens[2:5])
        assert await said(client, prompt, first) == tokens == await said(engine, prompt, first)
        assert tokens != await said(client, await client.render(shown(1, 0)))
        request = GenerateRequest(
            "r", prompt.ids, SamplingParams(seed=0, max_tokens=8), media=prompt.media, owner="ann"
        )
        client.keep("a", request, tokens, 60.0)
        client.save("a", request, tokens)
        await client.saved_names()
        # Of fewer pixels, and never of more than the checkpoint's own settings would take.
        sizes = [
            len((await client.render(RenderInput(shown(0).messages, image_options=options))).ids)
            for options in ({"max_pixels": 400}, {}, {"max_pixels": 1 << 30}, {"min_pixels": 1 << 30})
        ]
        assert sizes[0] < sizes[1] == sizes[2] < sizes[3] < 2 * sizes[1]
    finally:
        await client.close()
        await host.close()
        await engine.close()


async def test_an_image_is_as_small_in_each_process_as_the_engine_needs_it(
    seeing: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "CORE_OPERATIONS_PER_S", 5e5)
    folder, path = seeing("qwen2_5_vl"), tmp_path / "s"
    engine = LocalEngine(folder, num_blocks=64)
    info = await engine.start()
    host = EngineHost(path, engine)
    await host.start()
    client = RemoteEngine(EngineLine(path), folder, num_servers=1)
    try:
        await client.start()
        prompt = await client.render(shown(0))
        assert prompt == await engine.render(shown(0))
        pixels = len(prompt.media[0].places) * 8 * 8
        assert info.image_pixels is not None and pixels <= info.image_pixels < 60 * 44
    finally:
        await client.close()
        await host.close()
        await engine.close()


async def test_what_a_user_writes_is_no_place_for_an_image(seeing: Find) -> None:
    for allowed in (False, True):
        engine = LocalEngine(seeing("idefics3"), num_blocks=64, allow_special_tokens=allowed)
        await engine.start()
        try:
            prompt = await engine.render(shown(0, text="an <image> in words"))
            assert not allowed and len(prompt.media) == 1
        except RenderError as error:
            assert allowed and "2 places for images" in str(error)
        finally:
            await engine.close()


async def test_a_model_of_text_alone_takes_no_images(seeing: Find) -> None:
    engine = LocalEngine(seeing("llava_onevision"), num_blocks=64, text_only=True)
    info = await engine.start()
    try:
        assert info.modalities == {"text"}
        prompt = await engine.render(RenderInput([{"role": "user", "content": "hi"}]))
        assert len(await said(engine, prompt)) == 8
        with pytest.raises(RenderError, match="text only"):
            await engine.render(shown(0))
        span: Any = object()
        with pytest.raises(RequestError, match="text only"):
            await said(engine, Prompt(prompt.ids, media=(span,)))
    finally:
        await engine.close()
