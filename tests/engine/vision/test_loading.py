"""Models that see and are not served are refused in one line, before anything of them is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.models import load_model
from engine.types import LoadError, Prompt
from tests.support.seeing_checkpoints import IMAGE_TOKEN, picture

Find = Callable[[str], Path]


@pytest.mark.parametrize(
    "architecture",
    ["Gemma3ForConditionalGeneration", "PaliGemmaForConditionalGeneration", "Lfm2VlForConditionalGeneration"],
)
def test_other_families_that_see_are_refused(seeing: Find, tmp_path: Path, architecture: str) -> None:
    folder = shutil.copytree(seeing("idefics3"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=f"^{architecture} sees images in a way that is not served") as caught:
        load_model(EngineConfig(folder), torch.device("cpu"))
    assert "text_only" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "why"), [({"deterministic": True}, "deterministic"), ({"lora": {"a": "b"}}, "adapters")]
)
def test_what_is_not_served_with_images_is_refused(seeing: Find, settings: Any, why: str) -> None:
    with pytest.raises(LoadError, match=why):
        load_model(EngineConfig(seeing("idefics3"), **settings), torch.device("cpu"))


def test_a_model_without_an_image_processor_is_refused(seeing: Find, tmp_path: Path) -> None:
    folder = shutil.copytree(seeing("idefics3"), tmp_path / "model")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(LoadError, match="no image processor"):
        load_model(EngineConfig(folder), torch.device("cpu"))


def test_the_settings_of_the_processor_are_part_of_the_fingerprint(seeing: Find, tmp_path: Path) -> None:
    folder = shutil.copytree(seeing("idefics3"), tmp_path / "model")
    before = load_model(EngineConfig(folder), torch.device("cpu")).spec.fingerprint
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_mean": [0.4, 0.5, 0.6]}))
    assert load_model(EngineConfig(folder), torch.device("cpu")).spec.fingerprint != before


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_an_image_is_no_larger_than_a_layer_computes_in_time(seeing: Find, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(seeing(name), tmp_path / "model")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_pixels": 12_845_056}))
    found: list[int] = []
    for seconds in (10.0, 1e-4, 1e-9):
        model = load_model(EngineConfig(folder, step_timeout_s=seconds), torch.device("cpu"))
        assert model.sight is not None
        processor = model.sight.processor
        media = processor.placed(Prompt([IMAGE_TOKEN]), [picture(0, 600, 600)], lambda _: []).media
        patches = 4 * media[0].length  # of 4 x 4 pixels
        assert processor.max_pixels is not None and 16 * patches <= max(processor.max_pixels, 64)
        # The attention of a tower of this width, by one core, in half of the time.
        assert 4 * 32 * patches**2 <= max(seconds / 2 * 5e10, 4 * 32 * 16)
        found.append(patches)
    assert found[0] == 150**2 and found[0] > found[1] > found[2] == 4
