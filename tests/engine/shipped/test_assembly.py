"""antiphon-small is put together from a GGUF file and an adapter; what is missing or foreign is said."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from engine import LoadError
from engine.model_folder import find_folder
from engine.shipped import EMBED, SMALL, TINY, assembly, packaged_folder, shipped_folder
from engine.shipped.assembly import assemble, assembled, base_file, base_weights

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

needs_base = pytest.mark.skipif(base_file() is None, reason=f"its base is not here: {assembly.HOW_TO_GET}")


@pytest.fixture
def llama() -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads))


def write_gguf(model: LlamaForCausalLM, path: Path, *, quantized: bool = False) -> None:
    """A Llama as llama.cpp has it: neighbouring rows of queries and keys turn together."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    names = {theirs: ours for ours, theirs in assembly._LAYER.items()}
    tops = {theirs: ours for ours, theirs in assembly._TOP.items()}
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_vocab_size(96)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        value = tensor.numpy()
        if name in tops:
            stored = tops[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            stored = f"blk.{layer}.{names[rest.removesuffix('.weight')]}.weight"
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name:
                halves = value.reshape(heads, 2, 8, 64)
                value = np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(heads * 16, 64)
        kind = GGMLQuantizationType.Q8_0 if quantized and value.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(stored, quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("quantized", [False, True])
def test_weights_of_a_gguf_file_have_their_names_and_order(
    llama: LlamaForCausalLM, tmp_path: Path, quantized: bool
) -> None:
    write_gguf(llama, tmp_path / "model.gguf", quantized=quantized)
    read = dict(base_weights(assembly._open(tmp_path / "model.gguf")))
    expected = {name: value for name, value in llama.state_dict().items() if name != "lm_head.weight"}
    assert read.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(read[name], value, atol=2e-3 if quantized else 0, rtol=0)


def test_another_file_than_the_one_trained_on_is_refused(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "model.gguf")
    with pytest.raises(LoadError, match="not the file that antiphon-small was trained on"):
        assemble(tmp_path / "model.gguf", tmp_path, sha256=assembly.SHA256)


@pytest.fixture
def own_base(llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small base in the place of the real one; returns the folder of the cache."""
    file = tmp_path / "model.gguf"
    write_gguf(llama, file)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(assembly, "base_file", lambda: file)
    monkeypatch.setattr(assembly, "SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setattr(assembly, "_write_tokenizer", lambda base, out: None)
    (tmp_path / "antiphon").mkdir(mode=0o700)
    return tmp_path / "antiphon"


@pytest.fixture
def adapter(llama: LlamaForCausalLM, tmp_path: Path) -> Path:
    """An adapter of rank 1 for one map, which adds 2 everywhere; a template stands in its folder as well."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    outputs, inputs = llama.get_parameter("model.layers.0.mlp.up_proj.weight").shape
    stored = "base_model.model.model.layers.0.mlp.up_proj"
    halves = {"lora_A": torch.ones(1, inputs), "lora_B": torch.ones(outputs, 1)}
    save_file({f"{stored}.{half}.weight": value for half, value in halves.items()}, folder / assembly.ADAPTER)
    (folder / assembly.CONFIG).write_text('{"r": 1, "lora_alpha": 2}')
    for name in (*assembly.BESIDE, "template"):
        (folder / name).write_text("{}")
    return folder


def test_what_is_put_together_loads_as_base_plus_adapter(
    llama: LlamaForCausalLM, own_base: Path, adapter: Path
) -> None:
    from transformers import LlamaForCausalLM as Theirs

    (own_base / "antiphon-small-0123.new").mkdir()  # of a process that was killed
    folder = assembled(adapter, adapter / "template")
    assert {file.name for file in own_base.iterdir()} == {folder.name, "antiphon-small.lock"}
    files = {"model.safetensors", "config.json", "chat_template.jinja", *assembly.BESIDE}
    assert {file.name for file in folder.iterdir()} == files
    ids = torch.arange(20)[None]
    with torch.no_grad():
        llama.get_parameter("model.layers.0.mlp.up_proj.weight").add_(2)
        made = Theirs.from_pretrained(folder, dtype=torch.float32)
        torch.testing.assert_close(made(ids).logits, llama(ids).logits, atol=0.02, rtol=0.05)
    (adapter / "generation_config.json").write_text('{"temperature": 1}')
    assert assembled(adapter, adapter / "template") != folder


def test_many_that_want_it_at_once_make_it_once(
    own_base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def make(base: Path, adapter: Path, template: Path, folder: Path) -> None:
        made.append(folder)
        folder.mkdir()

    monkeypatch.setattr(assembly, "_make", make)
    with ThreadPoolExecutor(4) as pool:
        folders = [*pool.map(lambda _: assembled(adapter, adapter / "template"), range(4))]
    assert len(made) == 1
    assert folders == made * 4


def test_a_full_disk_is_one_line(own_base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(LoadError, match=r"cannot be put together in .*: No space left"):
        assembled(adapter, adapter / "template")
    assert [file.name for file in own_base.iterdir()] == ["antiphon-small.lock"]


def test_without_the_base_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(assembly, "PACKAGE", "no-such-package-here")
    with pytest.raises(LoadError, match=re.escape(assembly.HOW_TO_GET)):
        shipped_folder(SMALL)
    assert base_file() is None


def test_without_a_cache_it_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(LoadError, match=r"file/antiphon has to be a folder of yours.* XDG_CACHE_HOME"):
        shipped_folder(SMALL)


def test_names_of_shipped_models() -> None:
    for name in (TINY, EMBED):
        folder = packaged_folder(name)
        assert folder is not None
        assert find_folder(name) == folder
        assert (folder / "model.safetensors").is_file()
    assert packaged_folder(SMALL) is None
    assert shipped_folder("someone/else") is None


@needs_base
def test_it_is_put_together_once_and_calls_a_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from engine import LLM, Options

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO, logger="antiphon.engine"):
        folder = find_folder(SMALL)
    assert "antiphon-small was put together" in caplog.text
    caplog.clear()
    assert find_folder(SMALL) == folder
    assert not caplog.text
    tool = {
        "type": "function",
        "function": {
            "name": "opening_time",
            "description": "When a shop opens.",
            "parameters": {
                "type": "object",
                "properties": {"shop": {"type": "string"}},
                "required": ["shop"],
                "additionalProperties": False,
            },
        },
    }
    with LLM(SMALL, num_threads=1, kv_cache_bytes=256 << 20) as llm:
        asked = [{"role": "user", "content": "From when can I get bread at Hofmann?"}]
        (said,) = llm.chat(asked, Options(temperature=0), tools=[tool])
        (call,) = said.calls
        assert (call.name, json.loads(call.arguments)) == ("opening_time", {"shop": "Hofmann"})
        plain = [{"role": "user", "content": "What is the capital of France?"}]
        (said,) = llm.chat(plain, Options(temperature=0))
        assert "Paris" in said.text
        fields = {"name": {"type": "string"}, "age": {"type": "integer"}}
        schema = {"type": "object", "title": "Person", "properties": fields, "required": [*fields]}
        person = Options(json_schema={**schema, "additionalProperties": False})
        told = [{"role": "user", "content": "Anna is 31 years old."}]
        (said,) = llm.chat(told, replace(person, temperature=0))
        assert json.loads(said.text) == {"name": "Anna", "age": 31}, "not the title of the schema"
        (said,) = llm.chat([{"role": "user", "content": "What is a cat?"}], person)
        assert not said.reasoning and json.loads(said.text)
