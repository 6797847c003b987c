"""Texts far beyond the context: refused by their length, before they cost anything."""

from __future__ import annotations

import pytest

from engine import PromptTooLong, RenderInput
from engine.backends.local import LocalEngine
from engine.tiny import CHECKPOINT
from engine.tokenizer.renderer import HOPELESS


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
            with pytest.raises(PromptTooLong):
                await work
        assert encoded == []
        # One that is merely too long is counted exactly.
        ids = await engine.tokenize("word " * 100)
        assert len(ids) > 64 and len(encoded) == 1
    finally:
        await engine.close()
