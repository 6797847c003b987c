"""Texts far beyond the context are refused by their length, before they cost anything; others that are long
wait for each other only."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine import Picture, PromptTooLong, RenderInput, Shape
from engine.backends.local import LocalEngine
from engine.backends.scripted_tokens import scripted_tokenizer
from engine.tiny import CHECKPOINT
from engine.tokenizer import TEXT_THREADS, Prompts, open_dialect
from engine.tokenizer.renderer import HOPELESS, SMALL_TEXT, _is_small
from tests.support.blocking import until


async def test_a_hopeless_text_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(CHECKPOINT, max_model_len=64)
    await engine.start()
    try:
        longest = engine._tokenizer.longest_token
        text = "a" * (longest * 64 * HOPELESS + longest)
        encoded: list[int] = []
        encode = engine._tokenizer.encode

        def counted(given: str, *, add_special_tokens: bool = False) -> list[int]:
            encoded.append(len(given))
            return encode(given, add_special_tokens=add_special_tokens)

        monkeypatch.setattr(engine._tokenizer, "encode", counted)
        for work in (engine.tokenize(text), engine.render(RenderInput([{"role": "user", "content": text}]))):
            with pytest.raises(PromptTooLong, match="at least") as refusal:
                await work
            assert refusal.value.at_least
        assert encoded == []
        # One that is merely too long is counted exactly.
        assert "at least" not in str(PromptTooLong(65, 64))
        ids = await engine.tokenize("word " * 100)
        assert len(ids) > 64 and len(encoded) == 1
    finally:
        await engine.close()


async def test_long_texts_of_one_owner_hold_up_no_other_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = scripted_tokenizer()
    dialect = open_dialect(tokenizer, tools=None, reasoning=None)
    gate, began, encode = threading.Event(), list[str](), tokenizer.encode

    def slow(text: str, *, add_special_tokens: bool = False) -> list[int]:
        began.append(text[0])
        gate.wait(60)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", slow)
    with ThreadPoolExecutor(TEXT_THREADS) as pool:
        prompts = Prompts(tokenizer, dialect, limit=1 << 20, pool=pool)
        texts = [(owner, owner * SMALL_TEXT) for owner in "a" * 20 + "b"]
        jobs = [asyncio.create_task(prompts.tokenize(text, owner=owner)) for owner, text in texts]
        try:
            await until(lambda: len(began) == TEXT_THREADS // 2)
            async with asyncio.timeout(30):
                prompt = await prompts.render(RenderInput([{"role": "user", "content": "hi"}], scope="c"))
            assert prompt.ids and set(began) == {"a"} and not any(job.done() for job in jobs)
        finally:
            gate.set()
            found = await asyncio.gather(*jobs)
        assert [len(ids) for ids in found] == [SMALL_TEXT] * 21
        assert began.index("b") <= TEXT_THREADS


@pytest.mark.parametrize(
    ("fields", "small"),
    [
        ({}, True),
        ({"messages": [{"role": "user", "content": "x" * SMALL_TEXT}]}, False),
        ({"messages": [{"role": "user", "content": ""}] * SMALL_TEXT}, False),
        ({"messages": [{"role": "user", "content": [{"image": Picture(b"png", b"digest")}]}]}, False),
        ({"tools": [{"function": {"description": "x" * SMALL_TEXT}}]}, False),
        ({"template_kwargs": {"a": [{"b": "x" * SMALL_TEXT}]}}, False),
        ({"chat_template": "x" * SMALL_TEXT}, False),
        ({"answer": Shape("regex", "x" * SMALL_TEXT)}, False),
    ],
)
def test_which_inputs_wait_for_none_that_are_long(fields: dict[str, Any], small: bool) -> None:
    assert _is_small(RenderInput(**{"messages": [{"role": "user", "content": "hi"}], **fields})) is small
