"""Tiny checkpoints of models that see, with random weights: one a family, made once a session."""

from __future__ import annotations

import io
import json
import warnings
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from engine.types import Picture

WORDS = ("<image>", "<fake_token_around_image>", "<global-img>", "<|vision_start|>", "<|vision_end|>")
ROWS = tuple(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7))
TEXT = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 299,
    "pad_token_id": None,
}
IMAGE_TOKEN = 259
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_MEAN = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "do_normalize": True}
# name -> model type, fields of the config, preprocessor_config.json, how the template writes an image
SEEING: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "idefics3": (
        "idefics3",
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {**_SIGLIP, "image_size": 32, "patch_size": 8},
            "scale_factor": 2,
            "image_token_id": IMAGE_TOKEN,
            "tie_word_embeddings": False,
            "pad_token_id": 299,
        },
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
            **_MEAN,
        },
        "<image>",
    ),
    "llava_onevision": (
        "llava_onevision",
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {
                "model_type": "siglip_vision_model",
                **_SIGLIP,
                "image_size": 28,
                "patch_size": 7,
                "vision_use_head": False,
            },
            "image_token_index": IMAGE_TOKEN,
            "video_token_index": 318,
            "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56], [28, 84], [84, 28]],
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "tie_word_embeddings": False,
        },
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 28, "width": 28},
            "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56], [28, 84], [84, 28]],
            **_MEAN,
        },
        "<image>\n",
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {
            "text_config": {
                "model_type": "qwen2_5_vl_text",
                **TEXT,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 2, 2]},
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": 48,
                "patch_size": 4,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            "image_token_id": IMAGE_TOKEN,
            "video_token_id": 318,
            "vision_start_token_id": 262,
            "vision_end_token_id": 263,
            "tie_word_embeddings": False,
        },
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "min_pixels": 64,
            "max_pixels": 4096,
            **_MEAN,
        },
        "<|vision_start|><image><|vision_end|>",
    ),
}

_TYPE, _FIELDS, _PROCESSOR, _SHOWN = SEEING["idefics3"]
SEEING["smolvlm"] = (
    "smolvlm",
    {**_FIELDS, "text_config": {**_FIELDS["text_config"], "num_hidden_layers": 1}},
    {**_PROCESSOR, "image_processor_type": "SmolVLMImageProcessor"},
    _SHOWN,
)
_TYPE, _FIELDS, _PROCESSOR, _SHOWN = SEEING["qwen2_5_vl"]
SEEING["qwen2_vl"] = (
    "qwen2_vl",
    {
        **_FIELDS,
        "text_config": {**_FIELDS["text_config"], "model_type": "qwen2_vl_text", "num_hidden_layers": 1},
        "vision_config": {
            "depth": 1,
            "embed_dim": 32,
            "hidden_size": 48,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    _PROCESSOR,
    _SHOWN,
)


def make_seeing(name: str, folder: Path) -> Path:
    """Write the checkpoint of that family into `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    model_type, fields, processor, shown = SEEING[name]
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(model_type, **fields)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():  # norms and biases too: a dropped one must show
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, 1.0 if "norm" in type(parameter).__name__ else 0.5, 0.3)
            else:
                torch.nn.init.normal_(parameter, 0.0, 0.15)
        model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    _write_tokenizer(folder, shown)
    return folder


def _write_tokenizer(folder: Path, shown: str) -> None:
    """A byte-level tokenizer without merges, and a template that takes parts of messages."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<pad>", *WORDS])
    tokenizer.add_special_tokens([*ROWS[: 299 - 256 - 8]])
    tokenizer.add_special_tokens(["<|endoftext|>", ROWS[-1]])
    tokenizer.add_special_tokens([f"<unused_{i}>" for i in range(320 - tokenizer.get_vocab_size())])
    assert tokenizer.token_to_id("<image>") == IMAGE_TOKEN
    assert tokenizer.token_to_id("<|endoftext|>") == 299
    assert tokenizer.get_vocab_size() == 320
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{% if part.type == 'image' %}" + shown + "{% else %}"
        "{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = {"eos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def pixels(seed: int, width: int, height: int) -> Any:
    """An image without a pattern, as Pillow has it."""
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def picture(seed: int, width: int = 60, height: int = 44) -> Picture:
    """The same as an engine is given it."""
    data = io.BytesIO()
    image = pixels(seed, width, height)
    image.save(data, "PNG")
    return Picture(data.getvalue(), blake2b(image.tobytes() + repr(image.size).encode()).digest()[:16])


@lru_cache
def seeing_oracle(folder: Path) -> Any:
    """The unmodified transformers model of a folder, eager, f32."""
    import torch
    from transformers import AutoModelForImageTextToText

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()


@lru_cache
def processor_of(name: str, folder: Path) -> Any:
    """Transformers' own processor of texts and images."""
    from transformers import AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    if name in ("idefics3", "smolvlm"):
        from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

        return Idefics3Processor(images, tokenizer, image_seq_len=4)
    if name == "llava_onevision":
        from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

        kind: Any = LlavaOnevisionProcessor
        more = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    else:
        from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

        kind, more = Qwen2_5_VLProcessor, {}
        tokenizer.image_token = "<image>"
        tokenizer.image_token_id = IMAGE_TOKEN
    # Without torchvision there are no processors of videos, and the class cannot tell that it has none.
    check, kind.check_argument_for_proper_class = kind.check_argument_for_proper_class, lambda *_: None
    try:
        return kind(images, tokenizer, None, **more)
    finally:
        kind.check_argument_for_proper_class = check
