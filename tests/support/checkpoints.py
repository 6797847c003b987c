"""Tiny random checkpoints, made on the fly, and their oracle: the plain forward pass of transformers."""

from __future__ import annotations

import json
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

VOCAB_SIZE = 300

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 299,
    "pad_token_id": None,
}

# one row a checkpoint that the tests know by name: model type, and what differs from SMALL
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama31": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral": ("mistral", {"sliding_window": 24, "head_dim": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-strips": ("qwen3", {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64}),
    "qwen3-yarn": (
        "qwen3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3-linear": (
        "qwen3",
        {"head_dim": 16, "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}},
    ),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}},
    ),
    "llama-longrope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "long_factor": [1.0, 2.0, 4.0, 8.0],
                "short_factor": [1.0] * 4,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    # heads as wide as the CPU's own kernels take them
    "llama-32": ("llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    "mistral-32": ("mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen2-windows-32": (
        "qwen2",
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3-64": ("qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
    "gemma2-32": (
        "gemma2",
        {
            "head_dim": 32,
            "sliding_window": 20,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gpt_oss-32": (
        "gpt_oss",
        {
            "head_dim": 32,
            "sliding_window": 20,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    # with experts of whole blocks of 32
    "gpt_oss-mxfp4": (
        "gpt_oss",
        {
            "head_dim": 32,
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "qwen3_moe-32": (
        "qwen3_moe",
        {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
    ),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 20,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"sliding_window": 28, "pad_token_id": 0}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5, "num_attention_heads": 6}),
    "cohere2": (
        "cohere2",
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": 20,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    # the layers of these two hand nothing on to their attention but what they know
    "stablelm": ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True}),
    "nemotron": ("nemotron", {"head_dim": 16}),
    # these two have their windows in the masks alone
    "phimoe": (
        "phimoe",
        {
            "sliding_window": 20,
            "num_local_experts": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 3,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
}


def make_checkpoint(name: str, folder: Path) -> Path:
    """Write the checkpoint of that name, with a tokenizer of 300 tokens, into `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, changes = CHECKPOINTS[name]
    fields = {**SMALL, **changes}
    if model_type == "cohere2":
        fields["num_hidden_layers"] = 4
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(model_type, **fields)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():  # norms and biases too: a dropped one must show
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, 1.0 if "norm" in type(parameter).__name__ else 0.5, 0.3)
        model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: 256 bytes, a few tags, and words that pad it to VOCAB_SIZE."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tags = ["<|im_start|>", "<|im_end|>"]
    words = [f" w{i}" for i in range(VOCAB_SIZE - len(alphabet) - len(tags) - 1)]
    tokenizer.add_tokens(words)
    tokenizer.add_special_tokens([*tags, "<|endoftext|>"])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = {"eos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@lru_cache
def oracle(folder: Path) -> Any:
    """The unmodified transformers model of a folder, eager, f32."""
    import torch
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()


def oracle_logits(folder: Path, ids: tuple[int, ...]) -> Any:
    """Logits [T, V] of the plain forward over `ids`."""
    import torch

    with torch.inference_mode():
        return oracle(folder)(torch.tensor([ids]), use_cache=False).logits[0]


@lru_cache(maxsize=4096)
def oracle_greedy(folder: Path, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """`count` greedy tokens of the plain forward, each from a whole new forward; stops at the end of turn."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(oracle_logits(folder, tuple(ids))[-1].argmax()))
        if ids[-1] == 299:
            break
    return tuple(ids[len(prompt) :])
