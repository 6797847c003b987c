"""Tiny random models for vectors and scores, as sentence-transformers lays their folders out."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
_TEXT = """the a an of to in is was are and or not river bank money water boat tree dog cat house runs sleeps
yes no query document search passage green blue red one two three four five who what where why"""
WORDS = tuple(_TEXT.split())

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
_DECODER = _SIZES | {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 192}

# name of a checkpoint -> model type, what differs from the sizes, pooling, further modules, end of the class
EMBEDDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...], str]] = {
    "bert": ("bert", {}, {"pooling_mode_cls_token": True}, ("Normalize",), "Model"),
    "roberta": ("roberta", {}, {"pooling_mode_mean_tokens": True}, ("Normalize",), "Model"),
    "xlm-roberta": ("xlm-roberta", {}, {"pooling_mode": "cls"}, ("Normalize",), "Model"),
    "mpnet": ("mpnet", {}, {"pooling_mode": "mean"}, ("Normalize",), "Model"),
    "distilbert": (
        "distilbert",
        {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
        {"pooling_mode": ["cls", "max", "mean_sqrt_len_tokens"]},
        (),
        "Model",
    ),
    "modernbert": (
        "modernbert",
        {"local_attention": 16, "global_attn_every_n_layers": 2},
        {"pooling_mode": "mean"},
        ("Dense", "Normalize"),
        "Model",
    ),
    "nomic_bert": ("nomic_bert", {}, {"pooling_mode": "mean"}, ("Normalize",), "Model"),
    "electra": ("electra", {"embedding_size": 64}, {"pooling_mode": "weightedmean"}, (), "Model"),
    "t5": (
        "t5",
        {"d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16},
        {"pooling_mode": "mean"},
        ("Dense", "Normalize"),
        "EncoderModel",
    ),
    "gemma3_text": (
        "gemma3_text",
        {"num_key_value_heads": 2, "head_dim": 16, "use_bidirectional_attention": True},
        {"pooling_mode": "mean"},
        ("Dense", "Dense", "Normalize"),
        "Model",
    ),
    "gemma2": (
        "gemma2",
        {"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16},
        {"pooling_mode": "lasttoken"},
        ("Normalize",),
        "Model",
    ),
    "qwen2-bidirectional": (
        "qwen2",
        {"is_causal": False, "num_key_value_heads": 2},
        {"pooling_mode": "mean"},
        (),
        "Model",
    ),
    # on the paged engine
    "qwen3": ("qwen3", _DECODER, {"pooling_mode": "lasttoken"}, ("Normalize",), "Model"),
    "qwen3-with-head": (
        "qwen3",
        _DECODER | {"tie_word_embeddings": True},
        {"pooling_mode": "lasttoken"},
        ("Normalize",),
        "ForCausalLM",
    ),
    "mistral": (
        "mistral",
        _DECODER | {"sliding_window": 24},
        {"pooling_mode": "lasttoken"},
        ("Normalize",),
        "Model",
    ),
    "qwen2": ("qwen2", _DECODER, {"pooling_mode": "weightedmean"}, ("Normalize",), "Model"),
    "llama": (
        "llama",
        _DECODER | {"head_dim": 16},
        {"pooling_mode": ["mean", "max"], "include_prompt": False},
        ("Dense",),
        "Model",
    ),
}


def make_embedder(name: str, folder: Path, *, modules: bool = True) -> Path:
    """Write the checkpoint of that name. modules: with the files that say how it pools."""
    kind, changes, pooling, after, end = EMBEDDERS[name]
    hidden = _write_model(kind, changes, end, folder)
    if not modules:
        return folder
    rows = [("Transformer", "")]
    for i, each in enumerate(("Pooling", *after), 1):
        rows.append((each, f"{i}_{each}"))
        (folder / f"{i}_{each}").mkdir()
    size = hidden * (len(pooling["pooling_mode"]) if isinstance(pooling.get("pooling_mode"), list) else 1)
    _write(folder / "1_Pooling" / "config.json", {"embedding_dimension": hidden, **pooling})
    for i, each in enumerate(after, 2):
        if each == "Dense":
            size = _write_dense(folder / f"{i}_Dense", size, 40 if after.count("Dense") == 1 else size)
    _write_modules(folder, rows)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": 120, "do_lower_case": False})
    prompts = {"query": "search query : ", "document": "search document : "}
    _write(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )
    return folder


def make_static(folder: Path, *, by_model2vec: bool = False) -> Path:
    """Write a model that has a vector for each token alone. by_model2vec: with rows that tokens share."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(4)
    _write_tokenizer(folder, ends_only=False)
    vocab, size = len(SPECIAL) + len(WORDS) + 26, 24
    tensors = {"embedding.weight": torch.randn(vocab, size)}
    if by_model2vec:
        tensors = {"embeddings": torch.randn(20, size), "mapping": torch.arange(vocab) % 20}
        tensors["weights"] = torch.rand(vocab)
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "1_Normalize").mkdir()
    _write_modules(folder, [("StaticEmbedding", ""), ("Normalize", "1_Normalize")])
    return folder


