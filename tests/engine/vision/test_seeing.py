"""Models that see on the paged engine, each against transformers' own generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend

from engine.models.general import GeneralDecoder
from engine.types import MediaSpan, Prompt, RequestFailed
from engine.vision import Sight
from tests.support.driver import Driver, greedy
from tests.support.seeing_checkpoints import SEEING, picture, pixels, processor_of, seeing_oracle

Find = Callable[[str], Path]
COUNT = 6
SIZES = ((60, 44), (20, 90), (33, 31))


class Seen:
    """A checkpoint with its tokenizer, and an engine that is stepped by hand."""

    def __init__(self, name: str, folder: Path, **settings: Any) -> None:
        self.name, self.folder = name, folder
        self.backend = Backend.from_file(str(folder / "tokenizer.json"))
        self.driver = Driver(folder, vocab_size=320, num_blocks=200, **settings)
        model = self.driver.loop.runner.model
        assert isinstance(model, GeneralDecoder) and model.sight is not None
        self.sight: Sight = model.sight

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def prompt(self, text: str, images: Sequence[int]) -> Prompt:
        """A text with `<image>` where these images are, by their seeds."""
        pictures = [picture(seed, *SIZES[seed % 3]) for seed in images]
        return self.sight.processor.placed(Prompt(self.encode(text)), pictures, self.encode)

    def submit(self, text: str, images: Sequence[int]) -> int:
        prompt = self.prompt(text, images)
        return self.driver.submit(prompt.ids, greedy(COUNT), media=prompt.media)

    def oracle(self, text: str, images: Sequence[int]) -> tuple[int, ...]:
        """What transformers generates, from its own processor's tokens and pixels."""
        given = [pixels(seed, *SIZES[seed % 3]) for seed in images]
        with torch.inference_mode():
            if images:
                nested = given if self.name.startswith("qwen") else [given]
                inputs = processor_of(self.name, self.folder)(
                    text=[text], images=nested, return_tensors="pt", return_mm_token_type_ids=True
                )
                if self.name == "llava_onevision":
                    inputs.pop("mm_token_type_ids")
                elif not self.name.startswith("qwen"):
                    inputs.pop("mm_token_type_ids", None)
            else:
                inputs = {"input_ids": torch.tensor([self.encode(text)])}
            length = inputs["input_ids"].shape[1]
            model = seeing_oracle(self.folder)
            out = model.generate(**inputs, max_new_tokens=COUNT, do_sample=False, use_cache=True)
        return tuple(out[0, length:].tolist())


ASKED: list[tuple[str, list[int]]] = [
    ("<|im_start|>a <image> b", [0]),
    ("no image at all, but some text", []),
    ("two <image> of <image> them", [1, 2]),
    ("the same, another image <image> b", [4]),
    ("<image> <image>", [0, 0]),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SEEING)
def test_a_mixed_batch_equals_generate(seeing: Find, name: str) -> None:
    seen = Seen(name, seeing(name), max_num_batched_tokens=24)  # prompts are computed in chunks
    handles = [seen.submit(text, images) for text, images in ASKED]
    seen.driver.run()
    found = [seen.driver.tokens(handle) for handle in handles]
    assert found == [seen.oracle(text, images) for text, images in ASKED]
    assert len(set(found)) > 1
    # once for each content: one image of two prompts, where it is processed alike in both
    distinct = 6 if seen.sight.processor.row.alone else 4
    assert seen.sight.num_computed <= distinct


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["idefics3", "llava_onevision", "qwen2_5_vl"])
def test_a_prefix_that_was_computed_is_found_with_its_image_and_not_with_another(
    seeing: Find, name: str
) -> None:
    seen = Seen(name, seeing(name))
    text = "look <image> and say what you see, in a few words"
    seen.submit(text, [0])
    seen.driver.run()
    counters = seen.driver.loop.scheduler.counters
    before, computed = counters.prefix_hits, seen.sight.num_computed
    handle = seen.submit(text + " now", [0])
    seen.driver.run()
    assert seen.driver.tokens(handle) == seen.oracle(text + " now", [0])
    assert counters.prefix_hits - before >= len(seen.prompt(text, [0]).ids) // 16 * 16
    assert seen.sight.num_computed == computed
    # Of the same size, so that every token is the same: nothing behind the image may be found.
    before = counters.prefix_hits
    other = seen.submit(text, [3])
    seen.driver.run()
    assert seen.driver.tokens(other) == seen.oracle(text, [3])
    assert counters.prefix_hits - before < 16


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SEEING)
def test_no_scores_of_all_patches_are_in_memory_at_once(
    seeing: Find, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, attend = Seen(name, seeing(name)), torch.nn.functional.scaled_dot_product_attention
    attended: list[int] = []

    def counted(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        attended.append(query.shape[-2])
        return attend(query, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    with torch.inference_mode():
        seen.sight.try_out()
    assert attended


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: not enough"),
        MemoryError(),
    ],
    ids=["gpu", "cpu", "host"],
)
def test_an_image_that_is_too_large_for_the_memory_ends_its_own_request_alone(
    seeing: Find, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    seen = Seen("qwen2_5_vl", seeing("qwen2_5_vl"))
    computed = seen.sight._computed
    large = seen.prompt("a <image> b", [0]).media[0].content_hash

    def with_little_memory(span: MediaSpan) -> torch.Tensor:
        if span.content_hash == large:
            raise error
        return computed(span)

    monkeypatch.setattr(seen.sight, "_computed", with_little_memory)
    failing = seen.submit("a <image> b", [0])
    others = [seen.submit("a <image> b", [1]), seen.submit("some text", [])]
    seen.driver.run()
    with pytest.raises(RequestFailed, match="memory for an image"):
        seen.driver.end(failing)
    assert [seen.driver.tokens(handle) for handle in others] == [
        seen.oracle("a <image> b", [1]),
        seen.oracle("some text", []),
    ]
