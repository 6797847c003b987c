"""The native families as rows of flags, and the `DecoderShape` that a config.json gives one.

It also lists how a family's tensors are packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.types import LoadError


@dataclass(frozen=True, slots=True)
class Family:
    """One row: how an architecture differs from the plain Llama decoder.

    `bias` names the config flag (or says True) for a bias on q, k and v; `o_bias` and `mlp_bias` likewise.
    `windows`: "none"; "all" (every layer slides when `sliding_window` is set); "layers" (`layer_types`, or
    `use_sliding_window` with `max_window_layers`). The numbers are the defaults of an absent config field.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: str = "none"
    sliding_window: int | None = None
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    max_positions: int = 32768
    tied: bool = False


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias", max_positions=2048
    ),
    "MistralForCausalLM": Family(windows="all", sliding_window=4096, max_positions=131072),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows="layers", sliding_window=4096),
    "Qwen3ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows="layers",
        sliding_window=4096,
        head_dim=128,
    ),
}


@dataclass(frozen=True, slots=True)
class Packed:
    """One tensor of the decoder, made of one or several of the checkpoint's, joined along the first axis.

    sources: each tensor's name and its axes, in the words of `DecoderShape.axes`.
    """

    name: str
    sources: dict[str, str]


LAYER_PACKING = (
    Packed("attention_norm", {"input_layernorm.weight": "hidden"}),
    Packed(
        "qkv",
        {
            "self_attn.q_proj.weight": "q hidden",
            "self_attn.k_proj.weight": "kv hidden",
            "self_attn.v_proj.weight": "kv hidden",
        },
    ),
    Packed(
        "qkv_bias",
        {"self_attn.q_proj.bias": "q", "self_attn.k_proj.bias": "kv", "self_attn.v_proj.bias": "kv"},
    ),
    Packed("q_norm", {"self_attn.q_norm.weight": "head"}),
    Packed("k_norm", {"self_attn.k_norm.weight": "head"}),
    Packed("o", {"self_attn.o_proj.weight": "hidden q"}),
    Packed("o_bias", {"self_attn.o_proj.bias": "hidden"}),
    Packed("mlp_norm", {"post_attention_layernorm.weight": "hidden"}),
    Packed("gate_up", {"mlp.gate_proj.weight": "middle hidden", "mlp.up_proj.weight": "middle hidden"}),
    Packed("gate_up_bias", {"mlp.gate_proj.bias": "middle", "mlp.up_proj.bias": "middle"}),
    Packed("down", {"mlp.down_proj.weight": "hidden middle"}),
    Packed("down_bias", {"mlp.down_proj.bias": "hidden"}),
)
MODEL_PACKING = (
    Packed("embedding", {"model.embed_tokens.weight": "vocab hidden"}),
    Packed("final_norm", {"model.norm.weight": "hidden"}),
    Packed("head", {"lm_head.weight": "vocab hidden"}),
)

# rope types served, and the fields that each needs beside `rope_theta`
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A native decoder's sizes and flags, every one resolved."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    absent: frozenset[str]  # packed names that this checkpoint does not have
    windows: tuple[int | None, ...]  # one a layer; a window counts the token itself
    rope: dict[str, Any]  # rope_type, rope_theta and what the type needs
    max_positions: int

    @property
    def axes(self) -> dict[str, int]:
        """Sizes by the names that the packing table uses."""
        return {
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "middle": self.intermediate_size,
            "q": self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
            "head": self.head_dim,
        }


def is_native(config: dict[str, Any]) -> bool:
    """True when a row serves this config as it stands; otherwise the general tier may."""
    rope = _rope(config)
    return (
        _architecture(config) in FAMILIES
        and config.get("hidden_act", "silu") == "silu"
        and rope.get("rope_type") in ROPE_FIELDS
        and rope.get("partial_rotary_factor", 1.0) == 1.0
    )


def parse(config: dict[str, Any], max_model_len: int | None) -> DecoderShape:
    """Read a config.json of a native family; raises LoadError naming the field that is missing or wrong."""
    architecture = _architecture(config)
    family = FAMILIES[architecture]

    def number(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or value <= 0:
            raise LoadError(f"{architecture}: config.json has no usable {name!r}")
        return value

    norm_eps = config.get("rms_norm_eps", 1e-6)
    if not isinstance(norm_eps, (int, float)):
        raise LoadError(f"{architecture}: config.json has no usable 'rms_norm_eps'")
    num_layers, num_heads = number("num_hidden_layers"), number("num_attention_heads")
    head_dim = number("head_dim", family.head_dim or number("hidden_size") // num_heads)
    shape = DecoderShape(
        architecture=architecture,
        vocab_size=number("vocab_size"),
        hidden_size=number("hidden_size"),
        intermediate_size=number("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=number("num_key_value_heads", num_heads),
        head_dim=head_dim,
        norm_eps=float(norm_eps),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        absent=_absent(config, family),
        windows=_windows(config, family, num_layers),
        rope=_rope(config),
        max_positions=number("max_position_embeddings", family.max_positions),
    )
    if shape.num_heads % shape.num_kv_heads:
        raise LoadError(
            f"{architecture}: {num_heads} query heads do not share {shape.num_kv_heads} KV heads evenly"
        )
    for field in ("rope_theta", *ROPE_FIELDS[shape.rope["rope_type"]]):
        if not _is_positive(shape.rope.get(field)):
            raise LoadError(f"{architecture}: {shape.rope['rope_type']} rope has no usable {field!r}")
    if shape.rope["rope_type"] == "dynamic" and (max_model_len or 0) > shape.max_positions:
        # beyond, the rotation of every token would depend on the longest sequence of the batch
        raise LoadError(f"{architecture}: dynamic rope serves at most its {shape.max_positions} positions")
    return shape


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _architecture(config: dict[str, Any]) -> str:
    return str((config.get("architectures") or [""])[0])


def _absent(config: dict[str, Any], family: Family) -> frozenset[str]:
    def off(flag: bool | str) -> bool:
        return not (config.get(flag, False) if isinstance(flag, str) else flag)

    absent = set()
    if off(family.qkv_bias):
        absent.add("qkv_bias")
    if off(family.o_bias):
        absent.add("o_bias")
    if off(family.mlp_bias):
        absent |= {"gate_up_bias", "down_bias"}
    if not family.qk_norm:
        absent |= {"q_norm", "k_norm"}
    return frozenset(absent)


def _windows(config: dict[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window", family.sliding_window)
    if family.windows == "none" or window is None:
        return (None,) * num_layers
    if family.windows == "all":
        return (window,) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    for layer_type in types:
        if layer_type not in ("sliding_attention", "full_attention"):
            raise LoadError(
                f"{_architecture(config)} has layers of type {layer_type!r}, which are not served"
            )
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in types)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters of either config form: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise LoadError(f"{_architecture(config)}: config.json has no usable 'rope_parameters'")
    rope = dict(rope)
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if "partial_rotary_factor" in config:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    longest = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    rope.setdefault("original_max_position_embeddings", longest)
    return rope
