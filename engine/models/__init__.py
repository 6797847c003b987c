"""Decoder models: native families, and any other transformers decoder through its attention interface."""

from __future__ import annotations

from engine.models.checkpoint import Checkpoint, require_headers
from engine.models.compiled import Mapped, Routed
from engine.models.decoder import NativeDecoder
from engine.models.families import LAYER_PACKING, MODEL_PACKING, DecoderShape, Packed, parse
from engine.models.fp8 import Fp8
from engine.models.interface import Attention, Model, ModelSpec
from engine.models.layers import Layer, run_layers
from engine.models.linear import Linear, Plain
from engine.models.loader import F32_BELOW, is_pooled_natively, load_model, load_pooled
from engine.models.lora import Adapted, Adapters, Stack, unadapted

__all__ = [
    "F32_BELOW",
    "LAYER_PACKING",
    "MODEL_PACKING",
    "Adapted",
    "Adapters",
    "Attention",
    "Checkpoint",
    "DecoderShape",
    "Fp8",
    "Layer",
    "Linear",
    "Mapped",
    "Model",
    "ModelSpec",
    "NativeDecoder",
    "Packed",
    "Plain",
    "Routed",
    "Stack",
    "is_pooled_natively",
    "load_model",
    "load_pooled",
    "parse",
    "require_headers",
    "run_layers",
    "unadapted",
]
