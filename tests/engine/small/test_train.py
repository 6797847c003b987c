"""The trainer of antiphon-small: its network is the base, and what it saves is what it has learned."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.shipped.assembly import ADAPTER, BESIDE
from engine.small import ADAPTER_FOLDER
from engine.small.train import MAPS, AdaptedLlama, rate_at, save
from engine.tiny.net import Layout


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A small random Llama, as transformers saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, initializer_range=0.2, **shape, **heads))
    folder = tmp_path / "base"
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_theta": model.config.rope_parameters["rope_theta"], "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_without_an_adapter_it_computes_what_transformers_does(base: Path) -> None:
    from transformers import LlamaForCausalLM

    model, theirs = AdaptedLlama(base, False), LlamaForCausalLM.from_pretrained(base)
    ids = torch.randint(0, 97, (50,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours = model.states(ids, Layout.plain(50, ids.device)) @ model.frozen["model.embed_tokens.weight"].T
        expected = theirs(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


def test_what_is_saved_is_what_was_learned(base: Path, tmp_path: Path) -> None:
    model = AdaptedLlama(base, False)
    ids = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(3))
    learn, layout = torch.ones(60, dtype=torch.bool), Layout.plain(60, ids.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(25):
        loss, _ = model.loss(ids, learn, layout)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    save(model, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {ADAPTER, "adapter_config.json", *BESIDE}
    again = AdaptedLlama(base, False)
    again.load_adapter(tmp_path / "out")
    with torch.no_grad():
        loss, _ = again.loss(ids, learn, layout)
        learned, _ = model.loss(ids, learn, layout)
    assert abs(loss.item() - learned.item()) < 0.02 * losses[0]  # bfloat16


def test_peft_reads_what_is_saved_as_the_same_function(base: Path, tmp_path: Path) -> None:
    """`engine.models.peft` is what reads adapters of PEFT."""
    from engine.models.peft import read_adapter

    model = AdaptedLlama(base, False)
    with torch.no_grad():
        for part in model.up.values():
            part.normal_()
    save(model, tmp_path / "out")
    sizes = {path: tuple(reversed(model.frozen[f"{path}.weight"].shape)) for path in model.paths()}
    adapter = read_adapter("small", tmp_path / "out", sizes)
    for path in itertools.islice(model.paths(), 7):
        key, own = path.replace(".", "/"), adapter.maps[path]
        expected = 2.0 * model.up[key] @ model.down[key]
        torch.testing.assert_close(
            own.scale * own.up.float() @ own.down.float(), expected, atol=0.2, rtol=0.05
        )


def test_the_shipped_adapter_has_every_map_of_the_base() -> None:
    weights = load_file(ADAPTER_FOLDER / ADAPTER)
    assert len(weights) == 2 * 30 * len(MAPS)
    assert all(value.isfinite().all() for value in weights.values())
    assert max(value.abs().max().item() for name, value in weights.items() if "lora_B" in name) > 0


def test_the_rate_rises_and_falls() -> None:
    assert rate_at(0, 0) == pytest.approx(0.05)
    assert rate_at(0.3, 100) == 1
    assert rate_at(1, 100) == 0.02
