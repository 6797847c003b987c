"""Decoder models: native families, and any other transformers decoder through its attention interface."""

from __future__ import annotations

from engine.models.compiled import Mapped
from engine.models.decoder import NativeDecoder
from engine.models.families import LAYER_PACKING, MODEL_PACKING, DecoderShape, Packed, parse
from engine.models.fp8 import Fp8
from engine.models.interface import Attention, Model, ModelSpec
from engine.models.layers import Layer, run_layers
from engine.models.linear import Linear, Plain
from engine.models.loader import load_model
from engine.models.lora import Adapted, Adapters, Stack, unadapted

__all__ = [
    "LAYER_PACKING",
    "MODEL_PACKING",
    "Adapted",
    "Adapters",
    "Attention",
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
    "Stack",
    "load_model",
    "parse",
    "run_layers",
    "unadapted",
]