def make_classifier(kind: str, folder: Path, labels: int, **changes: Any) -> Path:
    """Write a sequence classifier of that many labels."""
    decoder = _DECODER if kind in ("qwen3", "llama") else {}
    named = {str(i): f"label-{i}" for i in range(labels)}
    fields = {**decoder, "num_labels": labels, "id2label": named, **changes}
    _write_model(kind, fields, "ForSequenceClassification", folder)
    return folder


def make_judge(folder: Path) -> Path:
    """Write a reranker in the form of Qwen3-Reranker."""
    _write_model("qwen3", _DECODER | {"tie_word_embeddings": True}, "ForCausalLM", folder)
    return folder


def _write_model(kind: str, changes: dict[str, Any], end: str, folder: Path) -> int:
    import torch
    import transformers
    from transformers import AutoConfig

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(3)
    vocab = len(SPECIAL) + len(WORDS) + 26
    fields = {**_SIZES, "vocab_size": vocab, "bos_token_id": 2, "eos_token_id": 3, **changes}
    if kind in ("distilbert", "t5"):  # which call them otherwise
        fields = {key: value for key, value in fields.items() if key not in _SIZES or key == "pad_token_id"}
        fields.update(changes)
    names = {"Model": "AutoModel", "EncoderModel": "T5EncoderModel"}
    loader: Any = getattr(transformers, names.get(end, f"AutoModel{end}"))
    make: Any = loader if end == "EncoderModel" else loader.from_config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(kind, **fields)
        model = make(config).to(torch.float32).eval()
        for name, parameter in model.named_parameters():  # norms and biases too: a dropped one must show
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.1, 0.2)
        model.save_pretrained(folder)
    _write_tokenizer(folder, ends_only="num_key_value_heads" in changes)
    _write_tokenizer_config(folder, typed=kind in ("bert", "electra"))
    return int(config.hidden_size)


def _write_tokenizer(folder: Path, *, ends_only: bool) -> None:
    """Words and single letters. ends_only: a text gets an end, as decoders have it, and no beginning."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    letters = [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    vocab = {word: i for i, word in enumerate((*SPECIAL, *WORDS, *letters))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(SPECIAL))
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    single, pair = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
    if ends_only:
        single, pair = "$A [SEP]", "$A $B [SEP]"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_tokenizer_config(folder: Path, *, typed: bool) -> None:
    """typed: the model is told which text of a pair each token is of."""
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if typed else [])]
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "model_input_names": inputs,
        },
    )


def _write_modules(folder: Path, rows: Sequence[tuple[str, str]]) -> None:
    """rows: the kinds of modules, and their folders."""
    _write(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{type_}"}
            for i, (type_, path) in enumerate(rows)
        ],
    )


def _write_dense(folder: Path, inputs: int, outputs: int) -> int:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(5)
    weights = {"linear.weight": torch.randn(outputs, inputs) / 8, "linear.bias": torch.randn(outputs) / 8}
    save_file(weights, str(folder / "model.safetensors"))
    told = {"in_features": inputs, "out_features": outputs, "bias": True}
    _write(folder / "config.json", told | {"activation_function": "torch.nn.modules.activation.Tanh"})
    return outputs


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))
